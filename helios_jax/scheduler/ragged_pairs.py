"""Pairs before a round whose aggregate target rows P are too few: a bounded search of the joint cohort.

Lanes that share P are not additive, so the sorted prefix sums of `joint` do not apply. Here a
pair is searched like the round alone would be (`ragged`), once for each of a few restrictions:

1. At most k newly ready rows take part, the k best by complete prefix, by pending token and by value per
   target row, and the k shortest; all that fit the prerequisite, and fewer where terminal rows want the same places.
2. One newly ready row certainly takes part, because without one it is no pair: if none does, that is
   the best by complete prefix, by pending token and by value per target row, and the shortest.

The rows of every cohort are those that the round will allocate (complete prefixes in fixed selection),
so a pair is never promised more than its lanes do. How far it stays below the optimum is measured in
tests/property/test_scheduler_ragged_pairs.py; the reading is docs/adr/0010.

Source: specification, "Prerequisites and completion" and "Useful service and selection".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.candidates import Decision, decode_values, scatter
from helios_jax.scheduler.joint import prefix_sums
from helios_jax.scheduler.pruning import ROUNDING, most_value
from helios_jax.scheduler.ragged import adaptive_cohorts, fixed_cohorts
from helios_jax.scheduler.rounds import marginal_prices

_CAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # numbers of new rows that are tried where terminal rows compete


class Pairs(NamedTuple):
    """C pairs of a prerequisite and a round.

    Attributes:
        first: int64 [C] the prerequisites.
        follow: int64 [C] the rounds.
        room: int64 [C] rows of the prerequisites.
        total_ms: float64 [C] T + F, 0 if that is not known.
        ending: float64 [C, t] values of terminal rows, largest first.
        fresh: int64 [m] slots that the prerequisite makes ready.
        ready: int64 [k] slots that are ready already.
    """

    first: np.ndarray
    follow: np.ndarray
    room: np.ndarray
    total_ms: np.ndarray
    ending: np.ndarray
    fresh: np.ndarray
    ready: np.ndarray


class Searched(NamedTuple):
    """Pairs int64 [R] that were searched: target rows int64 [R, slots], retirements int64 [R], value float64 [R]."""

    pairs: np.ndarray
    work: np.ndarray
    ends: np.ndarray
    value: np.ndarray


class _Lanes(NamedTuple):
    """Lanes of R pairs over n slots; one source and one allocation."""

    base: np.ndarray  # float64 [R, n]
    gains: np.ndarray  # float64 [n, depth]
    priority: np.ndarray  # float64 [n, depth], the same array where the host allocates
    rows: np.ndarray  # int64 [R, n]
    batch: np.ndarray  # int64 [R]
    packed: np.ndarray  # int64 [R]


def ragged_cohorts(decision: Decision, pairs: Pairs, least: float | None = None) -> Searched | None:
    """The joint cohorts of the pairs whose P is too few; None if there are none.

    Args:
        least: Score below which a measured pair does not matter, nor one below the best pair, unless it may make
            one redundant that does: those keep what they have. None: all of them matter.
    """
    programs = decision.state.programs
    slots = np.sort(np.concatenate([pairs.fresh, pairs.ready]))
    rows = decision.rows[programs.lane_class[pairs.follow]][:, slots]
    if decision.state.policy.speculation != "adaptive":  # complete prefixes only
        rows = np.where(rows <= programs.packed[pairs.follow, None], rows, 0)
    is_new = np.isin(slots, pairs.fresh)
    streams = int(np.count_nonzero(decision.rates.family >= 0))
    share = programs.packed[pairs.follow] // np.minimum(programs.batch[pairs.follow], max(1, streams))
    tight = np.flatnonzero((rows.max(axis=1, initial=0) > np.maximum(1, share)) & rows[:, is_new].any(axis=1))
    # Pairs with rows for everybody are not searched here and may win as they are.
    settled = np.setdiff1d(np.arange(len(pairs.follow)), tight)
    covers = np.any(_padding(decision, pairs, settled), axis=0, keepdims=True)[0]
    found = []
    groups = programs.source[pairs.follow] * 2 + programs.device_allocates[pairs.follow]
    for group in np.unique(groups[tight]).tolist():
        some = tight[groups[tight] == group]
        prices = marginal_prices(decision, int(pairs.follow[some[0]]), slots)
        lanes = _lanes(decision, pairs, slots, rows, some, prices)
        if least is not None:
            bounds, padding = _bounds(decision, pairs, some, lanes), _padding(decision, pairs, some)
            # Only the score of a pair that nothing can make redundant is certain to stay in the race.
            certain = np.flatnonzero(~padding.any(axis=1) & (bounds < np.inf))
            best = certain[bounds[certain].argsort()[-1:]]
            if len(best):
                found.append(_search(decision, pairs, some[best], slots, is_new, _only(lanes, best)))
                least = max(least, float(_rates(decision, pairs, some[best], found[-1].value)[0]))
            parts = bounds + pairs.total_ms[some] * decision.values.waiting
            hopeful = bounds + ROUNDING * parts >= least
            matter = hopeful | padding[:, some][hopeful].any(axis=0) | covers[some]
            matter[best] = False
            some, lanes = some[matter], _only(lanes, matter)
        if len(some):
            found.append(_search(decision, pairs, some, slots, is_new, lanes))
    return Searched(*[np.concatenate(column) for column in zip(*found, strict=True)]) if found else None


def _padding(decision: Decision, pairs: Pairs, some: np.ndarray) -> np.ndarray:
    """bool [R, C]: which of some pairs may be redundant padding of which pairs; timings play no part in that."""
    table, rows = decision.state.programs.padding_of, some[:, None]
    first = table[pairs.first[rows], pairs.first], pairs.first[rows] == pairs.first
    follow = table[pairs.follow[rows], pairs.follow], pairs.follow[rows] == pairs.follow
    found: np.ndarray = (first[0] & (follow[0] | follow[1])) | (first[1] & follow[0])
    return found


def _only(lanes: _Lanes, which: np.ndarray) -> _Lanes:
    """The lanes of some pairs, a mask or positions."""
    return _Lanes(
        lanes.base[which], lanes.gains, lanes.priority, lanes.rows[which], lanes.batch[which], lanes.packed[which]
    )


def _lanes(
    decision: Decision, pairs: Pairs, slots: np.ndarray, rows: np.ndarray, some: np.ndarray,
    prices: tuple[np.ndarray, np.ndarray],
) -> _Lanes:  # fmt: skip
    programs, follow = decision.state.programs, pairs.follow[some]
    base = decode_values(decision, slots, pairs.total_ms[some])
    return _Lanes(base, *prices, rows[some], programs.batch[follow], programs.packed[follow])


def _bounds(decision: Decision, pairs: Pairs, some: np.ndarray, lanes: _Lanes) -> np.ndarray:
    """Upper bounds of scores, float64 [R]; inf for unmeasured pairs."""
    bound = most_value(lanes.base, lanes.gains, lanes.rows, lanes.batch, lanes.packed)
    return _rates(decision, pairs, some, bound + pairs.ending[some].sum(axis=1))


def _rates(decision: Decision, pairs: Pairs, some: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Scores of values, float64 [R]; inf for unmeasured pairs."""
    total_ms = pairs.total_ms[some]
    held = np.where(total_ms > 0, total_ms, 1.0)
    return np.where(total_ms > 0, value / held - 0.5 * held * decision.values.waiting, np.inf)


