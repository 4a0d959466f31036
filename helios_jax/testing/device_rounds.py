"""Rounds of the fake device: speculative programs, and mixed ones with a prompt row beside.

The plainest form of what `aot.programs` does in arrays: a loop over lanes and tokens.

1. Proposals: the supplied copy, or guesses of a `FakeDraft`, as far as the lane has pages.
2. Confidence of each, mapped by the host's calibration; joint probability of each prefix.
3. Target rows: the host's lengths, or the best causal frontier until P rows are given.
4. Every row's token is written through the page table and judged on what is read back.
5. The accepted prefix and one token of the target's own are emitted; the last one is pending.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource, lane_width, packed_rows
from helios_jax.testing.device_programs import STATUS_NOTHING_ALLOWED
from helios_jax.testing.device_state import FakeState, Mask, Parts
from helios_jax.testing.model import FakeDraft


@dataclasses.dataclass
class _Lane:
    """One decoding row: its proposals with their confidence, and the target rows that it gets."""

    row: int
    slot: int
    table: np.ndarray
    ceiling: int
    proposals: list[int] = dataclasses.field(default_factory=list)
    confidence: list[float] = dataclasses.field(default_factory=list)
    rows: int = 0

    @property
    def joint(self) -> list[float]:
        return np.cumprod(self.confidence).tolist()


def speculative(
    state: FakeState, shape: ProgramShape, parts: Parts, out: Parts, draft: FakeDraft, mask: Mask
) -> None:  # fmt: skip
    """A complete round."""
    _round(state, shape, parts, parts["limit"], out, draft, mask, prompt_row=-1)


def mixed(state: FakeState, shape: ProgramShape, parts: Parts, out: Parts, draft: FakeDraft, mask: Mask) -> None:
    """A round with at most one prompt row, whose chunk may end with the first token."""
    prompt_row = int(parts["prefill_row"][0])
    if prompt_row >= 0:
        _prompt(state, shape, parts, out, prompt_row, mask)
    _round(state, shape, parts, parts["query_len"], out, draft, mask, prompt_row)


def _prompt(state: FakeState, shape: ProgramShape, parts: Parts, out: Parts, row: int, mask: Mask) -> None:
    slot, table = int(parts["slot"][row]), parts["page_table"][row]
    start, length = int(parts["start"][0]), int(parts["query_len"][row])
    out["tokens"][row] = -1
    state.write(table, start, parts["tokens"][:length])
    state.consume(slot, start, parts["tokens"][:length])
    state.committed[slot] = out["committed_len"][row] = start + length
    if parts["sample"][0]:
        allowed = mask(row * shape.token_capacity)
        _emit(state, parts, out, row, [state.choose(slot, state.history(table, start + length), allowed)])


def _round(
    state: FakeState, shape: ProgramShape, parts: Parts, limit: np.ndarray, out: Parts, draft: FakeDraft,
    mask: Mask, prompt_row: int,
) -> None:  # fmt: skip
    lanes = []
    for row, slot in enumerate(parts["slot"].tolist()):
        if row == prompt_row:
            continue
        out["tokens"][row] = -1
        if slot != state.dims.slots and limit[row] > 0:
            lanes.append(_Lane(row, slot, parts["page_table"][row], int(limit[row])))
    for lane in lanes:
        _propose(state, shape, parts, lane, draft)
        lane.ceiling = min(lane.ceiling, lane_width(shape), 1 + len(lane.proposals))
    _allocate(shape, lanes)
    for lane in lanes:
        _judge(state, shape, parts, out, lane, mask)


def _propose(state: FakeState, shape: ProgramShape, parts: Parts, lane: _Lane, draft: FakeDraft) -> None:
    depth, position = shape.proposal_depth, int(state.committed[lane.slot])
    room = state.room(lane.table, position + 1, depth)
    if not room:
        return
    if shape.proposal_source is ProposalSource.COPY:
        supplied = parts["proposal"][lane.row][:room].tolist()
        raw = parts["confidence"][lane.row][:room].tolist()
        there = [0 <= token < state.dims.vocab_size for token in supplied]
        count = there.index(False) if False in there else room
        lane.proposals, raw = supplied[:count], raw[:count]
    else:
        known = state.history(lane.table, position)
        tokens = [*known.tolist(), int(state.pending[lane.slot])]
        raw, prompt_len, seed = [], state.prompt_len(lane.slot), state.seed(lane.slot)
        for _ in range(room):
            guess = draft.guess(state.next_token, np.array(tokens, np.int32), prompt_len, seed)
            tokens.append(guess.token)
            raw.append(guess.confidence)
        lane.proposals = tokens[position + 1 :]
    scale, shift = parts["calibration"].tolist()
    lane.confidence = [_calibrated(value, scale, shift) for value in raw]


def _calibrated(probability: float, scale: float, shift: float) -> float:
    if (scale, shift) == (1.0, 0.0):
        return probability
    logit = math.log(probability) - math.log1p(-probability)
    return 1.0 / (1.0 + math.exp(-max(-40.0, min(40.0, scale * logit + shift))))


def _allocate(shape: ProgramShape, lanes: list[_Lane]) -> None:
    """Target rows of each lane; their sum is at most P."""
    budget = packed_rows(shape)
    if shape.kind is ProgramKind.MIXED or shape.allocation is Allocation.QUERY_LENGTH:
        for lane in lanes:
            lane.rows = min(lane.ceiling, budget)
            budget -= lane.rows
        return
    for lane in lanes:
        lane.rows = 1
    for _ in range(budget - len(lanes)):
        open_lanes = [lane for lane in lanes if lane.rows < lane.ceiling]
        if not open_lanes:
            return
        best = min(open_lanes, key=lambda lane: (-np.float32(lane.joint[lane.rows - 1]), lane.rows, lane.slot))
        best.rows += 1


def _judge(state: FakeState, shape: ProgramShape, parts: Parts, out: Parts, lane: _Lane, mask: Mask) -> None:
    position, offered = int(state.committed[lane.slot]), lane.proposals[: lane.rows - 1]
    rows = np.array([state.pending[lane.slot], *offered], np.int32)
    state.write(lane.table, position, rows)
    emitted: list[int] = []
    for depth in range(lane.rows):
        history = state.history(lane.table, position + 1 + depth)
        token = state.choose(lane.slot, history, mask(lane.row * shape.token_capacity + depth))
        emitted.append(token)
        if depth == len(offered) or token != offered[depth]:
            break
    if emitted[-1] < 0 and len(emitted) > 1:  # nothing may follow the proposal: it counts as not made
        emitted.pop()
        offered = offered[: len(emitted) - 1]
    if _emit(state, parts, out, lane.row, emitted):
        state.consume(lane.slot, position, rows[: len(emitted)])
        state.committed[lane.slot] = position + len(emitted)
        out["offered"][lane.row], out["accepted"][lane.row] = len(offered), len(emitted) - 1
    out["committed_len"][lane.row] = state.committed[lane.slot]
    count = len(lane.proposals)
    if count:
        out["confidence"][0, lane.slot, :count] = lane.confidence
        out["confidence"][1, lane.slot, :count] = np.cumprod(np.array(lane.confidence, np.float32))
    if offered:
        out["survival"][lane.slot, : len(offered)] = np.arange(len(offered)) < len(emitted) - 1


def _emit(state: FakeState, parts: Parts, out: Parts, row: int, tokens: list[int]) -> bool:
    """Report the tokens of a row; False where a mask allows none."""
    slot = int(parts["slot"][row])
    if tokens[0] < 0:
        out["status"][row] = STATUS_NOTHING_ALLOWED
        return False
    out["tokens"][row, : len(tokens)] = tokens
    out["num_tokens"][row] = len(tokens)
    state.pending[slot] = tokens[-1]
    if parts["want_logprobs"][0]:
        for index, token in enumerate(tokens):
            state.describe(token, out, (row, index))
    return True
