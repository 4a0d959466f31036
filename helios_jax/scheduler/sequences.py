"""Sequences that begin with a prerequisite: whom it serves, what retirements are worth, redundant padding.

What `pairs` and `multistage` share. A sequence is a prerequisite program of duration T and,
in a pair, an inference of duration F behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.candidates import Candidates, Decision, scatter
from helios_jax.scheduler.stages import next_features
from helios_jax.scheduler.utility import undominated


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


def known_times(decision: Decision, first: np.ndarray, follow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T and F of pairs, ms; both 0 where one is not measured."""
    first_ms, rest_ms = decision.duration_ms[first], decision.duration_ms[follow]
    known = (first_ms > 0) & (rest_ms > 0)
    return np.where(known, first_ms, 0.0), np.where(known, rest_ms, 0.0)


def first_of(slots: np.ndarray, count: np.ndarray, num_slots: int) -> np.ndarray:
    """bool [C, num_slots]: the first `count` of `slots`."""
    return scatter(np.arange(len(slots)) < count[:, None], slots, num_slots)


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


def unused_first(decision: Decision, first: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Padding of prerequisites, int64 [C]: empty request rows, and of image encoders the token rows without features.

    Args:
        first: int64 [C] programs of one kind.
        members: bool [C, slots] whom they serve.
    """
    state, programs = decision.state, decision.state.programs
    unused = programs.batch[first] - members.sum(axis=1)
    if not len(first) or not programs.physical[first[0]]:
        return unused
    slots = np.flatnonzero(members.any(axis=0))
    return unused + programs.physical[first] - members[:, slots] @ next_features(state, slots)


def pair_rows(
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