def _search(
    decision: Decision, pairs: Pairs, some: np.ndarray, slots: np.ndarray, is_new: np.ndarray, lanes: _Lanes
) -> Searched:
    """The best cohort over all restrictions; of equal ones that which advances more requests."""
    preferred = decision.order[np.isin(decision.order, slots)]
    preference = np.searchsorted(slots, preferred)
    endings, which = prefix_sums(pairs.ending[some]), np.arange(len(some))
    best = np.zeros(lanes.rows.shape, np.int64)
    value, count, ends = np.full(len(some), -np.inf), np.zeros(len(some), np.int64), np.zeros(len(some), np.int64)
    offered = np.arange(1, lanes.gains.shape[1] + 1) < lanes.rows[:, :, None]
    whole = lanes.base + np.where(offered, lanes.gains, 0.0).sum(axis=2)
    keys = [np.where(is_new & (lanes.rows > 0), key, -np.inf) for key in
            (whole, lanes.base, whole / np.maximum(lanes.rows, 1), -lanes.rows.astype(np.float64))]  # fmt: skip
    able = (is_new & (lanes.rows > 0)).sum(axis=1)
    most = np.minimum(np.minimum(pairs.room[some], able), np.minimum(lanes.batch, lanes.packed))
    for rows in _restrictions(keys, is_new, lanes, most, pairs.room[some], pairs.ending.shape[1]):
        work = _cohorts(decision, lanes._replace(rows=rows), whole, np.zeros(rows.shape, np.bool_), preference)
        lacking = np.flatnonzero(~((work > 0) & is_new).any(axis=1))
        attempts = [(which, work)]
        if len(lacking):
            less = _only(lanes._replace(rows=rows), lacking)
            for forced in _forced([key[lacking] for key in keys], less.rows):
                attempts.append((lacking, _cohorts(decision, less, whole[lacking], forced, preference)))
        for mine, work in attempts:
            total, retired = _worth(_only(lanes, mine), work, is_new, pairs.room[some[mine]], endings[mine])
            advanced = (work > 0).sum(axis=1) + retired
            better = (total > value[mine]) | ((total == value[mine]) & (advanced > count[mine]))
            at = mine[better]
            best[at], value[at], count[at], ends[at] = work[better], total[better], advanced[better], retired[better]
    return Searched(some, scatter(best, slots, decision.state.limits.slots), ends, value)


