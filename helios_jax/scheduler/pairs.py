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
    redundant_mixed,
    redundant_unmeasured,
    scatter,
)
from helios_jax.scheduler.joint import Lanes, best_option, pair_cohorts, prefix_sums
from helios_jax.scheduler.packed import enabled_cohorts, usable_tokens
from helios_jax.scheduler.state import DECODE, PROMPT
from helios_jax.scheduler.utility import undominated

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
    if not fresh.any():
        return []
    able = stage.fits & fresh
    found = [_prefill_group(decision, stage, firsts, stage.waiting[able[firsts[0]]], scored) for firsts in _alike(able)]
    every = joined([pairs for pairs in found if pairs is not None])
    slots = np.flatnonzero(every.work.any(axis=0))
    redundant = redundant_unmeasured(decision, every.follow, every.work[:, slots], slots, scored)
    return [kept(every, without_padding(decision, every) & ~redundant)]


def _alike(able: np.ndarray) -> list[np.ndarray]:
    """Positions of the programs that can serve somebody, alike ones together; `able` is bool [F, n]."""
    if (able == able[0]).all():
        return [np.arange(len(able))]
    _, group = np.unique(able, axis=0, return_inverse=True)
    every = [np.flatnonzero(group.ravel() == number) for number in range(int(group.max()) + 1)]
    return [firsts for firsts in every if able[firsts[0]].any()]


def _prefill_group(decision: Decision, stage: Stage, firsts: np.ndarray, fresh: np.ndarray, scored: bool) -> Candidates:
    """Pairs of the G prerequisite programs at positions `firsts`, which can all serve the `fresh` prompts."""
    state, requests, programs = decision.state, decision.state.requests, decision.state.programs
    mine = (requests.phase == PROMPT) & (requests.scored == scored)
    mine[fresh] = True
    slots = decision.slots(mine)
    following = prompt_programs(decision, slots, scored)
    newly = requests.phase[slots] != PROMPT
    room = programs.batch[stage.programs[firsts]]
    options, allowed = _new_rows(np.minimum(room, len(fresh)), room, len(stage.terminal))
    lengths, value = enabled_cohorts(
        prompt_rows(decision, slots, newly), programs.tokens[following], programs.batch[following], options.tolist()
    )
    served = lengths > 0
    ends = np.clip(room[:, None] - (served & newly).sum(axis=2)[:, None], 0, len(stage.terminal))  # [M, G, Q]
    of, which = np.repeat(firsts, len(following)), np.tile(np.arange(len(following)), len(firsts))
    first, follow = stage.programs[of], following[which]
    ending = prefix_sums(terminal_values(decision, stage.terminal, *_known_times(decision, first, follow)))
    ends = ends.reshape(len(options), len(of))
    totals = value[:, which] + ending[np.arange(len(of)), ends]
    totals = np.where(np.repeat(allowed, len(following), axis=1), totals, -np.inf)
    best, pairs = best_option(totals, served.sum(axis=2)[:, which] + ends), np.arange(len(of))
    work = scatter(lengths[best, which], slots, state.limits.slots)
    needed = (work > 0) & (requests.phase != PROMPT)
    needed |= _first_of(stage.terminal, ends[best, pairs], state.limits.slots)
    members = fill_first(needed, stage, of, programs.batch)
    padding = programs.batch[first] - members.sum(axis=1)
    padding += prompt_padding(programs.tokens[follow], programs.batch[follow], work)
    found = _pairs(decision, stage, of, follow, members, work, totals[best, pairs], padding)
    return kept(found, np.isfinite(found.value))


