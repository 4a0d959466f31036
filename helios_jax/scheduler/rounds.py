"""Candidates of ordinary decode and of complete speculative rounds: the best cohort of every loaded program.

1. Every lane is worth its delivery, its age credit and its expected output (`candidates`, `lanes`).
2. Where the target rows suffice for every complete prefix, and in fixed selection everywhere, a
   cohort is the most valuable set of complete prefixes that fits B and P: exact.
3. In adaptive selection a program with fewer target rows cuts prefixes: three orderings of the
   lanes, each priced by its causal allocation. The host allocates by marginal value; the device
   will allocate by its own probabilities, forecast here by those of completed rounds, while the
   value of what it admits is still expected acceptance.
4. Redundant padding drops out.

Source: specification, "Speculative graph coverage" and "Useful service and selection".
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import Candidates, Decision, decode_values, scatter, single_stage, unused_rows
from helios_jax.scheduler.lanes import COPY_SOURCE, class_sources
from helios_jax.scheduler.pruning import may_matter, may_win, most_value
from helios_jax.scheduler.ragged import adaptive_cohorts, fixed_cohorts
from helios_jax.scheduler.speculation import survival
from helios_jax.scheduler.state import DECODE
from helios_jax.scheduler.utility import undominated


def round_candidates(
    decision: Decision, wanted: np.ndarray | None = None, *, winner_only: bool = False, least: float = -np.inf
) -> list[Candidates]:
    """One candidate a decode or speculative program that serves anybody, redundant ones removed.

    Args:
        wanted: bool [programs] those that are looked at; all without it.
        winner_only: Leave out what cannot win by score (`pruning`).
        least: Score below which a measured candidate does not matter.
    """
    state, programs = decision.state, decision.state.programs
    preferred = decision.slots(state.requests.phase == DECODE)
    slots = np.sort(preferred)  # the order in which target rows tie
    preference = np.searchsorted(slots, preferred)
    found = []
    for kind in (programs.decode, programs.speculative):
        kind = kind if wanted is None else kind[wanted[kind]]
        if len(kind) and len(slots):
            rows = decision.rows[programs.lane_class[kind]][:, slots]
            usable = rows.any(axis=1)
            if usable.any():
                found.append(_best_cohorts(decision, kind[usable], slots, preference, rows[usable], winner_only, least))
    return found


def _best_cohorts(
    decision: Decision, kind: np.ndarray, slots: np.ndarray, preference: np.ndarray, rows: np.ndarray,
    winner_only: bool, least: float,
) -> Candidates:  # fmt: skip
    """Candidates of programs of one kind.

    Args:
        kind: int64 [C] their row numbers.
        slots: int64 [n] streams, rising.
        preference: int64 [n] their positions, preferred ones first.
        rows: int64 [C, n] target rows of their lanes, 0 where a stream cannot take part.
    """
    state, programs = decision.state, decision.state.programs
    duration, batch, packed = decision.duration_ms[kind], programs.batch[kind], programs.packed[kind]
    base = decode_values(decision, slots, duration)
    tokens = decision.tokens[programs.lane_class[kind]][:, slots]
    values = base + decision.values.output_token[slots] * (tokens - 1.0)
    cut = packed < np.minimum(batch, len(slots)) * programs.width[kind]
    cut &= state.policy.speculation == "adaptive"
    if not cut.any():
        members, totals = fixed_cohorts(values, rows, batch, packed, preference)
        work = np.where(members, rows, 0)
    else:
        work, totals, whole = np.zeros_like(rows), np.zeros(len(kind)), ~cut
        members, totals[whole] = fixed_cohorts(values[whole], rows[whole], batch[whole], packed[whole], preference)
        work[whole] = np.where(members, rows[whole], 0)
    groups = [(some, *marginal_prices(decision, int(kind[some[0]]), slots)) for some in _alike(decision, kind, cut)]
    matter = np.ones(len(kind), np.bool_)
    if groups and (winner_only or least > -np.inf):
        bounds = totals.copy()
        for some, gains, _ in groups:
            bounds[some] = most_value(base[some], gains, rows[some], batch[some], packed[some])
        matter = may_matter(decision, kind, bounds, least)
        if winner_only:
            matter &= may_win(decision, kind, cut, bounds, work)
    for some, gains, priority in groups:
        some = some[matter[some]]
        if not len(some):
            continue
        work[some], totals[some] = adaptive_cohorts(
            base[some], gains, priority, rows[some], batch[some], packed[some], preference
        )
    keep = np.flatnonzero(matter & work.any(axis=1))
    keep = keep[_undominated(decision, kind[keep], work[keep])]
    kind, rows, work = kind[keep], rows[keep], work[keep]
    spread = scatter(work, slots, state.limits.slots)
    found = single_stage(kind, spread, totals[keep], duration[keep], unused_rows(programs, kind, work))
    device = programs.device_allocates[kind, None]
    if not device.any():
        return found
    return found._replace(lengths=scatter(np.where(device & (work > 0), rows, work), slots, state.limits.slots))


def _alike(decision: Decision, kind: np.ndarray, cut: np.ndarray) -> list[np.ndarray]:
    """Positions of the programs with too few target rows, those of one source and allocation together."""
    if not cut.any():
        return []
    programs = decision.state.programs
    groups = programs.source[kind] * 2 + programs.device_allocates[kind]
    return [np.flatnonzero(cut & (groups == group)) for group in np.unique(groups[cut]).tolist()]


def marginal_prices(decision: Decision, program: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each further proposal of a lane adds, and in which order target rows go; float64 [n, depth] each."""
    state, programs = decision.state, decision.state.programs
    source = int(class_sources(state)[programs.lane_class[program]])
    gains = decision.prefixes[source, slots] * decision.values.output_token[slots, None]
    if not programs.device_allocates[program]:
        return gains, gains
    return gains, survival(state.acceptance.forecast_mean[slots])


def _undominated(decision: Decision, kind: np.ndarray, work: np.ndarray) -> np.ndarray:
    """bool [C]: no program with the same cohort, prefixes and actual proposal depth is smaller.

    The proposals of a learned program are all produced; those of a copy program are the supplied
    prefixes, and its D is a capacity.
    """
    programs = decision.state.programs
    copies, depth = programs.source[kind] == COPY_SOURCE, programs.depth[kind]
    if not depth.any():
        return undominated(work, programs.extents[kind])
    actual = np.where(copies, np.maximum(work.max(axis=1) - 1, 0), depth)
    # Width one and an unsupplied copy program propose nothing: their source makes no difference.
    source = np.where(actual > 0, programs.source[kind], 0)
    device = programs.device_allocates[kind] & (actual > 0)
    cohorts = np.concatenate([work, actual[:, None], source[:, None], device[:, None]], axis=1)
    return undominated(cohorts, np.concatenate([programs.extents[kind], np.where(copies, depth, 0)[:, None]], axis=1))
