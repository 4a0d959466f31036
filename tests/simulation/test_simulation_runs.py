"""Random workloads in virtual time: every invariant after every event, books balanced at the end."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import Catalog, Limits, PolicyConfig, RequestSpec, Scheduler, policy_preset, serving_catalog
from helios_jax.simulation import Arrival, FakeDevice, LinearCosts, Simulation
from tests.unit.scheduler_toy import PREFILL

MS = 1_000_000


def workload(seed: int, count: int, *, cancelled: float, per_s: float = 100.0) -> list[Arrival]:
    """Poisson arrivals, prompts of 1 to 600 tokens, some scored, some cancelled at a random moment."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(per_s) * 1e9
        scored = rng.random() < 0.1
        spec = RequestSpec(
            prompt=np.zeros(int(np.exp(rng.uniform(0, 6.4))), np.int32),
            max_tokens=rng.randint(0 if scored else 1, 40),
            scored=scored,
            stop_token_ids=frozenset({1, 2, 3}),
        )
        cancel = int(now + rng.expovariate(10.0) * 1e9) if rng.random() < cancelled else None
        arrivals.append(Arrival(at_ns=int(now), spec=spec, cancel_ns=cancel))
    return arrivals


def simulate(arrivals: list[Arrival], *, check: bool = True, policy: PolicyConfig | None = None) -> Simulation:
    catalog = serving_catalog(max_slots=8, prefill_chunk=256)
    scheduler = Scheduler(catalog, Limits(slots=8, pages=120, page_size=16, max_context=700), policy)
    simulation = Simulation(scheduler, FakeDevice(LinearCosts(), 16, jitter=0.2, seed=1), arrivals, check=check)
    simulation.run()
    return simulation


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_with_cancellations_leave_the_page_ledger_balanced(count: int) -> None:
    """Three in ten requests are cancelled at a random moment: waiting, between frames, in flight."""
    simulation = simulate(workload(1, count, cancelled=0.6))
    counters = simulation.scheduler.snapshot_counters()
    assert counters["pages_free"] == counters["pages_total"] == 120
    assert (counters["slots_used"], counters["pages_reserved"], counters["pages_used"]) == (0, 0, 0)
    outcomes = Counter(request.reason for request in simulation.requests)
    assert outcomes["cancelled"] >= 0.3 * count
    assert sum(outcomes.values()) == count
    assert outcomes[None] == 0


@pytest.mark.parametrize("preset", ["balanced", "throughput"])
def test_output_is_complete_and_independent_of_the_neighbours(preset: str) -> None:
    """Each uncancelled request gets its own tokens up to its limit or a stop token."""
    arrivals = workload(2, 150, cancelled=0.2)
    simulation = simulate(arrivals, policy=policy_preset(preset))
    for arrival, served in zip(arrivals, simulation.requests, strict=True):
        if served.reason == "stop":
            assert served.tokens[-1] in (1, 2, 3)
        elif served.reason == "length":
            assert len(served.tokens) == arrival.spec.max_tokens
        assert not set(served.tokens[:-1]) & {1, 2, 3}
        assert served.reason in ("stop", "length", "cancelled")


def test_the_same_events_give_the_same_state() -> None:
    first, second = (simulate(workload(3, 120, cancelled=0.3), check=False) for _ in range(2))
    assert first.digest() == second.digest()
    assert first.plans == second.plans
    assert simulate(workload(4, 120, cancelled=0.3), check=False).digest() != first.digest()


def test_every_plan_is_in_the_catalogue_and_none_is_redundantly_padded() -> None:
    simulation = simulate(workload(5, 200, cancelled=0.1), check=False)
    catalog = simulation.scheduler.state.catalog
    for plan in simulation.plans:
        assert plan.shape in catalog.shapes
        used = sum(lane.length for lane in plan.lanes)
        same_kind = catalog.of_kind(plan.shape.kind)
        smaller = [
            other for other in same_kind
            if len(plan.lanes) <= other.batch_capacity <= plan.shape.batch_capacity
            and used <= other.token_capacity <= plan.shape.token_capacity and other != plan.shape
        ]  # fmt: skip
        if plan.shape.kind is not PREFILL:  # a packed prefill's smaller twin may have chosen other rows
            assert not smaller or plan.shape.token_capacity == 1


def test_a_request_that_never_fits_is_an_error_and_not_a_stall() -> None:
    limits = Limits(slots=1, pages=2, page_size=16, max_context=64)
    scheduler = Scheduler(serving_catalog(max_slots=1, prefill_chunk=64), limits)
    arrival = Arrival(at_ns=0, spec=RequestSpec(prompt=np.zeros(60, np.int32), max_tokens=4))
    with pytest.raises(Exception, match="need 4 pages of 16 tokens, the cache has 2"):
        Simulation(scheduler, FakeDevice(LinearCosts(), 16), [arrival]).run()


def test_the_device_notices_a_page_that_two_requests_share() -> None:
    """The device's own books are not the scheduler's: a planted double owner is found."""
    limits = Limits(slots=2, pages=8, page_size=16, max_context=64)
    scheduler = Scheduler(serving_catalog(max_slots=2, prefill_chunk=64), limits)
    device = FakeDevice(LinearCosts(), 16)
    for _ in range(2):
        scheduler.admit(RequestSpec(prompt=np.zeros(8, np.int32), max_tokens=4), 0)

    def run_frame(fence: int) -> None:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, fence)
        records, timing = device.run(plan, {lane.handle: np.array([1], np.int32) for lane in plan.lanes})
        scheduler.complete(fence, records, timing)

    run_frame(1)  # initialises both
    with pytest.raises(InvariantError, match="is given to"):
        run_frame(2)


def test_prompts_of_every_length_up_to_a_page_and_one_in_one_slot() -> None:
    catalog = Catalog(serving_catalog(max_slots=1, prefill_chunk=7).shapes)
    for length in range(1, 10):
        scheduler = Scheduler(catalog, Limits(slots=1, pages=3, page_size=8, max_context=13))
        spec = RequestSpec(prompt=np.zeros(length, np.int32), max_tokens=13 - length)
        simulation = Simulation(scheduler, FakeDevice(LinearCosts(), 8), [Arrival(at_ns=0, spec=spec)] * 2)
        simulation.run()
        assert [len(request.tokens) for request in simulation.requests] == [13 - length] * 2
