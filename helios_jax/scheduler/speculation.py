"""Acceptance estimates and confidence forecasts: what past rounds say about the next one.

Two separate kinds of observation. *Acceptance* is what the target decided about proposals,
per request and per source. A *forecast* is the joint probability that the draft model itself
gave to its prefixes, per request, starting from one prior of the whole population. Both are
means and weights of prefix survival: entry d - 1 of an axis `depth` belongs to the prefix of
d proposals.

The life of a slot's estimates:

1. `reset_slots` at admission: a forecast starts from the population prior with weight two, acceptance from
   0.5^d with weight two or from what the population's rounds show, whichever is higher (ADR 0015).
2. A round completes: `observe_forecast`, then `observe_acceptance`, which ages what the slot
   knows by the tokens that it generated (also of rounds and programs without proposals).
3. A decision reads `survival` (ordinary) or `optimistic` (probes), and prices lanes with
   `lane_lengths` and `expected_tokens`.

Knows no requests, programs or plans: arrays in, arrays out.

Source: scheduling-utility.md section 8; specification, "Completed confidence and acceptance".
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from helios_jax.scheduler.sidecars import checked_confidence, checked_survival

LEARNED, COPY = 0, 1  # rows of the source axis
NUM_SOURCES = 2
FIRST_WEIGHT = 2.0
POPULATION_WEIGHT = 8.0  # most weight that a request's start takes from the population
MAX_WEIGHT = 128.0
LEAST_WEIGHT = 1e-100  # far below any weight that matters; bounds the division by an aged weight
HALF_LIFE_TOKENS = 128.0
PRIOR_STEP = 1.0 / 64.0  # weight of one completed prefix probability in the population prior
OPTIMISM = math.log(20.0) / 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Read-only float64 columns; `depth` is the largest proposal depth of the catalogue.

    Attributes:
        accept_mean, accept_weight: [slots, sources, depth] verified survival of each prefix.
        forecast_mean, forecast_weight: [slots, depth] joint prefix probability of the draft.
        prior: [depth] population prior of the forecasts.
        accept_prior, accept_prior_weight: [sources, depth] verified survival over the population.
    """

    accept_mean: np.ndarray
    accept_weight: np.ndarray
    forecast_mean: np.ndarray
    forecast_weight: np.ndarray
    prior: np.ndarray
    accept_prior: np.ndarray
    accept_prior_weight: np.ndarray

    @property
    def depth(self) -> int:
        return len(self.prior)


def new_acceptance(slots: int, depth: int) -> Acceptance:
    """Estimates before any observation: 0.5^d everywhere, weight two."""
    halves = 0.5 ** np.arange(1.0, depth + 1.0)
    return _sealed(
        Acceptance(
            accept_mean=np.tile(halves, (slots, NUM_SOURCES, 1)),
            accept_weight=np.full((slots, NUM_SOURCES, depth), FIRST_WEIGHT),
            forecast_mean=np.tile(halves, (slots, 1)),
            forecast_weight=np.full((slots, depth), FIRST_WEIGHT),
            prior=halves,
            accept_prior=np.tile(halves, (NUM_SOURCES, 1)),
            accept_prior_weight=np.full((NUM_SOURCES, depth), FIRST_WEIGHT),
        )
    )


def reset_slots(acceptance: Acceptance, slots: np.ndarray | list[int]) -> Acceptance:
    """Forget the former occupants of `slots`: nothing of a request outlives it but its share in the priors.

    Acceptance starts no lower than 0.5^d: every request tries its luck, whatever became of others. Where others
    did better, their mean weighs more than a guess, so that one early refusal does not end the wide rounds.
    """
    if not acceptance.depth or not len(slots):
        return acceptance
    draft = _draft(acceptance)
    guess, shown = 0.5 ** np.arange(1.0, acceptance.depth + 1.0), acceptance.accept_prior
    draft.accept_mean[slots] = np.maximum(guess, shown)
    known = np.minimum(acceptance.accept_prior_weight, POPULATION_WEIGHT)
    draft.accept_weight[slots] = np.where(shown > guess, known, FIRST_WEIGHT)
    draft.forecast_mean[slots], draft.forecast_weight[slots] = acceptance.prior, FIRST_WEIGHT
    return _sealed(draft)


