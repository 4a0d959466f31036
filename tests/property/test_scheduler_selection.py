"""Selection against the exhaustive oracle, on random catalogues, prices and requests."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from helios_jax.scheduler import PolicyConfig, RequestSpec, ScheduledPlan, SelectionReason, State, new_state, plan_next
from helios_jax.scheduler.packed import PromptRows, packed_cohorts
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_oracle import Oracle
from tests.unit.scheduler_toy import admitted, measured, request, small_catalog, small_limits

HOUR_NS = 3_600_000_000_000


def random_state(
    rng: random.Random, *, prefill_rows: tuple[int, ...], num: int = 6, unmeasured: float = 0.0,
    policy: PolicyConfig | None = None,
) -> State:  # fmt: skip
    """Requests in any phase, prices over many decades, a random catalogue with random durations."""
    tokens = sorted(rng.sample(range(1, 9), 3))
    rows = sorted(rng.sample((1, 2, 3, 4, 6, 8), 3))
    catalog = small_catalog(
        decode=rows,
        prefill=[(b, t) for b in prefill_rows for t in tokens],
        scored=[(1, t) for t in tokens[:2]],
        initialize=rng.sample((1, 2, 3, 8), 2),
    )
    state = new_state(catalog, small_limits(slots=8), policy or random_policy(rng))
    state = dataclasses.replace(state, now_ns=HOUR_NS)
    specs = [
        random_request(rng.randint(1, 5), rng.randint(1, 6), rng.random() < 0.2, rng.randint(1, 5))
        for _ in range(rng.randint(1, num))
    ]
    state, handles = admitted(state, *specs)
    requests = state.requests.draft()
    for (slot, _), spec in zip(handles, specs, strict=True):
        requests.phase[slot] = phase = rng.choice([Phase.INITIALIZE, Phase.PROMPT, Phase.DECODE])
        if phase == Phase.PROMPT:
            requests.consumed_len[slot] = rng.randint(0, len(spec.prompt) - 1)
        elif phase == Phase.DECODE:
            requests.consumed_len[slot] = len(spec.prompt)
            requests.delivery_r[slot] = rng.choice([np.nan, 10 ** rng.uniform(-3, 6)])
            requests.visible_ns[slot] = HOUR_NS - rng.randint(0, 2 * 10**9)
        requests.committed_len[slot] = requests.consumed_len[slot]
        ends = [e for e in (*spec.message_ends, len(spec.prompt)) if e > requests.consumed_len[slot]]
        requests.endpoint[slot] = min([*(e for e in ends if e <= len(spec.prompt)), len(spec.prompt)])
        # One request without history at most: two would tie, and a tie is the tie order's business.
        requests.token_r[slot] = np.nan if slot == 0 and rng.random() < 0.5 else 10 ** rng.uniform(-3, 6)
        requests.last_use_ns[slot] = rng.randint(0, HOUR_NS)
    state = dataclasses.replace(state, requests=requests.sealed())
    return measured(state, lambda _: 0 if rng.random() < unmeasured else rng.randint(10**5, 10**8))


def random_request(prompt_len: int, max_tokens: int, scored: bool, message_end: int) -> RequestSpec:
    """A request with one message end, if it lies in the prompt."""
    ends = (message_end,) if message_end <= prompt_len else ()
    return request(prompt_len, max_tokens, scored=scored, message_ends=ends)


def random_policy(rng: random.Random) -> PolicyConfig:
    return PolicyConfig(
        output_token_value=rng.choice([0.0, 1.0, 64.0]),
        token_fairness=rng.choice([0.25, 16.0]),
        delivery_fairness=rng.choice([0.0, 4.0]),
        decode_age_price=rng.choice([0.0, 0.1, 3.0]),
    )


def shortfall(plan: ScheduledPlan, optimum: Fraction) -> float:
    """Relative gap of a plan's score to the optimum, 0 when equal to rounding."""
    scored = Fraction(plan.selection_value_rate()) * Fraction(math.exp(plan.selection_log_scale()))
    scale = max(abs(optimum), Fraction(1, 10**12))
    return max(0.0, float((optimum - scored) / scale))


