"""Properties of every policy over random small workloads, with all invariants checked at each step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.scheduler import LaneRole, Limits, ProgramKind, RequestSpec, Scheduler, policy_preset
from helios_jax.simulation import Arrival, FakeDevice, LinearCosts, Simulation
from helios_jax.simulation.acceptance import AcceptanceSampler, AcceptanceTable
from helios_jax.simulation.baselines import BASELINES, VtcAdmission, baseline
from helios_jax.simulation.experiment import simulation_catalog

MS = 1_000_000
TABLE = AcceptanceTable("toy", (0.7, 0.4), "eagle3")
REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=9
)  # (ms after the one before, prompt, output)


def simulate(requests: list[tuple[int, int, int]], policy: str, slots: int, depth: int) -> Simulation:
    at, arrivals = 0, []
    for gap, prompt, output in requests:
        at += gap * MS
        arrivals.append(Arrival(at_ns=at, spec=RequestSpec(prompt=np.zeros(prompt, np.int32), max_tokens=output)))
    limits = Limits(slots=slots, pages=60, page_size=16, max_context=400, draft_extent=depth)
    catalog, clients = simulation_catalog(slots, 128, depth), [i % 3 for i in range(len(requests))]
    vtc = VtcAdmission(clients, [prompt for _, prompt, _ in requests])
    if policy in BASELINES:
        scheduler: Scheduler = baseline(policy, catalog, limits, 96, vtc)
    else:
        scheduler = Scheduler(catalog, limits, policy_preset(policy))
    device = FakeDevice(LinearCosts(), 16, slots=slots, sampler=AcceptanceSampler(TABLE) if depth else None)
    simulation = Simulation(scheduler, device, arrivals, admission=vtc if policy == "vtc" else None)
    simulation.run()
    return simulation


@settings(max_examples=25, deadline=None)
@given(
    requests=REQUESTS, policy=st.sampled_from(("balanced", "throughput", *BASELINES)),
    slots=st.sampled_from([1, 3, 8]), depth=st.sampled_from([0, 2]),
)  # fmt: skip
def test_everybody_gets_their_output_whatever_the_policy(
    requests: list[tuple[int, int, int]], policy: str, slots: int, depth: int
) -> None:
    simulation = simulate(requests, policy, slots, depth)
    assert [len(served.tokens) for served in simulation.requests] == [output for _, _, output in requests]
    assert {served.reason for served in simulation.requests} == {"length"}
    state = simulation.scheduler.state
    assert state.pool.num_free + state.pool.num_kept == state.limits.pages
    prefilled = sum(lane.length for plan in simulation.plans for lane in plan.lanes if lane.role is LaneRole.PROMPT)
    assert prefilled == sum(prompt for _, prompt, _ in requests)


@settings(max_examples=15, deadline=None)
@given(requests=REQUESTS, slots=st.sampled_from([2, 8]))
def test_prompts_first_means_in_order_of_arrival(requests: list[tuple[int, int, int]], slots: int) -> None:
    firsts = [served.first_ns for served in simulate(requests, "fcfs-prefill", slots, 0).requests]
    assert firsts == sorted(firsts)


@settings(max_examples=15, deadline=None)
@given(requests=REQUESTS, depth=st.sampled_from([0, 2]))
def test_decoders_first_means_in_every_step(requests: list[tuple[int, int, int]], depth: int) -> None:
    """From its first token on, every program but an initialisation serves a request until it ends."""
    simulation = simulate(requests, "fcfs-chunked", 8, depth)
    plans = [plan for plan in simulation.plans if plan.shape.kind is not ProgramKind.INITIALIZE]
    steps = {index: {lane.handle: lane.role for lane in plan.lanes} for index, plan in enumerate(plans)}
    for handle in {handle for lanes in steps.values() for handle in lanes}:
        named = [index for index, lanes in steps.items() if handle in lanes]
        ready = max(index for index in named if steps[index][handle] is LaneRole.PROMPT)
        assert [index for index in named if index > ready] == list(range(ready + 1, max(named) + 1))
    for plan in plans:
        rows = [lane.length for lane in plan.lanes if lane.role is LaneRole.DECODE]
        prompts = sum(lane.length for lane in plan.lanes if lane.role is LaneRole.PROMPT)
        assert prompts <= max(1, 96 - sum(rows))
