"""The entropy-dual update and what prices are made of (scheduling-utility.md sections 3 to 5)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helios_jax.scheduler.service import (
    MAX_R,
    MIN_R,
    charge,
    corrected_deliveries,
    reference_intervals,
    update,
)

usual = st.floats(1e-3, 1e3)
extreme = st.floats(min_value=5e-324, max_value=1.7e308, allow_subnormal=True)


def one(r: float, duration: float, service: float, n: float, tau: float = 100.0) -> float:
    return float(update(np.array([r]), duration, np.array([service]), np.array([n]), tau)[0])


@given(rate=usual, duration=usual, n=usual)
def test_true_reciprocal_rate_is_the_fixed_point(rate: float, duration: float, n: float) -> None:
    """u = x / n and q = r n = 1 / u stand still whatever the normaliser."""
    assert one(1.0 / rate, duration, rate * duration, n) == pytest.approx(1.0 / rate, rel=1e-12)


@given(
    r=st.floats(MIN_R, MAX_R), duration=extreme, service=st.one_of(st.just(0.0), extreme), n=extreme, tau=extreme
)  # fmt: skip
@settings(max_examples=400)
def test_prices_stay_positive_and_finite(r: float, duration: float, service: float, n: float, tau: float) -> None:
    after = one(r, duration, service, n, tau)
    assert MIN_R <= after <= MAX_R


@given(r=usual, duration=usual, n=usual, tau=usual)
def test_without_service_the_normalised_price_grows_by_duration_over_tau(
    r: float, duration: float, n: float, tau: float
) -> None:
    assert one(r, duration, 0.0, n, tau) == pytest.approx((r * n + duration / tau) / n, rel=1e-12)


def test_a_starved_price_rises_linearly_for_hours() -> None:
    r, hour_ms = 1.0, 3.6e6
    for hours in range(1, 6):
        r = one(r, hour_ms, 0.0, 0.5)
        assert r == pytest.approx(1.0 + hours * hour_ms / (0.5 * 100.0))


@given(r=usual, rate=usual, n=usual, first=usual, second=usual)
def test_splitting_an_interval_changes_nothing(r: float, rate: float, n: float, first: float, second: float) -> None:
    whole = one(r, first + second, rate * (first + second), n)
    parts = one(one(r, first, rate * first, n), second, rate * second, n)
    assert parts == pytest.approx(whole, rel=1e-9)


@given(r=usual, duration=usual, n=usual, low=st.floats(0.0, 1e3), more=st.floats(1e-2, 1e3))
def test_more_service_lowers_the_price(r: float, duration: float, n: float, low: float, more: float) -> None:
    less, greater = one(r, duration, low, n), one(r, duration, low + more, n)
    assert greater <= less * (1 + 1e-12)
    # Both may have reached the same floor D / s in the last bit; apart from that the order is strict.
    a = (low + more) / (n * 100.0)
    if 1e-6 < a < 30.0 and more > 0.01 * (low + more):
        assert greater < less


@given(
    rows=st.lists(st.tuples(usual, st.floats(0.0, 1e3), usual), min_size=1, max_size=8),
    seed=st.randoms(use_true_random=False),
)
def test_a_permutation_of_requests_permutes_the_results(rows: list, seed: object) -> None:
    order = list(range(len(rows)))
    seed.shuffle(order)  # type: ignore[attr-defined]
    r, s, n = np.array(rows).T
    assert np.array_equal(update(r, 7.0, s, n, 100.0)[order], update(r[order], 7.0, s[order], n[order], 100.0))


@given(r=usual, n=usual, other=usual)
def test_a_change_of_the_normaliser_changes_no_price(r: float, n: float, other: float) -> None:
    """Nothing is stored in normalised units: an interval of no length leaves r, whatever n."""
    assert one(r, 0.0, 0.0, n) == one(r, 0.0, 0.0, other) == r


@given(r=usual, duration=usual, service=usual, n=usual)
def test_physical_form_equals_the_normalised_one(r: float, duration: float, service: float, n: float) -> None:
    tau = 100.0
    a = service / (n * tau)
    assume(a > 1e-6)
    q = r * n * math.exp(-a) + (duration / tau) * (1 - math.exp(-a)) / a
    assert one(r, duration, service, n) == pytest.approx(q / n, rel=1e-6)


def test_tokens_are_charged_to_known_members_only() -> None:
    nan = np.nan
    token_r = np.array([2.0, 2.0, nan, nan, 2.0])
    first = np.array([9.0, 9.0, 9.0, nan, 9.0])
    members = np.array([True, False, True, True, True])
    n = np.array([0.5, 0.5, 0.5, nan, nan])
    after, _ = charged(token_r, np.full(5, nan), first, members, 10.0, n)
    # Member, not a member, without history (starts at its first value), unknown first value, unknown normaliser.
    np.testing.assert_allclose(after, [2.2, 2.0, 9.2, nan, 2.0])


def charged(
    token_r: np.ndarray, delivery_r: np.ndarray, first: np.ndarray, members: np.ndarray, duration: float, n: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Both histories after an interval without service, with the same normalisers."""
    requests = SimpleNamespace(token_r=token_r.copy(), delivery_r=delivery_r.copy())
    frame = SimpleNamespace(first_token_r=first, token_n=n, delivery_n=n)
    charge(requests, frame, members, duration, np.zeros(len(n)), 100.0)  # type: ignore[arg-type]
    return requests.token_r, requests.delivery_r


def test_publication_replaces_the_interval_and_first_burst_starts_the_history() -> None:
    before, n = np.array([5.0, np.nan, 5.0]), np.array([0.1, 0.1, np.nan])
    members = np.ones(3, np.bool_)
    _, unserved = charged(before, before, before, members, 20.0, n)
    np.testing.assert_allclose(unserved, [5.0 + 20.0 / (0.1 * 100.0), np.nan, 5.0])
    served = corrected_deliveries(before, 20.0, n, 100.0)
    a = 1 / (0.1 * 100.0)
    np.testing.assert_allclose(served, [5.0 * math.exp(-a) + 20.0 * (1 - math.exp(-a)), 20.0, 5.0])


def test_reference_interval_by_family() -> None:
    """sigma = K min T / min(B, k): unmeasured programs and prompts take no part."""
    family = np.array([0, 0, 0, 1, -1, -1])
    feasible = np.array([[True, True, True, True], [True, False, False, False]])
    duration, capacity = np.array([3.0, 4.0, 6.0, 0.0]), np.array([1, 2, 4, 8])
    sigma, program = reference_intervals(family, feasible, duration, capacity)
    # Family 0: k = 3, T / min(B, k) = 3, 2, 2 -> 4 * 2. Family 1: k = 1, only the first program -> 4 * 3.
    np.testing.assert_array_equal(sigma, [8.0, 8.0, 8.0, 12.0, np.nan, np.nan])
    np.testing.assert_array_equal(program, [1, 1, 1, 0, -1, -1])
    assert np.isnan(reference_intervals(family, feasible, np.zeros(4), capacity)[0]).all()
