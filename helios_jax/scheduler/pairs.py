"""Pairs: a prerequisite program and the inference that it enables, with both cohorts chosen together.

For fixed shapes and durations lane values are additive, so the best joint cohort follows from
sorted prefix sums over the number of newly ready rows that take part (`pair_cohorts`): exact
for one-row prefill, decode and mixed programs. Rows of a packed prefill share its tokens; there
the orders of `packed_cohorts` bound the search. Lanes of a round may share too few target rows;
such pairs are searched by `ragged_pairs`.

A pair is scored over T + F, with output ages that reset at its end; terminal rows retire at T.
Unused rows of the prerequisite advance further requests. Redundant padding drops out at the end,
when every pair has its cohort.

Source: specification, "Prerequisites and completion" and "Mixed execution contract".
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import (
    Candidates,
    Decision,
    delivery_lanes,
    prompt_programs,
    prompt_rows,
    redundant_mixed,
    redundant_unmeasured,
    scatter,
    unused_rows,
)
from helios_jax.scheduler.joint import Lanes, best_option, pair_cohorts, prefix_sums
from helios_jax.scheduler.packed import enabled_cohorts, usable_tokens
from helios_jax.scheduler.race import Race
from helios_jax.scheduler.ragged_pairs import Pairs, ragged_cohorts
from helios_jax.scheduler.sequences import (
    Stage,
    fill_first,
    first_of,
    joined,
    kept,
    known_times,
    pair_rows,
    terminal_values,
    unused_first,
    without_padding,
)
from helios_jax.scheduler.state import DECODE, PROMPT
from helios_jax.scheduler.utility import undominated

_ALL_OPTIONS = 8  # numbers of new rows that are all tried before a packed prefill; beyond, powers of two


# ---- a following prefill


def prefill_pairs(decision: Decision, stage: Stage, race: Race | None = None, *, scored: bool) -> list[Candidates]:
    """Each prerequisite program before each prefill (or scored prefill) program; none if they lose the `race`."""
    requests, programs = decision.state.requests, decision.state.programs
    fresh = (stage.after == PROMPT) & (requests.scored[stage.waiting] == scored)
    if not fresh.any():
        return []
    if race is not None:
        prompts = np.concatenate(
            [stage.waiting[fresh], np.flatnonzero((requests.phase == PROMPT) & (requests.scored == scored))]
        )
        if race.is_lost(stage, programs.scored_prefill if scored else programs.prefill, prompts):
            return []
    able = stage.fits & fresh
    found = [_prefill_group(decision, stage, firsts, stage.waiting[able[firsts[0]]], scored) for firsts in _alike(able)]
    if not found:
        return []
    every = joined(found)
    slots = np.flatnonzero(every.work.any(axis=0))
    redundant = redundant_unmeasured(decision, every.follow, every.work[:, slots], slots, scored)
    return [kept(every, without_padding(decision, every) & ~redundant)]


def _alike(able: np.ndarray) -> list[np.ndarray]:
    """Positions of the programs that can serve somebody, alike ones together; `able` is bool [F, n]."""
    if (able == able[0]).all():
        return [np.arange(len(able))] if able[0].any() else []
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
    if len(stage.terminal):  # what a retirement is worth depends on the program that follows, so cohorts may differ
        following = programs.scored_prefill if scored else programs.prefill
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
    ending = prefix_sums(terminal_values(decision, stage.terminal, *known_times(decision, first, follow)))
    ends = ends.reshape(len(options), len(of))
    totals = value[:, which] + ending[np.arange(len(of)), ends]
    totals = np.where(np.repeat(allowed, len(following), axis=1), totals, -np.inf)
    best, pairs = best_option(totals, served.sum(axis=2)[:, which] + ends), np.arange(len(of))
    work = scatter(lengths[best, which], slots, state.limits.slots)
    needed = (work > 0) & (requests.phase != PROMPT)
    needed |= first_of(stage.terminal, ends[best, pairs], state.limits.slots)
    members = fill_first(needed, stage, of, programs.batch)
    padding = unused_first(decision, first, members) + unused_rows(programs, follow, work)
    found = pair_rows(decision, stage, of, follow, members, work, totals[best, pairs], padding)
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


def delivery_pairs(decision: Decision, stage: Stage, race: Race | None = None) -> list[Candidates]:
    """Each prerequisite program before each program that decodes; without the kinds that lose the `race`.

    The prompt row of a mixed program is absent, ready already, or enabled by the prerequisite;
    each case leaves an exact problem of the decoding and terminal rows.
    """
    requests, programs = decision.state.requests, decision.state.programs
    nobody = np.zeros(0, np.int64)
    enabled = (stage.after == PROMPT) & ~requests.scored[stage.waiting]
    cases: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
    if (stage.after == DECODE).any():
        cases = [(kind, nobody, None) for kind in (programs.decode, programs.speculative, programs.mixed)]
        ready = decision.slots((requests.phase == PROMPT) & ~requests.scored)
        cases += [(programs.mixed, ready, None)] if len(ready) else []
    if enabled.any():
        cases.append((programs.mixed, stage.waiting[enabled], stage.fits[:, enabled]))
    found = []
    for kind, prompts, able in cases:
        if race is None or not race.is_lost(stage, kind, prompts):
            found += _delivery_case(decision, stage, kind, prompts, able, least=race.least if race else None)
    return found


def _delivery_case(
    decision: Decision, stage: Stage, following: np.ndarray, prompts: np.ndarray, able: np.ndarray | None = None,
    *, least: float | None = None,
) -> list[Candidates]:  # fmt: skip
    """Pairs with programs of one kind, the best of `prompts` in their prompt row if there are any.

    Args:
        able: bool [F, n] where the prompts are newly ready: each takes a row of the prerequisite that serves it.
        least: Score that a measured pair must reach to win; None where losers matter as well.
    """
    if not len(following):
        return []
    state, programs = decision.state, decision.state.programs
    fresh, ready = stage.waiting[stage.after == DECODE], decision.slots(state.requests.phase == DECODE)
    following = _worth_a_look(decision, stage, following, prompts, len(fresh) + len(ready))
    of, which = np.divmod(np.arange(len(stage.programs) * len(following)), len(following))
    first, follow = stage.programs[of], following[which]
    first_ms, rest_ms = known_times(decision, first, follow)
    enabled = able is not None
    prompt, prompt_value, prompt_work = best_prompts(decision, follow, prompts, None if able is None else able[of])
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
    needed |= first_of(stage.terminal, cohorts.ends, state.limits.slots)
    value = cohorts.value
    if following is programs.speculative:
        pairs = Pairs(first, follow, programs.batch[first], first_ms + rest_ms, ending, fresh, ready)
        searched = ragged_cohorts(decision, pairs, least)
        if searched is not None:
            work[searched.pairs], value[searched.pairs] = searched.work, searched.value
            needed[searched.pairs] = first_of(stage.terminal, searched.ends, state.limits.slots)
            needed[searched.pairs] |= (searched.work > 0) & (state.requests.phase != DECODE)
    legal = np.isfinite(value)
    if taken:
        work[np.arange(len(of)), prompt] = prompt_work
        needed[np.arange(len(of)), prompt] = enabled
        legal &= prompt_work > 0
    members = fill_first(needed, stage, of, programs.batch)
    padding = unused_first(decision, first, members) + unused_rows(programs, follow, work)
    found = pair_rows(decision, stage, of, follow, members, work, value + prompt_value, padding)
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


def _worth_a_look(
    decision: Decision, stage: Stage, following: np.ndarray, prompts: np.ndarray, num_lanes: int
) -> np.ndarray:
    """The decode or mixed programs whose cohorts cannot all be a smaller one's: the filter of padding, beforehand.

    Programs alike for a lane agree in every cohort when both have room for all lanes and for the
    longest prompt, unless time decides: streams gain differently by it, or retirements compete.
    Rounds are left alone: their target rows are an extent of its own.
    """
    state, programs = decision.state, decision.state.programs
    if following is programs.speculative or len(stage.terminal) or not same_age_prices(decision):
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
