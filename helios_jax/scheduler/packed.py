"""Cohorts of packed prefills: request rows that share the token capacity of their program.

Lane values are not additive here (scheduling-utility.md section 9, reading 4), so the search is
bounded: a few orders of the prompts, each filled greedily. Programs with one row are exact.
Arrays in, arrays out, no state; programs run along the first axis and requests along the second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PromptRows(NamedTuple):
    """Prompts that may be prefilled; [n] each.

    Attributes:
        remaining: int64, tokens up to the next boundary, at least 1.
        token_value: Scaled value of one prompt token.
        bonus: Scaled value of consuming all of them (the first output token), 0 if the
            boundary is not the end of the prompt or nothing is sampled.
        newly_ready: bool, rows that a prerequisite in the same sequence makes ready.
        atoms: int64 [n, spans, 2] unsplittable spans (start, end) relative to the next token,
            padded with zeros; None if no prompt has any.
    """

    remaining: np.ndarray
    token_value: np.ndarray
    bonus: np.ndarray
    newly_ready: np.ndarray
    atoms: np.ndarray | None = None


def whole_spans(lengths: np.ndarray, atoms: np.ndarray | None) -> np.ndarray:
    """Lengths shortened so that none ends inside an atomic span.

    Args:
        lengths: int64 [..., n].
        atoms: int64 [n, spans, 2] or None.
    """
    if atoms is None:
        return lengths
    for number in range(atoms.shape[1]):
        start, end = atoms[:, number, 0], atoms[:, number, 1]
        lengths = np.where((start < lengths) & (lengths < end), start, lengths)
    return lengths


def usable_tokens(remaining: np.ndarray, capacity: np.ndarray, atoms: np.ndarray | None) -> np.ndarray:
    """Tokens of each prompt that each program can consume alone; int64 [C, n]."""
    return whole_spans(np.minimum(capacity[:, None], remaining), atoms)


def packed_cohorts(rows: PromptRows, tokens: np.ndarray, capacities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Best prompt cohort of each prefill program, rows sharing its token capacity.

    Lane values are not additive here. The search orders the prompts by value, by value per
    token and by shortest tail, fills rows and tokens in that order, and keeps the best; a
    program with one row is exact.

    Args:
        rows: The n prompts, preferred order first among equals.
        tokens, capacities: int [C] token capacity and request rows of each program.

    Returns:
        Tokens of each prompt int64 [C, n] and value float64 [C].
    """
    extents, extent = _distinct(tokens)
    order = np.argsort(-_packed_keys(rows, extents), axis=-1, kind="stable")  # [orders, U, n]
    taken = _filled(extents, order, rows.remaining[order], rows.atoms)
    last = np.minimum(capacities, len(rows.remaining)) - 1
    totals = _totals(rows, order, taken, extent, last)
    best, programs = totals.argmax(axis=0), np.arange(len(tokens))
    return _in_place(order[best, extent], taken[best, extent], last), totals[best, programs]


