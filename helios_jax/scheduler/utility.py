"""Value arithmetic and cohort selection: arrays in, arrays out, no state.

Every value of one decision is divided by one positive scale m, the largest absolute term, so
that prices anywhere in float64 stay representable. Terms are formed as logarithms first:
a coefficient times a reciprocal rate may overflow although their ratio to m does not.

The cohort searches take programs along the first axis and requests along the second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.preferences import PolicyConfig


class Values(NamedTuple):
    """Scaled values of one decision; float64 [slots] where not stated.

    Attributes:
        prompt_token: 1 + f r, one consumed prompt token.
        output_token: beta + f r, one committed output token.
        delivery: g r, one delivery.
        age_price: c sigma of a decoder, value/ms; times (A + T) it is the age credit.
        age_ms: A, age of a decoder's last visible output.
        terminal: Value of retiring one finished request (a number).
        terminal_price: p sigma of a request that waits for its terminal snapshot, value/ms.
        terminal_wait: p, its waiting cost, value/ms^2 (a number).
        waiting: c over the active decoders and p over the terminal requests, value/ms^2 (a number).
        log_scale: ln m.

    `age_ms` of a terminal request counts from its end.
    """

    prompt_token: np.ndarray
    output_token: np.ndarray
    delivery: np.ndarray
    age_price: np.ndarray
    age_ms: np.ndarray
    terminal: float
    terminal_price: np.ndarray
    terminal_wait: float
    waiting: float
    log_scale: float


class Terms(NamedTuple):
    """Who is worth what before scaling; [slots] each, NaN = unknown, its part is 0.

    Attributes:
        token_r, delivery_r: ms per unit.
        sigma: ms; of a terminal request, its snapshot family's.
        age_ms: At least 0.
        prompting, streaming, terminal: bool, disjoint.
    """

    token_r: np.ndarray
    delivery_r: np.ndarray
    sigma: np.ndarray
    age_ms: np.ndarray
    prompting: np.ndarray
    streaming: np.ndarray
    terminal: np.ndarray


def scaled_values(policy: PolicyConfig, terms: Terms, longest_ms: float) -> Values:
    """Prices of one decision over their common scale.

    Args:
        longest_ms: The longest duration that any candidate may have, 0 if none is measured.
    """
    prompting, streaming, ending = terms.prompting, terms.streaming, terms.terminal
    active, num_ending = prompting | streaming, int(np.count_nonzero(ending))
    with np.errstate(divide="ignore"):
        fair = np.where(active, np.log(policy.token_fairness) + _log_or_nothing(terms.token_r), -np.inf)
        delivered = np.log(policy.delivery_fairness) + _log_or_nothing(terms.delivery_r)
        log_sigma = _log_or_nothing(terms.sigma)
        age_cost, end_cost = np.log(policy.decode_age_price), np.log(policy.terminal_age_price)
        delivered = np.where(streaming, delivered, -np.inf)
        aged = np.where(streaming, age_cost + log_sigma, np.where(ending, end_cost + log_sigma, -np.inf))
        waits = float(np.logaddexp(age_cost + np.log(np.count_nonzero(streaming)), end_cost + np.log(num_ending)))
        span = np.log(terms.age_ms + longest_ms)
        worths = [
            0.0 if prompting.any() else -np.inf,
            np.log(policy.output_token_value) if active.any() else -np.inf,
            np.log(policy.terminal_value) if num_ending else -np.inf,
            waits + 2.0 * np.log(longest_ms),
            end_cost + np.log(longest_ms) + float(np.max(span, where=ending, initial=-np.inf)),
        ]
    log_scale = float(max(*worths, fair.max(), delivered.max(), (aged + span).max()))
    if log_scale == -np.inf:
        log_scale = 0.0
    with np.errstate(under="ignore", over="ignore"):
        fairness = np.exp(fair - log_scale)
        age_price = np.exp(aged - log_scale)
        return Values(
            prompt_token=np.where(prompting, np.exp(-log_scale) if prompting.any() else 0.0, 0.0) + fairness,
            output_token=np.where(active, np.exp(worths[1] - log_scale), 0.0) + fairness,
            delivery=np.exp(delivered - log_scale),
            age_price=np.where(streaming, age_price, 0.0),
            age_ms=terms.age_ms,
            terminal=float(np.exp(worths[2] - log_scale)),
            terminal_price=np.where(ending, age_price, 0.0),
            terminal_wait=float(np.exp(end_cost - log_scale)) if num_ending else 0.0,
            waiting=float(np.exp(waits - log_scale)),
            log_scale=log_scale,
        )


def _log_or_nothing(values: np.ndarray) -> np.ndarray:
    """Logarithms with an unknown (NaN) value contributing nothing."""
    return np.where(np.isnan(values), -np.inf, np.log(values))


def top_cohorts(values: np.ndarray, capacities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The highest additive lane values for each program: exact when no row budget binds.

    Lane values are at least 0, and equal values prefer more requests, so a cohort is always as
    full as it can be. Equal lanes keep the caller's order.

    Args:
        values: [C, n] lane values at each program's duration.
        capacities: int [C] request rows.

    Returns:
        Membership bool [C, n] and total value [C].
    """
    order = np.argsort(-values, axis=1, kind="stable")
    chosen = np.arange(values.shape[1]) < capacities[:, None]
    totals = np.where(chosen, np.take_along_axis(values, order, 1), 0.0).sum(axis=1)
    members = np.zeros(values.shape, np.bool_)
    np.put_along_axis(members, order, chosen, 1)
    return members, totals