@pytest.mark.parametrize("unmeasured", [0.0, 0.3])
def test_decode_and_one_row_prefill_are_exact(unmeasured: float) -> None:
    """Decode cohorts, single prompts, pairs of initialisation and prefill: all as enumerated."""
    for seed in range(400):
        state = random_state(random.Random(seed), prefill_rows=(1,), unmeasured=unmeasured)
        plan = plan_next(state)
        assert plan is not None
        assert shortfall(plan, Oracle(state).best()) < 1e-9, f"seed {seed}: {plan}"


def test_packed_prefill_gap_to_the_optimum() -> None:
    """Whole decisions with packed programs, prices over many decades: measured, 0 of 300 below the optimum."""
    gaps = []
    for seed in range(300):
        state = random_state(random.Random(seed), prefill_rows=(1, 3), num=5)
        plan = plan_next(state)
        assert plan is not None
        gaps.append(shortfall(plan, Oracle(state).best()))
    missed = [gap for gap in gaps if gap > 1e-9]
    print(f"packed prefill: {len(missed)} of {len(gaps)} below the optimum, worst {max(gaps):.3%}")
    assert len(missed) <= 0.01 * len(gaps)
    assert max(gaps) < 0.25


@pytest.mark.parametrize("seed", range(20))
def test_submitted_plan_is_the_prerequisite_alone(seed: int) -> None:
    """An initialise plan keeps its own duration and takes no work of what follows."""
    state = random_state(random.Random(seed), prefill_rows=(1,))
    requests = state.requests.draft()
    requests.phase[requests.phase > 0] = Phase.INITIALIZE
    requests.consumed_len[:] = requests.committed_len[:] = 0
    plan = plan_next(dataclasses.replace(state, requests=requests.sealed()))
    assert plan is not None
    index = state.catalog.shapes.index(plan.shape)
    assert plan.estimated_duration_ns == state.costs.estimate_ns[index]
    assert all(lane.length == 0 and not lane.emits for lane in plan.lanes)
    assert len(plan.lanes) == min(plan.shape.batch_capacity, int((requests.phase > 0).sum()))


@pytest.mark.parametrize("seed", range(40))
def test_scale_of_all_coefficients_changes_no_decision_between_decoders(seed: int) -> None:
    """Without prompts every term scales: 1e-300, 1 and 1e300 times the coefficients choose alike."""
    plans = []
    for factor in (1e-300, 1.0, 1e300):
        policy = PolicyConfig(
            output_token_value=64 * factor,
            token_fairness=16 * factor,
            delivery_fairness=4 * factor,
            decode_age_price=0.1 * factor,
        )
        rng = random.Random(seed)
        state = random_state(rng, prefill_rows=(1,), policy=policy)
        requests = state.requests.draft()
        occupied = requests.phase > 0
        requests.phase[occupied] = Phase.DECODE
        requests.visible_ns[occupied] = [rng.randint(0, HOUR_NS) for _ in range(int(occupied.sum()))]  # starved hours
        plan = plan_next(dataclasses.replace(state, requests=requests.sealed()))
        assert plan is not None
        assert math.isfinite(plan.selection_value_rate())
        plans.append((plan.shape, plan.lanes, round(plan.value_rate, 9)))
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("factor", [1e-300, 1e300])
@pytest.mark.parametrize("name", ["output_token_value", "token_fairness", "delivery_fairness", "decode_age_price"])
def test_one_extreme_coefficient_keeps_the_order(name: str, factor: float) -> None:
    """Values at the ends of float64, and prices of 1e300: the winner is the exact arithmetic's winner."""
    for seed in range(25):
        policy = dataclasses.replace(PolicyConfig(), **{name: factor})
        state = random_state(random.Random(seed), prefill_rows=(1,), policy=policy)
        requests = state.requests.draft()
        requests.token_r[requests.phase > 0] *= 1e250
        state = dataclasses.replace(state, requests=requests.sealed())
        plan = plan_next(state)
        assert plan is not None
        assert math.isfinite(plan.selection_value_rate())
        optimum = Oracle(state).best()
        scaled = float(optimum / exact_exp(plan.selection_log_scale()))
        assert plan.selection_value_rate() == pytest.approx(scaled, rel=1e-6)


