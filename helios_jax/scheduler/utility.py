"""Value arithmetic and the filter of redundant padding: arrays in, arrays out, no state.

Every value of one decision is divided by one positive scale m, the largest absolute term, so
that prices anywhere in float64 stay representable. Terms are formed as logarithms first:
a coefficient times a reciprocal rate may overflow although their ratio to m does not.
"""

from __future__ import annotations

from operator import ge
from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.preferences import PolicyConfig

EQUAL = 1e-12  # totals nearer than this share of what was added are equal: sums in another order differ by less


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
        known = np.array([terms.token_r, terms.delivery_r, terms.sigma, terms.age_ms + longest_ms])
        token, deliver, log_sigma, span = np.where(np.isnan(known), -np.inf, np.log(known))
        token_cost, delivery_cost, age_cost, end_cost = np.log(policy.costs)
        fair = np.where(active, token_cost + token, -np.inf)
        delivered = np.where(streaming, delivery_cost + deliver, -np.inf)
        aged = np.where(streaming, age_cost + log_sigma, np.where(ending, end_cost + log_sigma, -np.inf))
        waits = float(np.logaddexp(age_cost + np.log(np.count_nonzero(streaming)), end_cost + np.log(num_ending)))
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
    keep = np.ones(len(cohorts), np.bool_)
    if len(cohorts) < 2:
        return keep
    alike: dict[bytes, list[int]] = {}
    for number, cohort in enumerate(row_bytes(cohorts)):
        alike.setdefault(cohort, []).append(number)
    if len(alike) == len(cohorts):
        return keep
    extents = [tuple(extent) for extent in capacities.tolist()]
    dominated: list[int] = []
    for numbers in alike.values():
        if len(numbers) > 1:
            dominated += _dominated(extents, numbers)
    keep[dominated] = False
    return keep


def _dominated(extents: list[tuple[int, ...]], numbers: list[int]) -> list[int]:
    """Those of `numbers` whose extents are no smaller than another one's in anything, and larger in something.

    In rising order whatever dominates comes before what it dominates, and it is enough to look at
    the smallest ones: a few comparisons of small tuples, where arrays would take a dozen calls.
    """
    smallest: list[tuple[int, ...]] = []
    dominated = []
    for number in sorted(numbers, key=extents.__getitem__):
        mine = extents[number]
        for other in smallest:
            if mine != other and all(map(ge, mine, other)):
                dominated.append(number)
                break
        else:
            smallest.append(mine)
    return dominated


def row_bytes(rows: np.ndarray) -> list[bytes]:
    """The contents of each row of [C, ...], C > 0, as a key; rows of one dtype are equal when their keys are."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    return flat.view((np.void, flat.itemsize * flat.shape[1])).ravel().tolist() if flat.size else [b""] * len(flat)