def top_order(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots by value, larger first, and the prefix sums of their values.

    Args:
        values: [C, n].

    Returns:
        int64 [C, n] order (equal values keep the caller's) and float64 [C, n + 1] sums.
    """
    order = np.argsort(-values, axis=1, kind="stable")
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(np.take_along_axis(values, order, 1), axis=1, out=sums[:, 1:])
    return order, sums


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
    extents, extent = np.unique(tokens, return_inverse=True)  # U distinct token capacities
    order = np.argsort(-_packed_keys(rows, extents), axis=-1, kind="stable")  # [orders, U, n]
    return _best_order(rows, order, rows.remaining[order], extents, extent, capacities)


def enabled_cohorts(
    rows: PromptRows, tokens: np.ndarray, capacities: np.ndarray, max_new: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Best cohorts in which 1 to m of the newly ready rows take part, for each m of `max_new` (M of them).

    Each order of `packed_cohorts` is tried as it is and with its best new row moved to the front.

    Returns:
        Tokens int64 [M, C, n] and value float64 [M, C], -inf without a legal cohort.
    """
    extents, extent = np.unique(tokens, return_inverse=True)
    keys = _packed_keys(rows, extents)
    front = keys.copy()
    best_new = np.where(rows.newly_ready, keys, -np.inf).argmax(axis=-1)
    np.put_along_axis(front, best_new[..., None], np.inf, -1)
    order = np.argsort(-np.concatenate([keys, front]), axis=-1, kind="stable")
    found = []
    for number in max_new:
        allowed, remaining = _excess_last(rows, order, number)
        found.append(_best_order(rows, allowed, remaining, extents, extent, capacities, needs_new=True))
    return np.stack([lengths for lengths, _ in found]), np.stack([value for _, value in found])


def _best_order(
    rows: PromptRows, order: np.ndarray, remaining: np.ndarray, extents: np.ndarray, extent: np.ndarray,
    capacities: np.ndarray, *, needs_new: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Fill each program in each order and keep the best order: tokens int64 [C, n] and value float64 [C].

    Args:
        order, remaining: int64 [orders, U, n] prompts and what they may consume, in turn.
        extents, extent: int [U] token capacities and int [C] which of them each program has.
    """
    taken = _filled(extents, order, remaining, rows.atoms)
    gains = taken * rows.token_value[order] + np.where(taken == remaining, rows.bonus[order], 0.0)
    gains[taken <= 0] = 0.0
    # Fewer rows cut an order's tail and leave its head as it is: prefix sums give every row capacity.
    last = np.minimum(capacities, len(rows.remaining)) - 1
    totals = np.cumsum(gains, axis=-1)[:, extent, last]  # [orders, C]
    if needs_new:
        num_new = np.cumsum(rows.newly_ready[order] & (taken > 0), axis=-1)[:, extent, last]
        totals = np.where(num_new > 0, totals, -np.inf)
    best, programs = totals.argmax(axis=0), np.arange(len(extent))
    chosen = taken[best, extent]
    chosen[np.arange(chosen.shape[1]) > last[:, None]] = 0
    lengths = np.zeros_like(chosen)
    np.put_along_axis(lengths, order[best, extent], chosen, 1)
    return lengths, totals[best, programs]


def _filled(extents: np.ndarray, order: np.ndarray, remaining: np.ndarray, atoms: np.ndarray | None) -> np.ndarray:
    """Tokens of each row when rows take what is left of the capacity in turn; int64 [orders, U, n]."""
    if atoms is None:
        return np.clip(extents[:, None] - (np.cumsum(remaining, axis=-1) - remaining), 0, remaining)
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
    back = np.argsort(excess, axis=-1, kind="stable")
    order = np.take_along_axis(order, back, -1)
    return order, np.where(np.take_along_axis(excess, back, -1), 0, rows.remaining[order])


def _packed_keys(rows: PromptRows, tokens: np.ndarray) -> np.ndarray:
    """Sort keys [orders, C, n], larger first."""
    usable = usable_tokens(rows.remaining, tokens, rows.atoms)
    worth = usable * rows.token_value + np.where(usable == rows.remaining, rows.bonus, 0.0)
    tails = np.broadcast_to(-rows.remaining.astype(np.float64), worth.shape)
    return np.stack([worth, worth / np.maximum(usable, 1), tails])


def undominated(cohorts: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Which candidates survive the filter of redundant padding; timings play no part.

    Of candidates with the same cohort and per-request prefixes, one whose capacities are all
    at least as large as another's, with one strictly larger, is discarded.

    Args:
        cohorts: [C, ...] integer or bool work of each candidate, of one program kind.
        capacities: int [C, extents].

    Returns:
        bool [C].
    """
    numbers: dict[bytes, int] = {}
    group = np.array([numbers.setdefault(cohort.tobytes(), len(numbers)) for cohort in cohorts], np.int64)
    keep = np.ones(len(cohorts), np.bool_)
    if len(numbers) == len(cohorts):
        return keep
    shared = np.flatnonzero(np.bincount(group)[group] > 1)
    group, extents = group[shared], capacities[shared]
    dominated = group[:, None] == group
    larger = np.zeros_like(dominated)
    for extent in extents.T:
        dominated &= extent[:, None] >= extent
        larger |= extent[:, None] > extent
    keep[shared] = ~(dominated & larger).any(axis=1)
    return keep
