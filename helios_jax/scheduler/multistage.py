"""Chains of several stages before tokens, and retirements by terminal snapshots.

A request that needs more stages after this one has a continuation: useful value V in a further
F milliseconds. Its contribution to the first program, of duration T, is V T / (T + F). This is
bounded lookahead, not an optimal schedule (specification: "Prerequisites and completion").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.candidates import Candidates, Decision, prompt_rows, scatter
from helios_jax.scheduler.packed import usable_tokens
from helios_jax.scheduler.sequences import (
    Stage,
    fill_first,
    joined,
    kept,
    terminal_values,
    unused_first,
    without_padding,
)
from helios_jax.scheduler.stages import next_boundary, window_end
from helios_jax.scheduler.state import RESTORE, SNAPSHOT, VISION

_NEVER_MS = 1e300  # F of a program that is not measured: its contribution vanishes


class Chains(NamedTuple):
    """Continuations of n requests by Q prompt programs.

    Attributes:
        worth: float64 [Q, n] useful value of the first inference, 0 where a program cannot run it.
        rest_ms: float64 [Q, n] F, the stages ahead and that inference.
        known: bool [n] every stage ahead and an inference are measured.
    """

    worth: np.ndarray
    rest_ms: np.ndarray
    known: np.ndarray


def terminal_candidates(decision: Decision, stage: Stage) -> list[Candidates]:
    """Retirement alone: the productive part of a first stage, without anything that follows."""
    if not len(stage.terminal):
        return []
    duration = decision.duration_ms[stage.programs]
    worth = terminal_values(decision, stage.terminal, duration, np.zeros(len(duration)))
    found = []
    for position, room in enumerate(decision.state.programs.batch[stage.programs].tolist()):
        value = float(worth[position, :room].sum())
        found.append(_alone(decision, stage, position, stage.terminal[:room], value, bool(duration[position] > 0)))
    every = joined(found)
    return [kept(every, without_padding(decision, every))]


def continuation_candidates(decision: Decision, stage: Stage) -> list[Candidates]:
    """The requests that need further stages, ranked by their individual continuations.

    Terminal rows take part with their own worth where the program is a snapshot. Requests with
    an unmeasured stage in their chain make a candidate of their own, which compares by useful value.
    """
    blocked = np.flatnonzero(stage.after == 0)
    if not len(blocked):
        return []
    chains = _chains(decision, stage.waiting[blocked])
    durations = decision.duration_ms[stage.programs]
    nothing = np.zeros(1)
    late = terminal_values(decision, stage.terminal, nothing, nothing)[0]
    found = []
    for position, duration in enumerate(durations.tolist()):
        able = stage.fits[position, blocked]
        unknown = able & ~chains.known if duration > 0 else able
        if duration > 0 and (able & chains.known).any():
            share = (chains.worth * (duration / (duration + chains.rest_ms))).max(axis=0)
            ending = terminal_values(decision, stage.terminal, durations[position : position + 1], nothing)[0]
            mine = np.flatnonzero(able & chains.known)
            found += _best_rows(decision, stage, position, blocked[mine], share[mine], ending, known=True)
        if unknown.any():
            mine = np.flatnonzero(able)
            leader = int(np.where(unknown, chains.worth.max(axis=0), -1.0).argmax())
            mine = np.concatenate([[leader], mine[mine != leader]])
            value = chains.worth.max(axis=0)[mine]
            found += _best_rows(decision, stage, position, blocked[mine], value, late, known=False)
    if not found:
        return []
    every = joined(found)
    return [kept(every, without_padding(decision, every))]


def _best_rows(
    decision: Decision, stage: Stage, position: int, blocked: np.ndarray, worth: np.ndarray, ending: np.ndarray, *,
    known: bool,
) -> list[Candidates]:  # fmt: skip
    """The most valuable rows of one program, blocked and terminal ones.

    A known cohort without any blocked request is a retirement, which competes by itself; an
    indeterminate one holds the first of the blocked in any case, which makes it indeterminate.

    Args:
        blocked: int64 [n] positions in `stage.waiting`.
        worth: float64 [n] their contributions.
        ending: float64 [t] worth of the terminal rows.
    """
    slots, value = np.concatenate([stage.waiting[blocked], stage.terminal]), np.concatenate([worth, ending])
    order = np.argsort(-value, kind="stable")
    if not known:
        order = np.concatenate([[0], order[order != 0]])
    best = order[: decision.state.programs.batch[stage.programs[position]]]
    if not (best < len(blocked)).any():
        return []
    return [_alone(decision, stage, position, slots[best], float(value[best].sum()), known)]


def _chains(decision: Decision, slots: np.ndarray) -> Chains:
    """Continuations of requests that need more stages after their present one."""
    state, programs = decision.state, decision.state.programs
    following = np.concatenate([programs.prefill, programs.mixed, programs.scored_prefill])
    rows = prompt_rows(decision, slots)
    ahead = [_stages_ahead(decision, slot) for slot in slots.tolist()]
    stages_ms, known = np.array([ms for ms, _, _ in ahead]), np.array([measured for _, measured, _ in ahead])
    boundary = np.array([end for _, _, end in ahead])
    remaining = boundary - state.requests.consumed_len[slots]
    finishes = (boundary == state.requests.prompt_len[slots]) & (state.requests.max_tokens[slots] > 0)
    bonus = np.where(finishes, decision.values.output_token[slots], 0.0)
    usable = usable_tokens(remaining, programs.prompt[following], rows.atoms)
    worth = usable * rows.token_value + np.where(usable == remaining, bonus, 0.0)
    scored = np.isin(following, programs.scored_prefill)
    worth = np.where(scored[:, None] == state.requests.scored[slots], worth, 0.0)
    duration = decision.duration_ms[following][:, None]
    usable_now = (duration > 0) & (worth > 0)
    return Chains(worth, np.where(usable_now, stages_ms + duration, _NEVER_MS), known & usable_now.any(axis=0))


def _stages_ahead(decision: Decision, slot: int) -> tuple[float, bool, int]:
    """The stages between the present one and inference: measured time, whether all are measured, next boundary."""
    state, requests, programs = decision.state, decision.state.requests, decision.state.programs
    spec, phase = state.specs[slot], requests.phase[slot]
    assert spec is not None  # a waiting request has its spec: invariant 4
    first, last = int(requests.images_done[slot]), int(requests.window_images[slot])
    ahead, boundary = [], int(requests.boundary[slot])
    if phase == SNAPSHOT:  # the end of a window: a due capture comes before the private copy
        ahead = [programs.snapshot, programs.restore] if requests.state_row[slot] else [programs.restore]
    if phase == SNAPSHOT or (phase == RESTORE and first == last):  # the next window opens with the restore
        last = window_end(spec, first, state.limits)
        boundary = next_boundary(spec, int(requests.consumed_len[slot]), last)
    images = spec.image_spans[first + int(phase == VISION) : last]
    ahead += [programs.vision[programs.tokens[programs.vision] >= span.end - span.start] for span in images]
    times = [decision.duration_ms[rows][decision.duration_ms[rows] > 0] for rows in ahead]
    return sum(float(ms.min()) for ms in times if len(ms)), all(len(ms) for ms in times), boundary


def _alone(
    decision: Decision, stage: Stage, position: int, chosen: np.ndarray, value: float, known: bool
) -> Candidates:  # fmt: skip
    """A candidate of the prerequisite program by itself; unused rows advance waiting requests."""
    state, first = decision.state, stage.programs[position : position + 1]
    needed = scatter(np.ones((1, len(chosen)), np.bool_), chosen, state.limits.slots)
    members = fill_first(needed, stage, np.array([position]), state.programs.batch)
    nothing = np.zeros((1, state.limits.slots), np.int64)
    return Candidates(
        first=first,
        follow=np.array([-1]),
        members=members,
        lengths=nothing,
        work=nothing,
        prompt=np.array([-1]),
        value=np.array([value]),
        duration_ms=decision.duration_ms[first],
        known=np.array([known]),
        padding=unused_first(decision, first, members),
    )