def exact_exp(exponent: float) -> Fraction:
    """exp of any float64 exponent that scores have, without overflow."""
    return Fraction(math.exp(exponent / 8)) ** 8


def test_permuted_slots_give_the_permuted_plan() -> None:
    for seed in range(60):
        state = random_state(random.Random(seed), prefill_rows=(1, 3), unmeasured=0.2)
        order = np.random.default_rng(seed).permutation(8)
        columns = {f.name: getattr(state.requests, f.name)[order] for f in dataclasses.fields(state.requests)}
        moved = dataclasses.replace(
            state,
            requests=dataclasses.replace(state.requests, **columns).draft().sealed(),
            specs=tuple(state.specs[i] for i in order),
        )
        first, second = plan_next(state), plan_next(moved)
        assert first is not None
        assert second is not None
        assert first.shape == second.shape
        back = {(int(order[lane.handle.slot]), lane.start, lane.length) for lane in second.lanes}
        assert back == {(lane.handle.slot, lane.start, lane.length) for lane in first.lanes}


def test_discovery_is_recorded_and_needs_an_empty_queue() -> None:
    for seed in range(60):
        state = random_state(random.Random(seed), prefill_rows=(1,), unmeasured=0.4)
        plan = plan_next(state)
        assert plan is not None
        unknown = plan.estimated_duration_ns == 0
        assert (plan.reason is SelectionReason.DISCOVERY) == unknown
        assert plan.required_empty_queue or not unknown


def best_packed(remaining: list[int], value: list[float], bonus: list[float], rows: int, tokens: int) -> float:
    """Exact optimum by dynamic programming over requests, rows and tokens."""
    best = {(0, 0): 0.0}
    for left, price, finish in zip(remaining, value, bonus, strict=True):
        more = dict(best)
        for (used_rows, used), worth in best.items():
            for length in range(1, min(left, tokens - used) + 1) if used_rows < rows else ():
                key, gain = (used_rows + 1, used + length), worth + length * price + finish * (length == left)
                more[key] = max(more.get(key, 0.0), gain)
        best = more
    return max(best.values())


def test_packed_cohorts_of_eight_prompts_stay_near_the_optimum() -> None:
    """Similar prices and finishing bonuses of the default policy: where prefix orders can go wrong.

    Measured: 91 of 400 below the exact optimum, the worst by 31.3 %, 1.3 % on average.
    """
    gaps, rng = [], random.Random(5)
    for _ in range(400):
        n = rng.randint(2, 8)
        remaining = [rng.randint(1, 24) for _ in range(n)]
        value = [1 + rng.uniform(0.0, 4.0) for _ in range(n)]
        bonus = [rng.choice([4.0, 64.0]) + v - 1 for v in value]
        rows, tokens = rng.randint(1, 8), rng.choice([8, 16, 32])
        prompts = PromptRows(np.array(remaining), np.array(value), np.array(bonus), np.zeros(n, np.bool_))
        lengths, totals = packed_cohorts(prompts, np.array([tokens]), np.array([rows]))
        finished = lengths[0] == remaining
        assert (lengths[0] <= remaining).all()
        assert lengths.sum() <= tokens
        assert (lengths > 0).sum() <= rows
        assert totals[0] == pytest.approx(float((lengths[0] * value + finished * bonus).sum()))
        gaps.append(1 - totals[0] / best_packed(remaining, value, bonus, rows, tokens))
    missed = [gap for gap in gaps if gap > 1e-9]
    print(
        f"packed cohorts: {len(missed)} of {len(gaps)} below the optimum, "
        f"worst {max(gaps):.1%}, mean {np.mean(gaps):.2%}"
    )
    assert len(missed) <= 0.25 * len(gaps)
    assert max(gaps) < 0.32
    assert np.mean(gaps) < 0.015
