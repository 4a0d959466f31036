"""Pairs of a prerequisite and an inference against the exhaustive oracle, on random catalogues and states."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from helios_jax.scheduler import ProgramShape, State
from helios_jax.scheduler.candidates import new_decision
from helios_jax.scheduler.policy import scores
from helios_jax.scheduler.prerequisites import prerequisite_candidates
from tests.unit.scheduler_pairs_oracle import Choice, PairOracle
from tests.unit.scheduler_pairs_states import FRESH, READY, random_catalog, random_state

Key = tuple[ProgramShape, ...]


def found_scores(state: State) -> dict[tuple[Key, bool], float]:
    """Best score of each pair (or prerequisite alone) among the scheduler's candidates, and whether it is known."""
    decision, found = new_decision(state), {}
    scale = math.exp(decision.values.log_scale)
    for block in prerequisite_candidates(decision):
        rates = scores(block, decision.values.waiting)
        for row, rate in enumerate(rates.tolist()):
            programs = [block.first[row], *([block.follow[row]] if block.follow[row] >= 0 else [])]
            key = tuple(state.catalog.shapes[i] for i in programs), bool(block.known[row])
            found[key] = max(found.get(key, -math.inf), rate * scale)
    return found


def best_scores(choices: list[Choice]) -> dict[tuple[Key, bool], Fraction]:
    best: dict[tuple[Key, bool], Fraction] = {}
    for choice in choices:
        key = choice.shapes, choice.known
        best[key] = max(best.get(key, choice.score), choice.score)
    return best


def close(value: float, wanted: Fraction) -> bool:
    return abs(Fraction(value) - wanted) <= abs(wanted) * Fraction(1, 10**9) + Fraction(1, 10**6)


def check_exact(seed: int, *, num: int, unmeasured: float) -> None:
    """Every pair that may win has the score of its best cohort, and no other pair is proposed."""
    rng = random.Random(seed)
    stage = rng.choice(FRESH)
    also = ("saved stream", "saved prompt", "terminal") if stage.startswith("saved") else (rng.choice(FRESH),)
    state = random_state(rng, (stage, *also, *READY), catalog=random_catalog(rng), num=num, unmeasured=unmeasured)
    wanted, found = best_scores(PairOracle(state).choices()), found_scores(state)
    assert set(found) == set(wanted), f"seed {seed}"
    for key, score in wanted.items():
        assert close(found[key], score), f"seed {seed}: {key} {found[key]} {float(score)}"


@pytest.mark.parametrize("unmeasured", [0.0, 0.3])
def test_every_pair_has_the_score_of_its_best_cohort(unmeasured: float) -> None:
    for seed in range(150):
        check_exact(seed, num=5, unmeasured=unmeasured)


@pytest.mark.slow
@pytest.mark.parametrize("unmeasured", [0.0, 0.3])
def test_every_pair_of_eight_requests_has_the_score_of_its_best_cohort(unmeasured: float) -> None:
    for seed in range(1000, 1800):
        check_exact(seed, num=8, unmeasured=unmeasured)
