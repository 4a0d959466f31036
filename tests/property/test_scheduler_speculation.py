"""Acceptance estimates and forecasts against a naive second implementation, number by number."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler.speculation import (
    COPY,
    LEARNED,
    Acceptance,
    expected_tokens,
    lane_lengths,
    new_acceptance,
    observe_acceptance,
    observe_forecast,
    optimistic,
    reset_slots,
    survival,
)

SLOTS, DEPTH = 4, 5


class Book:
    """The formulas of scheduling-utility.md section 8, one number at a time."""

    def __init__(self) -> None:
        self.prior = [0.5**d for d in range(1, DEPTH + 1)]
        self.accept: dict[tuple[int, int, int], list[float]] = {}
        self.forecast: dict[tuple[int, int], list[float]] = {}
        self.shown = {(source, d): [0.5 ** (d + 1), 2.0] for source in (LEARNED, COPY) for d in range(DEPTH)}
        for slot in range(SLOTS):
            self.reset(slot)

    def reset(self, slot: int) -> None:
        for d in range(DEPTH):
            self.forecast[slot, d] = [self.prior[d], 2.0]
            for source in (LEARNED, COPY):
                mean, weight = self.shown[source, d]
                better = mean > 0.5 ** (d + 1)
                self.accept[slot, source, d] = [mean, min(weight, 8.0)] if better else [0.5 ** (d + 1), 2.0]

    @staticmethod
    def average(entry: list[float], y: float) -> None:
        mean, weight = entry
        entry[0] = (mean * weight + y) / (weight + 1)
        entry[1] = min(weight + 1, 128.0)

    def acceptance(
        self, slot: int, source: int, offered: int, accepted: int, censored: bool, rows: list
    ) -> list[tuple[tuple[int, int], float]]:
        """Returns the lessons: (source, depth) and what was seen."""
        lessons = []
        for d in range(1, offered + 1):
            if d <= accepted or not censored:
                y = 1.0 if d <= accepted else 0.0
                if rows and not math.isnan(rows[d - 1]):
                    y = rows[d - 1]
                self.average(self.accept[slot, source, d - 1], y)
                lessons.append(((source, d - 1), y))
        return lessons

    def population(self, lessons: list[tuple[tuple[int, int], float]]) -> None:
        """Every lesson of a frame counts once, the mean before it with its weight; the cap comes after."""
        for where, (mean, weight) in list(self.shown.items()):
            seen = [y for place, y in lessons if place == where]
            self.shown[where] = [(mean * weight + sum(seen)) / (weight + len(seen)), min(weight + len(seen), 128.0)]

    def age(self, slot: int, generated: int) -> None:
        for (owner, *_), entry in [*self.accept.items(), *self.forecast.items()]:
            if owner == slot:
                entry[1] *= 2.0 ** (-generated / 128.0)

    def confidence(self, joint: np.ndarray, ceilings: list[int], teaches: list[bool], produced: int) -> None:
        for d in range(DEPTH):
            lessons = []
            for slot in range(SLOTS):
                if d + 1 <= produced and d + 1 < ceilings[slot]:
                    self.average(self.forecast[slot, d], float(joint[slot, d]))
                    lessons += [float(joint[slot, d])] if teaches[slot] else []
            for y in sorted(lessons):
                self.prior[d] += (y - self.prior[d]) / 64

    def check(self, estimates: Acceptance) -> None:
        close = {"rtol": 1e-12, "atol": 0}
        np.testing.assert_allclose(estimates.prior, self.prior, **close)
        where = tuple(np.array(list(self.accept)).T)
        found = np.stack([estimates.accept_mean[where], estimates.accept_weight[where]], axis=1)
        np.testing.assert_allclose(found, list(self.accept.values()), **close)
        where = tuple(np.array(list(self.forecast)).T)
        found = np.stack([estimates.forecast_mean[where], estimates.forecast_weight[where]], axis=1)
        np.testing.assert_allclose(found, list(self.forecast.values()), **close)
        where = tuple(np.array(list(self.shown)).T)
        found = np.stack([estimates.accept_prior[where], estimates.accept_prior_weight[where]], axis=1)
        np.testing.assert_allclose(found, list(self.shown.values()), **close)


def sidecar(rng: random.Random) -> np.ndarray:
    own = np.array([[rng.choice([rng.random(), 0.0, 1.0]) for _ in range(DEPTH)] for _ in range(SLOTS)], np.float32)
    return np.stack([own, np.cumprod(own, axis=1)])


@pytest.mark.parametrize("seed", range(30))
def test_observations_follow_the_formulas(seed: int) -> None:
    """Rounds of every kind: rejections, censored ones, survival rows, forecasts, new occupants, both sources."""
    rng, estimates, book = random.Random(seed), new_acceptance(SLOTS, DEPTH), Book()
    for _ in range(40):
        if rng.random() < 0.1:
            slot = rng.randrange(SLOTS)
            estimates = reset_slots(estimates, [slot])
            book.reset(slot)
        offered = [rng.randint(0, DEPTH) for _ in range(SLOTS)]
        accepted = [rng.randint(0, count) for count in offered]
        censored = [rng.random() < 0.2 for _ in range(SLOTS)]
        generated = [rng.choice([0, 1, 1 + count, 300]) for count in accepted]
        source = [rng.choice([LEARNED, COPY]) for _ in range(SLOTS)]
        typical = [rng.random() < 0.7 for _ in range(SLOTS)]
        if rng.random() < 0.6:
            confidence, produced = sidecar(rng), rng.randint(0, DEPTH)
            ceilings = [rng.randint(0, produced + 1) for _ in range(SLOTS)]
            teaches = [rng.random() < 0.7 for _ in range(SLOTS)]
            estimates = observe_forecast(estimates, confidence, np.array(ceilings), np.array(teaches), produced)
            book.confidence(confidence[1], ceilings, teaches, produced)
        rows = None
        if rng.random() < 0.5:
            rows = sidecar(rng)[1].astype(np.float64)
            rows[rng.randrange(SLOTS), rng.randrange(DEPTH) :] = np.nan
        estimates = observe_acceptance(
            estimates, np.array(source), np.array(offered), np.array(accepted), np.array(censored),
            np.array(generated), rows, np.array(typical),
        )  # fmt: skip
        lessons = []
        for slot in range(SLOTS):
            row = [] if rows is None else rows[slot].tolist()
            seen = book.acceptance(slot, source[slot], offered[slot], accepted[slot], censored[slot], row)
            lessons += seen if typical[slot] else []
            book.age(slot, generated[slot])
        book.population(lessons)
        book.check(estimates)


def observed(offered: int, accepted: int, censored: bool = False, generated: int = 0) -> np.ndarray:
    """Acceptance means of slot 0 after one learned round."""
    after = observe_acceptance(
        new_acceptance(1, 3), LEARNED, np.array([offered]), np.array([accepted]), np.array([censored]),
        np.array([generated]),
    )  # fmt: skip
    return after.accept_mean[0, LEARNED]


def test_a_rejection_is_zero_from_its_depth_on_and_termination_hides_the_rest() -> None:
    np.testing.assert_allclose(observed(3, 1), [(0.5 * 2 + 1) / 3, 0.25 * 2 / 3, 0.125 * 2 / 3])
    np.testing.assert_allclose(observed(3, 1, censored=True), [(0.5 * 2 + 1) / 3, 0.25, 0.125])
    np.testing.assert_allclose(observed(2, 2), [(0.5 * 2 + 1) / 3, (0.25 * 2 + 1) / 3, 0.125])
    np.testing.assert_allclose(observed(0, 0), [0.5, 0.25, 0.125])


def test_weights_halve_in_128_tokens_and_stop_at_128() -> None:
    estimates, nothing = new_acceptance(2, 1), np.zeros(2, np.bool_)
    for _ in range(200):
        estimates = observe_acceptance(estimates, COPY, np.array([1, 0]), np.array([1, 0]), nothing, np.zeros(2))
    assert estimates.accept_weight[0, COPY, 0] == 128
    aged = observe_acceptance(estimates, COPY, np.zeros(2), np.zeros(2), nothing, np.array([128, 256]))
    assert aged.accept_weight[0, COPY, 0] == 64
    assert aged.forecast_weight[:, 0].tolist() == [1, 0.5]
    assert np.array_equal(aged.accept_mean, estimates.accept_mean)


def test_a_hundred_thousand_unobserved_tokens_leave_usable_numbers() -> None:
    estimates, nothing = new_acceptance(1, 2), np.zeros(1, np.bool_)
    for _ in range(40):
        estimates = observe_acceptance(estimates, LEARNED, np.zeros(1), np.zeros(1), nothing, np.array([10_000]))
    with np.errstate(all="raise"):
        hopes = optimistic(estimates.accept_mean, estimates.accept_weight)
    assert (hopes == 1).all()
    after = observe_acceptance(estimates, LEARNED, np.array([2]), np.array([1]), nothing, np.array([2]))
    np.testing.assert_allclose(after.accept_mean[0, LEARNED], [1, 0], atol=1e-12)


def test_used_estimates_never_rise_and_carry_the_exponent() -> None:
    mean, weight = np.array([[0.5, 0.8, 0.3]]), np.array([[2.0, 50.0, 4.0]])
    np.testing.assert_allclose(survival(mean), [[0.5, 0.5, 0.3]])
    np.testing.assert_allclose(survival(mean, 2.0), [[0.25, 0.25, 0.09]])
    bonus = [math.sqrt(math.log(20) / (2 * v)) for v in (2.0, 50.0, 4.0)]
    hopes = [min(1.0, 0.5 + bonus[0]), min(1.0, 0.8 + bonus[1]), min(1.0, 0.3 + bonus[2])]
    np.testing.assert_allclose(optimistic(mean, weight), [[hopes[0], hopes[1], min(hopes)]])


@pytest.mark.parametrize("seed", range(10))
def test_slot_numbers_do_not_matter(seed: int) -> None:
    """A permutation of the slots permutes the estimates and leaves the population prior alone, to the bit."""
    rng = random.Random(seed)
    confidence, order = sidecar(rng), np.array(rng.sample(range(SLOTS), SLOTS))
    ceilings = np.array([rng.randint(0, DEPTH + 1) for _ in range(SLOTS)])
    teaches = np.array([rng.random() < 0.7 for _ in range(SLOTS)])
    one = observe_forecast(new_acceptance(SLOTS, DEPTH), confidence, ceilings, teaches, DEPTH)
    other = observe_forecast(new_acceptance(SLOTS, DEPTH), confidence[:, order], ceilings[order], teaches[order], DEPTH)
    assert np.array_equal(one.prior, other.prior)
    assert np.array_equal(one.forecast_mean[order], other.forecast_mean)


def test_constrained_requests_teach_nobody_and_new_ones_start_from_the_population() -> None:
    sure, ceilings = np.ones((2, 2, 3), np.float32), np.array([4, 4])
    estimates = new_acceptance(2, 3)
    alone = observe_forecast(estimates, sure, ceilings, np.array([False, False]), 3)
    assert np.array_equal(alone.prior, estimates.prior)
    assert (alone.forecast_mean > estimates.forecast_mean).all()
    for _ in range(500):
        estimates = observe_forecast(estimates, sure, ceilings, np.array([True, False]), 3)
    assert (estimates.prior > 0.99).all()
    fresh = reset_slots(estimates, [1])
    assert np.array_equal(fresh.forecast_mean[1], estimates.prior)
    assert fresh.accept_mean[1].tolist() == [[0.5, 0.25, 0.125]] * 2


def test_acceptance_of_a_new_request_starts_from_the_population_and_no_lower_than_halves() -> None:
    """Others' successes are a better guess than 0.5^d; their failures, and constrained requests, cost it nothing."""
    halves, both = [0.5, 0.25, 0.125], np.array([3, 3])
    calm, one = np.zeros(2, np.bool_), np.array([True, False])

    def started(accepted: list[int], teaches: np.ndarray, rounds: int = 200) -> np.ndarray:
        return fresh(accepted, teaches, rounds).accept_mean[1]

    def fresh(accepted: list[int], teaches: np.ndarray, rounds: int) -> Acceptance:
        estimates = new_acceptance(2, 3)
        for _ in range(rounds):
            tokens = np.array(accepted) + 1
            estimates = observe_acceptance(estimates, LEARNED, both, np.array(accepted), calm, tokens, teaches=teaches)
        return reset_slots(estimates, [1])

    assert (started([3, 3], one)[LEARNED] > 0.99).all()
    assert started([3, 3], one)[COPY].tolist() == halves  # each source for itself
    assert started([0, 0], one)[LEARNED].tolist() == halves
    assert started([3, 0], ~one)[LEARNED].tolist() == halves  # slot 0 is constrained
    assert started([3, 3], calm)[LEARNED].tolist() == halves
    weights = [fresh([1, 0], one, rounds).accept_weight[1, LEARNED].tolist() for rounds in (1, 3, 200)]
    # A guess weighs two, what is known up to eight.
    assert weights == [[3.0, 2.0, 2.0], [5.0, 2.0, 2.0], [8.0, 2.0, 2.0]]
    np.testing.assert_allclose(started([2, 0], one, rounds=1)[LEARNED], [2 / 3, 0.5, 0.125])