def observe_acceptance(
    acceptance: Acceptance, source: np.ndarray | int, offered: np.ndarray, accepted: np.ndarray,
    censored: np.ndarray, generated: np.ndarray, survival: np.ndarray | None = None,
    teaches: np.ndarray | None = None,
) -> Acceptance:  # fmt: skip
    """Learn what the target decided in one completed frame, then age by the tokens generated.

    Call it once a frame, after `observe_forecast`, also for frames without proposals: those
    only age. A prefix of d proposals observes 1 for d <= accepted, 0 for accepted < d <= offered;
    a censored lane (it terminated inside the block) observes nothing after its accepted prefix.

    Args:
        source: int [slots] or a number, LEARNED or COPY.
        offered: int [slots] proposals that the target judged, 0 where none; at most `depth`.
        accepted: int [slots] how many of them it accepted and emitted, 0 to offered.
        censored: bool [slots].
        generated: int [slots] output tokens of this frame.
        survival: [slots, >= offered] cumulative products of min(1, p / q), or None. Where a value
            is a number it replaces the 0 or 1 that was observed; NaN covers nothing.
        teaches: bool [slots] lanes that teach the population as well (no target-only constraint); None = nobody.

    Raises:
        InvariantError: A survival value outside [0, 1], or a rising row.
    """
    if not acceptance.depth:
        return acceptance
    depths, draft = np.arange(1, acceptance.depth + 1), _draft(acceptance)
    hit = depths <= accepted[:, None]
    seen = (depths <= offered[:, None]) & (hit | ~censored[:, None])
    observed = hit.astype(np.float64)
    if survival is not None:
        rows = _fitted(checked_survival(survival, offered), acceptance.depth)
        observed = np.where(np.isnan(rows), observed, np.clip(rows, 0.0, 1.0))
    slots = np.flatnonzero(seen.any(axis=1))
    rows_of = np.broadcast_to(np.asarray(source), offered.shape)[slots]
    mean, weight = draft.accept_mean[slots, rows_of], draft.accept_weight[slots, rows_of]
    _average(mean, weight, observed[slots], seen[slots])
    draft.accept_mean[slots, rows_of], draft.accept_weight[slots, rows_of] = mean, weight
    if teaches is not None:
        kept = seen & teaches[:, None]
        _teach_population(draft, np.where(kept, observed, np.nan), np.broadcast_to(np.asarray(source), offered.shape))
    fading = np.exp2(-np.asarray(generated, np.float64) / HALF_LIFE_TOKENS)
    draft.accept_weight[:] *= fading[:, None, None]
    draft.forecast_weight[:] *= fading[:, None]
    return _sealed(draft)


def observe_forecast(
    acceptance: Acceptance, confidence: np.ndarray, ceilings: np.ndarray, teaches: np.ndarray, produced: int
) -> Acceptance:
    """Learn the draft's own joint prefix probabilities of one completed confidence-producing round.

    The population prior moves toward every one of them with weight 1/64; in ascending order, so
    that the numbers of the slots do not matter.

    Args:
        confidence: [2, slots, draft_capacity] float32 sidecar: plane 0 the confidence of each
            proposal, plane 1 the joint probability of the prefix that it ends.
        ceilings: int [slots] frozen target rows of each lane, the pending one included, 0 for a
            slot without a lane; prefixes below the ceiling are observed.
        teaches: bool [slots] lanes that may teach the population prior (no target-only constraint).
        produced: D, proposals that the program produced for every lane.

    Raises:
        InvariantError: The sidecar of a lane is not made of probabilities or its joint ones rise.
    """
    planes = checked_confidence(confidence, ceilings > 0, produced)
    if not acceptance.depth:
        return acceptance
    joint = np.clip(_fitted(planes[1], acceptance.depth), 0.0, 1.0)
    depths, draft = np.arange(1, acceptance.depth + 1), _draft(acceptance)
    seen = depths < np.minimum(ceilings, produced + 1)[:, None]
    _average(draft.forecast_mean, draft.forecast_weight, joint, seen)
    draft.prior[:] = _taught(acceptance.prior, np.where(seen & teaches[:, None], joint, np.nan))
    return _sealed(draft)


