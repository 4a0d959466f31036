"""Where a prompt is cut for checkpoints, and when a finished request earns a terminal one.

Pure arithmetic on endpoints and measured durations; rows and requests are elsewhere.

1. At admission: the anchor is the last completed message that ends after the restored prefix;
   the prompt end when there is none. It needs no allowance and no known cost.
2. Extras: the earlier messages from the last to the first, then the prompt end if it is not the
   anchor. One is planned if the time it adds still fits the request's allowance, a fraction of
   the time that its uncached prompt is estimated to take. Their number has no other limit.
3. When the cut of an extra is reached and the cost of its copy has expired meanwhile, the copy is
   skipped: the split has been paid, the request goes on.
4. Productive decode earns the same fraction of its measured time; a finished request whose
   credit covers a snapshot, and whose end nobody has captured, asks for a terminal one.

Times are nanoseconds, as measured; positions are absolute token counts of the prefix.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.state_rows import Role


class Cut(NamedTuple):
    """A planned capture: the prefill stops at `endpoint`. `cost_ns` is charged to the allowance (anchor: 0)."""

    endpoint: int
    role: Role
    cost_ns: int


class CutPlan(NamedTuple):
    """Cuts by endpoint, and how many extras were left out, by reason."""

    cuts: tuple[Cut, ...]
    over_allowance: int = 0
    unknown_cost: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class CutCosts:
    """Measured durations that matter to one request.

    Attributes:
        tokens: int64 [programs] prompt tokens of each measured prefill program that it may use.
        prefill_ns: int64 [programs] their estimates, all positive.
        snapshot_ns: Estimate of the cheapest snapshot program with a fresh one, 0 if unknown.
    """

    tokens: np.ndarray
    prefill_ns: np.ndarray
    snapshot_ns: int


def cover_ns(costs: CutCosts, longest: int) -> np.ndarray:
    """Least total duration of prefills that consume n tokens, float64 [longest + 1].

    The unbounded covering knapsack, one program at a time: with capacity u and duration d,
    f'[n] = min over k of f[n - k u] + k d is a running minimum of f[q u + r] - q d along q.
    A sum of capacities may exceed n, so a running minimum from the right follows.
    Infinite (but for n = 0) without a measured program. Cost: O(programs x longest / gcd).
    """
    if not len(costs.tokens):
        return np.where(np.arange(longest + 1) == 0, 0.0, np.inf)
    unit = int(np.gcd.reduce(costs.tokens))
    top = -(-longest // unit) + int(costs.tokens.max()) // unit  # an optimal cover overshoots by less than one program
    exact = np.full(top + 1, np.inf)
    exact[0] = 0.0
    capacities, place = np.unique(costs.tokens // unit, return_inverse=True)
    cheapest = np.full(len(capacities), np.inf)  # of the programs of a capacity, whatever their request rows
    np.minimum.at(cheapest, place, costs.prefill_ns)
    for capacity, duration in zip(capacities.tolist(), cheapest.tolist(), strict=True):
        padded = np.concatenate([exact, np.full(-len(exact) % capacity, np.inf)]).reshape(-1, capacity)
        paid = np.arange(len(padded), dtype=np.float64)[:, None] * duration
        exact = (np.minimum.accumulate(padded - paid, axis=0) + paid).reshape(-1)[: top + 1]
    covered = np.minimum.accumulate(exact[::-1])[::-1]
    return covered[-(-np.arange(longest + 1) // unit)]


def plan_cuts(
    *,
    prompt_len: int,
    restored_len: int,
    message_ends: Iterable[int],
    mandatory: Iterable[int],
    costs: CutCosts,
    fraction: float,
) -> CutPlan:
    """The cuts of a request, decided once at its admission.

    Args:
        prompt_len: Tokens of the prompt.
        restored_len: Tokens that a restore supplies, less than `prompt_len`.
        message_ends: Ends of completed messages that are eligible; others may be among them.
        mandatory: Positions at which the prefill stops anyway (system end, image windows).
        costs: Measured durations; an extra needs all of them.
        fraction: Allowance per estimated uncached prefill time.
    """
    ends = sorted({end for end in message_ends if restored_len < end <= prompt_len})
    anchor = Cut(ends.pop() if ends else prompt_len, Role.ANCHOR, 0)
    extras = [(end, Role.EXTRA) for end in reversed(ends)]
    if anchor.endpoint != prompt_len:
        extras.append((prompt_len, Role.PROMPT_END))
    if not extras or not costs.snapshot_ns or not len(costs.tokens):
        return CutPlan((anchor,), unknown_cost=len(extras))
    inside = {end for end in (*mandatory, anchor.endpoint) if restored_len < end < prompt_len}
    stops = sorted({restored_len, *inside, prompt_len})
    pieces = [end - start for start, end in itertools.pairwise(stops)]
    cover = cover_ns(costs, max(pieces))
    allowance, spent, cuts = fraction * float(cover[pieces].sum()), 0, [anchor]
    for endpoint, role in extras:
        cost = costs.snapshot_ns + int(_split_ns(cover, stops, endpoint))
        if spent + cost <= allowance:
            spent += cost
            cuts.append(Cut(endpoint, role, cost))
            if endpoint not in stops:
                bisect.insort(stops, endpoint)
    return CutPlan(tuple(sorted(cuts)), over_allowance=len(extras) + 1 - len(cuts))


def _split_ns(cover: np.ndarray, stops: list[int], endpoint: int) -> float:
    """What the additional prefills of one more stop take: two pieces against the unsplit one."""
    place = bisect.bisect_left(stops, endpoint)
    if stops[place] == endpoint:
        return 0.0
    start, end = stops[place - 1], stops[place]
    return float(cover[endpoint - start] + cover[end - endpoint] - cover[end - start])


def anchor_ahead(cuts: tuple[Cut, ...], consumed_len: int) -> int:
    """Endpoint of the anchor when it lies beyond the consumed tokens, else 0."""
    return next((cut.endpoint for cut in cuts if cut.role is Role.ANCHOR and cut.endpoint > consumed_len), 0)


def copy_is_due(role: Role, snapshot_ns: int) -> bool:
    """Whether a reached cut is copied: always an anchor; an extra only while its cost is known.

    `snapshot_ns` is the fresh estimate of the moment, 0 when it is unknown or has expired.
    """
    return role in (Role.ANCHOR, Role.TERMINAL) or snapshot_ns > 0


def earned_ns(credit_ns: np.ndarray, execution_ns: int, fraction: float) -> np.ndarray:
    """Terminal credits, float64 [n], of requests after a productive decode that took `execution_ns`."""
    return credit_ns + fraction * execution_ns


def terminal_is_due(*, credit_ns: float, snapshot_ns: int, committed_len: int, captured_len: int) -> bool:
    """Whether a finished request deserves a terminal capture, if a row is obtainable.

    Its state must end beyond everything it restored or captured, and its credit must cover the
    measured cost of the snapshot; an unmeasured one (0) is never covered.
    """
    return 0 < snapshot_ns <= credit_ns and committed_len > captured_len