BAD_VALUES = {"above": 1.5, "negative": -0.25, "nan": np.nan, "infinite": np.inf}


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_sidecar_that_is_not_made_of_probabilities_is_refused(plane: int, value: float) -> None:
    confidence = np.full((2, 2, 3), 0.5, np.float32)
    observe_forecast(new_acceptance(2, 3), confidence, np.array([3, 0]), np.ones(2, np.bool_), 3)
    confidence[plane, 0, 2] = value
    with pytest.raises(InvariantError, match="slot 0"):
        observe_forecast(new_acceptance(2, 3), confidence, np.array([3, 0]), np.ones(2, np.bool_), 3)
    # Neither a slot without a lane nor a position that was not produced is read.
    for ceilings, produced in ((np.array([0, 3]), 3), (np.array([3, 0]), 2)):
        observe_forecast(new_acceptance(2, 3), confidence, ceilings, np.ones(2, np.bool_), produced)


def test_joint_probabilities_and_survival_rows_must_not_rise() -> None:
    confidence = np.full((2, 1, 2), 0.5, np.float32)
    confidence[1, 0] = [0.25, 0.25 + 1e-3]
    with pytest.raises(InvariantError, match="joint confidence"):
        observe_forecast(new_acceptance(1, 2), confidence, np.array([3]), np.array([True]), 2)
    rounds = [np.array([2]), np.array([0]), np.array([False]), np.array([1])]
    for row in ([0.5, 0.6], [1.2, 0.1], [0.5, -0.1], [0.5, np.inf]):
        with pytest.raises(InvariantError, match="survival"):
            observe_acceptance(new_acceptance(1, 2), LEARNED, *rounds, np.array([row]))
    with pytest.raises(InvariantError, match="sidecar must be"):
        observe_forecast(new_acceptance(1, 2), confidence[:, :, :1], np.array([3]), np.array([True]), 2)


