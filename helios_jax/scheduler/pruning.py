"""Which ragged rounds are worth a search at all: a bound of their score, against what certainly competes.

The search for the cohort of a program that cuts prefixes is the most expensive part of a decision
with proposals, and most of these programs lose by far. One is left out only if that cannot
change the winner:

1. A bound of its value (`most_value`) gives a bound of its score.
2. Some other measured program has a higher score, and is certain to stay: nothing smaller can hold
   its cohort, so the filter of redundant padding will not discard it.
3. It cannot make a larger program redundant that may win itself. Timings play no part in that
   filter, so a slower program may discard a faster one and must be there to do it.

Where losers matter as well (a timing refresh, an acceptance probe) nothing may be left out: the
callers of `rounds` say so.
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import Decision

ROUNDING = 1e-9  # of the parts of a score: far more than what makes two of them equal (`utility.EQUAL`)


def most_value(
    base: np.ndarray, gains: np.ndarray, lengths: np.ndarray, batch: np.ndarray, packed: np.ndarray
) -> np.ndarray:
    """Upper bound of what `ragged.adaptive_cohorts` finds, float64 [C]; arguments as there.

    The most valuable pending tokens with the most valuable proposals of all lanes, whosever they
    are, for the best number of lanes.
    """
    num_lanes = base.shape[1]
    pending = -np.where(lengths > 0, -base, 0.0)
    pending.sort(axis=1)
    pending = pending[:, ::-1].cumsum(axis=1)
    offered = np.arange(1, gains.shape[1] + 1) < lengths.max(axis=0)[:, None]
    proposals = np.zeros(int(np.count_nonzero(offered)) + 1)
    np.cumsum(np.sort(gains[offered])[::-1], out=proposals[1:])
    sizes, most = np.arange(1, num_lanes + 1), np.minimum(batch, packed)[:, None]
    budget = np.minimum(np.maximum(packed[:, None] - sizes, 0), len(proposals) - 1)
    return np.where(sizes <= most, pending + proposals[budget], 0.0).max(axis=1)


def may_matter(decision: Decision, kind: np.ndarray, value: np.ndarray, least: float) -> np.ndarray:
    """bool [C]: the programs that may reach a score, and those that may make one of these redundant.

    Args:
        kind: int64 [C] row numbers.
        value: float64 [C] their values, or bounds of them.
        least: A score.
    """
    duration = decision.duration_ms[kind]
    known, held = duration > 0, np.where(duration > 0, duration, 1.0)
    rates = value / held - 0.5 * held * decision.values.waiting
    parts = rates + held * decision.values.waiting
    hopeful: np.ndarray = ~known | (rates >= least - ROUNDING * parts)
    if least == -np.inf or hopeful.all():
        return np.ones(len(kind), np.bool_)
    return hopeful | decision.state.programs.padding_of[kind[:, None], kind][hopeful].any(axis=0)


def may_win(decision: Decision, kind: np.ndarray, cut: np.ndarray, value: np.ndarray, work: np.ndarray) -> np.ndarray:
    """bool [C]: the programs that may win, or make one redundant that may; of `cut` only these need their search.

    Args:
        kind: int64 [C] row numbers.
        cut: bool [C], those that are not searched yet.
        value: float64 [C] their bounds; of the others, their values.
        work: int64 [C, n] target rows of the others.
    """
    programs, duration = decision.state.programs, decision.duration_ms[kind]
    known, held = duration > 0, np.where(duration > 0, duration, 1.0)
    rates = value / held - 0.5 * held * decision.values.waiting
    padding = programs.padding_of[kind[:, None], kind]
    lanes, rows = (work > 0).sum(axis=1)[:, None], work.sum(axis=1)[:, None]
    holds = (programs.batch[kind] >= lanes) & (programs.packed[kind] >= rows)
    certain = ~cut & known & (rows[:, 0] > 0) & ~(padding & holds).any(axis=1)
    if not certain.any():
        return np.ones(len(kind), np.bool_)
    return may_matter(decision, kind, value, float(rates[certain].max()))
