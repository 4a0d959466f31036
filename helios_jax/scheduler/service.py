"""Service prices: reciprocal rates, their update, normalisers, reference intervals.

A request's history is two numbers, the reciprocal token rate and the reciprocal delivery
rate, r in ms per unit. They are physical: a coefficient, a phase or an estimate that changes
leaves them alone, only measured service moves them. Price = coefficient * r.

Symbols: r reciprocal rate (`token_r`, `delivery_r`), n normaliser in units/ms (`token_n`,
`delivery_n`), D interval in ms, s service in units, tau `adaptation_ms`, K streams with
deliveries, N participants, sigma reference interval in ms.

Reading: the source gives multistage blocked streams an individual reference of their future
delivery. Here a stream is at most one snapshot away from decoding (invariant 24), because images and
restoration come before the first output, and a pair prices that snapshot together with what follows;
so every stream has its family's reference interval, and no individual one exists.

Source: scheduling-utility.md sections 2 to 6.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.cost import durations_ms
from helios_jax.scheduler.lanes import lane_rows, lane_tokens, prefix_survival, usual_programs
from helios_jax.scheduler.programs import SOURCES
from helios_jax.scheduler.state import Frame, Requests, State
from helios_jax.scheduler.types import FEEDBACK, Constraint

MIN_R, MAX_R = 1e-300, 1e300  # ms per unit; no formula stays positive and finite for every float64 input


def clamp(r: np.ndarray) -> np.ndarray:
    """Bring reciprocal rates into [1e-300, 1e300]; NaN (no history) stays NaN."""
    return np.minimum(np.maximum(r, MIN_R), MAX_R)


def update(
    r: np.ndarray, duration_ms: np.ndarray | float, service: np.ndarray, n: np.ndarray, tau_ms: float
) -> np.ndarray:
    """Exact solution of the entropy-dual flow over one interval of constant service.

        a  = s / (n tau)
        r' = r exp(-a) + (D / s) (1 - exp(-a))    for s > 0
        r' = r + D / (n tau)                      for s = 0

    Args:
        r: [...] reciprocal rates before, positive.
        duration_ms: D > 0.
        service: [...] units served, at least 0.
        n: [...] normalisers, positive.
        tau_ms: Adaptation time.

    Returns:
        [...] positive finite reciprocal rates; an intermediate that is not a number keeps r.

    Source: scheduling-utility.md section 3, the physical form.
    """
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        a = service / tau_ms / n
        # (D / s)(1 - exp(-a)) = (D / (n tau)) phi(a): the second form where a is tiny or zero.
        served = r * np.exp(-a) + (duration_ms / service) * -np.expm1(-a)
        small = r * np.exp(-a) + duration_ms / tau_ms / n * (1.0 - 0.5 * a)
        after = np.where(a > 1e-9, served, small)
    return clamp(np.where(np.isnan(after), r, after))


def reference_intervals(
    family: np.ndarray, feasible: np.ndarray, duration_ms: np.ndarray, capacity: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """sigma of every delivery-bearing stream: K * min T / min(capacity, k) over its family.

    Args:
        family: int64 [slots] family of each stream, -1 for a request without deliveries.
        feasible: bool [families, programs] programs that the members of a family can use.
        duration_ms: float64 [programs], 0 = not measured; those take no part.
        capacity: int64 [programs] batch capacities.

    Returns:
        float64 [slots], NaN where sigma is unknown; int64 [slots] the minimising program, -1.
    """
    sigma, program = np.full(len(family), np.nan), np.full(len(family), -1)
    streams = int(np.count_nonzero(family >= 0))
    measured = duration_ms > 0
    for number in range(len(feasible)):
        members = family == number
        k = int(np.count_nonzero(members))
        usable = np.flatnonzero(feasible[number] & measured)
        if k and len(usable):
            share = duration_ms[usable] / np.minimum(capacity[usable], k)
            best = int(share.argmin())
            sigma[members], program[members] = streams * share[best], usable[best]
    return sigma, program


# Constraints that change which programs can serve a stream, or when.
_FAMILY = int(FEEDBACK | Constraint.NO_LEARNED | Constraint.NO_COPY)
_NO_LEARNED, _NO_COPY = int(Constraint.NO_LEARNED), int(Constraint.NO_COPY)
_LEARNED, _COPY = SOURCES.index(ProposalSource.LEARNED), SOURCES.index(ProposalSource.COPY)


def stream_families(state: State) -> tuple[np.ndarray, np.ndarray]:
    """Families of the decoding streams: (family int64 [slots], feasible bool [families, programs]).

    A family is the set of streams with the same grammar, proposal, history and feedback
    restrictions, so that the same programs can serve them. A stream without copy proposals at
    hand can still take part in a copy program, with its pending token alone.
    """
    requests, programs = state.requests, state.programs
    family = np.full(len(requests.phase), -1)
    streams = np.flatnonzero(requests.streams)
    if not len(streams):
        return family, np.zeros((0, len(state.catalog)), np.bool_)
    keys = requests.constraints[streams] & _FAMILY
    if (keys == keys[0]).all():  # nearly always
        kinds, family[streams] = keys[:1], 0
    else:
        kinds, family[streams] = np.unique(keys, return_inverse=True)
    feasible = np.repeat(programs.delivers[None], len(kinds), axis=0)
    for number, key in enumerate(kinds.tolist()):
        # Width one proposes nothing, whatever its source: it serves everybody.
        if key & _NO_LEARNED:
            feasible[number] &= (programs.source != _LEARNED) | (programs.depth == 0)
        if key & _NO_COPY:
            feasible[number] &= (programs.source != _COPY) | (programs.depth == 0)
    return family, feasible


class Rates(NamedTuple):
    """What one decision or commit knows of service; float64 [slots], NaN = unknown.

    `token_r` and `delivery_r` include the first values of requests without history. `family`
    (int64 [slots], -1) and `feasible` (bool [families, programs]) say which programs can serve
    which stream; `reference` is the program behind each sigma, -1 where it is unknown. `rows` (int64)
    and `tokens` [lane classes, slots] are the target rows and the physical expected output of each lane,
    from the `prefixes` [sources, slots, depth] that survive.
    """

    token_r: np.ndarray
    delivery_r: np.ndarray
    sigma: np.ndarray
    token_n: np.ndarray
    delivery_n: np.ndarray
    family: np.ndarray
    feasible: np.ndarray
    reference: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    prefixes: np.ndarray


def current_rates(state: State) -> Rates:
    """Reciprocal rates, reference intervals and normalisers from measured programs only.

    A state is a value, so they are computed once for it: planning and committing share them.

    Source: scheduling-utility.md sections 3 (first values), 4 and 5.
    """
    known: Rates | None = vars(state).get(_MEMO)
    if known is None:
        known = vars(state)[_MEMO] = _rates(state)
    return known


_MEMO = "_rates"  # not a field: it takes no part in a state's value


def _rates(state: State) -> Rates:
    requests, duration = state.requests, durations_ms(state.costs)
    family, feasible = stream_families(state)
    usual = usual_programs(state, feasible)
    sigma, reference = reference_intervals(family, usual, duration, state.programs.batch)
    rows = lane_rows(state, family, feasible)
    prefixes = prefix_survival(state, 1.0)
    tokens = lane_tokens(state, rows, prefixes)
    expected = tokens[state.programs.lane_class[reference], np.arange(len(family))]
    with np.errstate(divide="ignore", over="ignore"):
        delivery_n = 1.0 / sigma
        participants = int(np.count_nonzero(requests.active))
        # A lane that the reference program cannot serve to the full (its last token) counts as one token.
        output_n = np.maximum(expected, 1.0) * delivery_n
        token_n = np.where(family >= 0, output_n, prompt_normalisers(state, duration) / max(1, participants))
        first = clamp(participants / token_n)
    token_r = np.where(np.isnan(requests.token_r), first, requests.token_r)
    delivery_r = np.where(np.isnan(requests.delivery_r), sigma, requests.delivery_r)
    return Rates(token_r, delivery_r, sigma, token_n, delivery_n, family, feasible, reference, rows, tokens, prefixes)


def prompt_normalisers(state: State, duration_ms: np.ndarray) -> np.ndarray:
    """float64 [slots]: max over measured prompt programs of (prompt tokens usable now / T)."""
    requests, programs = state.requests, state.programs
    usable_now = requests.boundary - requests.consumed_len
    best = np.full(len(usable_now), np.nan)
    waiting = requests.active & (usable_now > 0)
    if not waiting.any():
        return best
    unscored = np.concatenate([programs.prefill, programs.mixed])
    for rows, scored in ((unscored, False), (programs.scored_prefill, True)):
        measured = rows[duration_ms[rows] > 0]
        members = waiting & (requests.scored == scored)
        if len(measured) and members.any():
            usable = np.minimum(programs.prompt[measured, None], usable_now[members])
            best[members] = (usable / duration_ms[measured, None]).max(axis=0)
    return best


def charge(
    requests: Requests, frame: Frame, members: np.ndarray, duration_ms: float, served: np.ndarray, tau_ms: float
) -> None:
    """Charge one interval to the token and delivery histories of its participants, in place; both in one update.

    Participants without token history start from the frame's first value; without delivery history
    a stream keeps none until its first publication, which brings its delivery (`corrected_deliveries`).
    Those whose normaliser is unknown, and slots outside `members`, keep what they have.

    Args:
        members: bool [slots].
        served: [slots] tokens.
    """
    started = np.where(np.isnan(requests.token_r), frame.first_token_r, requests.token_r)
    before, n = np.array([started, requests.delivery_r]), np.array([frame.token_n, frame.delivery_n])
    service = np.zeros(before.shape)
    service[0] = served
    after = update(before, duration_ms, service, n, tau_ms)
    token, delivery = members & ~(np.isnan(n) | np.isnan(before))
    requests.token_r[token] = after[0, token]
    requests.delivery_r[delivery] = after[1, delivery]


def corrected_deliveries(before_r: np.ndarray, duration_ms: float, delivery_n: np.ndarray, tau_ms: float) -> np.ndarray:
    """r after an interval whose publications were reported: the update with s = 1 from the r before it.

    A missing history starts at one delivery over the frame's measured duration. Without a
    normaliser the coordinate is not updated. All [k].
    """
    served = update(before_r, duration_ms, np.ones(len(before_r)), delivery_n, tau_ms)
    known = np.where(np.isnan(delivery_n), before_r, served)
    return np.where(np.isnan(before_r), clamp(np.full(len(before_r), duration_ms)), known)
