"""Leaving out searches that cannot win: the same winner as with all of them, on random rounds and pairs."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from helios_jax.scheduler import ProgramKind, ProgramShape
from helios_jax.scheduler.candidates import Candidates, Decision, new_decision, scores
from helios_jax.scheduler.mixed import _undominated, mixed_candidates
from helios_jax.scheduler.prerequisites import prerequisite_candidates
from helios_jax.scheduler.pruning import most_value
from helios_jax.scheduler.race import Race
from helios_jax.scheduler.ragged import adaptive_cohorts
from helios_jax.scheduler.rounds import round_candidates
from helios_jax.scheduler.utility import undominated
from tests.unit.scheduler_pairs_states import FRESH, READY, random_catalog, random_state
from tests.unit.scheduler_rounds_oracle import (
    COPY,
    DEVICE,
    HOST,
    LEARNED,
    NONE,
    mixed,
    ragged,
    random_policy,
    rectangular,
    round_state,
)


def random_decision(seed: int) -> Decision:
    rng = random.Random(seed)
    source = rng.choice([LEARNED, LEARNED, COPY])
    shapes = [*rectangular(rng, source, (1, 2, 4, 6))]
    for allocation in (HOST, DEVICE):
        shapes += ragged(rng, source, (2, 4, 6), allocation)
    unmeasured = rng.choice([0.0, 0.0, 0.2])
    return new_decision(round_state(rng, shapes, num=8, unmeasured=unmeasured, policy=random_policy(rng, "adaptive")))


def best(decision: Decision, found: list[Candidates]) -> tuple[str, set[tuple[int, bytes]]]:
    """The highest score of the candidates that compete, and all candidates that have it.

    Up to rounding: sums over a few programs may run in another order than over many.
    """
    every = Candidates(*[np.concatenate(column) for column in zip(*found, strict=True)])
    rates = scores(every, decision.values.waiting)
    rates[every.known & ~every.known.all()] = -np.inf  # something unmeasured wins over what is measured
    rows = np.flatnonzero(np.isclose(rates, rates.max(), rtol=1e-12, atol=0.0))
    return f"{rates.max():.9e}", {(int(every.first[row]), every.work[row].tobytes()) for row in rows}


def check(seeds: range) -> None:
    left_out = 0
    for seed in seeds:
        decision = random_decision(seed)
        every, some = round_candidates(decision), round_candidates(decision, winner_only=True)
        assert best(decision, every) == best(decision, some), seed
        left_out += sum(len(block.first) for block in every) - sum(len(block.first) for block in some)
    assert left_out > len(seeds)


def test_what_is_left_out_never_wins() -> None:
    check(range(150))


@pytest.mark.slow
def test_what_is_left_out_never_wins_in_thousands_of_cases() -> None:
    check(range(10_000, 13_000))


def check_mixed_once(seed: int) -> tuple[int, int]:
    """Mixed programs below a score that one of them has are left out, and the best stay the best."""
    rng = random.Random(seed)
    source = rng.choice([LEARNED, COPY])
    shapes = [mixed(b, w, p, source) for b in (2, 4, 8) for w, p in ((1, 64), (1, 128), (2, 64), (3, 128))]
    unmeasured, policy = rng.choice([0.0, 0.0, 0.1]), random_policy(rng, "adaptive")
    state = round_state(rng, [*shapes, *rectangular(rng, source, (2, 4))], num=8, unmeasured=unmeasured,
                        prompts=rng.choice([0.0, 0.3]), policy=policy)  # fmt: skip
    decision = new_decision(state)
    every = mixed_candidates(decision)
    assert every is not None
    measured = scores(every, decision.values.waiting)[every.known]
    some = mixed_candidates(decision, least=float(measured.max(initial=-np.inf)))
    assert some is not None
    assert best(decision, [every]) == best(decision, [some]), seed
    return len(every.first) - len(some.first), len(every.first)


def check_mixed(seeds: range) -> None:
    left_out, compared = np.sum([check_mixed_once(seed) for seed in seeds], axis=0).tolist()
    assert left_out > 0.2 * compared


@pytest.mark.parametrize("seed", [500974, 502933])
def test_a_mixed_program_of_another_depth_may_be_padding(seed: int) -> None:
    """A slow small program discards larger ones whatever their depth, where a prompt runs alone."""
    check_mixed_once(seed)


def test_mixed_programs_below_a_score_do_not_matter() -> None:
    check_mixed(range(150))


@pytest.mark.slow
def test_mixed_programs_below_a_score_do_not_matter_in_thousands_of_cases() -> None:
    check_mixed(range(10_000, 13_000))


def pairs_decision(seed: int) -> Decision:
    """Requests in one or two stages before inference, terminal ones, and ready ones."""
    rng = random.Random(seed)
    kinds = rng.choice(FRESH), rng.choice(FRESH), "saved stream", "terminal", *READY
    catalog = random_catalog(rng, rounds=seed % 2 == 0)
    return new_decision(random_state(rng, kinds, catalog=catalog, num=7, unmeasured=rng.choice([0.0, 0.0, 0.05])))


def check_race(seeds: range) -> None:
    """A kind of pairs that holds the best one is searched, and most of the others are not, once the best is known."""
    left_out = compared = 0
    for seed in seeds:
        decision = pairs_decision(seed)
        every = prerequisite_candidates(decision)
        if not every:
            continue
        race = Race(decision)
        race.saw(every)
        some = prerequisite_candidates(decision, race)
        assert best(decision, every) == best(decision, some), seed
        left_out, compared = left_out + len(every) - len(some), compared + len(every)
    assert left_out > 0.3 * compared


def test_pairs_that_lose_the_race_never_win() -> None:
    check_race(range(250))


@pytest.mark.slow
def test_pairs_that_lose_the_race_never_win_in_thousands_of_cases() -> None:
    check_race(range(10_000, 12_000))


def test_bounds_are_never_below_what_a_search_finds() -> None:
    rng = np.random.default_rng(3)
    tight = 0
    for _ in range(200):
        n, depth, count = int(rng.integers(1, 9)), int(rng.integers(1, 5)), 4
        base = rng.exponential(1.0, (count, n))
        gains = -np.sort(-rng.exponential(1.0, (n, depth)), axis=1)
        lengths = np.broadcast_to(rng.integers(0, depth + 2, n), (count, n))
        batch = rng.integers(1, n + 1, count)
        packed = batch + rng.integers(0, n * depth + 1, count)
        _, found = adaptive_cohorts(base, gains, gains, lengths, batch, packed, np.arange(n))
        bound = most_value(base, gains, lengths, batch, packed)
        assert (bound >= found * (1.0 - 1e-12)).all()
        tight += int(np.isclose(bound, found).sum())
    assert tight > 200  # where rows are for everybody the bound is the optimum


def test_the_table_of_padding_holds_whatever_the_filter_discards() -> None:
    """Programs of one kind whose cohorts are equal: the smaller one discards the larger, and the table says so."""
    for seed in range(60):
        decision = random_decision(seed)
        programs = decision.state.programs
        kind = programs.speculative
        same = np.zeros((len(kind), 1), np.int64)
        for one, other in np.argwhere(programs.extents[kind][:, None, 0] > programs.extents[kind][:, 0]).tolist():
            pair = kind[[one, other]]
            learned = bool((programs.depth[pair] == programs.depth[pair[0]]).all())
            if learned and programs.device_allocates[pair[0]] == programs.device_allocates[pair[1]]:
                discarded = not undominated(same[:2], programs.extents[pair])[0]
                assert programs.padding_of[pair[0], pair[1]] or not discarded


def test_the_table_of_padding_holds_whatever_the_filter_of_mixed_programs_discards() -> None:
    """A prompt alone in two programs of any depth, width and source: if one discards the other, the table says so."""
    discarded = 0
    for seed in range(60):
        rng = random.Random(seed)
        shapes = {
            ProgramShape(ProgramKind.MIXED, rng.choice((2, 4)), w := rng.randint(1, 4), rng.randint(w - 1, 4), 0,
                         rng.choice((64, 128)), rng.choice((LEARNED, COPY)))
            for _ in range(8)
        }  # fmt: skip
        shapes = {
            shape if shape.proposal_depth else dataclasses.replace(shape, proposal_source=NONE) for shape in shapes
        }
        state = round_state(
            rng, [ProgramShape(ProgramKind.DECODE, 4, 1), *shapes], policy=random_policy(rng, "adaptive")
        )
        programs = state.programs
        for one, other in itertools.permutations(programs.mixed.tolist(), 2):
            pair, nobody = np.array([one, other]), np.zeros(2, np.bool_)
            work = np.zeros((2, 8), np.int64)
            work[:, 3] = 9
            kept = _undominated(new_decision(state), pair, work, np.full(2, 3), nobody)
            assert kept[0] or programs.padding_of[one, other]
            discarded += int(not kept[0])
    assert discarded > 100
