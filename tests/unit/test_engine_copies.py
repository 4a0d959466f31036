"""Copy proposals against a naive search, acceptance by match length, and the logistic map."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helios_jax.engine.calibration import Calibration, logit
from helios_jax.engine.copy_index import LONGEST, LONGEST_MATCH, SHORTEST, CopyHistory, CopyIndex


def naive(tokens: list[int], limit: int) -> tuple[tuple[int, ...], int]:
    """Scan all earlier positions for the longest n-gram, the newest first."""
    for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        suffix = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == suffix:
                length = 0
                while length < min(LONGEST_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
                    length += 1
                return tuple(tokens[end : end + limit]), length
    return (), 0


@pytest.mark.parametrize("seed", range(20))
def test_proposals_equal_a_search_of_the_whole_history(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice([2, 4, 12])) for _ in range(rng.randrange(1, 10))]
    index = CopyIndex(tokens)
    for _ in range(150):
        more = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        tokens += more
        index.extend(more)
        limit = rng.randrange(0, 8)
        assert index.propose(limit) == naive(tokens, limit)


def test_the_index_is_bounded_and_forgets_the_oldest() -> None:
    index = CopyIndex(range(5000), capacity=100)
    assert index.num_entries <= 4 * 101
    index.extend([10, 11, 12])
    assert index.propose(4).tokens == ()  # 10, 11, 12 occurred long ago
    index.extend([4990, 4991, 4992])
    assert index.propose(3).tokens == (4993, 4994, 4995)


def test_a_match_never_continues_with_itself() -> None:
    assert CopyIndex([7, 8]).propose(3).tokens == ()
    assert CopyIndex([7, 7, 7]).propose(3).tokens == (7,)
    assert CopyIndex([1]).propose(3) == ((), 0)


def test_confidence_follows_the_conditional_acceptance_of_its_cell() -> None:
    history, rng = CopyHistory(4), random.Random(3)
    rates = (0.9, 0.6, 0.3, 0.8)
    for _ in range(6000):
        accepted = 0
        while accepted < 4 and rng.random() < rates[accepted]:
            accepted += 1
        history.observe(5, 4, accepted)
    np.testing.assert_allclose(history.confidence(5), rates, atol=0.06)
    np.testing.assert_array_equal(history.confidence(6), [0.5] * 4)


def test_offers_beyond_the_judged_ones_teach_nothing() -> None:
    history = CopyHistory(3)
    history.observe(2, 2, 0)
    after = history.confidence(2)
    assert after[0] < 0.5
    np.testing.assert_array_equal(after[1:], [0.5, 0.5])


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.5, -1.0), (2.0, 0.7)])
def test_the_map_recovers_a_distorted_confidence(scale: float, shift: float) -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    for _ in range(3000):
        raw = rng.normal(0.5, 1.5)
        true = 1.0 / (1.0 + np.exp(-(scale * raw + shift)))
        calibration.observe(np.array([raw]), int(rng.random() < true))
    assert calibration.scale == pytest.approx(scale, abs=0.15)
    assert calibration.shift == pytest.approx(shift, abs=0.15)


def test_the_map_is_the_identity_until_taught_and_inverts() -> None:
    calibration = Calibration()
    some = np.array([0.01, 0.3, 0.97])
    np.testing.assert_allclose(calibration.apply(some), some)
    calibration.observe(np.zeros(63), 63)
    assert (calibration.scale, calibration.shift) == (1.0, 0.0)
    calibration.observe(np.zeros(1), 1)
    assert calibration.shift > 0  # 64 zeros of log-odds, all right
    np.testing.assert_allclose(calibration.raw_logit(calibration.apply(some)), logit(some), atol=1e-9)


@pytest.mark.parametrize("accepted", [0, 8])
def test_one_sided_observations_keep_the_map_finite_and_rising(accepted: int) -> None:
    calibration = Calibration()
    for _ in range(400):
        calibration.observe(logit(np.linspace(0.0, 1.0, 8)), accepted)
        mapped = calibration.apply(np.linspace(0.0, 1.0, 50))
        assert np.isfinite(mapped).all()
        assert (np.diff(mapped) >= 0).all()
