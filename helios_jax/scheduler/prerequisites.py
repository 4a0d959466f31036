"""Prerequisites: a state operation judged by the inference that it enables.

1. `enabled_phases` says what each waiting request can do right after its stage.
2. Every pair of a prerequisite program and a following inference program competes, with both
   cohorts chosen together (`pair_cohorts`, exact for fixed shapes; a following packed prefill
   is bounded by the orders of `packed_cohorts`). At least one newly ready row takes part.
3. The productive part of the first stage alone, terminal retirements, competes too.
4. Chains of several stages are ranked by an individual continuation (`multistage`).

The pair's score is its useful value over T + F; the submitted plan keeps the prerequisite and
its T, and what follows is planned anew. Source: specification, "Prerequisites and completion".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.candidates import (
    Candidates,
    Decision,
    delivery_lanes,
    prompt_padding,
    prompt_programs,
    prompt_rows,
    redundant_unmeasured,
    scatter,
)
from helios_jax.scheduler.multistage import (
    continuation_candidates,
    ranked_terminals,
    terminal_candidates,
    terminal_values,
)
from helios_jax.scheduler.stages import at_window_end, next_features
from helios_jax.scheduler.state import DECODE, INITIALIZE, PROMPT, RESTORE, SNAPSHOT, TERMINAL, VISION, State
from helios_jax.scheduler.utility import packed_cohorts, top_order, undominated, usable_tokens


class Stage(NamedTuple):
    """The requests that wait for one kind of prerequisite.

    Attributes:
        phase: Their phase.
        programs: Row numbers of the prerequisite's programs that are worth a look.
        waiting: int64 [n] slots, preferred order first.
        prompts, decoders: Those of them that the prerequisite makes ready, in that order.
        blocked: Those of them that need more stages.
        terminal: int64 slots that a snapshot retires.
    """

    phase: int
    programs: np.ndarray
    waiting: np.ndarray
    prompts: np.ndarray
    decoders: np.ndarray
    blocked: np.ndarray
    terminal: np.ndarray


def prerequisite_candidates(decision: Decision) -> list[Candidates]:
    """Every prerequisite program with everything that it may enable."""
    found: list[Candidates] = []
    for stage in _stages(decision):
        for first in stage.programs:
            served = _fitting(decision, stage, int(first))
            if len(served.decoders) or len(served.prompts):
                found += _enabled_pairs(decision, served, int(first))
            found += continuation_candidates(decision, int(first), served.waiting, served.blocked, served.terminal)
            found += terminal_candidates(decision, int(first), served.waiting, served.terminal)
    return found


def enabled_phases(state: State) -> np.ndarray:
    """What each request can do once its present stage is over: PROMPT, DECODE or 0; int64 [slots].

    0 stands for one that needs a further stage, or that needs none.
    """
    requests, phase = state.requests, state.requests.phase
    images = requests.window_images - requests.images_done
    windowed = (requests.private_row > 0) & (requests.restore_row == requests.private_row)
    fresh = ((phase == INITIALIZE) & (images == 0)) | ((phase == VISION) & (images == 1))
    fresh |= (phase == RESTORE) & (images == 0) & ~windowed
    saved = phase == SNAPSHOT
    for slot in np.flatnonzero(saved & (requests.private_row > 0)).tolist():
        spec = state.specs[slot]
        saved[slot] = spec is not None and not at_window_end(requests, slot, spec)
    decoding = saved & (requests.consumed_len == requests.prompt_len)
    return np.where(decoding, DECODE, np.where(fresh | saved, PROMPT, 0))


def _stages(decision: Decision) -> list[Stage]:
    state, phase = decision.state, decision.state.requests.phase
    programs = state.programs
    waiting_for = ((INITIALIZE, programs.initialize), (RESTORE, programs.restore), (VISION, programs.vision),
                   (SNAPSHOT, programs.snapshot))  # fmt: skip
    present = [(number, rows) for number, rows in waiting_for if (phase == number).any()]
    if (phase == TERMINAL).any() and not any(number == SNAPSHOT for number, _ in present):
        present.append((SNAPSHOT, programs.snapshot))
    if not present:
        return []
    enabled, stages = enabled_phases(state), []
    for number, rows in present:
        waiting = decision.slots(phase == number)
        terminal = ranked_terminals(decision, decision.slots((phase == TERMINAL) & (number == SNAPSHOT)))
        after = enabled[waiting]
        # A larger program than the smallest that takes every waiting request has the same cohorts and more padding.
        capacity, total = programs.batch[rows], len(waiting) + len(terminal)
        useful = undominated(
            np.stack([np.minimum(capacity, total), _image_room(decision, number, rows, waiting)], 1),
            np.stack([capacity, programs.tokens[rows]], 1),
        )
        stages.append(
            Stage(number, rows[useful], waiting, waiting[after == PROMPT], waiting[after == DECODE],
                  waiting[after == 0], terminal)
        )  # fmt: skip
    return stages


def _image_room(decision: Decision, phase: int, rows: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """How many of the next images each vision program can take; 0 for other kinds. int64 [programs]."""
    if phase != VISION:
        return np.zeros(len(rows), np.int64)
    return (next_features(decision.state, waiting) <= decision.state.programs.tokens[rows, None]).sum(axis=1)


def _fitting(decision: Decision, stage: Stage, first: int) -> Stage:
    """The stage with those requests only that the program can serve at all: images have sizes."""
    if stage.phase != VISION:
        return stage
    state = decision.state

    def fit(slots: np.ndarray) -> np.ndarray:
        return slots[next_features(state, slots) <= state.programs.tokens[first]]

    return stage._replace(waiting=fit(stage.waiting), prompts=fit(stage.prompts), blocked=fit(stage.blocked))


def _enabled_pairs(decision: Decision, stage: Stage, first: int) -> list[Candidates]:
    """Pairs of one prerequisite program with every following kind."""
    scored = decision.state.requests.scored
    found = []
    for kind in (False, True):
        fresh = stage.prompts[scored[stage.prompts] == kind]
        if len(fresh):
            found += _prefill_pairs(decision, stage, first, fresh, kind)
    found += _delivery_pairs(decision, stage, first)
    return found


# ---- a following prefill


def _prefill_pairs(decision: Decision, stage: Stage, first: int, fresh: np.ndarray, scored: bool) -> list[Candidates]:
    """Candidates of one prerequisite before each prefill (or scored prefill) program."""
    state = decision.state
    requests = state.requests
    mine = (requests.phase == PROMPT) & (requests.scored == scored)
    mine[fresh] = True
    slots = decision.slots(mine)
    following = prompt_programs(decision, slots, scored)
    rows = prompt_rows(decision, slots, requests.phase[slots] != PROMPT)
    capacity_first = int(state.programs.batch[first])
    tokens, capacity = state.programs.tokens[following], state.programs.batch[following]
    ending = terminal_values(decision, first, stage.terminal, decision.duration_ms[following])
    # Terminal rows only compete with newly ready ones where the prerequisite cannot take all of both.
    crowded = len(fresh) + len(stage.terminal) > capacity_first
    options = range(1, min(len(fresh), capacity_first) + 1) if crowded else (min(len(fresh), capacity_first),)
    cohorts = [packed_cohorts(rows, tokens, capacity, max_new=num_new) for num_new in options]
    room = [min(capacity_first - num_new, len(stage.terminal)) for num_new in options]
    values = np.stack([value + ending[:, :count].sum(axis=1) for (_, value), count in zip(cohorts, room, strict=True)])
    best, which = values.argmax(axis=0), np.arange(len(following))
    lengths, totals = np.stack([lengths for lengths, _ in cohorts])[best, which], values[best, which]
    ends = np.array(room)[best]
    keep = undominated(lengths, np.stack([capacity, tokens], axis=1)) & np.isfinite(totals)
    keep &= ~redundant_unmeasured(decision, following, lengths, slots, scored)
    work = scatter(lengths[keep], slots, state.limits.slots)
    used = scatter(np.arange(len(stage.terminal)) < ends[keep, None], stage.terminal, state.limits.slots)
    members = fill_first((work > 0) & (requests.phase != PROMPT) | used, stage.waiting, capacity_first)
    padding = capacity_first - members.sum(axis=1) + prompt_padding(tokens[keep], capacity[keep], work)
    return [_pair(decision, first, following[keep], members, work, totals[keep], padding)]


# ---- a following program that delivers


def _delivery_pairs(decision: Decision, stage: Stage, first: int) -> list[Candidates]:
    """Candidates of one prerequisite before each program that decodes.

    The prompt row of a mixed program is absent, ready already, or enabled by the prerequisite;
    each case leaves an exact problem of the decoding and terminal rows.
    """
    state, programs = decision.state, decision.state.programs
    requests = state.requests
    ready = decision.slots(requests.phase == DECODE)
    found = []
    if len(stage.decoders):
        rows = np.concatenate([programs.decode, programs.speculative, programs.mixed])
        found += _cases(decision, stage, first, rows, ready, np.zeros(0, np.int64), least=1)
        waiting = decision.slots((requests.phase == PROMPT) & ~requests.scored)
        if len(waiting):
            found += _cases(decision, stage, first, programs.mixed, ready, waiting, least=1)
    enabled = stage.prompts[~requests.scored[stage.prompts]]
    if len(enabled):
        found += _cases(decision, stage, first, programs.mixed, ready, enabled, least=0)
    return found


def _cases(
    decision: Decision, stage: Stage, first: int, following: np.ndarray, ready: np.ndarray, prompts: np.ndarray,
    least: int,
) -> list[Candidates]:  # fmt: skip
    """One candidate a following program, with the best of `prompts` in its prompt row if there are any.

    Args:
        least: Newly ready decoders needed; 0 where the prompt itself is newly ready.
    """
    if not len(following):
        return []
    state, programs = decision.state, decision.state.programs
    num_slots, capacity = state.limits.slots, programs.batch[following]
    duration = decision.duration_ms[first] + decision.duration_ms[following]
    measured = (decision.duration_ms[first] > 0) & (decision.duration_ms[following] > 0)
    prompt, prompt_value, prompt_work = best_prompts(decision, following, prompts)
    taken = int(len(prompts) > 0)
    capacity_first = int(programs.batch[first]) - (taken if least == 0 else 0)
    new, new_work = delivery_lanes(decision, following, stage.decoders, np.where(measured, duration, 0.0))
    old, old_work = delivery_lanes(decision, following, ready, np.where(measured, duration, 0.0))
    ending = terminal_values(decision, first, stage.terminal, decision.duration_ms[following])
    new_in, old_in, ends, totals = pair_cohorts(new, old, ending, capacity_first, capacity - taken, least)
    if least:
        totals = np.where((new_in & (new_work > 0)).any(axis=1), totals, -np.inf)
    totals = np.where(prompt_work > 0, totals + prompt_value, totals) if taken else totals
    work = scatter(np.where(new_in, new_work, 0), stage.decoders, num_slots)
    work += scatter(np.where(old_in, old_work, 0), ready, num_slots)
    members = scatter(np.where(new_in, new_work > 0, False), stage.decoders, num_slots)
    members |= scatter(np.arange(len(stage.terminal)) < ends[:, None], stage.terminal, num_slots)
    if taken:
        work[np.arange(len(following)), prompt] = prompt_work
        members[np.arange(len(following)), prompt] = least == 0
    members = fill_first(members, stage.waiting, int(programs.batch[first]))
    extents = np.stack(
        [capacity, programs.tokens[following], programs.prompt[following], programs.packed[following]], 1
    )
    depth = programs.depth[following, None]
    keep = undominated(np.concatenate([work, members, depth], axis=1), extents) & np.isfinite(totals)
    if taken:
        keep &= prompt_work > 0
    used = work.sum(axis=1) + (work > 0).sum(axis=1)
    padding = int(programs.batch[first]) - members.sum(axis=1) + extents[:, 0] + extents[:, 2] + extents[:, 3] - used
    return [_pair(decision, first, following[keep], members[keep], work[keep], totals[keep], padding[keep])]


def best_prompts(
    decision: Decision, following: np.ndarray, prompts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The prompt row of each mixed program: slot, value and tokens of the most valuable one; [C] each."""
    if not len(prompts):
        nothing = np.zeros(len(following))
        return nothing.astype(np.int64), nothing, nothing.astype(np.int64)
    rows = prompt_rows(decision, prompts)
    usable = usable_tokens(rows.remaining, decision.state.programs.prompt[following], rows.atoms)
    worth = usable * rows.token_value + np.where(usable == rows.remaining, rows.bonus, 0.0)
    best = np.where(usable > 0, worth, -1.0).argmax(axis=1)
    which = np.arange(len(following))
    return prompts[best], worth[which, best], usable[which, best]


