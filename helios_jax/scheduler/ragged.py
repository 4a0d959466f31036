"""Cohorts of rounds whose aggregate target rows P may be too few: arrays in, arrays out.

A lane of length l is worth its base (pending token, delivery, age credit) and the gains of
its first l - 1 proposals; gains never rise along a lane. Programs take the first axis, lanes
the second, in the order of their slots. A lane of length 0 cannot be served by that program.

Three questions, two of them answered exactly:

- `fixed_cohorts`: complete prefixes only, rows B and target rows P both bind. Exact.
- `causal_lengths`: a given cohort shares P. Exact for the host, whose order is the gain; the
  device's order is the joint prefix probability, and its result is what the device will do.
- `adaptive_cohorts`: which cohort, when prefixes may be cut. Prefixes of three orderings of
  the lanes, each priced by its resulting allocation; the search does not enumerate cohorts.

Source: specification, "Useful service and selection" and "Speculative graph coverage".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

COHORTS_AT_ONCE = 32


def fixed_cohorts(
    values: np.ndarray, lengths: np.ndarray, batch: np.ndarray, packed: np.ndarray, preference: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The highest-value cohort of complete prefixes that fits both B and P, for each program.

    Equal values prefer more lanes, then earlier ones of `preference`.

    Args:
        values: float64 [C, n] value of each lane's complete prefix, at least 0.
        lengths: int64 [C, n] its target rows; 0 = not feasible.
        batch, packed: int64 [C] B and P.
        preference: int64 [n] a permutation of the lanes.

    Returns:
        bool [C, n] cohorts and float64 [C] their values.

    Cost: O(C n log n), and O(m^2 W) beside that for each program whose P binds, m being the lanes
    that are not of the most frequent length.
    """
    ranked = np.where(lengths > 0, values, -np.inf)[:, preference]
    order = preference[(-ranked).argsort(axis=1, kind="stable")]
    which, positions = np.arange(len(values))[:, None], np.arange(values.shape[1])
    rows = lengths[which, order]
    chosen = (positions < batch[:, None]) & (rows > 0)
    members = np.zeros(values.shape, np.bool_)
    members[which, order] = chosen
    for program in ((rows * chosen).sum(axis=1) > packed).nonzero()[0].tolist():
        lanes, rows_left = order[program][rows[program] > 0], int(packed[program])
        mine, longest = lengths[program, lanes], int(rows[program].max())
        if mine.min() == longest:  # all alike: the best ones
            taken = positions[: rows_left // longest]
        else:
            taken = _knapsack(values[program, lanes], mine, int(batch[program]), rows_left)
        members[program] = False
        members[program, lanes[taken]] = True
    return members, np.where(members, values, 0.0).sum(axis=1)


def _knapsack(values: np.ndarray, lengths: np.ndarray, batch: int, packed: int) -> np.ndarray:
    """Indices of the best lanes, at most `batch` of at most `packed` rows together.

    Lanes of equal length are taken by value, so the most frequent length needs no table: given
    what the others use, it fills the rest with its best.

    Args:
        values, lengths: [n], values falling.
    """
    sizes, frequency = np.unique(lengths, return_counts=True)
    common = int(sizes[frequency.argmax()])
    main = np.flatnonzero(lengths == common)
    others = [
        lane
        for size in sizes.tolist()
        if size != common
        for lane in np.flatnonzero(lengths == size)[: min(batch, packed // size)].tolist()
    ]
    best, taken = _table(values, lengths, others, batch, packed)
    sums = np.concatenate([[0.0], np.cumsum(values[main])])
    count, used = np.ogrid[: best.shape[0], : best.shape[1]]
    filled = np.minimum(np.minimum(batch - count, (packed - used) // common), len(main))
    total = best + sums[filled]
    tied = np.flatnonzero(total.ravel() == total.max())
    cell = int(tied[(count + filled).ravel()[tied].argmax()])
    lanes_used, rows_used = divmod(cell, best.shape[1])
    chosen = main[: filled[lanes_used, rows_used]].tolist()
    for number in range(len(others) - 1, -1, -1):
        if taken[number, lanes_used, rows_used]:
            chosen.append(others[number])
            lanes_used, rows_used = lanes_used - 1, rows_used - int(lengths[others[number]])
    return np.array(chosen, np.int64)


def _table(
    values: np.ndarray, lengths: np.ndarray, others: list[int], batch: int, packed: int
) -> tuple[np.ndarray, np.ndarray]:
    """best[k, p]: highest value of exactly k of `others` with exactly p rows; and which took part last."""
    most = min(batch, len(others))
    rows = min(packed, int(lengths[others].sum()) if others else 0)
    best = np.full((most + 1, rows + 1), -np.inf)
    best[0, 0] = 0.0
    taken = np.zeros((len(others), most + 1, rows + 1), np.bool_)
    for number, lane in enumerate(others):
        size = int(lengths[lane])
        if size > rows or not most:
            continue
        with_lane = best[:-1, : rows + 1 - size] + values[lane]
        better = with_lane > best[1:, size:]
        taken[number, 1:, size:] = better
        best[1:, size:] = np.where(better, with_lane, best[1:, size:])
    return best, taken


class Marginals(NamedTuple):
    """Proposals of all lanes in the order in which target rows are given to them.

    Attributes:
        lane: int64 [M] lane of each proposal; along one lane the depths rise.
        gain: float64 [M] what it adds to the lane's value.
    """

    lane: np.ndarray
    gain: np.ndarray


def sorted_marginals(priority: np.ndarray, gains: np.ndarray, lengths: np.ndarray) -> Marginals:
    """Causal order: highest priority first, ties by shorter prefix, then by lower slot.

    Priorities never rise along a lane, so sorting is the same as repeatedly admitting the best
    proposal whose predecessors are admitted.

    Args:
        priority, gains: float64 [n, depth].
        lengths: int64 [n] the most target rows of each lane, pending token included.
    """
    depth = priority.shape[1]
    allowed = (np.arange(1, depth + 1) < lengths[:, None]).T.ravel()
    lane = np.tile(np.arange(len(lengths)), depth)[allowed]  # depth by depth, each by slot: the order of ties
    order = np.argsort(-priority.T.ravel()[allowed], kind="stable")
    return Marginals(lane[order], gains.T.ravel()[allowed][order])


def causal_lengths(marginals: Marginals, members: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Target rows of each lane when a cohort shares P rows, and what its proposals add.

    Args:
        members: bool [C, n] one cohort a program, at most P lanes.
        packed: int64 [C] P.

    Returns:
        int64 [C, n] lengths, 0 outside the cohort, and float64 [C] sums of the admitted gains.
    """
    budget = packed - members.sum(axis=1)
    offered = members[:, marginals.lane]
    admitted = offered & (np.cumsum(offered, axis=1) <= budget[:, None])
    program, proposal = np.nonzero(admitted)
    cells = program * members.shape[1] + marginals.lane[proposal]
    lengths = members + np.bincount(cells, minlength=members.size).reshape(members.shape)
    return lengths, np.where(admitted, marginals.gain, 0.0).sum(axis=1)


def adaptive_cohorts(
    base: np.ndarray, gains: np.ndarray, priority: np.ndarray, lengths: np.ndarray, batch: np.ndarray,
    packed: np.ndarray, preference: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The best cohort prefix of three orderings of the lanes, each priced by its causal allocation.

    The orderings: total lane value, value of the pending token with its delivery, and value per target row.
    Equal values prefer more lanes.

    Args:
        base: float64 [C, n] value of each lane's pending token, at least 0.
        gains: float64 [n, depth] what each proposal adds, non-increasing along a lane.
        priority: float64 [n, depth] order of allocation, non-increasing along a lane; the gains themselves
            (the same array) where the host allocates.
        lengths: int64 [C, n] most target rows of each lane; 0 = not feasible.
        batch, packed: int64 [C] B and P.
        preference: int64 [n] a permutation of the lanes, for equal keys.

    Returns:
        int64 [C, n] allocated target rows (0 outside the cohort) and float64 [C] values; a program without a
        feasible lane has an empty cohort of value 0.
    """
    rows, totals = np.zeros(lengths.shape, np.int64), np.zeros(len(lengths))
    groups: dict[bytes, list[int]] = {}
    for program, ceilings in enumerate(lengths):
        groups.setdefault(ceilings.tobytes(), []).append(program)
    for programs in groups.values():
        ceilings = lengths[programs[0]]
        if not ceilings.any():
            continue
        marginals = sorted_marginals(priority, gains, ceilings)
        members = _best_prefixes(
            base[programs], gains, marginals, ceilings, batch[programs], packed[programs], preference,
            by_gain=priority is gains,
        )  # fmt: skip
        rows[programs], added = causal_lengths(marginals, members, packed[programs])
        totals[programs] = np.where(members, base[programs], 0.0).sum(axis=1) + added
    return rows, totals


def _best_prefixes(
    base: np.ndarray, gains: np.ndarray, marginals: Marginals, ceilings: np.ndarray, batch: np.ndarray,
    packed: np.ndarray, preference: np.ndarray, *, by_gain: bool,
) -> np.ndarray:  # fmt: skip
    """bool [G, n]: the best cohort of each program; the programs share one row of ceilings.

    A cohort is priced exactly only where a bound says that it can win: with the best proposals
    of all lanes, or with all of its own, it would reach what a first guess earns. That bound is
    worth its time only where rows are given out `by_gain`.
    """
    orders = _orders(base, gains, ceilings, preference)  # [G, 3, n]
    num_lanes = orders.shape[-1]
    sizes = np.arange(1, num_lanes + 1)
    value = np.cumsum(np.take_along_axis(base[:, None], orders, 2), axis=2)  # of the first 1 .. n lanes
    most = np.minimum(np.minimum(batch, packed), num_lanes)
    # Until the complete prefixes exceed P a longer cohort is never worse: shorter ones need no price.
    fitting = (np.cumsum(ceilings[orders], axis=2) <= packed[:, None, None]).sum(axis=2)
    least = np.clip(fitting, 1, most[:, None])
    budget = np.maximum(packed[:, None] - sizes, 0)  # [G, n]
    legal = (sizes >= least[..., None]) & (sizes <= most[:, None, None])
    unique, which = _distinct(orders)
    cells = (which[..., None] * num_lanes + sizes - 1).ravel()  # number of each cohort

    def priced(where: np.ndarray) -> np.ndarray:
        program, size = where // (3 * num_lanes), where % num_lanes
        return value.ravel()[where] + _added(marginals, ceilings, unique, cells[where], budget[program, size])

    programs = np.arange(len(base))
    if by_gain:
        bound = np.where(legal, value + _most_added(gains, marginals, ceilings, orders, budget), -np.inf)
        guess = programs * 3 * num_lanes + bound.reshape(len(base), -1).argmax(axis=1)
        legal = bound >= (priced(guess) * (1.0 - 1e-12))[:, None, None]
    prices = np.full(legal.shape, -np.inf)
    prices[legal] = priced(np.flatnonzero(legal))
    # The last of equal prices is the longest cohort.
    flat = prices.transpose(0, 2, 1).reshape(len(base), -1)
    last = flat.shape[1] - 1 - flat[:, ::-1].argmax(axis=1)
    members = np.zeros(base.shape, np.bool_)
    np.put_along_axis(members, orders[programs, last % 3], np.arange(num_lanes) <= (last // 3)[:, None], 1)
    return members


def _most_added(
    gains: np.ndarray, marginals: Marginals, ceilings: np.ndarray, orders: np.ndarray, budget: np.ndarray
) -> np.ndarray:
    """Upper bound of what proposals add to every cohort prefix, float64 [G, 3, n]."""
    everybody = np.zeros(len(marginals.gain) + 1)
    np.cumsum(np.sort(marginals.gain)[::-1], out=everybody[1:])
    offered = np.arange(1, gains.shape[1] + 1) < ceilings[:, None]
    own = np.cumsum(np.where(offered, gains, 0.0).sum(axis=1)[orders], axis=2)
    return np.minimum(own, everybody[np.minimum(budget, len(marginals.gain))][:, None])


def _orders(base: np.ndarray, gains: np.ndarray, ceilings: np.ndarray, preference: np.ndarray) -> np.ndarray:
    """int64 [G, 3, feasible lanes]: lanes by total value, by pending-token value, by value per target row."""
    lanes = preference[ceilings[preference] > 0]
    offered = np.arange(1, gains.shape[1] + 1) < ceilings[:, None]
    pending = base[:, lanes]
    total = pending + np.where(offered, gains, 0.0).sum(axis=1)[lanes]
    keys = np.stack([total, pending, total / ceilings[lanes]], axis=1)
    return lanes[np.argsort(-keys, axis=2, kind="stable")]


def _distinct(orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[U, n] distinct orderings of [G, 3, n] and the number of each, int64 [G, 3]; few differ."""
    numbers: dict[bytes, int] = {}
    flat = orders.reshape(-1, orders.shape[-1])
    which = np.array([numbers.setdefault(order.tobytes(), len(numbers)) for order in flat], np.int64)
    first = np.unique(which, return_index=True)[1]
    return flat[first], which.reshape(orders.shape[:2])


def _added(
    marginals: Marginals, ceilings: np.ndarray, orders: np.ndarray, cells: np.ndarray, budget: np.ndarray
) -> np.ndarray:
    """What the first `budget` proposals of cohort prefixes add, in the order of allocation; float64 [R].

    Args:
        ceilings: int64 [n] most target rows of each lane.
        orders: int64 [U, lanes] distinct orderings of the feasible lanes.
        cells: int64 [R] cohorts, u * lanes + k - 1 for the first k lanes of ordering u; they may repeat.
        budget: int64 [R] target rows beyond the pending ones.
    """
    cohorts, row = np.unique(cells, return_inverse=True)
    number, last = cohorts // orders.shape[1], cohorts % orders.shape[1]
    position = np.zeros((len(orders), len(ceilings)), np.uint8)
    np.put_along_axis(position, orders, np.arange(orders.shape[1], dtype=np.uint8)[None], 1)
    included = position.take(marginals.lane, axis=1)[number] <= last[:, None].astype(np.uint8)  # [cohorts, M]
    count = np.cumsum(ceilings[orders] - 1, axis=1)[number, last]
    # A running sum over the gains of some cohorts after another, a zero before it: a difference is the
    # sum of a stretch. Some at a time, because fresh pages for large temporaries cost more than the sums.
    group = np.arange(len(cohorts)) // COHORTS_AT_ONCE
    sums = np.zeros(int(count.sum() + group[-1] + 1))
    first = np.cumsum(count) - count + group
    gains = np.tile(marginals.gain, min(COHORTS_AT_ONCE, len(cohorts)))
    for start in range(0, len(cohorts), COHORTS_AT_ONCE):
        some = included[start : start + COHORTS_AT_ONCE].ravel()
        stretch = np.compress(some, gains[: len(some)])
        np.cumsum(stretch, out=sums[first[start] + 1 : first[start] + 1 + len(stretch)])
    return sums[first[row] + np.minimum(budget, count[row])] - sums[first[row]]
