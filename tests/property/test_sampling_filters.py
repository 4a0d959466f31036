"""Filters against float64 sorting, for any logits: kept sets are exact, ties go to the lower id."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helios_jax.aot.programs.filters import keep_min_p, keep_top_k, keep_top_p, order_key

ROWS, SIZE, SLACK = 3, 37, 1e-5
FLOATS = st.floats(-80, 0, width=32) | st.sampled_from([0.0, -0.0, -1.0, -1.5, -3.0])  # many ties
LOGITS = hnp.arrays(np.float32, (ROWS, SIZE), elements=FLOATS)
MASKS = hnp.arrays(np.bool_, (ROWS, SIZE))

top_k, top_p, min_p, key = (jax.jit(f) for f in (keep_top_k, keep_top_p, keep_min_p, order_key))


def ordered(values: np.ndarray, kept: np.ndarray) -> list[int]:
    """Kept token ids, largest value first, ties by id."""
    return [int(i) for i in np.lexsort((np.arange(SIZE), -values.astype(np.float64))) if kept[i]]


def prepared(values: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = kept.copy()
    kept[:, 0] = True
    values = np.where(kept, values, -90)
    return _flushed((values - values.max(1, keepdims=True)).astype(np.float32)), kept


def _flushed(values: np.ndarray) -> np.ndarray:
    """XLA flushes denormals, so to it they are all equal."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


@settings(deadline=None, max_examples=150)
@given(hnp.arrays(np.float32, (SIZE,), elements=st.floats(width=32, allow_nan=False)))
def test_order_key_orders_as_the_floats_do(values: np.ndarray) -> None:
    keys = np.asarray(key(values)).astype(np.int64)
    np.testing.assert_array_equal(np.sign(np.subtract.outer(keys, keys)), _order(values))
    assert keys.min() > 0


def _order(values: np.ndarray) -> np.ndarray:
    flushed = _flushed(values)
    return (flushed[:, None] > flushed).astype(int) - (flushed[:, None] < flushed)


@settings(deadline=None, max_examples=150)
@given(LOGITS, MASKS, hnp.arrays(np.int32, (ROWS,), elements=st.integers(0, SIZE + 5)))
def test_top_k_keeps_exactly_the_first_k(values: np.ndarray, mask: np.ndarray, limit: np.ndarray) -> None:
    values, mask = prepared(values, mask)
    kept = np.asarray(top_k(values, mask, limit))
    for row in range(ROWS):
        expected = ordered(values[row], mask[row])
        expected = expected[: limit[row]] if limit[row] else expected
        assert sorted(expected) == np.flatnonzero(kept[row]).tolist()


@settings(deadline=None, max_examples=150)
@given(LOGITS, MASKS, hnp.arrays(np.float32, (ROWS,), elements=st.floats(np.float32(1e-3), 1, width=32)))
def test_top_p_keeps_the_smallest_sufficient_set(values: np.ndarray, mask: np.ndarray, share: np.ndarray) -> None:
    values, mask = prepared(values, mask)
    kept = np.asarray(top_p(values, mask, share))
    for row in range(ROWS):
        order = ordered(values[row], mask[row])
        count = int(kept[row].sum())
        assert sorted(order[:count]) == np.flatnonzero(kept[row]).tolist()
        if share[row] == 1:
            assert count == len(order)
            continue
        weight = np.exp(values[row].astype(np.float64))[order]
        weight /= weight.sum()
        assert count >= 1
        assert weight[:count].sum() >= share[row] - SLACK
        assert weight[: count - 1].sum() < share[row] + SLACK


@settings(deadline=None, max_examples=150)
@given(LOGITS, hnp.arrays(np.float32, (ROWS,), elements=st.floats(0, 1, width=32)))
def test_min_p_keeps_probabilities_above_its_share(values: np.ndarray, share: np.ndarray) -> None:
    kept = np.asarray(min_p(values, share))
    ratio = np.exp(values.astype(np.float64) - values.max(1, keepdims=True))
    share = share[:, None].astype(np.float64)
    assert kept[ratio >= share * (1 + SLACK)].all()
    assert not kept[(ratio < share * (1 - SLACK)) & (share > 1e-30)].any()
    assert kept.any(axis=1).all()