def _new_rows(most: np.ndarray, room: np.ndarray, num_terminal: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of new rows to try, and which prerequisite programs try them: int64 [M] and bool [M, G].

    As many as possible, unless terminal rows want the same places.

    Args:
        most: int64 [G] largest number of each program.
        room: int64 [G] its rows.
    """
    crowded = most + num_terminal > room if num_terminal else np.zeros(len(most), np.bool_)
    options = {int(n) for n in most}
    if crowded.any():
        options |= {n for n in (*range(1, _ALL_OPTIONS + 1), 16, 32) if n <= most[crowded].max()}
    number = np.array(sorted(options))[:, None]
    return number[:, 0], (number == most) | (crowded & (number <= most))


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
    fresh, ready = stage.waiting[stage.after == DECODE], decision.slots(state.requests.phase == DECODE)
    following = _worth_a_look(decision, following, prompts, len(fresh) + len(ready))
    of, which = np.divmod(np.arange(len(stage.programs) * len(following)), len(following))
    first, follow = stage.programs[of], following[which]
    first_ms, rest_ms = _known_times(decision, first, follow)
    able = stage.fits[of][:, np.isin(stage.waiting, prompts)] if enabled else None
    prompt, prompt_value, prompt_work = best_prompts(decision, follow, prompts, able)
    new, new_work = _lanes(decision, following, fresh, which, first_ms + rest_ms)
    old, old_work = _lanes(decision, following, ready, which, first_ms + rest_ms)
    taken = int(len(prompts) > 0)
    ending = terminal_values(decision, stage.terminal, first_ms, rest_ms)
    cohorts = pair_cohorts(
        new, old, ending, programs.batch[first] - int(enabled), programs.batch[follow] - taken, least=int(not enabled)
    )
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
    legal[legal] = without_padding(decision, kept(found, legal))
    return [kept(found, legal & ~redundant_mixed(decision, follow, work, prompt) if taken else legal)]


def _lanes(
    decision: Decision, following: np.ndarray, slots: np.ndarray, which: np.ndarray, duration_ms: np.ndarray
) -> tuple[Lanes, np.ndarray]:
    """Decoding lanes of C pairs and their target rows, int64 [C, n].

    Args:
        following: int64 [Q] programs.
        which: int64 [C] positions in `following`.
        duration_ms: float64 [C] when the pair's service ends, 0 if that is not known.
    """
    base, rows = delivery_lanes(decision, following, slots, np.zeros(len(following)))
    rows = rows[which]
    values = base[which] + np.where(rows > 0, decision.values.age_price[slots], 0.0) * duration_ms[:, None]
    return Lanes(values, rows > 0), rows


def _worth_a_look(decision: Decision, following: np.ndarray, prompts: np.ndarray, num_lanes: int) -> np.ndarray:
    """The decode or mixed programs whose cohorts cannot all be a smaller one's: the filter of padding, beforehand.

    Programs alike for a lane agree in every cohort when both have room for all lanes and for the
    longest prompt. Rounds are left alone: their target rows are an extent of its own.
    """
    state, programs = decision.state, decision.state.programs
    if np.isin(following[0], programs.speculative) or not same_age_prices(decision):
        return following
    longest = (state.requests.boundary - state.requests.consumed_len)[prompts].max(initial=0)
    rows = np.minimum(programs.batch[following], num_lanes + int(len(prompts) > 0))
    usable = np.stack([rows, np.minimum(programs.prompt[following], longest), programs.lane_class[following]], 1)
    extents = np.stack([column[following] for column in (programs.batch, programs.tokens, programs.prompt)], 1)
    return following[undominated(usable, extents)]


def same_age_prices(decision: Decision) -> bool:
    """Whether all streams gain alike by time, so that their order is the same at every duration."""
    prices = decision.values.age_price[decision.state.requests.streams]
    return not len(prices) or bool(prices.min() == prices.max())


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
    decodes = found.work[:, decision.state.requests.streams].any(axis=1)
    depth = np.where(decodes & (follow >= 0), programs.depth[follow], 0)
    # Without proposals programs are alike, whatever their source.
    source = np.where(depth > 0, 1 + 2 * programs.source[follow] + programs.device_allocates[follow], 0)
    used = np.flatnonzero(found.work.any(axis=0))
    identity = np.concatenate([found.work[:, used], depth[:, None], source[:, None]], axis=1).astype(np.int32)
    rows = np.packbits(found.members, axis=1)
    return undominated(np.concatenate([np.ascontiguousarray(identity).view(np.uint8), rows], axis=1), extents)


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
