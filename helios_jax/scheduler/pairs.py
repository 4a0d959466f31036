"""Pairs: a prerequisite program and the inference that it enables, with both cohorts chosen together.

For fixed shapes and durations lane values are additive, so the best joint cohort follows from
sorted prefix sums over the number of newly ready rows that take part (`pair_cohorts`): exact
for one-row prefill, decode and mixed programs. Rows of a packed prefill share its tokens; there
the orders of `packed_cohorts` bound the search.

A pair is scored over T + F, with output ages that reset at its end; terminal rows retire at T.
Unused rows of the prerequisite advance further requests. Redundant padding drops out at the end,
when every pair has its cohort.

Source: specification, "Prerequisites and completion" and "Mixed execution contract".
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
from helios_jax.scheduler.joint import Lanes, best_option, pair_cohorts, prefix_sums
from helios_jax.scheduler.state import DECODE, PROMPT
from helios_jax.scheduler.utility import packed_cohorts, undominated, usable_tokens

_ALL_OPTIONS = 8  # numbers of new rows that are all tried before a packed prefill; beyond, powers of two


class Stage(NamedTuple):
    """The requests that wait for one kind of prerequisite, n of them, and its F programs.

    Attributes:
        programs: int64 [F] row numbers.
        waiting: int64 [n] slots, preferred order first.
        after: int64 [n] what each can do afterwards: PROMPT, DECODE, or 0 (needs more stages).
        fits: bool [F, n] whom each program can serve at all: images have sizes.
        terminal: int64 [t] slots that a snapshot retires, most valuable first.
    """

    programs: np.ndarray
    waiting: np.ndarray
    after: np.ndarray
    fits: np.ndarray
    terminal: np.ndarray


# ---- a following prefill


def prefill_pairs(decision: Decision, stage: Stage, *, scored: bool) -> list[Candidates]:
    """Each prerequisite program before each prefill (or scored prefill) program."""
    fresh = (stage.after == PROMPT) & (decision.state.requests.scored[stage.waiting] == scored)
    able = stage.fits & fresh
    found = []
    for firsts in _alike(able):
        slots = stage.waiting[able[firsts[0]]]
        if len(slots):
            found += _prefill_group(decision, stage, firsts, slots, scored)
    if not found:
        return []
    every = joined(found)
    slots = np.flatnonzero(every.work.any(axis=0))
    redundant = redundant_unmeasured(decision, every.follow, every.work[:, slots], slots, scored)
    return [kept(every, without_padding(decision, every) & ~redundant)]


def _alike(able: np.ndarray) -> list[np.ndarray]:
    """Positions of the programs that can serve the same requests; `able` is bool [F, n]."""
    if len(able) == 1 or (able == able[0]).all():
        return [np.arange(len(able))]
    _, group = np.unique(able, axis=0, return_inverse=True)
    return [np.flatnonzero(group.ravel() == number) for number in range(int(group.max()) + 1)]


def _prefill_group(
    decision: Decision, stage: Stage, firsts: np.ndarray, fresh: np.ndarray, scored: bool
) -> list[Candidates]:
    """Pairs of the prerequisite programs at positions `firsts`, which can all serve the `fresh` prompts."""
    state, requests = decision.state, decision.state.requests
    mine = (requests.phase == PROMPT) & (requests.scored == scored)
    mine[fresh] = True
    slots = decision.slots(mine)
    following = prompt_programs(decision, slots, scored)
    newly = requests.phase[slots] != PROMPT
    rows = prompt_rows(decision, slots, newly)
    tokens, capacity = state.programs.tokens[following], state.programs.batch[following]
    cohorts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    found = []
    for position in firsts.tolist():
        first = int(stage.programs[position])
        room = int(state.programs.batch[first])
        options = _new_rows(min(room, len(fresh)), crowded=len(stage.terminal) > max(0, room - len(fresh)))
        for number in options:
            if number not in cohorts:
                cohorts[number] = packed_cohorts(rows, tokens, capacity, max_new=number)
        choices = [cohorts[number] for number in options]
        lengths, value = np.stack([chosen for chosen, _ in choices]), np.stack([worth for _, worth in choices])
        ends = np.minimum(room - ((lengths > 0) & newly).sum(axis=2), len(stage.terminal))
        times = _known_times(decision, np.full(len(following), first), following)
        ending = prefix_sums(terminal_values(decision, stage.terminal, *times))
        value = value + np.take_along_axis(ending, ends.T, 1).T
        best, which = best_option(value, (lengths > 0).sum(axis=2) + ends), np.arange(len(following))
        keep = np.isfinite(value[best, which])
        work = scatter(lengths[best, which][keep], slots, state.limits.slots)
        needed = (work > 0) & (requests.phase != PROMPT)
        needed |= _first_of(stage.terminal, ends[best, which][keep], state.limits.slots)
        of = np.full(len(work), position)
        members = fill_first(needed, stage, of, state.programs.batch)
        padding = room - members.sum(axis=1) + prompt_padding(tokens[keep], capacity[keep], work)
        found.append(_pairs(decision, stage, of, following[keep], members, work, value[best, which][keep], padding))
    return found


def _new_rows(most: int, *, crowded: bool) -> list[int]:
    """Numbers of new rows to try: only beside terminal rows that want the same places do fewer make sense."""
    if not crowded:
        return [most]
    return sorted({n for n in (*range(1, _ALL_OPTIONS + 1), 16, 32, most) if n <= most})


# ---- a following program that delivers


def delivery_pairs(decision: Decision, stage: Stage) -> list[Candidates]:
    """Each prerequisite program before each program that decodes.

    The prompt row of a mixed program is absent, ready already, or enabled by the prerequisite;
    each case leaves an exact problem of the decoding and terminal rows.
    """
    requests, programs = decision.state.requests, decision.state.programs
    nobody = np.zeros(0, np.int64)
    enabled = stage.waiting[(stage.after == PROMPT) & ~requests.scored[stage.waiting]]
    found = []
    if (stage.after == DECODE).any():
        for kind in (programs.decode, programs.speculative, programs.mixed):
            found += _delivery_case(decision, stage, kind, nobody, enabled=False)
        ready = decision.slots((requests.phase == PROMPT) & ~requests.scored)
        if len(ready):
            found += _delivery_case(decision, stage, programs.mixed, ready, enabled=False)
    if len(enabled):
        found += _delivery_case(decision, stage, programs.mixed, enabled, enabled=True)
    return found


def _delivery_case(
    decision: Decision, stage: Stage, following: np.ndarray, prompts: np.ndarray, *, enabled: bool
) -> list[Candidates]:
    """Pairs with programs of one kind, the best of `prompts` in their prompt row if there are any.

    Args:
        enabled: The prompt itself is newly ready, and takes a row of the prerequisite.
    """
    if not len(following):
        return []
    state, programs = decision.state, decision.state.programs
    of = np.repeat(np.arange(len(stage.programs)), len(following))
    first, follow = stage.programs[of], np.tile(following, len(stage.programs))
    taken = int(len(prompts) > 0)
    able = stage.fits[of][:, np.isin(stage.waiting, prompts)] if enabled else None
    prompt, prompt_value, prompt_work = best_prompts(decision, follow, prompts, able)
    first_ms, rest_ms = _known_times(decision, first, follow)
    fresh, ready = stage.waiting[stage.after == DECODE], decision.slots(state.requests.phase == DECODE)
    new, new_work = delivery_lanes(decision, follow, fresh, first_ms + rest_ms)
    old, old_work = delivery_lanes(decision, follow, ready, first_ms + rest_ms)
    ending = terminal_values(decision, stage.terminal, first_ms, rest_ms)
    cohorts = pair_cohorts(
        Lanes(new, new_work > 0), Lanes(old, old_work > 0), ending,
        programs.batch[first] - int(enabled), programs.batch[follow] - taken, least=int(not enabled),
    )  # fmt: skip
    work = scatter(np.where(cohorts.new, new_work, 0), fresh, state.limits.slots)
    work += scatter(np.where(cohorts.old, old_work, 0), ready, state.limits.slots)
    needed = scatter(cohorts.new, fresh, state.limits.slots)
    needed |= _first_of(stage.terminal, cohorts.ends, state.limits.slots)
    legal = np.isfinite(cohorts.value)
    if taken:
        work[np.arange(len(of)), prompt] = prompt_work
        needed[np.arange(len(of)), prompt] = enabled
        legal &= prompt_work > 0
    members = fill_first(needed, stage, of, programs.batch)
    rows, tokens = programs.batch + programs.prompt + programs.packed, work.sum(axis=1) + (work > 0).sum(axis=1)
    padding = programs.batch[first] - members.sum(axis=1) + rows[follow] - tokens
    found = _pairs(decision, stage, of, follow, members, work, cohorts.value + prompt_value, padding)
    found = kept(found, legal)
    return [kept(found, without_padding(decision, found))]


def best_prompts(
    decision: Decision, following: np.ndarray, prompts: np.ndarray, able: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The prompt row of each mixed program: slot, value and tokens of the most valuable one; [C] each.

    Args:
        able: bool [C, n] prompts that each program may take, all if None.
    """
    if not len(prompts):
        nothing = np.zeros(len(following))
        return nothing.astype(np.int64), nothing, nothing.astype(np.int64)
    rows = prompt_rows(decision, prompts)
    usable = usable_tokens(rows.remaining, decision.state.programs.prompt[following], rows.atoms)
    if able is not None:
        usable = np.where(able, usable, 0)
    worth = usable * rows.token_value + np.where(usable == rows.remaining, rows.bonus, 0.0)
    best = np.where(usable > 0, worth, -1.0).argmax(axis=1)
    which = np.arange(len(following))
    return prompts[best], worth[which, best], usable[which, best]