def survival(mean: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """Prefix survival [..., depth] as ordinary selection uses it: non-increasing, raised to alpha."""
    ordered = np.minimum.accumulate(mean, axis=-1) if mean.shape[-1] else mean
    return ordered if alpha == 1.0 else ordered**alpha


def optimistic(mean: np.ndarray, weight: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """Survival as funded acceptance learning uses it: min(1, m + sqrt(ln 20 / (2 v))), non-increasing."""
    scarce = np.maximum(weight, LEAST_WEIGHT)  # an estimate as old as this is no information
    return survival(np.minimum(1.0, mean + np.sqrt(OPTIMISM / scarce)), alpha)


def lane_lengths(
    width: np.ndarray, depth: np.ndarray, copies: np.ndarray, room: np.ndarray, proposals: np.ndarray
) -> np.ndarray:
    """Target rows that a lane can use, its pending token included: min(D + 1, W, limits).

    Args:
        width, depth, copies: [C] W, D and whether the source is copy, of each program.
        room: int [slots] output and context positions left, at least 1 for a decoder.
        proposals: int [slots] copy proposals that the host offers.

    Returns:
        int64 [C, slots].
    """
    lengths = np.minimum(np.minimum(depth + 1, width)[:, None], room)
    return np.where(copies[:, None], np.minimum(lengths, 1 + proposals), lengths)


def expected_tokens(prefix_survival: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """1 + s_1 + ... + s_(length - 1), 0 for length 0.

    Args:
        prefix_survival: [slots, depth], or [C, slots, depth].
        lengths: int [C, slots] target rows, at most depth + 1.

    Returns:
        float64 [C, slots].
    """
    sums = np.zeros((*prefix_survival.shape[:-1], prefix_survival.shape[-1] + 2))
    sums[..., 1] = 1.0
    np.cumsum(prefix_survival, axis=-1, out=sums[..., 2:])
    sums[..., 2:] += 1.0
    if sums.ndim == 2:
        return sums[np.arange(len(sums)), lengths]
    return np.take_along_axis(sums, lengths[..., None], -1)[..., 0]


def _average(mean: np.ndarray, weight: np.ndarray, observed: np.ndarray, seen: np.ndarray) -> None:
    """m <- (m v + y) / (v + 1), v <- min(v + 1, 128), in place where seen."""
    mean[seen] = (mean[seen] * weight[seen] + observed[seen]) / (weight[seen] + 1.0)
    weight[seen] = np.minimum(weight[seen] + 1.0, MAX_WEIGHT)


def _teach_population(draft: Acceptance, lessons: np.ndarray, source: np.ndarray) -> None:
    """The same average over all lessons of a frame, in place; it does not age, its cap forgets.

    Args:
        lessons: [slots, depth], NaN teaches nothing; added in ascending order, so that slots do not matter.
        source: int [slots].
    """
    ordered = np.sort(np.where(source[:, None] == np.arange(NUM_SOURCES)[:, None, None], lessons, np.nan), axis=1)
    known = ~np.isnan(ordered)
    count, total = known.sum(axis=1), np.where(known, ordered, 0.0).sum(axis=1)
    weight = draft.accept_prior_weight
    draft.accept_prior[:] = (draft.accept_prior * weight + total) / (weight + count)
    weight[:] = np.minimum(weight + count, MAX_WEIGHT)


def _taught(prior: np.ndarray, lessons: np.ndarray) -> np.ndarray:
    """p <- p + (y - p) / 64 for each number of `lessons` [n, depth], ascending; NaN teaches nothing.

    After k lessons y_0 ... y_(k-1) that is p (63/64)^k + sum of y_i (63/64)^(k-1-i) / 64.
    """
    ordered = np.sort(lessons, axis=0)  # NaN last
    count = np.count_nonzero(~np.isnan(ordered), axis=0)
    keep = 1.0 - PRIOR_STEP
    later = count - 1 - np.arange(len(ordered))[:, None]
    shares = np.where(later >= 0, PRIOR_STEP * keep ** np.maximum(later, 0), 0.0)
    return prior * keep**count + (shares * np.where(np.isnan(ordered), 0.0, ordered)).sum(axis=0)


def _fitted(rows: np.ndarray, depth: int) -> np.ndarray:
    """float64 [slots, depth]: the first `depth` columns, NaN where there are none."""
    given = np.asarray(rows, np.float64)[:, :depth]
    if given.shape[1] == depth:
        return given
    return np.concatenate([given, np.full((len(given), depth - given.shape[1]), np.nan)], axis=1)


def _draft(acceptance: Acceptance) -> Acceptance:
    """A writable copy; `_sealed` makes it a value again."""
    return Acceptance(*[getattr(acceptance, field.name).copy() for field in dataclasses.fields(acceptance)])


def _sealed(acceptance: Acceptance) -> Acceptance:
    for field in dataclasses.fields(acceptance):
        getattr(acceptance, field.name).setflags(write=False)
    return acceptance
