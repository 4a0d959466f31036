"""Prerequisites against exhaustive oracles, on random catalogues and states with fixed seeds.

Exact (every pair of programs has the score of its best cohort, and no other pair is proposed):
one-row prefill, scored prefill, decode, rectangular rounds, mixed with the prompt row absent, ready or enabled,
retirements alone, and the index of longer chains.

Bounded, with what was measured here:

- packed prefill, close prices: 6 of 400 winners below the optimum, worst 15.2 %, mean 0.05 %; 35 of 1,826 pairs,
  worst 15.2 %, mean 0.06 %. (Without the orders that give a new row no more than it must have, 16 instead of 1 of 355
  pairs, and nearly all of a pair's value where prices differ by decades.)
- multistage: the first step of 35 of 300 decisions does not begin the best schedule; the best one that begins so
  has up to 27.5 % less value per time, 1.3 % in the mean.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest

from helios_jax.scheduler import (
    Catalog,
    ImageSpan,
    ProgramKind,
    ProgramShape,
    SelectionReason,
    State,
    new_state,
    plan_next,
)
from helios_jax.scheduler.candidates import Candidates, new_decision, scores
from helios_jax.scheduler.prerequisites import prerequisite_candidates
from helios_jax.scheduler.state import REQUEST_COLUMNS, Phase, Requests
from tests.unit.scheduler_pairs_oracle import Choice, PairOracle
from tests.unit.scheduler_pairs_states import FRESH, LONGER, READY, random_catalog, random_state
from tests.unit.scheduler_sequences_oracle import Sequences
from tests.unit.scheduler_toy import MS, admitted, measured, request, small_catalog, small_limits

Key = tuple[tuple[ProgramShape, ...], bool]  # the programs and whether all are measured


def found_scores(state: State) -> dict[Key, float]:
    """Best score of each pair (or prerequisite alone) among the scheduler's candidates."""
    decision, found = new_decision(state), {}
    scale = math.exp(decision.values.log_scale)
    for block in prerequisite_candidates(decision):
        rates = scores(block, decision.values.waiting)
        for row, rate in enumerate(rates.tolist()):
            programs = [block.first[row], *([block.follow[row]] if block.follow[row] >= 0 else [])]
            key = tuple(state.catalog.shapes[i] for i in programs), bool(block.known[row])
            found[key] = max(found.get(key, -math.inf), rate * scale)
    return found


def best_scores(choices: list[Choice]) -> dict[Key, Fraction]:
    best: dict[Key, Fraction] = {}
    for choice in choices:
        key = choice.shapes, choice.known
        best[key] = max(best.get(key, choice.score), choice.score)
    return best


def close(value: float, wanted: Fraction) -> bool:
    return abs(Fraction(value) - wanted) <= abs(wanted) * Fraction(1, 10**9) + Fraction(1, 10**6)


def compare(seed: int, state: State) -> list[Choice]:
    """Assert that the scheduler proposes what the oracle does, at the same scores."""
    choices = PairOracle(state).choices()
    wanted, found = best_scores(choices), found_scores(state)
    assert set(found) == set(wanted), f"seed {seed}"
    for key, score in wanted.items():
        assert close(found[key], score), f"seed {seed}: {key} {found[key]} {float(score)}"
    return choices


def pairs_state(seed: int, num: int, unmeasured: float) -> State:
    """Requests in one or two stages before inference, among ready ones."""
    rng = random.Random(seed)
    stage = rng.choice(FRESH)
    also = ("saved stream", "saved prompt", "terminal") if stage.startswith("saved") else (rng.choice(FRESH),)
    catalog = random_catalog(rng, rounds=seed % 2 == 0)
    return random_state(rng, (stage, *also, *READY), catalog=catalog, num=num, unmeasured=unmeasured)


def chains_state(seed: int, num: int, unmeasured: float) -> State:
    """Requests behind several stages among others."""
    rng = random.Random(seed)
    kinds = (rng.choice(LONGER), rng.choice(LONGER), rng.choice(FRESH), "terminal", *READY)
    return random_state(rng, kinds, catalog=random_catalog(rng), num=num, unmeasured=unmeasured)


def combinations(choices: Iterable[Choice]) -> collections.Counter[tuple[str, ...]]:
    """How often each prerequisite met each following kind and case of the prompt row."""
    return collections.Counter((*(str(s.kind) for s in c.shapes), c.case) for c in choices)


@pytest.mark.parametrize("unmeasured", [0.0, 0.3])
def test_every_pair_has_the_score_of_its_best_cohort(unmeasured: float) -> None:
    """And all pairs occur: a program that enables streams can only be a snapshot."""
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    for seed in range(130):
        seen.update(combinations(compare(seed, pairs_state(seed, num=5, unmeasured=unmeasured))))
    cases = {("prefill", ""), ("scored_prefill", ""), ("mixed", "enabled")}
    first = ("initialize", "restore", "vision", "snapshot")
    expected = {(kind, *case) for kind in first for case in cases}
    expected |= {
        ("snapshot", *case) for case in (("decode", ""), ("speculative", ""), ("mixed", "absent"), ("mixed", "ready"))
    }
    assert set(seen) == expected | {("snapshot", "")}
    assert min(seen.values()) >= 3, seen