# ---- candidates


def _first_of(slots: np.ndarray, count: np.ndarray, num_slots: int) -> np.ndarray:
    """bool [C, num_slots]: the first `count` of `slots`."""
    return scatter(np.arange(len(slots)) < count[:, None], slots, num_slots)


def terminal_values(decision: Decision, terminal: np.ndarray, first_ms: np.ndarray, rest_ms: np.ndarray) -> np.ndarray:
    """Scaled worth of terminal rows whose snapshot takes T, before a rest F of the sequence; float64 [C, t].

    terminal_value + p sigma (A + T), and the waiting that its end at T saves over the rest,
    p F (A + T + F / 2).

    Args:
        terminal: int64 [t] slots.
        first_ms, rest_ms: float64 [C], both 0 in a sequence with an unmeasured stage.

    Source: scheduling-utility.md section 9, readings 6 and 7.
    """
    values, rest = decision.values, rest_ms[:, None]
    done_ms = values.age_ms[terminal] + first_ms[:, None]
    worth = values.terminal + values.terminal_price[terminal] * done_ms
    return worth + values.terminal_wait * rest * (done_ms + 0.5 * rest)


def fill_first(needed: np.ndarray, stage: Stage, of: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Fill prerequisite programs: unused rows advance further waiting requests at no physical cost.

    Args:
        needed: bool [C, slots] rows that the sequences need.
        of: int64 [C] positions of the programs in the stage.
        batch: int64 [programs] rows of the catalogue.
    """
    members = needed.copy()
    free = batch[stage.programs[of]] - members.sum(axis=1)
    idle = stage.fits[of] & ~members[:, stage.waiting]
    members[:, stage.waiting] |= idle & (np.cumsum(idle, axis=1) <= free[:, None])
    return members


def without_padding(decision: Decision, found: Candidates) -> np.ndarray:
    """bool [C]: which candidates are no redundant padding of another one.

    Those are redundant that have the members, work and proposal depth of one with no larger and
    one smaller extent; timings play no part. Prerequisites, and programs that follow, are of one kind each.
    """
    programs, follow = decision.state.programs, found.follow
    columns = np.stack([programs.batch, programs.tokens, programs.prompt, programs.packed], axis=1)
    extents = np.concatenate([columns[found.first], np.where(follow[:, None] < 0, 0, columns[follow])], axis=1)
    depth = np.where(follow < 0, 0, programs.depth[follow])
    # Programs without proposals are alike, whatever their source.
    source = np.where(depth > 0, 1 + 2 * programs.source[follow] + programs.device_allocates[follow], 0)
    cohorts = np.concatenate([found.work, found.members, depth[:, None], source[:, None]], axis=1)
    return undominated(cohorts, extents)


def kept(found: Candidates, mask: np.ndarray) -> Candidates:
    """The candidates of a bool [C] mask."""
    return found if mask.all() else Candidates(*[column[mask] for column in found])


def joined(found: list[Candidates]) -> Candidates:
    """All candidates of a list of at least one."""
    return found[0] if len(found) == 1 else Candidates(*[np.concatenate(column) for column in zip(*found, strict=True)])


def _known_times(decision: Decision, first: np.ndarray, follow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T and F of pairs, ms; both 0 where one is not measured."""
    first_ms, rest_ms = decision.duration_ms[first], decision.duration_ms[follow]
    known = (first_ms > 0) & (rest_ms > 0)
    return np.where(known, first_ms, 0.0), np.where(known, rest_ms, 0.0)


def _pairs(
    decision: Decision, stage: Stage, of: np.ndarray, follow: np.ndarray, members: np.ndarray, work: np.ndarray,
    value: np.ndarray, padding: np.ndarray,
) -> Candidates:  # fmt: skip
    first = stage.programs[of]
    return Candidates(
        first=first,
        follow=follow,
        members=members,
        lengths=np.zeros_like(work),
        work=work,
        prompt=np.full(len(first), -1),
        value=value,
        duration_ms=decision.duration_ms[first] + decision.duration_ms[follow],
        known=(decision.duration_ms[first] > 0) & (decision.duration_ms[follow] > 0),
        padding=padding,
    )
