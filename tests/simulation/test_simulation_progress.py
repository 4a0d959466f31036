"""Progress on stated catalogues: nobody starves, first outputs and gaps stay within bounds.

Catalogue: decode rows 1 to 64 at 5.04 ms + 0.03 ms a row; initialise at 0.5 ms and 0.7 ms; prefill
of 64 to 1024 tokens at 5.04 ms + 0.015 ms a token (6 ms for 64), with one request row and, where the
test says packed, with 16; host 0.2 ms a frame. Durations are measured before the run begins
unless the test says cold.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helios_jax.scheduler import Catalog, Limits, PolicyConfig, ProgramShape, RequestSpec, Scheduler, policy_preset
from helios_jax.simulation import Arrival, FakeDevice, LinearCosts, Simulation
from tests.unit.scheduler_toy import DECODE, INITIALIZE, PREFILL, measured

MS = 1_000_000
COSTS = LinearCosts(launch_ns=5_040_000, row_ns=30_000, token_ns=15_000)


def arrivals(count: int, *, at_ms: float = 0.0, prompt: int = 64, output: int = 64) -> list[Arrival]:
    spec = RequestSpec(prompt=np.zeros(prompt, np.int32), max_tokens=output)
    return [Arrival(at_ns=int(at_ms * MS), spec=spec)] * count


def run(requests: list[Arrival], *, packed: bool, cold: bool = False, policy: PolicyConfig | None = None) -> Simulation:
    shapes = [ProgramShape(DECODE, b, 1) for b in (1, 2, 4, 8, 16, 32, 64)]
    shapes += [ProgramShape(INITIALIZE, b, 0) for b in (1, 64)]
    shapes += [ProgramShape(PREFILL, b, t) for t in (64, 128, 256, 512, 1024) for b in ((1, 16) if packed else (1,))]
    scheduler = Scheduler(
        Catalog(tuple(shapes)), Limits(slots=64, pages=64 * 256, page_size=16, max_context=4096), policy
    )
    if not cold:
        scheduler._state = measured(scheduler.state, COSTS)
    simulation = Simulation(scheduler, FakeDevice(COSTS, 16), requests, check=False)
    simulation.run()
    assert all(request.reason == "length" for request in simulation.requests)
    return simulation


def first_outputs_ms(simulation: Simulation, rows: slice) -> list[float]:
    return [(request.first_ns - request.arrival_ns) / MS for request in simulation.requests[rows]]


def largest_gap_ms(simulation: Simulation, rows: slice = slice(None)) -> float:
    return max(request.largest_gap_ns for request in simulation.requests[rows]) / MS


@pytest.mark.parametrize("decoders", [1, 5, 16, 32, 48])
def test_sixteen_short_prompts_beside_decoders_start_within_100_ms(decoders: int) -> None:
    """Packed rows: sixteen prompts of 64 tokens do not queue behind each other."""
    simulation = run(arrivals(decoders, output=200) + arrivals(16, at_ms=500, output=20), packed=True)
    assert max(first_outputs_ms(simulation, slice(decoders, None))) < 100
    assert largest_gap_ms(simulation) < 150


@pytest.mark.parametrize("decoders", [1, 5, 16, 32])
def test_one_row_prefills_start_at_the_prefill_floor(decoders: int) -> None:
    """Without packed rows the floor is 16 x (6 + 0.5 + 2 x 0.2) ms = 111 ms; decode adds at most a few frames."""
    simulation = run(arrivals(decoders, output=200) + arrivals(16, at_ms=500, output=20), packed=False)
    assert max(first_outputs_ms(simulation, slice(decoders, None))) < 150


@pytest.mark.parametrize("streams", [5, 16])
def test_streams_stay_together(streams: int) -> None:
    """First output in 100 ms, gaps under 150 ms, every stream progresses alike."""
    simulation = run(arrivals(streams, output=120), packed=True)
    assert max(first_outputs_ms(simulation, slice(None))) < 100
    assert largest_gap_ms(simulation) < 150
    ends = [request.last_ns for request in simulation.requests]
    assert (max(ends) - min(ends)) / MS < 150


def test_more_streams_than_the_widest_decode_all_progress() -> None:
    """24 streams over decode rows of 8: after the start, nobody waits longer than its share.

    Three decodes of 5.28 + 0.2 ms serve everyone once, 16.4 ms. Until the histories agree, a stream
    may wait longer: a cold start measures 148 ms.
    """
    shapes = [ProgramShape(DECODE, b, 1) for b in (1, 8)] + [ProgramShape(INITIALIZE, 64, 0)]
    catalog = Catalog((*shapes, ProgramShape(PREFILL, 16, 1024)))
    scheduler = Scheduler(catalog, Limits(slots=64, pages=4096, page_size=16, max_context=512))
    simulation = Simulation(scheduler, FakeDevice(COSTS, 16), arrivals(24, output=200), check=False)
    simulation.run(until_ns=1000 * MS)
    assert largest_gap_ms(simulation) < 150
    produced = [len(request.tokens) for request in simulation.requests]
    for request in simulation.requests:
        request.largest_gap_ns = 0
    simulation.run(until_ns=2000 * MS)
    assert largest_gap_ms(simulation) < 25
    rounds = [len(request.tokens) - before for request, before in zip(simulation.requests, produced, strict=True)]
    assert max(rounds) - min(rounds) <= 8
    simulation.run()
    assert {request.reason for request in simulation.requests} == {"length"}


def test_a_late_short_prompt_beside_31_decoders_starts_soon() -> None:
    simulation = run(arrivals(31, output=150) + arrivals(1, at_ms=600), packed=True)
    assert first_outputs_ms(simulation, slice(31, None))[0] < 30


@pytest.mark.parametrize(("prompts", "gap_ms"), [(1, 100), (2, 150), (16, 500)])
def test_long_prompts_beside_decoders_neither_starve_nor_stall(prompts: int, gap_ms: float) -> None:
    """Prompts of 3,000 tokens: all finish, decoders keep moving.

    A newcomer starts at q = N, so its first chunk (20.6 ms with its frame) may precede the decoders:
    sixteen of them together measure a gap of 470 ms, once.
    """
    long = arrivals(prompts, at_ms=300, prompt=3000, output=8)
    simulation = run(arrivals(8, output=600) + long, packed=True)
    assert largest_gap_ms(simulation, slice(0, 8)) < gap_ms
    floor_ms = prompts * 3000 / 1024 * 20.4
    assert max(first_outputs_ms(simulation, slice(8, None))) < 4 * floor_ms + 100


def test_a_lone_long_prompt_takes_its_largest_useful_programs() -> None:
    simulation = run(arrivals(1, prompt=2100, output=2), packed=True)
    used = [plan.shape.token_capacity for plan in simulation.plans if plan.shape.kind is PREFILL]
    assert used == [1024, 1024, 64]


def test_a_cold_start_discovers_what_the_traffic_needs() -> None:
    """No duration is known: every discovery is recorded, and later requests meet measured programs."""
    simulation = run(arrivals(16, output=40) + arrivals(16, at_ms=2000), packed=True, cold=True)
    counters = simulation.scheduler.snapshot_counters()["flare_scheduler_executions_total"]
    assert isinstance(counters, dict)
    discovered = [plan for plan in simulation.plans if plan.reason == "discovery"]
    assert counters["discovery"] == len(discovered) == len({plan.shape for plan in discovered})
    assert max(first_outputs_ms(simulation, slice(16, None))) < 100


def test_throughput_preset_fills_large_programs() -> None:
    simulation = run(arrivals(16, prompt=1024, output=30), packed=True, policy=policy_preset("throughput"))
    assert all(request.first_ns for request in simulation.requests)
    prompt_plans = [plan for plan in simulation.plans if plan.shape.kind is PREFILL]
    assert np.mean([sum(lane.length for lane in plan.lanes) for plan in prompt_plans]) > 900


def test_stale_programs_keep_their_estimates_and_are_measured_again() -> None:
    """A minute of silence: nothing becomes unknown, the first run replaces its estimate."""
    simulation = run(arrivals(2, output=4) + arrivals(2, at_ms=60_000, output=4), packed=True)
    late = [plan for plan in simulation.plans if plan.reason == "discovery"]
    assert not late
    first_late = next(plan for plan in simulation.plans if plan.lanes[0].handle.generation == 2)
    assert first_late.required_empty_queue
    state = simulation.scheduler.state
    assert state.costs.num_samples[state.catalog.shapes.index(first_late.shape)] == 1
    assert dataclasses.asdict(simulation.requests[2])["reason"] == "length"
