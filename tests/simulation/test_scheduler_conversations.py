"""Conversations over a device that remembers tokens: what is restored is what was said, to the token.

The device stands in for a recurrent model: its state is the whole token sequence, a state row
holds one, and the next token is a hash of it. A row that is overwritten early, restored for the
wrong prefix or captured one token too late changes the answer. Every answer is compared with the
cold one, computed without any scheduler.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import CapacityError
from helios_jax.scheduler import (
    Catalog,
    CheckpointPublished,
    CompletionRecord,
    Event,
    ExecutionTiming,
    Fence,
    GeneratedToken,
    Lane,
    LaneRole,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
    State,
    admit,
    advance_to,
    awaits_capture,
    cancel,
    check_invariants,
    commit,
    complete,
    identify_checkpoint,
    plan_next,
)
from helios_jax.scheduler.catalog import ProposalSource, mixed_shapes
from helios_jax.scheduler.programs import KINDS
from helios_jax.scheduler.state_rows import RowUse
from tests.unit.checkpoint_toy import hybrid_catalog, hybrid_state
from tests.unit.scheduler_toy import MS

Tokens = tuple[int, ...]
VOCABULARY = 97
STOP = 5


def next_token(tokens: Tokens) -> int:
    drawn = hash(tokens) >> 3
    return STOP if drawn % 5 == 0 else drawn % VOCABULARY


def cold_answer(prompt: Tokens, length: int) -> Tokens:
    tokens = prompt
    while len(tokens) < len(prompt) + length and (tokens == prompt or tokens[-1] != STOP):
        tokens += (next_token(tokens),)
    return tokens[len(prompt) :]


class RecurrentDevice:
    """State of each slot and row is a token sequence; `pending` is sampled and not consumed yet."""

    def __init__(self, slots: int, rows: int, stops: bool) -> None:
        self.stops = stops
        self.slots: list[Tokens | None] = [None] * slots
        self.pending = [0] * slots
        self.rows: list[Tokens | None] = [None] * (rows + 1)

    def run(self, lane: Lane, prompt: Tokens) -> CompletionRecord:
        slot, sampled = lane.handle.slot, ()
        match lane.role:
            case LaneRole.INITIALIZE:
                self.slots[slot] = ()
            case LaneRole.RESTORE:
                self.slots[slot] = self.rows[lane.row]
            case LaneRole.SNAPSHOT:
                self.rows[lane.row] = self._of(slot)
            case LaneRole.PROMPT:
                self.slots[slot] = self._of(slot) + prompt[lane.start : lane.start + lane.length]
            case LaneRole.DECODE:
                return self._round(lane)
        if lane.emits:
            self.pending[slot] = next_token(self._of(slot))
            sampled = (self.pending[slot],)
        return CompletionRecord(lane.handle, lane.length, sampled, len(self._of(slot)))

    def _round(self, lane: Lane) -> CompletionRecord:
        """Accept some of the proposals under the lane's ceiling; leave a row alone whose output has ended."""
        slot = lane.handle.slot
        if self.stops and self.pending[slot] == STOP:
            return CompletionRecord(lane.handle, 0, (), len(self._of(slot)))
        tokens = (*self._of(slot), self.pending[slot])
        accepted = hash(tokens) % lane.length
        sampled = cold_answer(tokens, accepted + 1)
        self.slots[slot], self.pending[slot] = tokens + sampled[:-1], sampled[-1]
        end = len(self._of(slot))
        return CompletionRecord(lane.handle, len(sampled), sampled, end, offered=lane.length - 1, accepted=accepted)

    def _of(self, slot: int) -> Tokens:
        tokens = self.slots[slot]
        assert tokens is not None
        return tokens


@dataclasses.dataclass
class Turn:
    prompt: Tokens
    message_ends: tuple[int, ...]
    length: int
    abort_after: int | None = None
    answer: list[int] = dataclasses.field(default_factory=list)
    restored_len: int = 0
    done: bool = False