def test_lane_lengths_and_expected_tokens() -> None:
    width, depth = np.array([1, 4, 8, 4]), np.array([0, 7, 5, 3])
    room, proposals = np.array([100, 3, 1]), np.array([0, 2, 9])
    lengths = lane_lengths(width, depth, np.array([False, False, False, True]), room, proposals)
    assert lengths.tolist() == [[1, 1, 1], [4, 3, 1], [6, 3, 1], [1, 3, 1]]
    estimates = np.array([[0.5, 0.25, 0.125]])
    assert expected_tokens(estimates, np.array([[0], [1], [2], [4]])).tolist() == [[0], [1], [1.5], [1.875]]
    each = np.stack([estimates, 2 * estimates])
    assert expected_tokens(each, np.array([[2], [2]])).tolist() == [[1.5], [2.0]]


def test_a_catalogue_without_proposals_keeps_no_estimates() -> None:
    estimates, zeros = new_acceptance(3, 0), np.zeros(3, np.int64)
    assert reset_slots(estimates, [1]) is estimates
    assert observe_acceptance(estimates, LEARNED, zeros, zeros, zeros == 0, zeros) is estimates
    assert survival(estimates.accept_mean).shape == (3, 2, 0)
    assert expected_tokens(estimates.forecast_mean, np.ones((2, 3), np.int64)).tolist() == [[1] * 3] * 2
    assert not new_acceptance(2, 2).prior.flags.writeable