@pytest.mark.slow
@pytest.mark.parametrize("unmeasured", [0.0, 0.3])
def test_every_pair_of_eight_requests_has_the_score_of_its_best_cohort(unmeasured: float) -> None:
    for seed in range(1000, 2000):
        compare(seed, pairs_state(seed, num=8, unmeasured=unmeasured))


@pytest.mark.parametrize("unmeasured", [0.0, 0.3])
def test_chains_are_ranked_by_their_continuations(unmeasured: float) -> None:
    for seed in range(60):
        compare(seed, chains_state(seed, num=5, unmeasured=unmeasured))


@pytest.mark.slow
@pytest.mark.parametrize("unmeasured", [0.0, 0.3])
def test_chains_of_eight_requests_are_ranked_by_their_continuations(unmeasured: float) -> None:
    for seed in range(1000, 2000):
        compare(seed, chains_state(seed, num=8, unmeasured=unmeasured))


def check_winner(seed: int, num: int) -> None:
    """`plan_next` picks among these candidates: its score is at least theirs, of the same certainty."""
    unmeasured = 0.1 * (seed % 2)
    state = pairs_state(seed, num, unmeasured) if seed % 3 else chains_state(seed, num, unmeasured)
    plan, choices = plan_next(state), PairOracle(state).choices()
    assert plan is not None
    unknown = [choice.score for choice in choices if not choice.known]
    if not unknown and plan.reason is SelectionReason.DISCOVERY:
        return  # an indeterminate inference wins over determinate pairs
    best = max(unknown or [choice.score for choice in choices])
    scored = Fraction(plan.value_rate * math.exp(plan.log_scale))
    assert scored >= best - abs(best) * Fraction(1, 10**9) - Fraction(1, 10**6), f"seed {seed}"


def test_the_winner_is_no_worse_than_the_best_pair() -> None:
    for seed in range(45):
        check_winner(seed, 6)


@pytest.mark.slow
def test_the_winner_of_eight_requests_is_no_worse_than_the_best_pair() -> None:
    for seed in range(2000, 3000):
        check_winner(seed, 8)


def test_permuted_slots_give_the_permuted_plan() -> None:
    """Slots are names: no prerequisite, cohort or filling depends on them."""
    for seed in range(60):
        state = pairs_state(seed, 8, 0.1) if seed % 2 else chains_state(seed, 8, 0.1)
        requests = state.requests.draft()
        if np.isnan(requests.token_r[0]):
            requests.token_r[0] = 1.5
        state = dataclasses.replace(state, requests=requests.sealed())
        order = np.random.default_rng(seed).permutation(len(requests.phase))
        columns = {name: getattr(state.requests, name)[order] for name in REQUEST_COLUMNS}
        acceptance = dataclasses.replace(
            state.acceptance, **{name: getattr(state.acceptance, name)[order] for name in ACCEPTANCE_COLUMNS}
        )
        moved = dataclasses.replace(
            state, requests=Requests(**columns).draft().sealed(), specs=tuple(state.specs[i] for i in order),
            acceptance=acceptance,
        )  # fmt: skip
        first, second = plan_next(state), plan_next(moved)
        assert first is not None
        assert second is not None
        assert first.shape == second.shape, f"seed {seed}"
        back = {(int(order[lane.handle.slot]), lane.start, lane.length) for lane in second.lanes}
        assert back == {(lane.handle.slot, lane.start, lane.length) for lane in first.lanes}, f"seed {seed}"


ACCEPTANCE_COLUMNS = ("accept_mean", "accept_weight", "forecast_mean", "forecast_weight")


def packed_state(seed: int, num: int) -> State:
    """Prefills of two and four rows behind a prerequisite; prices close to each other, as in steady service."""
    rng = random.Random(seed)
    stage = rng.choice(FRESH[:4])
    others = ("saved prompt", "terminal") if stage.startswith("saved") else (stage,)
    catalog = random_catalog(rng, prefill_rows=(2, 4), mixed=False)
    state = random_state(rng, (stage, *others, *READY), catalog=catalog, num=num, short=3)
    requests = state.requests.draft()
    requests.token_r[requests.phase > 0] = [rng.uniform(0.5, 2) for _ in range(int((requests.phase > 0).sum()))]
    policy = dataclasses.replace(state.policy, token_fairness=1.0)
    return dataclasses.replace(state, requests=requests.sealed(), policy=policy)


def packed_gaps(seeds: Iterable[int], num: int) -> tuple[np.ndarray, np.ndarray]:
    """Relative gaps to the optimum: of the best pair of each state, and of every pair."""
    winners, pairs = [], []
    for seed in seeds:
        state = packed_state(seed, num)
        wanted, found = best_scores(PairOracle(state).choices()), found_scores(state)
        best = max(wanted.values())
        winners.append(relative_gap(max(found.values()), best))
        shared = set(wanted) & set(found)  # a cohort below the optimum can change what is redundant
        pairs += [relative_gap(found[key], wanted[key]) for key in shared]
    return np.array(winners), np.array(pairs)


