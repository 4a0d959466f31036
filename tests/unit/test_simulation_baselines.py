"""The baselines' steps: order, budgets, smallest programs, and VTC's counters against a naive ledger."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helios_jax.errors import ConfigError
from helios_jax.scheduler import Catalog, LaneRole, Limits, ProgramKind, RequestSpec, Scheduler
from helios_jax.simulation import Arrival, FakeDevice, LinearCosts, Simulation
from helios_jax.simulation.baselines import (
    BASELINES,
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    BaselineScheduler,
    ChunkedScheduler,
    VtcAdmission,
    VtcScheduler,
    baseline,
)
from helios_jax.simulation.experiment import simulation_catalog

MS = 1_000_000
K = ProgramKind
CATALOG = simulation_catalog(8, 512)
LIMITS = Limits(slots=8, pages=1000, page_size=16, max_context=1000)


def arrivals(*requests: tuple[float, int, int]) -> list[Arrival]:
    """(arrival ms, prompt, output) each."""
    return [
        Arrival(at_ns=round(at * MS), spec=RequestSpec(prompt=np.zeros(prompt, np.int32), max_tokens=output))
        for at, prompt, output in requests
    ]


def run(scheduler: Scheduler, requests: list[Arrival], admission: VtcAdmission | None = None) -> Simulation:
    simulation = Simulation(scheduler, FakeDevice(LinearCosts(), 16), requests, admission=admission)
    simulation.run()
    assert [served.reason for served in simulation.requests] == ["length"] * len(requests)
    return simulation


def test_prompts_come_first_in_order_and_whole() -> None:
    simulation = run(
        BaselineScheduler(CATALOG, LIMITS), arrivals((0, 100, 9), (1, 300, 5), (2, 200, 5), (3, 100, 5), (4, 40, 5))
    )
    plans = [plan for plan in simulation.plans if plan.shape.kind is not K.INITIALIZE]
    assert [(plan.shape.token_capacity, [lane.length for lane in plan.lanes]) for plan in plans[:3]] == [
        (128, [100]), (512, [300, 200]), (256, [100, 40]),
    ]  # fmt: skip
    assert all(plan.shape.kind is K.DECODE for plan in plans[3:])
    assert [plan.shape.batch_capacity for plan in plans[3:6]] == [8, 8, 8]


def test_a_prompt_longer_than_a_program_is_cut_and_keeps_its_turn() -> None:
    simulation = run(BaselineScheduler(CATALOG, LIMITS), arrivals((0, 700, 2), (0, 50, 2)))
    prompts = [plan for plan in simulation.plans if plan.shape.kind is K.PREFILL]
    assert [[(lane.handle.slot, lane.length) for lane in plan.lanes] for plan in prompts] == [
        [(0, 512)], [(0, 188), (1, 50)],
    ]  # fmt: skip


def test_chunks_fill_what_decoders_leave_of_the_budget() -> None:
    scheduler = ChunkedScheduler(CATALOG, LIMITS, 256)
    simulation = run(scheduler, arrivals((0, 20, 60), (0, 20, 60), (30, 900, 4)))
    mixed = [plan for plan in simulation.plans if plan.shape.kind is K.MIXED]
    assert [plan.lanes[plan.prompt_row].length for plan in mixed] == [254, 254, 254, 138]
    for plan in mixed:
        assert sum(lane.length for lane in plan.lanes) <= 256
        assert [lane.role for lane in plan.lanes].count(LaneRole.DECODE) == 2
        assert plan.shape.batch_capacity == 4  # the smallest with three rows
    between = simulation.plans[simulation.plans.index(mixed[0]) : simulation.plans.index(mixed[-1])]
    assert all(plan.shape.kind is K.MIXED for plan in between)  # decoders never wait for a prompt


def test_without_mixed_programs_chunks_and_decodes_take_turns() -> None:
    catalog = Catalog(tuple(shape for shape in CATALOG if shape.kind is not K.MIXED))
    simulation = run(ChunkedScheduler(catalog, LIMITS, 128), arrivals((0, 20, 60), (30, 500, 2)))
    kinds = [plan.shape.kind for plan in simulation.plans]
    last_chunk = len(kinds) - 1 - kinds[::-1].index(K.PREFILL)
    assert kinds[last_chunk - 5 : last_chunk + 1] == [K.DECODE, K.PREFILL] * 3


def test_more_decoders_than_rows_are_served_in_turn() -> None:
    catalog = Catalog(tuple(s for s in CATALOG if s.kind is not K.DECODE or s.batch_capacity <= 2))
    simulation = run(BaselineScheduler(catalog, LIMITS), arrivals(*[(0, 10, 20)] * 5))
    decodes = [plan for plan in simulation.plans if plan.shape.kind is K.DECODE]
    served = [lane.handle.slot for plan in decodes[:10] for lane in plan.lanes]
    assert [served.count(slot) for slot in range(5)] == [4] * 5


def test_rounds_have_the_whole_depth_within_the_output_left() -> None:
    catalog = simulation_catalog(8, 512, 3)
    limits = Limits(slots=8, pages=1000, page_size=16, max_context=1000, draft_extent=3)
    simulation = run(BaselineScheduler(catalog, limits), arrivals((0, 10, 11)))
    rounds = [plan for plan in simulation.plans if plan.shape.kind is K.SPECULATIVE]
    assert [plan.lanes[0].length for plan in rounds] == [4, 4, 2]  # 1 + 4 + 4 + 2 tokens, all accepted
    assert {plan.shape.proposal_depth for plan in rounds} == {3}


class NaiveVtc:
    """Counters by replaying events in the order in which they happened."""

    def __init__(self) -> None:
        self.counters: dict[int, float] = {}
        self.queue: list[tuple[int, int]] = []
        self.last: int | None = None

    def arrive(self, number: int, client: int) -> None:
        counter = self.counters.get(client, 0.0)
        waiting = {other for _, other in self.queue}
        if client not in waiting:
            if waiting:
                counter = max(counter, min(self.counters[other] for other in waiting))
            elif self.last is not None:
                counter = max(counter, self.counters[self.last])
        self.counters[client] = counter
        self.queue.append((number, client))

    def next(self) -> int:
        return min(self.queue, key=lambda item: self.counters[item[1]])[0]


def test_vtc_counters_equal_a_replay() -> None:
    rng = random.Random(1)
    clients, prompts = [rng.randrange(4) for _ in range(200)], [rng.randint(1, 500) for _ in range(200)]
    vtc, naive = VtcAdmission(clients, prompts), NaiveVtc()
    waiting: list[int] = []
    running: dict[int, int] = {}
    for number in range(200):
        vtc.arrived(number)
        naive.arrive(number, clients[number])
        waiting.append(number)
        for _ in range(rng.randrange(3)):
            if waiting:
                chosen = waiting.pop(vtc.choose(waiting))
                assert chosen == naive.next()
                vtc.admitted(chosen, type("Handle", (), {"slot": chosen}))  # type: ignore[arg-type]
                naive.queue.remove((chosen, clients[chosen]))
                naive.last = clients[chosen]
                naive.counters[clients[chosen]] += INPUT_WEIGHT * prompts[chosen]
                running[chosen] = clients[chosen]
        for slot in rng.sample(sorted(running), min(3, len(running))):
            vtc.produced(slot)
            naive.counters[running[slot]] += OUTPUT_WEIGHT
    assert vtc.counters == pytest.approx(naive.counters)


def test_vtc_serves_the_client_that_received_least() -> None:
    """A flood of one client does not delay the other's requests; first come, first served does."""
    requests = arrivals(*[(i * 0.01, 400, 40) for i in range(24)], *[(2 + i * 100, 50, 10) for i in range(3)])
    clients, prompts = [0] * 24 + [1] * 3, [len(arrival.spec.prompt) for arrival in requests]
    limits = Limits(slots=2, pages=1000, page_size=16, max_context=1000)
    vtc = VtcAdmission(clients, prompts)
    fair = run(VtcScheduler(CATALOG, limits, vtc), requests, vtc)
    first_come = run(BaselineScheduler(CATALOG, limits), requests)
    waits = [
        max(served.first_ns - served.arrival_ns for served in simulation.requests[24:]) / MS
        for simulation in (fair, first_come)
    ]
    assert waits[0] < 300
    assert waits[1] > 1000


def test_every_name_makes_a_baseline() -> None:
    vtc = VtcAdmission([0], [1])
    kinds = [type(baseline(name, CATALOG, LIMITS, 512, vtc)) for name in BASELINES]
    assert kinds == [BaselineScheduler, ChunkedScheduler, VtcScheduler]
    with pytest.raises(ConfigError, match="unknown baseline 'sjf'; choose one of fcfs-prefill"):
        baseline("sjf", CATALOG, LIMITS, 512, vtc)