def _worth(
    lanes: _Lanes, work: np.ndarray, is_new: np.ndarray, room: np.ndarray, endings: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Values float64 [R], -inf without a newly ready row, and retirements in the other rows, int64 [R]."""
    mine = (work > 0) & is_new
    retired = np.clip(room - mine.sum(axis=1), 0, endings.shape[1] - 1)
    admitted = np.arange(1, lanes.gains.shape[1] + 1) < work[:, :, None]
    total = np.where(work > 0, lanes.base, 0.0).sum(axis=1) + np.where(admitted, lanes.gains, 0.0).sum(axis=(1, 2))
    return np.where(mine.any(axis=1), total + endings[np.arange(len(work)), retired], -np.inf), retired


def _restrictions(
    keys: list[np.ndarray], is_new: np.ndarray, lanes: _Lanes, most: np.ndarray, room: np.ndarray, num_terminal: int
) -> list[np.ndarray]:
    """Ceilings int64 [R, n] of the lanes that may take part."""
    caps = {int(most.max())}
    if num_terminal and (most + num_terminal > room).any():
        caps |= {cap for cap in _CAPS if cap < most.max()}
    found: dict[bytes, np.ndarray] = {}
    for key in keys:
        rank = np.empty(key.shape, np.int64)
        np.put_along_axis(rank, (-key).argsort(axis=1, kind="stable"), np.arange(key.shape[1])[None], 1)
        for cap in sorted(caps):
            taking = np.where((cap >= most) & (room >= lanes.batch), len(is_new), np.minimum(cap, most))
            rows = np.where(is_new & (rank >= taking[:, None]), 0, lanes.rows)
            found.setdefault(rows.tobytes(), rows)
    return list(found.values())


def _forced(keys: list[np.ndarray], rows: np.ndarray) -> list[np.ndarray]:
    """Which newly ready lane certainly takes part, bool [R, n] each."""
    found: dict[bytes, np.ndarray] = {}
    for key in keys:
        forced = np.zeros(rows.shape, np.bool_)
        forced[np.arange(len(rows)), np.where(rows > 0, key, -np.inf).argmax(axis=1)] = True
        found.setdefault(forced.tobytes(), forced)
    return list(found.values())


def _cohorts(
    decision: Decision, lanes: _Lanes, whole: np.ndarray, forced: np.ndarray, preference: np.ndarray
) -> np.ndarray:
    """Target rows int64 [R, n] of the best cohorts; a `forced` lane is worth more than all others together."""
    bonus = np.where(forced, (lanes.gains.shape[1] + 2.0) * (whole.sum(axis=1)[:, None] + 1e-9), 0.0)
    if decision.state.policy.speculation == "adaptive":
        return adaptive_cohorts(
            lanes.base + bonus, lanes.gains, lanes.priority, lanes.rows, lanes.batch, lanes.packed, preference
        )[0]
    members, _ = fixed_cohorts(whole + bonus, lanes.rows, lanes.batch, lanes.packed, preference)
    return np.where(members, lanes.rows, 0)