def pair_cohorts(
    new: np.ndarray, old: np.ndarray, ending: np.ndarray, capacity_first: int, capacity: np.ndarray, least: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The exact joint cohort of a prerequisite and each following program, over every number of new rows.

    k newly ready rows take part: the k largest, the largest ready rows in what is left of the
    following program, the largest terminal rows in what is left of the prerequisite. Prefix
    sums of the sorted values give every k; equal totals prefer more new rows.

    Args:
        new, old: [C, n] lane values, at least 0.
        ending: [C, t] values of terminal rows, largest first.
        capacity_first: Rows of the prerequisite.
        capacity: int64 [C] rows of the following programs.
        least: Smallest legal k.

    Returns:
        Membership of new and old rows, bool [C, n]; terminal rows taken, int64 [C]; total [C],
        -inf where no k is legal.
    """
    programs, num_old, num_end = np.arange(len(new))[:, None], old.shape[1], ending.shape[1]
    most = min(capacity_first, new.shape[1])
    new_order, new_sums = top_order(new)
    old_order, old_sums = top_order(old)
    end_sums = np.concatenate([np.zeros((len(new), 1)), np.cumsum(ending, axis=1)], axis=1)
    k = np.arange(least, most + 1)
    if not len(k):
        nobody = np.zeros(new.shape, np.bool_), np.zeros(old.shape, np.bool_)
        return *nobody, np.zeros(len(new), np.int64), np.full(len(new), -np.inf)
    rest = np.clip(capacity[:, None] - k, 0, num_old)
    ends = np.minimum(capacity_first - k, num_end)
    totals = new_sums[:, k] + old_sums[programs, rest] + end_sums[:, ends]
    totals = np.where(k <= capacity[:, None], totals, -np.inf)
    best = len(k) - 1 - totals[:, ::-1].argmax(axis=1)
    which = programs[:, 0]
    new_in, old_in = np.zeros(new.shape, np.bool_), np.zeros(old.shape, np.bool_)
    np.put_along_axis(new_in, new_order, np.arange(new.shape[1]) < k[best, None], 1)
    np.put_along_axis(old_in, old_order, np.arange(num_old) < rest[which, best, None], 1)
    return new_in, old_in, ends[best], totals[which, best]


def fill_first(members: np.ndarray, waiting: np.ndarray, capacity: int) -> np.ndarray:
    """Fill a prerequisite program: unused rows advance further waiting requests at no physical cost.

    Args:
        members: bool [C, slots] rows that the sequence needs.
        waiting: int64 [n] slots in the stage, preferred order first.
    """
    members = members.copy()
    free = capacity - members.sum(axis=1, keepdims=True)
    idle = ~members[:, waiting]
    members[:, waiting] |= idle & (np.cumsum(idle, axis=1) <= free)
    return members


def _pair(
    decision: Decision, first: int, following: np.ndarray, members: np.ndarray, work: np.ndarray, value: np.ndarray,
    padding: np.ndarray,
) -> Candidates:  # fmt: skip
    duration, count = decision.duration_ms, len(following)
    return Candidates(
        first=np.full(count, first),
        follow=following,
        members=members,
        lengths=np.zeros_like(work),
        work=work,
        prompt=np.full(count, -1),
        value=value,
        duration_ms=duration[first] + duration[following],
        known=(duration[first] > 0) & (duration[following] > 0),
        padding=padding,
    )
