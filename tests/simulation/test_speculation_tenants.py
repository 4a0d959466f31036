"""One client floods with requests whose drafts are always refused; the others must not feel it afterwards."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from helios_jax.scheduler import Catalog, Limits, RequestSpec, Scheduler
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, speculative_shapes
from helios_jax.scheduler.types import Constraint
from helios_jax.simulation import Arrival, FakeDevice, LinearCosts, Simulation
from helios_jax.simulation.driver import Ran
from helios_jax.simulation.streams import Drafter, Draws, constant
from helios_jax.testing import EngineRig, FakeDraft
from helios_jax.testing.model import Guess, NextToken

SLOTS, DEPTH, PROMPT_LEN, OUTPUT = 4, 3, 8, 80
VICTIMS, FLOOD = 6, 16
SECOND_NS = 1_000_000_000
LATER_NS = 5 * SECOND_NS


def catalog() -> Catalog:
    shapes = [ProgramShape(ProgramKind.INITIALIZE, b, 0) for b in (1, SLOTS)] + [
        ProgramShape(ProgramKind.PREFILL, 4, 64)
    ]
    for allocation in Allocation:
        shapes += speculative_shapes(max_slots=SLOTS, draft_tokens=DEPTH, token_capacity=16, ragged=allocation)
    return Catalog(tuple(shapes))


@functools.cache
def served(flood: Constraint | None) -> tuple[Simulation, list[tuple[Any, ...]]]:
    """Typical requests, then a flood (or nothing), then typical requests again, each when the others are done.

    Returns:
        The run, and what the last ones experienced: program, target rows and tokens of every frame.
    """
    drafter = Drafter(
        tables=(constant(0.85, DEPTH), constant(0.0, DEPTH)), shown=(constant(0.85, DEPTH),) * 2,
        kinds=lambda requests, outputs: (requests >= 2 * VICTIMS).astype(np.int64),
    )  # fmt: skip
    spec = RequestSpec(prompt=np.zeros(PROMPT_LEN, np.int32), max_tokens=OUTPUT)
    arrivals = [Arrival(at_ns=(number // VICTIMS) * LATER_NS, spec=spec) for number in range(2 * VICTIMS)]
    if flood is not None:
        refused = RequestSpec(prompt=spec.prompt, max_tokens=OUTPUT, constraints=flood)
        arrivals += [Arrival(at_ns=2 * SECOND_NS, spec=refused)] * FLOOD
    frames: list[tuple[Any, ...]] = []

    def observe(ran: Ran) -> None:
        if ran.start_ns >= LATER_NS:
            frames.append((ran.plan.shape.name, tuple(lane.length for lane in ran.plan.lanes), ran.plan.reason))

    scheduler = Scheduler(catalog(), Limits(slots=SLOTS, pages=64, page_size=16, max_context=200, draft_extent=DEPTH))
    device = FakeDevice(LinearCosts(), 16, slots=SLOTS, sampler=Draws(drafter, PROMPT_LEN))
    simulation = Simulation(scheduler, device, arrivals, check=False, observe=observe)
    simulation.run(until_ns=LATER_NS - 1)
    assert all(request.reason == "length" for request in simulation.requests[2 * VICTIMS :])
    assert not scheduler.state.requests.runnable.any()
    simulation.run()
    return simulation, frames


def later(simulation: Simulation) -> list[tuple[int, ...]]:
    return [(r.first_ns, r.last_ns, *r.gaps_ns) for r in simulation.requests[VICTIMS : 2 * VICTIMS]]


def test_a_flood_with_target_only_constraints_changes_nobody_elses_widths_and_speed() -> None:
    (calm, calm_frames), (flooded, frames) = served(None), served(Constraint.TARGET_ONLY)
    assert sum(request.num_tokens for request in flooded.requests[2 * VICTIMS :]) == FLOOD * OUTPUT
    assert any(max(lengths) == DEPTH + 1 for _, lengths, _ in frames)
    assert frames == calm_frames
    assert later(flooded) == later(calm)
    known, wanted = flooded.scheduler.state.acceptance, calm.scheduler.state.acceptance
    for name in ("prior", "accept_prior", "accept_prior_weight"):
        np.testing.assert_array_equal(getattr(known, name), getattr(wanted, name))


def test_a_flood_without_constraints_costs_the_others_no_more_than_a_fresh_start() -> None:
    """It does lower what the population shows; a new request starts at 0.5^d all the same."""
    (calm, _), (flooded, _) = served(None), served(Constraint.NONE)
    shown = flooded.scheduler.state.acceptance.accept_prior
    assert (shown < calm.scheduler.state.acceptance.accept_prior)[0].all()
    times = [sum(last - first for first, last, *_ in later(run)) for run in (flooded, calm)]
    assert times[0] < 1.1 * times[1]


class Misled(FakeDraft):
    """Right for those whose prompt begins with another letter than the flood's, and for these sure and wrong."""

    def guess(self, next_token: NextToken, tokens: np.ndarray, prompt_len: int, seed: int | None) -> Guess:
        token = next_token(tokens, prompt_len, seed)
        return Guess((token + 1) % 256 if tokens[0] == ord("!") else token, 0.9)


@pytest.mark.parametrize("biased", [True, False])
def test_what_the_engine_shares_between_requests_is_not_taught_by_biased_ones(biased: bool) -> None:
    """The logistic map and the population means: a flood of logit_bias leaves them, a plain one does not."""
    with EngineRig(max_slots=2, spec_method="draft", num_draft_tokens=3, draft=Misled()) as rig:
        rig.finish(*[rig.submit(f"fine {number}", max_tokens=80) for number in range(4)])
        rig.settle()
        before = shared(rig)
        extra = {"logit_bias": {65: 1.0}} if biased else {}
        rig.finish(*[rig.submit(f"! {number}", max_tokens=80, **extra) for number in range(6)])
        rig.settle()
        counts = rig.engine.stats().rounds.values()
        assert sum(c.offered - c.accepted for c in counts) > 20
        assert (shared(rig) == before) == biased


def shared(rig: EngineRig) -> list[Any]:
    drafting, acceptance = rig.engine._drafting, rig.engine.scheduler.state.acceptance
    maps = [(known.scale, known.shift) for known in drafting._calibrations.values()]
    columns = (acceptance.prior, acceptance.accept_prior, acceptance.accept_prior_weight)
    return [maps, *(column.tolist() for column in columns)]
