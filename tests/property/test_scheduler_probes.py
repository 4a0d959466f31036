"""Funded acceptance probes against a naive enumeration, and what they teach in a run."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from helios_jax.scheduler import (
    Catalog,
    ProgramKind,
    ProgramShape,
    ScheduledPlan,
    SelectionReason,
    State,
    new_state,
    plan_next,
)
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_rounds_oracle import (
    COPY,
    LEARNED,
    Choice,
    RoundOracle,
    mixed,
    random_policy,
    rectangular,
    round_state,
    speculative,
)
from tests.unit.scheduler_toy import admitted, measured, request, small_catalog, small_limits

PROBE = SelectionReason.ACCEPTANCE_LEARNING


def funded(state: State, *names: str) -> State:
    """The state with full credit in the named ledgers."""
    full = {name: dataclasses.replace(ledger, balance=ledger.cap) for name in names
            for ledger in [getattr(state.ledgers, name)]}  # fmt: skip
    return dataclasses.replace(state, ledgers=dataclasses.replace(state.ledgers, **full))


def random_probe_state(rng: random.Random, mode: str = "adaptive") -> State:
    source, batches = rng.choice([LEARNED, LEARNED, COPY]), sorted(rng.sample((1, 2, 3, 4, 6), 2))
    shapes = rectangular(rng, source, batches)
    shapes += [mixed(b, w, 64, source) for b, w in ((2, 1), (4, 3))]
    state = round_state(rng, shapes, prompts=rng.choice([0.0, 0.2]), policy=random_policy(rng, mode))
    # Deep prefixes about which little is known, and programs that take about as long as each other.
    requests, known = state.requests.draft(), state.acceptance
    requests.max_tokens[:] = requests.output_len + [rng.randint(1, 12) for _ in requests.max_tokens]
    weight = known.accept_weight / [rng.uniform(1, 100) for _ in range(known.depth)]
    mean = known.accept_mean * rng.uniform(0.2, 1)
    for column in (weight, mean):
        column.setflags(write=False)
    acceptance = dataclasses.replace(known, accept_mean=mean, accept_weight=weight)
    state = dataclasses.replace(state, requests=requests.sealed(), acceptance=acceptance)
    return measured(state, lambda _: rng.randint(10**7, 3 * 10**7))


def ordinary_depths(plan: ScheduledPlan) -> dict[int, int]:
    depths = {lane.handle.slot: lane.length - 1 for lane in plan.lanes}
    if plan.prompt_row >= 0:
        del depths[plan.lanes[plan.prompt_row].handle.slot]
    return depths if plan.shape.kind is not ProgramKind.PREFILL else {}


def naive_gains(state: State, ordinary: ScheduledPlan, rate: Fraction) -> dict[Choice, tuple[Fraction, float]]:
    """Every eligible probe: (optimistic improvement per ms, weight of the least-informed added prefix)."""
    oracle, depths = RoundOracle(state, hopeful=True), ordinary_depths(ordinary)
    choices = oracle.choices()
    choices = [one for one in choices if not any(oracle.dominates(other, one) for other in choices)]
    found = {}
    for choice in choices:
        weights = []
        for slot, rows in choice.rows:
            first, offered = depths.get(slot, 0) + 1, rows - 1
            decodes = slot != choice.prompt and state.requests.phase[slot] == Phase.DECODE
            left = int(state.requests.max_tokens[slot] - state.requests.output_len[slot]) - rows
            if decodes and offered >= first and left >= first + 1:
                row = 0 if choice.shape.proposal_source is LEARNED else 1
                weights += state.acceptance.accept_weight[slot, row, first - 1 : offered].tolist()
        if weights and choice.score > rate:
            found[choice] = ((choice.score - rate) / oracle.duration[choice.shape], min(weights))
    return found


def score_of(plan: ScheduledPlan) -> Fraction:
    return Fraction(plan.selection_value_rate()) * Fraction(math.exp(plan.selection_log_scale()))


def check_probes(seeds: range) -> None:
    probes = 0
    for seed in seeds:
        state = random_probe_state(random.Random(seed))
        ordinary, plan = plan_next(state), plan_next(funded(state, "learning"))
        assert ordinary is not None
        assert plan is not None
        assert ordinary.reason is SelectionReason.ORDINARY
        rate = score_of(ordinary)
        margin = abs(rate) * Fraction(1, 10**9)
        gains = naive_gains(state, ordinary, rate)
        if plan.reason is not PROBE:
            assert all(gain < margin for gain, _ in gains.values()), seed
            assert dataclasses.replace(plan, reason=ordinary.reason) == ordinary
            continue
        probes += 1
        rows = tuple(sorted((lane.handle.slot, lane.length) for lane in plan.lanes))
        chosen = next(choice for choice in gains if (choice.shape, choice.rows) == (plan.shape, rows))
        best = max(gain for gain, _ in gains.values())
        assert gains[chosen][0] >= best * (1 - Fraction(1, 10**9)) - margin, seed
    assert probes > len(seeds) // 10


def test_probes_are_the_naive_choice() -> None:
    check_probes(range(120))


@pytest.mark.slow
def test_probes_are_the_naive_choice_in_thousands_of_cases() -> None:
    check_probes(range(5000, 7000))


@pytest.mark.parametrize("mode", ["fixed", "off"])
def test_only_adaptive_selection_probes(mode: str) -> None:
    for seed in range(60):
        plan = plan_next(funded(random_probe_state(random.Random(seed), mode), "learning"))
        assert plan is not None
        assert plan.reason is SelectionReason.ORDINARY


def tied_state(*shapes: ProgramShape, learned: float, copied: float) -> State:
    """One decoder whose first proposal may always be accepted, for all that is known; programs take equally long."""
    state = new_state(Catalog((*small_catalog().shapes, *shapes)), small_limits())
    state, _ = admitted(state, request(5, 20))
    known = state.acceptance
    mean, weight = np.full_like(known.accept_mean, 0.01), known.accept_weight.copy()
    weight[:, 0], weight[:, 1] = learned, copied
    for column in (mean, weight):
        column.setflags(write=False)
    requests = state.requests.draft()
    requests.phase[0], requests.consumed_len[0], requests.committed_len[0] = Phase.DECODE, 5, 5
    requests.output_len[0], requests.proposals[0] = 1, 5
    acceptance = dataclasses.replace(known, accept_mean=mean, accept_weight=weight)
    state = dataclasses.replace(state, requests=requests.sealed(), acceptance=acceptance)
    return funded(measured(state, lambda shape: 2_000_000 + 200_000 * (shape.proposal_depth > 0)), "learning")


def test_equal_gains_prefer_the_least_informed_prefix_and_then_the_smaller_geometry() -> None:
    learned, copied = speculative(1, 2, 1), speculative(1, 2, 1, source=COPY)
    for weights, expected in (((0.5, 0.25), copied), ((0.25, 0.5), learned)):
        plan = plan_next(tied_state(learned, copied, learned=weights[0], copied=weights[1]))
        assert plan is not None
        assert (plan.reason, plan.shape) == (PROBE, expected)
    plan = plan_next(tied_state(speculative(1, 2, 3), speculative(1, 2, 2), learned=0.5, copied=0.5))
    assert plan is not None
    assert (plan.reason, plan.shape) == (PROBE, speculative(1, 2, 2))


def test_a_probe_needs_full_credit_and_no_open_episode() -> None:
    state = next(
        state
        for state in (random_probe_state(random.Random(seed)) for seed in range(100))
        if (plan := plan_next(funded(state, "learning"))) and plan.reason is PROBE
    )
    full = funded(state, "learning")
    learning = full.ledgers.learning
    for broken in (dataclasses.replace(learning, balance=learning.cap - 1), dataclasses.replace(learning, episode=9)):
        plan = plan_next(dataclasses.replace(full, ledgers=dataclasses.replace(full.ledgers, learning=broken)))
        assert plan is not None
        assert plan.reason is SelectionReason.ORDINARY
    open_refresh = dataclasses.replace(full.ledgers.refresh, episode=9)
    plan = plan_next(dataclasses.replace(full, ledgers=dataclasses.replace(full.ledgers, refresh=open_refresh)))
    assert plan is not None
    assert plan.reason is SelectionReason.ORDINARY
