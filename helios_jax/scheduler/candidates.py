"""Candidates of one decision: the best cohort of every loaded program that can run now.

Each loaded batch capacity and prompt capacity competes. A candidate is a row of `Candidates`;
what the score needs is there, and nothing about why one wins (`policy`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.cost import durations_ms
from helios_jax.scheduler.lanes import class_sources, lane_tokens, prefix_survival
from helios_jax.scheduler.packed import PromptRows, packed_cohorts
from helios_jax.scheduler.programs import ProgramTable
from helios_jax.scheduler.service import Rates, current_rates
from helios_jax.scheduler.speculation import expected_tokens
from helios_jax.scheduler.state import PROMPT, TERMINAL, State
from helios_jax.scheduler.utility import (
    EQUAL,
    Terms,
    Values,
    scaled_values,
    undominated,
)

NS_PER_MS = 1e6


class Candidates(NamedTuple):
    """One row a candidate.

    Attributes:
        first: int64 [C] program that would be submitted.
        follow: int64 [C] inference program that it prepares, -1 without one.
        members: bool [C, slots] requests in the submitted program's rows.
        lengths: int64 [C, slots] logical work of the submitted program: prompt tokens, ceilings
            of target rows, 0 in state operations.
        work: int64 [C, slots] the same of the token-producing stage.
        prompt: int64 [C] slot in the prompt row of a mixed program that is submitted, -1.
        value: float64 [C] scaled service and age credit of the whole sequence.
        duration_ms: float64 [C] known time of the whole sequence; unmeasured stages add 0.
        known: bool [C] every stage has a measured duration.
        padding: int64 [C] physical token rows and request rows left unused, over all stages (`unused_rows`).
    """

    first: np.ndarray
    follow: np.ndarray
    members: np.ndarray
    lengths: np.ndarray
    work: np.ndarray
    prompt: np.ndarray
    value: np.ndarray
    duration_ms: np.ndarray
    known: np.ndarray
    padding: np.ndarray


def single_stage(
    first: np.ndarray, work: np.ndarray, value: np.ndarray, duration_ms: np.ndarray, padding: np.ndarray,
    prompt: np.ndarray | None = None,
) -> Candidates:  # fmt: skip
    """Candidates whose submitted program produces the tokens itself; arguments as in `Candidates`."""
    nobody = np.full(len(first), -1)
    return Candidates(
        first=first,
        follow=nobody,
        members=work > 0,
        lengths=work,
        work=work,
        prompt=nobody if prompt is None else prompt,
        value=value,
        duration_ms=duration_ms,
        known=duration_ms > 0,
        padding=padding,
    )


def scores(candidates: Candidates, waiting: float) -> np.ndarray:
    """Scaled score of each candidate, float64 [C].

    Determinate: value / T - T / 2 * sum c, T being the whole sequence. Indeterminate: an
    optimistic work score, the value itself (its age credit was formed with T = 0).
    """
    duration = np.where(candidates.known, candidates.duration_ms, 1.0)
    return np.where(candidates.known, candidates.value / duration - 0.5 * duration * waiting, candidates.value)


def nearly_best(candidates: Candidates, rates: np.ndarray, waiting: float, eligible: np.ndarray) -> np.ndarray:
    """The eligible candidates whose scores equal the best one's, int64 [ties].

    Equal means up to `utility.EQUAL` of a score's own parts, value / T and T / 2 * sum c (their difference may be
    far smaller than its rounding). Totals of the same lanes are added in different orders, which
    must not decide between candidates that the tie order is for.

    Args:
        rates: float64 [C], `scores` of the candidates.
        eligible: bool [C], one at least.
    """
    parts = np.where(candidates.known, rates + candidates.duration_ms * waiting, rates)
    return np.flatnonzero(eligible & (rates >= rates[eligible].max() - EQUAL * np.abs(parts)))


class Decision(NamedTuple):
    """What all candidates of one decision share.

    Attributes:
        state: The state that is planned for.
        duration_ms: float64 [programs], 0 = not measured.
        rates: Reciprocal rates and reference intervals.
        values: Scaled prices.
        order: int64 [slots] slots, least recently used first, then by number.
        prefixes: float64 [sources, slots, depth] prefix survival that prices proposals, alpha included.
        rows: int64 [lane classes, slots] target rows of each stream, 0 where it cannot take part.
        tokens: float64 [lane classes, slots] its expected output with `prefixes`.
    """

    state: State
    duration_ms: np.ndarray
    rates: Rates
    values: Values
    order: np.ndarray
    prefixes: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray

    def slots(self, mask: np.ndarray) -> np.ndarray:
        """Slots of a bool [slots] mask, preferred order first."""
        return self.order[mask[self.order]]


def new_decision(state: State) -> Decision:
    """Freeze prices, ages and durations for one decision."""
    requests, rates, duration = state.requests, current_rates(state), durations_ms(state.costs)
    streaming, ending = requests.streams, requests.phase == TERMINAL
    since_ns = np.where(ending, requests.terminal_ns, requests.visible_ns)
    age_ms = np.where(streaming | ending, (state.now_ns - since_ns) / NS_PER_MS, 0.0)
    longest = 2.0 * float(duration.max(initial=0.0))  # a prerequisite and what follows it
    sigma = np.where(ending, terminal_interval(state, duration), rates.sigma) if ending.any() else rates.sigma
    prompting = requests.active & ~streaming
    terms = Terms(rates.token_r, rates.delivery_r, sigma, age_ms, prompting, streaming, ending)
    order = requests.last_use_ns.argsort(kind="stable")
    prefixes, tokens = rates.prefixes, rates.tokens
    if state.policy.adaptive_verification_alpha != 1.0:
        prefixes = prefix_survival(state, state.policy.adaptive_verification_alpha)
        tokens = lane_tokens(state, rates.rows, prefixes)
    values = scaled_values(state.policy, terms, longest)
    return Decision(state, duration, rates, values, order, prefixes, rates.rows, tokens)


def terminal_interval(state: State, duration_ms: np.ndarray) -> float:
    """sigma of the snapshot family, K = k being the terminal requests; NaN if nothing is measured.

    Source: scheduling-utility.md section 9, reading 6.
    """
    rows = state.programs.snapshot[duration_ms[state.programs.snapshot] > 0]
    k = int(np.count_nonzero(state.requests.phase == TERMINAL))
    if not k or not len(rows):
        return np.nan
    return float((k * duration_ms[rows] / np.minimum(state.programs.batch[rows], k)).min())


def decode_values(decision: Decision, slots: np.ndarray, duration_ms: np.ndarray) -> np.ndarray:
    """Scaled worth of one decode lane that ends after each duration; float64 [C, n].

    A lane is worth one output token, one delivery and its age credit c sigma (A + T); T is 0
    for a program without a measured duration.
    """
    values = decision.values
    service = values.output_token[slots] + values.delivery[slots]
    return service + values.age_price[slots] * (values.age_ms[slots] + duration_ms[:, None])


def delivery_lanes(
    decision: Decision, programs: np.ndarray, slots: np.ndarray, duration_ms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Worth and target rows of each decoder in each delivering program, each lane for itself.

    The worth counts the expected output of the complete prefix. Target rows that are too few for
    everybody are shared evenly here, which keeps lanes additive (a lookahead's bound; `rounds`
    prices the real allocation).

    Args:
        programs: int64 [C] row numbers.
        slots: int64 [n] streams.
        duration_ms: float64 [C] when the program's service ends, 0 if that is not known.

    Returns:
        Scaled values float64 [C, n] and rows int64 [C, n]; 0 and 0 where a stream cannot take part.
    """
    table, classes = decision.state.programs, decision.state.programs.lane_class[programs]
    rows = decision.rows[classes][:, slots]
    streams = int(np.count_nonzero(decision.rates.family >= 0))
    share = np.maximum(1, table.packed[programs] // np.minimum(table.batch[programs], max(1, streams)))
    tokens = decision.tokens[classes][:, slots]
    tight = np.flatnonzero((rows > share[:, None]).any(axis=1))
    if len(tight):
        rows[tight] = np.minimum(rows[tight], share[tight, None])
        tokens[tight] = shortened_tokens(decision, classes[tight], slots, rows[tight])
    values = decode_values(decision, slots, duration_ms) + decision.values.output_token[slots] * (tokens - 1.0)
    return np.where(rows > 0, values, 0.0), rows


def shortened_tokens(decision: Decision, classes: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Expected output of lanes that get fewer target rows than their class allows; float64 [C, n]."""
    prefixes = decision.prefixes[class_sources(decision.state)[classes]][:, slots]
    return expected_tokens(prefixes, rows)


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
    lengths, totals = packed_cohorts(prompt_rows(decision, slots), tokens, capacity)
    keep = undominated(lengths, state.programs.extents[programs]) & lengths.any(axis=1)
    keep &= ~redundant_unmeasured(decision, programs, lengths, slots, scored)
    work = scatter(lengths[keep], slots, state.limits.slots)
    padding = unused_rows(state.programs, programs[keep], work)
    return single_stage(programs[keep], work, totals[keep], decision.duration_ms[programs][keep], padding)


def prompt_slots(decision: Decision, phase: int, scored: bool) -> np.ndarray:
    """Slots of one phase whose prompts use the given kind of program, preferred order first."""
    requests = decision.state.requests
    return decision.slots((requests.phase == phase) & (requests.scored == scored))


def prompt_rows(decision: Decision, slots: np.ndarray, newly_ready: np.ndarray | None = None) -> PromptRows:
    """Work and scaled prices of prompts. Finishing one earns an output token, no delivery and no age.

    Args:
        newly_ready: bool [n] rows that a prerequisite in the same sequence makes ready.
    """
    requests, values = decision.state.requests, decision.values
    ends = (requests.boundary[slots] == requests.prompt_len[slots]) & (requests.max_tokens[slots] > 0)
    return PromptRows(
        remaining=requests.boundary[slots] - requests.consumed_len[slots],
        token_value=values.prompt_token[slots],
        bonus=np.where(ends, values.output_token[slots], 0.0),
        newly_ready=np.zeros(len(slots), np.bool_) if newly_ready is None else newly_ready,
        atoms=_atoms(decision.state, slots),
    )


def _atoms(state: State, slots: np.ndarray) -> np.ndarray | None:
    """Image spans that the next prefill of each prompt may touch, int64 [n, spans, 2], or None."""
    if not state.requests.window_images[slots].any():
        return None
    spans: list[list[tuple[int, int]]] = []
    for slot in slots.tolist():
        spec, consumed = state.specs[slot], int(state.requests.consumed_len[slot])
        images = spec.image_spans if spec else ()
        spans.append([(span.start - consumed, span.end - consumed) for span in images if span.end > consumed])
    atoms = np.zeros((len(slots), max(1, *map(len, spans)), 2), np.int64)
    for row, relative in enumerate(spans):
        atoms[row, : len(relative)] = np.array(relative, np.int64).reshape(-1, 2)
    return atoms


def prompt_programs(decision: Decision, slots: np.ndarray, scored: bool) -> np.ndarray:
    """The prompt programs worth a search: those whose cohorts cannot all be a smaller one's.

    Programs agree in every cohort when their row capacities, bounded by the prompts, and their
    token capacities, bounded by what so many prompts can use, agree. The dominance filter
    would discard the larger ones after the search; this discards them before it.
    """
    state = decision.state
    rows = state.programs.scored_prefill if scored else state.programs.prefill
    capacity, tokens = state.programs.batch[rows], state.programs.tokens[rows]
    remaining = np.sort(state.requests.boundary[slots] - state.requests.consumed_len[slots])[::-1]
    usable = np.empty((len(rows), 2), np.int64)
    np.minimum(capacity, len(slots), out=usable[:, 0])
    np.minimum(tokens, remaining.cumsum()[usable[:, 0] - 1], out=usable[:, 1])
    return rows[undominated(usable, state.programs.extents[rows])]


def redundant_unmeasured(
    decision: Decision, programs: np.ndarray, lengths: np.ndarray, slots: np.ndarray, scored: bool
) -> np.ndarray:
    """Unmeasured programs that a smaller prepared one replaces up to the next endpoint.

    Exploration excludes a larger unmeasured prefill when a prepared program of fewer tokens
    (and no more rows) consumes the same tokens up to each prompt's next message or prompt end.

    Returns:
        bool [C].
    """
    state, unmeasured = decision.state, decision.duration_ms[programs] <= 0
    if not unmeasured.any():
        return unmeasured
    to_endpoint = state.requests.endpoint[slots] - state.requests.consumed_len[slots]
    demand = np.minimum(lengths, to_endpoint).sum(axis=1)[:, None]
    num_rows = (lengths > 0).sum(axis=1)[:, None]
    prepared = state.programs.scored_prefill if scored else state.programs.prefill
    tokens, capacity = state.programs.tokens[prepared], state.programs.batch[prepared]
    smaller = (tokens < state.programs.tokens[programs, None]) & (capacity <= state.programs.batch[programs, None])
    enough = (tokens >= demand) & (capacity >= num_rows)
    return unmeasured & (smaller & enough).any(axis=1)


def redundant_mixed(decision: Decision, kind: np.ndarray, work: np.ndarray, prompt_slot: np.ndarray) -> np.ndarray:
    """Unmeasured programs whose prompt row a smaller mixed program consumes as far as the next endpoint.

    The rule of prefill exploration, applied to the prompt row: the smaller program decodes in the
    same way and has room for as many rows.

    Args:
        kind: int64 [C] mixed programs.
        work: int64 [C, slots] tokens and target rows.
        prompt_slot: int64 [C] slot of the prompt row, -1 without one.

    Returns:
        bool [C].
    """
    state, programs = decision.state, decision.state.programs
    unmeasured = decision.duration_ms[kind] <= 0
    if not unmeasured.any():
        return unmeasured
    to_endpoint = (state.requests.endpoint - state.requests.consumed_len)[prompt_slot]
    demand = np.minimum(work[np.arange(len(work)), prompt_slot], to_endpoint)[:, None]
    prepared = programs.mixed
    batch, prompt = programs.batch[prepared], programs.prompt[prepared]
    smaller = (prompt < programs.prompt[kind, None]) & (batch <= programs.batch[kind, None])
    smaller &= programs.lane_class[prepared] == programs.lane_class[kind, None]
    enough = (prompt >= demand) & (batch >= (work > 0).sum(axis=1)[:, None])
    return (prompt_slot >= 0) & unmeasured & (smaller & enough).any(axis=1)


def unused_rows(programs: ProgramTable, which: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Padding of executions: the token rows that they compute for nobody, and their empty request rows; int64 [C].

    The unit is the same for every kind, so that the tie order can compare them.

    Args:
        which: int64 [C] programs.
        work: int64 [C, n] token rows that each request uses.
    """
    return programs.physical[which] + programs.batch[which] - work.sum(axis=1) - (work > 0).sum(axis=1)


def scatter(columns: np.ndarray, slots: np.ndarray, num_slots: int) -> np.ndarray:
    """[C, n] columns of `slots` spread to [C, num_slots], zero elsewhere."""
    spread = np.zeros((len(columns), num_slots), columns.dtype)
    spread[:, slots] = columns
    return spread