def enabled_cohorts(
    rows: PromptRows, tokens: np.ndarray, capacities: np.ndarray, max_new: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Best cohorts in which 1 to m of the newly ready rows take part, for each m of `max_new` (M of them).

    Each order of `packed_cohorts` is tried as it is, with its best new row moved to the front,
    and with one new row in front that first takes no more than it must and at the end what is left.

    Returns:
        Tokens int64 [M, C, n] and value float64 [M, C], -inf without a legal cohort.
    """
    extents, extent = _distinct(tokens)
    keys = _packed_keys(rows, extents)
    leaders = np.where(rows.newly_ready, keys, -np.inf).argmax(axis=-1), _cheapest_new(rows, extents)
    orders = [keys]
    for leader in leaders:
        orders.append(keys.copy())
        orders[-1][np.arange(len(keys))[:, None], np.arange(len(extents)), leader] = np.inf
    order = (-np.concatenate(orders)).argsort(axis=-1, kind="stable")
    last, modest, programs = np.minimum(capacities, len(rows.remaining)) - 1, 2 * len(keys), np.arange(len(tokens))
    found = []
    for number in max_new:
        allowed, remaining = _excess_last(rows, order, number)
        remaining[modest:, :, 0] = _least_tokens(rows)[allowed[modest:, :, 0]]
        taken = _filled(extents, allowed, remaining, rows.atoms)
        totals = _totals(rows, allowed, taken, extent, last)
        more, gain = _topped_up(rows, allowed[modest:], taken[modest:], tokens, extent, last)
        totals[modest:] += gain
        num_new = np.cumsum(rows.newly_ready[allowed] & (taken > 0), axis=-1)[:, extent, last]
        totals = np.where(num_new > 0, totals, -np.inf)
        best = totals.argmax(axis=0)
        chosen = taken[best, extent]
        chosen[:, 0] += np.concatenate([np.zeros((modest, len(tokens)), np.int64), more])[best, programs]
        found.append((_in_place(allowed[best, extent], chosen, last), totals[best, programs]))
    return np.stack([lengths for lengths, _ in found]), np.stack([value for _, value in found])


def _distinct(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The U distinct token capacities, rising, and which one each program has; quicker than `np.unique` for so few."""
    extents = np.array(sorted(set(tokens.tolist())), np.int64)
    return extents, extents.searchsorted(tokens)


def _least_tokens(rows: PromptRows) -> np.ndarray:
    """Fewest tokens that each prompt can consume: one, or the image that it begins with; int64 [n]."""
    least = np.ones(len(rows.remaining), np.int64)
    if rows.atoms is None:
        return least
    return np.maximum(least, np.where(rows.atoms[..., 0] == 0, rows.atoms[..., 1], 0).max(axis=1))


def _cheapest_new(rows: PromptRows, extents: np.ndarray) -> np.ndarray:
    """The new row whose fewest tokens are worth most by token, for each token capacity; int64 [U]."""
    least = _least_tokens(rows)
    worth = rows.token_value + np.where(least == rows.remaining, rows.bonus / least, 0.0)
    return np.where(rows.newly_ready & (least <= extents[:, None]), worth, -np.inf).argmax(axis=-1)


def _topped_up(
    rows: PromptRows, order: np.ndarray, taken: np.ndarray, tokens: np.ndarray, extent: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the first row of each order can still consume of the tokens left over, and its worth; [orders, C] each."""
    leader, first = order[:, extent, 0], taken[:, extent, 0]
    left = tokens - np.cumsum(taken, axis=-1)[:, extent, last]
    length = np.minimum(rows.remaining[leader], first + left)
    if rows.atoms is not None:
        for start, end in np.moveaxis(rows.atoms[leader], (-2, -1), (0, 1)):
            length = np.where((start < length) & (length < end), start, length)
    length = np.maximum(length, first)
    bonus = np.where((length == rows.remaining[leader]) & (first < length), rows.bonus[leader], 0.0)
    return length - first, (length - first) * rows.token_value[leader] + bonus


def _totals(rows: PromptRows, order: np.ndarray, taken: np.ndarray, extent: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Value of each order in each program; float64 [orders, C]."""
    gains = taken * rows.token_value[order] + np.where(taken == rows.remaining[order], rows.bonus[order], 0.0)
    # Fewer rows cut an order's tail and leave its head as it is: prefix sums give every row capacity.
    return np.cumsum(gains, axis=-1)[:, extent, last]


def _in_place(order: np.ndarray, taken: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Tokens of each prompt, int64 [C, n], from those in order up to the last row."""
    lengths = np.zeros_like(taken)
    lengths[np.arange(len(order))[:, None], order] = np.where(np.arange(taken.shape[1]) > last[:, None], 0, taken)
    return lengths


def _filled(extents: np.ndarray, order: np.ndarray, remaining: np.ndarray, atoms: np.ndarray | None) -> np.ndarray:
    """Tokens of each row when rows take what is left of the capacity in turn; int64 [orders, U, n]."""
    if atoms is None:
        left = extents[:, None] - (remaining.cumsum(axis=-1) - remaining)
        return np.minimum(np.maximum(left, 0), remaining)
    taken, room = np.zeros_like(remaining), np.broadcast_to(extents, remaining.shape[:-1]).copy()
    spans = atoms[order]  # [orders, U, n, spans, 2]
    for position in range(remaining.shape[-1]):  # what a row leaves depends on where its images let it stop
        length = np.minimum(room, remaining[..., position])
        for start, end in np.moveaxis(spans[..., position, :, :], (-2, -1), (0, 1)):
            length = np.where((start < length) & (length < end), start, length)
        taken[..., position] = length
        room = room - length
    return taken


def _excess_last(rows: PromptRows, order: np.ndarray, max_new: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders in which newly ready rows beyond the first `max_new` come last and have nothing to consume."""
    fresh = rows.newly_ready[order]
    excess = fresh & (np.cumsum(fresh, axis=-1) > max_new)
    if not excess.any():
        return order, rows.remaining[order]
    back = excess.argsort(axis=-1, kind="stable")
    first, second = np.arange(order.shape[0])[:, None, None], np.arange(order.shape[1])[:, None]
    order = order[first, second, back]
    return order, np.where(excess[first, second, back], 0, rows.remaining[order])


def _packed_keys(rows: PromptRows, tokens: np.ndarray) -> np.ndarray:
    """Sort keys [orders, C, n], larger first."""
    usable = usable_tokens(rows.remaining, tokens, rows.atoms)
    worth = usable * rows.token_value + np.where(usable == rows.remaining, rows.bonus, 0.0)
    keys = np.empty((3, *worth.shape))
    keys[0], keys[2] = worth, -rows.remaining
    np.divide(worth, np.maximum(usable, 1), out=keys[1])
    return keys