def relative_gap(value: float, optimum: Fraction) -> float:
    return max(0.0, float((optimum - Fraction(value)) / max(abs(optimum), Fraction(1, 10**9))))


def report(name: str, gaps: np.ndarray) -> tuple[float, float, float]:
    """Print and return: share below the optimum, worst and mean gap."""
    share, worst, mean = float((gaps > 1e-9).mean()), float(gaps.max()), float(gaps.mean())
    print(f"{name}: {int((gaps > 1e-9).sum())} of {len(gaps)} below the optimum, worst {worst:.1%}, mean {mean:.2%}")
    return share, worst, mean


def test_packed_prefill_pairs_gap_to_the_optimum() -> None:
    for name, gaps in zip(("packed winners", "packed pairs"), packed_gaps(range(100), num=5), strict=True):
        share, worst, mean = report(name, gaps)
        assert share <= 0.005
        assert worst <= 0.10
        assert mean <= 0.0005


@pytest.mark.slow
def test_packed_prefill_pairs_of_seven_requests_gap_to_the_optimum() -> None:
    for name, gaps in zip(("packed winners", "packed pairs"), packed_gaps(range(400), num=7), strict=True):
        share, worst, mean = report(name, gaps)
        assert share <= 0.02
        assert worst <= 0.16
        assert mean <= 0.0008


def images_state(seed: int) -> State:
    """2 to 4 prompts behind 0 to 3 images each, three vision programs and one prefill."""
    rng, kinds = random.Random(seed), ProgramKind
    base = small_catalog(decode=(1,), prefill=((1, 16),), scored=(), initialize=(1,))
    catalog = Catalog((*base, *(ProgramShape(kinds.VISION, b, 1) for b in (1, 2, 4))))
    specs = [
        request(rng.randint(4, 12), 4, image_spans=tuple(ImageSpan(i, i + 1) for i in range(rng.randint(0, 3))))
        for _ in range(rng.randint(2, 4))
    ]
    state = new_state(catalog, dataclasses.replace(small_limits(slots=4), feature_tokens=8))
    state, handles = admitted(state, *specs)
    requests = state.requests.draft()
    for handle in handles:
        images = requests.window_images[handle.slot]
        requests.phase[handle.slot] = Phase.VISION if images else Phase.PROMPT
        requests.token_r[handle.slot] = 10 ** rng.uniform(-2, 2)
    times = {shape: rng.randint(1, 40) * MS for shape in catalog}
    slower = sorted(rng.randint(2, 60) * MS for _ in range(3))  # more rows take longer
    times.update(zip(catalog.of_kind(kinds.VISION), slower, strict=True))
    return measured(dataclasses.replace(state, requests=requests.sealed()), times.__getitem__)


def worth_of_work(state: State, oracle: PairOracle, block: Candidates, row: int) -> Fraction:
    """What a pair's work and its retirements are worth, recounted."""
    first, follow = (state.catalog.shapes[int(column[row])] for column in (block.first, block.follow))
    times = oracle.times(first, follow)
    work = {slot: int(block.work[row, slot]) for slot in np.flatnonzero(block.work[row]).tolist()}
    streams = {slot: oracle.decode_value(slot, follow, times) for slot in work if state.requests.streams[slot]}
    ended = [slot for slot in oracle.ending(first) if block.members[row, slot]]
    value = sum((oracle.lane_value(slot, tokens, streams, follow) for slot, tokens in work.items()), Fraction(0))
    return value + sum((oracle.terminal_value(slot, times) for slot in ended), Fraction(0))


def test_a_pair_claims_what_its_work_is_worth() -> None:
    """Also where a cohort is below the optimum: nobody is promised what the lanes do not do."""
    for seed in range(60):
        state = packed_state(seed, 6) if seed % 2 else pairs_state(seed, 6, 0.1)
        decision, oracle = new_decision(state), PairOracle(state)
        scale = math.exp(decision.values.log_scale)
        for block in prerequisite_candidates(decision):
            for row in np.flatnonzero(block.follow >= 0).tolist():
                assert close(float(block.value[row]) * scale, worth_of_work(state, oracle, block, row)), f"seed {seed}"


def multistage_gaps(seeds: Iterable[int]) -> np.ndarray:
    gaps = []
    for seed in seeds:
        state = images_state(seed)
        plan = plan_next(state)
        assert plan is not None
        gaps.append(Sequences(state).shortfall(plan))
    return np.array(gaps)


def test_multistage_gap_to_the_best_schedule() -> None:
    share, worst, mean = report("multistage", multistage_gaps(range(60)))
    assert share <= 0.15
    assert worst <= 0.28
    assert mean <= 0.02


@pytest.mark.slow
def test_multistage_gap_to_the_best_schedule_of_many() -> None:
    share, worst, mean = report("multistage", multistage_gaps(range(300)))
    assert share <= 0.12
    assert worst <= 0.28
    assert mean <= 0.014
