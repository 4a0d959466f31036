"""Joint cohorts of two programs that run one after the other: arrays in, arrays out, no state.

The rows of the first program are newly ready ones, which the second can then serve, and
terminal ones, which end with the first; the second also serves rows that are ready already.
All lanes are additive.

Source: specification, "Prerequisites and completion".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.utility import EQUAL


class Lanes(NamedTuple):
    """Additive rows of C programs: values [C, n], at least 0, and who can take part, bool [C, n]."""

    values: np.ndarray
    able: np.ndarray


class Cohorts(NamedTuple):
    """Membership of new and ready rows bool [C, n], terminal rows taken int64 [C], value [C] (-inf: none is legal)."""

    new: np.ndarray
    old: np.ndarray
    ends: np.ndarray
    value: np.ndarray


def pair_cohorts(
    new: Lanes, old: Lanes, ending: np.ndarray, capacity_first: np.ndarray, capacity: np.ndarray, least: int
) -> Cohorts:
    """The exact joint cohort of each pair of programs, over every number of newly ready rows.

    k newly ready rows take part: the k largest, the largest ready rows in what is left of the
    following program, the largest terminal rows in what is left of the prerequisite. Prefix
    sums of the sorted values give every k; equal totals prefer to advance more requests.

    Args:
        ending: [C, t] values of terminal rows, largest first.
        capacity_first: int64 [C] rows of the prerequisites.
        capacity: int64 [C] rows of the following programs.
        least: Smallest legal k.

    Cost: O(C n log n).
    """
    new_order, new_sums, num_new = _ranked(new)
    old_order, old_sums, num_old = _ranked(old)
    end_sums = prefix_sums(ending)
    k = np.arange(least, new.values.shape[1] + 1)
    most = np.minimum(np.minimum(capacity_first, capacity), num_new)[:, None]
    rest = np.minimum(np.maximum(capacity[:, None] - k, 0), num_old[:, None])
    ends = np.minimum(np.maximum(capacity_first[:, None] - k, 0), ending.shape[1])
    if not len(k):
        return Cohorts(new.able & False, old.able & False, np.zeros(len(most), np.int64), np.full(len(most), -np.inf))
    rows = np.arange(len(most))
    totals = new_sums[:, k] + old_sums[rows[:, None], rest] + end_sums[rows[:, None], ends]
    totals = np.where(k <= most, totals, -np.inf)
    best = best_option(totals.T, (k + rest + ends).T)
    return Cohorts(
        new=_leading(new_order, k[best]),
        old=_leading(old_order, rest[rows, best]),
        ends=ends[rows, best],
        value=totals[rows, best],
    )


def _ranked(lanes: Lanes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order [C, n] by value, those who can take part first; prefix sums [C, n + 1]; their number [C]."""
    order = np.where(lanes.able, -lanes.values, 1.0).argsort(axis=1, kind="stable")
    usable = np.where(lanes.able, lanes.values, 0.0)
    return order, prefix_sums(usable[np.arange(len(order))[:, None], order]), lanes.able.sum(axis=1)


def prefix_sums(values: np.ndarray) -> np.ndarray:
    """[C, n + 1] sums of the first 0 to n columns."""
    sums = np.zeros((len(values), values.shape[1] + 1))
    values.cumsum(axis=1, out=sums[:, 1:])
    return sums


def _leading(order: np.ndarray, count: np.ndarray) -> np.ndarray:
    """bool [C, n]: the first `count` of each order."""
    members = np.zeros(order.shape, np.bool_)
    members[np.arange(len(order))[:, None], order] = np.arange(order.shape[1]) < count[:, None]
    return members


def best_option(value: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Row of the largest value in each column, of equal ones that which advances more requests; int64 [C].

    Values are sums of positive terms; equal means up to `EQUAL`.
    """
    return np.where(value >= value.max(axis=0) * (1.0 - EQUAL), count, -1).argmax(axis=0)
