"""What one decoding lane can do in each program: its target rows and its expected output.

A lane class is all programs that agree in width, proposal depth, source and allocation; a
lane means the same in each of them, so everything here is a table [classes, slots] that
`ProgramTable.lane_class` expands to programs. Cohorts and shared rows P come later (`rounds`, `mixed`).

Knows prices and durations not at all.
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.programs import SOURCE_ROW, SOURCES
from helios_jax.scheduler.reservation import page_room
from helios_jax.scheduler.speculation import lane_lengths, optimistic, survival
from helios_jax.scheduler.state import State

COPY_SOURCE = SOURCES.index(ProposalSource.COPY)


def lane_rows(state: State, family: np.ndarray, feasible: np.ndarray) -> np.ndarray:
    """Target rows of every stream in every lane class, its pending token included; 0 where it cannot take part.

    min(D + 1, W, output, context and pages left, and 1 + available proposals of a copy program), for
    the classes that the stream's restrictions and the selection mode allow:

    - adaptive: all;
    - fixed: those at the loaded maximum of their source, so that no prefix is shorter than the
      request's own limits force it to be; never a device-allocated one;
    - off: width one.

    Args:
        family: int64 [slots], -1 for a request that does not decode.
        feasible: bool [families, programs].

    Returns:
        int64 [classes, slots].
    """
    requests, programs = state.requests, state.programs
    of = programs.class_program
    room = np.minimum(requests.max_tokens - requests.output_len, state.limits.max_context - requests.committed_len)
    source = programs.source[of]
    rows = lane_lengths(programs.width[of], programs.depth[of], source == COPY_SOURCE, room, requests.proposals)
    allowed = (family >= 0) & (room > 0)
    if len(feasible):
        allowed = allowed & feasible[:, of][family].T
    rows = np.where(allowed, rows, 0)
    pages = page_room(state)
    if pages is not None:
        _keep_within(rows, pages.end - requests.committed_len, programs.width[of] > 1, state.limits.draft_extent)
    mode, drafts = state.policy.speculation, programs.depth[of] > 0
    if mode == "off":
        rows[drafts] = 0
    elif mode == "fixed":
        _keep_widest(rows, drafts, source, programs.device_allocates[of])
    return rows


def _keep_within(rows: np.ndarray, room: np.ndarray, wide: np.ndarray, draft_extent: int) -> None:
    """Cut target rows to the positions that pages are at hand for, in place; drafts write `draft_extent` further.

    Args:
        room: int64 [slots] positions, below 1 where nothing may be written.
        wide: bool [classes], those with proposals.
    """
    np.minimum(rows, room - draft_extent * wide[:, None], out=rows)
    np.maximum(rows, 0, out=rows)


def _keep_widest(rows: np.ndarray, drafts: np.ndarray, source: np.ndarray, device: np.ndarray) -> None:
    """Fixed selection, in place: the widest classes of each source; without any draft, width one."""
    rows[drafts & device] = 0
    widest = np.zeros(rows.shape[1], np.int64)
    for number in range(len(SOURCES)):
        mine = drafts & (source == number)
        if mine.any():
            best = rows[mine].max(axis=0)
            rows[mine] = np.where(rows[mine] == best, rows[mine], 0)
            widest = np.maximum(widest, best)
    rows[~drafts] = np.where(widest > 1, 0, rows[~drafts])


def usual_programs(state: State, feasible: np.ndarray) -> np.ndarray:
    """The feasible programs that the selection mode would use for a stream far from its limits.

    Args:
        feasible: bool [families, programs].

    Returns:
        bool [families, programs]; what a reference interval may be taken from.
    """
    programs, mode = state.programs, state.policy.speculation
    if mode == "adaptive" or not len(feasible):
        return feasible
    drafts = feasible & (programs.depth > 0) & ~programs.device_allocates
    if mode == "off":
        drafts = np.zeros_like(drafts)
    width = np.where(drafts, programs.width, 0)
    widest = np.zeros_like(width)
    for number in range(len(SOURCES)):
        mine = programs.source == number
        widest[:, mine] = width[:, mine].max(axis=1, initial=0, keepdims=True)
    usual = drafts & (width == widest)
    return np.where(usual.any(axis=1, keepdims=True), usual, feasible & (programs.depth == 0))


def prefix_survival(state: State, alpha: float, *, hopeful: bool = False) -> np.ndarray:
    """Survival of each prefix, raised to alpha; float64 [sources, slots, depth].

    Args:
        hopeful: The bounded optimistic estimate of funded acceptance learning.
    """
    known = state.acceptance
    if hopeful:
        estimate = optimistic(known.accept_mean, known.accept_weight, alpha)
    else:
        estimate = survival(known.accept_mean, alpha)
    return estimate.transpose(1, 0, 2)


def lane_tokens(state: State, rows: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
    """Expected output of each lane, 1 + s_1 + ... + s_(rows - 1); float64 [classes, slots].

    Args:
        rows: int64 [classes, slots].
        prefixes: float64 [sources, slots, depth].
    """
    if not prefixes.shape[-1]:
        return rows.astype(np.float64)
    sums = np.zeros((*prefixes.shape[:-1], prefixes.shape[-1] + 2))
    sums[..., 1] = 1.0
    np.cumsum(prefixes, axis=-1, out=sums[..., 2:])
    sums[..., 2:] += 1.0
    source = class_sources(state)
    return sums[source[:, None], np.arange(rows.shape[1]), rows]


def class_sources(state: State) -> np.ndarray:
    """Row of the acceptance estimates that each lane class reads, int64 [classes]."""
    return state.programs.class_source


def program_tokens(state: State, program: int, work: np.ndarray) -> np.ndarray:
    """Physical expectation of a program's output for each lane's target rows (alpha plays no part); float64 [slots].

    Args:
        work: int64 [slots] target rows, 0 outside the cohort.
    """
    prefixes = prefix_survival(state, 1.0)[SOURCE_ROW[state.programs.source[program]]]
    reached = np.arange(1, prefixes.shape[-1] + 1) < work[:, None]
    return (work > 0) + np.where(reached, prefixes, 0.0).sum(axis=1)
