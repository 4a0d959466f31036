"""Candidates of one decision: the best cohort of every loaded program that can run now.

Each loaded batch capacity and prompt capacity competes. A candidate is a row of `Candidates`;
what the score needs is there, and nothing about why one wins (`policy`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.cost import durations_ms
from helios_jax.scheduler.service import Rates, current_rates
from helios_jax.scheduler.state import DECODE, INITIALIZE, PROMPT, State
from helios_jax.scheduler.utility import (
    PromptRows,
    Values,
    packed_cohorts,
    scaled_values,
    top_cohorts,
    undominated,
)

NS_PER_MS = 1e6


class Candidates(NamedTuple):
    """One row a candidate.

    Attributes:
        first: int64 [C] program that would be submitted.
        members: bool [C, slots] requests in that program's rows.
        work: int64 [C, slots] tokens of each request in the token-producing stage.
        value: float64 [C] scaled service and age credit of the whole sequence.
        duration_ms: float64 [C] known time of the whole sequence; unmeasured stages add 0.
        known: bool [C] every stage has a measured duration.
        padding: int64 [C] physical rows and tokens left unused, over all stages.
    """

    first: np.ndarray
    members: np.ndarray
    work: np.ndarray
    value: np.ndarray
    duration_ms: np.ndarray
    known: np.ndarray
    padding: np.ndarray


class Decision(NamedTuple):
    """What all candidates of one decision share.

    Attributes:
        state: The state that is planned for.
        duration_ms: float64 [programs], 0 = not measured.
        rates: Reciprocal rates and reference intervals.
        values: Scaled prices.
        order: int64 [slots] slots, least recently used first, then by number.
    """

    state: State
    duration_ms: np.ndarray
    rates: Rates
    values: Values
    order: np.ndarray


def new_decision(state: State) -> Decision:
    """Freeze prices, ages and durations for one decision."""
    requests, rates, duration = state.requests, current_rates(state), durations_ms(state.costs)
    decoding = requests.phase == DECODE
    age_ms = np.where(decoding, (state.now_ns - requests.visible_ns) / NS_PER_MS, 0.0)
    longest = 2.0 * float(duration.max(initial=0.0))  # a prerequisite and what follows it
    values = scaled_values(
        state.policy, rates.token_r, rates.delivery_r, rates.sigma, age_ms,
        requests.runnable & ~decoding, decoding, longest,
    )  # fmt: skip
    order = np.lexsort((np.arange(len(age_ms)), requests.last_use_ns))
    return Decision(state, duration, rates, values, order)


def decode_candidates(decision: Decision) -> Candidates | None:
    """One candidate a decode program: its highest additive lane values.

    A lane is worth one output token, one delivery and its age credit c sigma (A + T); T is 0
    for a program without a measured duration.
    """
    state, values = decision.state, decision.values
    slots = decision.order[state.requests.phase[decision.order] == DECODE]
    if not len(slots):
        return None
    rows = state.programs.decode
    capacity, duration = state.programs.batch[rows], decision.duration_ms[rows]
    service = values.output_token[slots] + values.delivery[slots]
    lane_values = service + values.age_price[slots] * (values.age_ms[slots] + duration[:, None])
    chosen, totals = top_cohorts(lane_values, capacity)
    keep = undominated(chosen, capacity[:, None])
    members = scatter(chosen[keep], slots, state.limits.slots)
    return Candidates(
        first=rows[keep],
        members=members,
        work=members.astype(np.int64),
        value=totals[keep],
        duration_ms=duration[keep],
        known=duration[keep] > 0,
        padding=capacity[keep] - members.sum(axis=1),
    )


def prefill_candidates(decision: Decision, *, scored: bool) -> Candidates | None:
    """One candidate a prefill (or scored prefill) program over the prompts that are ready.

    Scored requests use scored programs only, and those serve nobody else.
    """
    state = decision.state
    slots = prompt_slots(decision, PROMPT, scored)
    if not len(slots):
        return None
    programs = prompt_programs(decision, slots, scored)
    tokens, capacity = state.programs.tokens[programs], state.programs.batch[programs]
    lengths, totals = packed_cohorts(prompt_rows(decision, slots), tokens, capacity, max_new=0)
    keep = undominated(lengths, np.stack([capacity, tokens], axis=1))
    keep &= ~redundant_unmeasured(decision, programs, lengths, slots, scored)
    work = scatter(lengths[keep], slots, state.limits.slots)
    duration = decision.duration_ms[programs][keep]
    return Candidates(
        first=programs[keep],
        members=work > 0,
        work=work,
        value=totals[keep],
        duration_ms=duration,
        known=duration > 0,
        padding=prompt_padding(tokens[keep], capacity[keep], work),
    )


def prompt_slots(decision: Decision, phase: int, scored: bool) -> np.ndarray:
    """Slots of one phase whose prompts use the given kind of program, preferred order first."""
    requests, order = decision.state.requests, decision.order
    return order[(requests.phase[order] == phase) & (requests.scored[order] == scored)]


def prompt_rows(decision: Decision, slots: np.ndarray) -> PromptRows:
    """Work and scaled prices of prompts. Finishing one earns an output token, no delivery and no age."""
    requests, values = decision.state.requests, decision.values
    return PromptRows(
        remaining=requests.prompt_len[slots] - requests.consumed_len[slots],
        token_value=values.prompt_token[slots],
        bonus=np.where(requests.max_tokens[slots] > 0, values.output_token[slots], 0.0),
        newly_ready=requests.phase[slots] == INITIALIZE,
    )


def prompt_programs(decision: Decision, slots: np.ndarray, scored: bool) -> np.ndarray:
    """The prompt programs worth a search: those whose cohorts cannot all be a smaller one's.

    Programs agree in every cohort when their row capacities, bounded by the prompts, and their
    token capacities, bounded by what so many prompts can use, agree. The dominance filter
    would discard the larger ones after the search; this discards them before it.
    """
    state = decision.state
    rows = state.programs.scored_prefill if scored else state.programs.prefill
    capacity, tokens = state.programs.batch[rows], state.programs.tokens[rows]
    remaining = np.sort(state.requests.prompt_len[slots] - state.requests.consumed_len[slots])[::-1]
    usable_rows = np.minimum(capacity, len(slots))
    usable_tokens = np.minimum(tokens, np.cumsum(remaining)[usable_rows - 1])
    return rows[undominated(np.stack([usable_rows, usable_tokens], 1), np.stack([capacity, tokens], 1))]


def redundant_unmeasured(
    decision: Decision, programs: np.ndarray, lengths: np.ndarray, slots: np.ndarray, scored: bool
) -> np.ndarray:
    """Unmeasured programs that a smaller prepared one replaces up to the next endpoint.

    Exploration excludes a larger unmeasured prefill when a prepared program of fewer tokens
    (and no more rows) consumes the same tokens up to each prompt's next message or prompt end.

    Returns:
        bool [C].
    """
    state = decision.state
    to_endpoint = state.requests.endpoint[slots] - state.requests.consumed_len[slots]
    demand = np.minimum(lengths, to_endpoint).sum(axis=1)[:, None]
    num_rows = (lengths > 0).sum(axis=1)[:, None]
    prepared = state.programs.scored_prefill if scored else state.programs.prefill
    tokens, capacity = state.programs.tokens[prepared], state.programs.batch[prepared]
    smaller = (tokens < state.programs.tokens[programs, None]) & (capacity <= state.programs.batch[programs, None])
    enough = (tokens >= demand) & (capacity >= num_rows)
    return (decision.duration_ms[programs] <= 0) & (smaller & enough).any(axis=1)


def prompt_padding(tokens: np.ndarray, capacity: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Unused tokens and request rows of prefills, int64 [C]."""
    return tokens - work.sum(axis=1) + capacity - (work > 0).sum(axis=1)


def scatter(columns: np.ndarray, slots: np.ndarray, num_slots: int) -> np.ndarray:
    """[C, n] columns of `slots` spread to [C, num_slots], zero elsewhere."""
    spread = np.zeros((len(columns), num_slots), columns.dtype)
    spread[:, slots] = columns
    return spread
