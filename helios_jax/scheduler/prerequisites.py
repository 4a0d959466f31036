"""Prerequisites: initialisation judged by the prefill that it enables.

Every pair of an initialise program and a following prefill program competes, with both
cohorts chosen together: newly ready prompts (at least one, at most the initialise program's
rows) beside prompts that are ready already. The pair's score is its useful value over T + F;
the submitted plan keeps the initialise program and its T, and what follows is planned anew.

For fixed shapes without a binding token capacity the lane values are additive and the limits
(rows in all, new rows) are nested, so taking rows by value is the best choice over every number
k of newly ready rows; with a binding token capacity the orders of `packed_cohorts` bound it.

The productive first-stage prefix that the specification compares with the whole sequence is
empty here: an initialise program finishes no terminal request and earns no tokens, so its own
value is zero and never beats a sequence.
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import (
    Candidates,
    Decision,
    prompt_padding,
    prompt_programs,
    prompt_rows,
    prompt_slots,
    redundant_unmeasured,
    scatter,
)
from helios_jax.scheduler.state import INITIALIZE, PROMPT
from helios_jax.scheduler.utility import packed_cohorts, undominated


def initialize_candidates(decision: Decision, *, scored: bool) -> list[Candidates]:
    """Pairs of every initialise program and every prefill (or scored prefill) program."""
    state = decision.state
    fresh = prompt_slots(decision, INITIALIZE, scored)
    if not len(fresh):
        return []
    ready = prompt_slots(decision, PROMPT, scored)
    slots = decision.order[np.isin(decision.order, np.concatenate([fresh, ready]))]
    following = prompt_programs(decision, slots, scored)
    waiting = decision.order[state.requests.phase[decision.order] == INITIALIZE]
    capacity = state.programs.batch[state.programs.initialize]
    # A larger program than the smallest that takes every waiting request has the same cohorts and more padding.
    useful = undominated(np.minimum(capacity, len(waiting))[:, None], capacity[:, None])
    return [_pairs(decision, program, following, slots, waiting) for program in state.programs.initialize[useful]]


def _pairs(
    decision: Decision, first: np.int64, following: np.ndarray, slots: np.ndarray, waiting: np.ndarray
) -> Candidates:
    """Candidates of one initialise program before each of `following`."""
    state, duration = decision.state, decision.duration_ms
    rows_first = int(state.programs.batch[first])
    tokens, capacity = state.programs.tokens[following], state.programs.batch[following]
    lengths, totals = packed_cohorts(prompt_rows(decision, slots), tokens, capacity, max_new=rows_first)
    keep = undominated(lengths, np.stack([capacity, tokens], axis=1))
    keep &= ~redundant_unmeasured(decision, following, lengths, slots, bool(state.requests.scored[slots[0]]))
    work = scatter(lengths[keep], slots, state.limits.slots)
    members = _first_rows(work > 0, waiting, rows_first)
    known = (duration[first] > 0) & (duration[following][keep] > 0)
    return Candidates(
        first=np.full(len(work), first),
        members=members,
        work=work,
        value=totals[keep],
        duration_ms=duration[first] + duration[following][keep],
        known=known,
        padding=rows_first - members.sum(axis=1) + prompt_padding(tokens[keep], capacity[keep], work),
    )


def _first_rows(served: np.ndarray, waiting: np.ndarray, capacity: int) -> np.ndarray:
    """Rows of the initialise program: those served next, then waiting ones in preferred order.

    Unused capacity advances further requests at no physical cost.
    """
    members = np.zeros(served.shape, np.bool_)
    members[:, waiting] = served[:, waiting]
    free = capacity - members.sum(axis=1, keepdims=True)
    idle = ~members[:, waiting]
    members[:, waiting] |= idle & (np.cumsum(idle, axis=1) <= free)
    return members