def heard(state: State, events: Iterable[Event], turns: Mapping[RequestHandle, Any]) -> State:
    """Add tokens to the answers of the turns (`prompt`, `answer`), and name checkpoints by their tokens."""
    for event in events:
        turn = turns[event.handle]
        if isinstance(event, GeneratedToken):
            turn.answer.append(event.token)
        elif isinstance(event, CheckpointPublished):
            tokens = (*turn.prompt, *turn.answer)[: event.endpoint]
            state = identify_checkpoint(state, event.checkpoint, tokens)
    return state


class Host:
    """Admits turns, matches prompts to checkpoints by their tokens, names what is published."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.device = RecurrentDevice(state.limits.slots, state.limits.state_rows, state.limits.stops_on_device)
        self.turns: dict[RequestHandle, Turn] = {}
        self.frames: list[tuple[Fence, ScheduledPlan, tuple[CompletionRecord, ...]]] = []
        self.ended: list[Turn] = []

    def admit(self, turn: Turn) -> bool:
        library = self.state.retention.checkpoints
        best, source = 0, 0
        for identity, key, endpoint in zip(library.ids.tolist(), library.keys, library.endpoints.tolist(), strict=True):
            if best < endpoint < len(turn.prompt) and turn.prompt[:endpoint] == key:
                best, source = endpoint, identity
        spec = RequestSpec(
            prompt=np.array(turn.prompt, np.int32), max_tokens=turn.length, message_ends=turn.message_ends,
            stop_token_ids=frozenset({STOP}), restored_len=best, restore_from=source,
        )  # fmt: skip
        try:
            self.state, handle = admit(self.state, spec, self.state.now_ns)
        except CapacityError:
            return False
        self.turns[handle], turn.restored_len = turn, best
        return True

    def step(self) -> bool:
        """Fill the window, complete the oldest frame; False when nothing is left."""
        while (plan := plan_next(self.state)) is not None:
            fence = self.state.last_fence + 1
            records = tuple(self.device.run(lane, self.turns[lane.handle].prompt) for lane in plan.lanes)
            self.state = commit(self.state, plan, fence)
            self.frames.append((fence, plan, records))
        if not self.frames:
            return False
        fence, plan, records = self.frames.pop(0)
        self.state = advance_to(self.state, self.state.now_ns + MS)
        self.state, events = complete(self.state, fence, records, ExecutionTiming((MS,), MS))
        self.state = heard(self.state, events, self.turns)
        check_invariants(self.state)
        self._finish()
        return True

    def _finish(self) -> None:
        for handle, turn in list(self.turns.items()):
            if turn.abort_after is not None and len(turn.answer) >= turn.abort_after:
                self.state = cancel(self.state, handle)
            slot_lost = self.state.requests.generation[handle.slot] != handle.generation
            if slot_lost or not self.state.requests.phase[handle.slot]:
                assert not awaits_capture(self.state, handle)
                del self.turns[handle]
                turn.done = True
                self.ended.append(turn)

    def drain(self, turns: list[Turn]) -> None:
        waiting = list(turns)
        while waiting or self.turns or self.frames:
            while waiting and self.admit(waiting[0]):
                waiting.pop(0)
            assert self.step()


def talk(host: Host, conversation: Tokens, ends: tuple[int, ...], message: Tokens, length: int) -> Turn:
    prompt = conversation + message
    return Turn(prompt, (*ends, len(conversation)) if conversation else (), length)


@pytest.mark.parametrize("fraction", [0.05, 5.0])
def test_ten_turns_restore_what_the_last_one_left(fraction: float) -> None:
    """At least the turn before the last; with terminal captures all but the last token, which has no state yet."""
    host = Host(hybrid_state(4, fraction=fraction, stops_on_device=True))
    conversation: Tokens = ()
    expected = 0
    for number in range(10):
        message = tuple(90 + (number + i) % 7 for i in range(3))
        turn = talk(host, conversation, (), message, 2)
        host.drain([turn])
        assert tuple(turn.answer) == cold_answer(turn.prompt, 2)
        assert turn.restored_len >= expected
        if fraction > 1 and number:
            assert turn.restored_len == len(conversation) - 1
        expected = len(conversation)  # the anchor of this turn: the message that ended before the new one
        conversation = (*turn.prompt, *turn.answer)


SPECULATIVE = (
    ProgramShape(ProgramKind.SPECULATIVE, 4, 1, 0, 4, proposal_source=ProposalSource.LEARNED),
    ProgramShape(ProgramKind.SPECULATIVE, 4, 3, 2, 12, proposal_source=ProposalSource.LEARNED),
    *mixed_shapes(max_slots=4, buckets=(64,), draft_tokens=2, token_capacity=12),
)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
@pytest.mark.parametrize("rows", [1, 2, 5, 12])
@pytest.mark.parametrize("more", [(), SPECULATIVE], ids=["plain", "speculative"])
def test_cached_answers_equal_cold_ones(seed: int, rows: int, more: tuple[ProgramShape, ...]) -> None:
    """Concurrent conversations with a shared system prompt, aborts and edited history, at every size of the pool."""
    random_ = random.Random(100 * rows + seed)
    fraction, catalog = random_.choice([0.0, 0.05, 1.0, 5.0]), Catalog((*hybrid_catalog(), *more))
    host = Host(hybrid_state(rows, fraction=fraction, catalog=catalog, stops_on_device=bool(seed % 2)))
    system = tuple(random_.randrange(VOCABULARY) for _ in range(6))
    talks: list[tuple[Tokens, tuple[int, ...]]] = [(system, (len(system),)) for _ in range(5)]
    served: list[Turn] = []
    for _ in range(4):
        turns = []
        for conversation, ends in talks:
            message = tuple(random_.randrange(VOCABULARY) for _ in range(random_.randint(1, 5)))
            length = random_.randint(1, 5)
            abort = random_.randint(0, length) if random_.random() < 0.25 else None
            turns.append(Turn(conversation + message, ends, length, abort))
        host.drain(turns)
        served += turns
        talks = []
        for turn in turns:
            said = (*turn.prompt, *turn.answer)
            if random_.random() < 0.2:  # the history is edited: everything after the cut is another text
                said = (*said[: random_.randint(6, len(said))], random_.randrange(VOCABULARY))
            ends = tuple(end for end in (*turn.message_ends, len(said)) if end <= len(said))
            talks.append((said, ends) if len(said) < 45 else (system, (len(system),)))
    for turn in served:
        cold = cold_answer(turn.prompt, turn.length)
        assert tuple(turn.answer) == (cold if turn.abort_after is None else cold[: len(turn.answer)])
    assert rows < 5 or any(turn.restored_len for turn in served)
    kinds = dict(zip(KINDS, host.state.counters.programs, strict=True))
    assert (kinds[ProgramKind.SPECULATIVE] + kinds[ProgramKind.MIXED] > 0) == bool(more)
    assert {RowUse(int(use)) for use in host.state.retention.rows.use} <= {RowUse.FREE, RowUse.PUBLISHED}
    for key, row in zip(host.state.retention.checkpoints.keys, host.state.retention.checkpoints.rows, strict=True):
        assert host.device.rows[row] == key, "every published row still holds its prefix"


def test_one_spare_row_and_every_row_pinned() -> None:
    """Two turns restore from the only checkpoints at once; their own captures are skipped, both are right."""
    host = Host(hybrid_state(2, fraction=0.0))
    first, second = Turn((1, 2, 3, 4, 5), (), 2), Turn((6, 7, 8, 9), (), 2)
    host.drain([first, second])
    turns = [Turn((1, 2, 3, 4, 5, *first.answer, 11), (), 3), Turn((6, 7, 8, 9, *second.answer, 12), (), 3)]
    assert all(host.admit(turn) for turn in turns)
    assert host.state.retention.checkpoints.pins.tolist() == [1, 1]
    host.drain([])
    for turn in turns:
        assert (tuple(turn.answer), turn.restored_len > 0) == (cold_answer(turn.prompt, 3), True)
