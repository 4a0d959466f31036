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
    order = preference[np.argsort(-ranked, axis=1, kind="stable")]
    rows = np.take_along_axis(lengths, order, 1)
    longest = np.maximum(lengths.max(axis=1, initial=0), 1)
    equal = ((lengths == 0) | (lengths == longest[:, None])).all(axis=1)
    most = np.where(equal, np.minimum(batch, packed // longest), batch)
    chosen = (np.arange(values.shape[1]) < most[:, None]) & (rows > 0)
    binding = (rows * chosen).sum(axis=1) > packed
    members = np.zeros(values.shape, np.bool_)
    np.put_along_axis(members, order, chosen, 1)
    for program in np.flatnonzero(binding).tolist():
        lanes = order[program][rows[program] > 0]
        taken = _knapsack(values[program, lanes], lengths[program, lanes], int(batch[program]), int(packed[program]))
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
        priority: float64 [n, depth] order of allocation, non-increasing along a lane.
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
            base[programs], gains, marginals, ceilings, batch[programs], packed[programs], preference
        )
        rows[programs], added = causal_lengths(marginals, members, packed[programs])
        totals[programs] = np.where(members, base[programs], 0.0).sum(axis=1) + added
    return rows, totals


def _best_prefixes(
    base: np.ndarray, gains: np.ndarray, marginals: Marginals, ceilings: np.ndarray, batch: np.ndarray,
    packed: np.ndarray, preference: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """bool [G, n]: the best cohort of each program; the programs share one row of ceilings."""
    orders = _orders(base, gains, ceilings, preference)  # [G, 3, n]
    num_lanes = orders.shape[-1]
    value = np.cumsum(np.take_along_axis(base[:, None], orders, 2), axis=2)  # of the first 1 .. n lanes
    most = np.minimum(np.minimum(batch, packed), num_lanes)
    # Until the complete prefixes exceed P a longer cohort is never worse: shorter ones need no price.
    fitting = (np.cumsum(ceilings[orders], axis=2) <= packed[:, None, None]).sum(axis=2)
    least = np.clip(fitting, 1, most[:, None])
    sizes = np.arange(int(least.min()), int(most.max()) + 1)  # [K]
    unique, which = _distinct(orders)
    sums, first, count = _prefix_sums(marginals, ceilings, unique, sizes)
    admitted = np.clip(packed[:, None, None] - sizes, 0, count[which])  # [G, 3, K]
    prices = value[:, :, sizes - 1] + sums[first[which] + admitted] - sums[first[which]]
    legal = (sizes >= least[..., None]) & (sizes <= most[:, None, None])
    # The last of equal prices is the longest cohort.
    flat = np.where(legal, prices, -np.inf).transpose(0, 2, 1).reshape(len(base), -1)
    last = flat.shape[1] - 1 - flat[:, ::-1].argmax(axis=1)
    size, ordering = sizes[last // orders.shape[1]], last % orders.shape[1]
    members = np.zeros(base.shape, np.bool_)
    programs = np.arange(len(base))
    np.put_along_axis(members, orders[programs, ordering], np.arange(num_lanes) < size[:, None], 1)
    return members


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


def _prefix_sums(
    marginals: Marginals, ceilings: np.ndarray, orders: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums of the best proposals of every cohort prefix, in one flat array.

    Args:
        ceilings: int64 [n] most target rows of each lane.
        orders: int64 [U, lanes] distinct orderings of the feasible lanes.
        sizes: int64 [K] lengths of the cohort prefixes.

    Returns:
        sums, first [U, K], count [U, K]: cohort (u, k) has `count` proposals, and the best m of
        them add sums[first + m] - sums[first].
    """
    position = np.zeros((len(orders), len(ceilings)), np.uint8)
    np.put_along_axis(position, orders, np.arange(orders.shape[1], dtype=np.uint8)[None], 1)
    included = position[:, None, marginals.lane] < sizes[:, None].astype(np.uint8)  # [U, K, M]
    sums = np.zeros(1 + int(np.count_nonzero(included)))
    np.cumsum(np.broadcast_to(marginals.gain, included.shape)[included], out=sums[1:])
    count = np.cumsum(ceilings[orders] - 1, axis=1)[:, sizes - 1]
    first = np.cumsum(count).reshape(count.shape) - count
    return sums, first, count
