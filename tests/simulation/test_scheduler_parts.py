"""Prompts that begin with pages of a part of a checkpoint: who holds them, what runs, and that answers stay the same.

The device has pages of tokens, and an answer is a hash of what it reads through the page table: a page that is given
to two, or written by one of two who share it, changes an answer.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from helios_jax.errors import CapacityError, ConfigError, RequestError
from helios_jax.scheduler import (
    CheckpointPublished,
    CompletionRecord,
    ExecutionTiming,
    Lane,
    LaneRole,
    ProgramKind,
    RequestHandle,
    RequestSpec,
    State,
    admit,
    advance_to,
    check_invariants,
    commit,
    complete,
    new_state,
    plan_next,
)
from helios_jax.scheduler.programs import KINDS
from tests.simulation.test_scheduler_conversations import STOP, VOCABULARY, Tokens, cold_answer, heard, next_token
from tests.unit.checkpoint_toy import asked, hybrid_catalog, hybrid_state, run
from tests.unit.scheduler_toy import MS

PAGE = 4


class PagedDevice:
    """Attention: what a request has read is in its pages, and in nothing else. A row has one page."""

    def __init__(self, state: State) -> None:
        self.pages = np.full((state.limits.pages + 1, PAGE), -1, np.int64)
        self.rows = np.full((state.limits.state_rows + 1, PAGE), -1, np.int64)
        self.pending = [0] * state.limits.slots

    def run(self, lane: Lane, table: np.ndarray, prompt: Tokens) -> CompletionRecord:
        slot, end, sampled = lane.handle.slot, lane.start + lane.length, ()
        match lane.role:
            case LaneRole.SNAPSHOT if lane.start % PAGE:
                self.rows[lane.row] = self.pages[table[lane.start // PAGE]]
            case LaneRole.RESTORE if lane.start % PAGE:
                self.pages[table[lane.start // PAGE]] = self.rows[lane.row]
            case LaneRole.PROMPT:
                self._write(table, lane.start, prompt[lane.start : end])
            case LaneRole.DECODE:
                self._write(table, lane.start, (self.pending[slot],))
        if lane.emits:
            positions = np.arange(end)
            self.pending[slot] = next_token(tuple(self.pages[table[positions // PAGE], positions % PAGE].tolist()))
            sampled = (self.pending[slot],)
        consumed = lane.length if lane.role in (LaneRole.PROMPT, LaneRole.DECODE) else 0
        return CompletionRecord(lane.handle, consumed, sampled, lane.start + consumed)

    def _write(self, table: np.ndarray, start: int, tokens: Tokens) -> None:
        for position, token in enumerate(tokens, start):
            self.pages[table[position // PAGE], position % PAGE] = token


@dataclasses.dataclass
class Turn:
    prompt: Tokens
    length: int
    restored_len: int = 0
    answer: list[int] = dataclasses.field(default_factory=list)


def common(one: Tokens, other: Tokens) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Host:
    """Serves turns, a frame at a time; every prompt begins with as much of a checkpoint as it can."""

    def __init__(self, state: State) -> None:
        self.state, self.device = state, PagedDevice(state)
        self.turns: dict[RequestHandle, Turn] = {}

    def match(self, prompt: Tokens) -> tuple[int, int]:
        """(tokens, checkpoint)"""
        library, best = self.state.retention.checkpoints, (0, 0)
        for identity, key, endpoint in zip(library.ids.tolist(), library.keys, library.endpoints.tolist(), strict=True):
            shared = min(common(prompt, key), len(prompt) - 1)
            best = max(best, (shared if shared == endpoint else shared // PAGE * PAGE, identity))
        return best if best[0] else (0, 0)

    def admit(self, turn: Turn) -> bool:
        turn.restored_len, source = self.match(turn.prompt)
        spec = RequestSpec(
            prompt=np.array(turn.prompt, np.int32), max_tokens=turn.length, restored_len=turn.restored_len,
            restore_from=source, stop_token_ids=frozenset({STOP}),
        )  # fmt: skip
        try:
            self.state, handle = admit(self.state, spec, self.state.now_ns)
        except CapacityError:
            return False
        check_invariants(self.state)
        self.turns[handle] = turn
        return True

    def step(self) -> None:
        plan = plan_next(self.state)
        assert plan is not None
        fence = self.state.last_fence + 1
        self.state = commit(self.state, plan, fence)
        check_invariants(self.state)
        tables = self.state.pool.tables
        records = [
            self.device.run(lane, tables[lane.handle.slot], self.turns[lane.handle].prompt) for lane in plan.lanes
        ]
        self.state = advance_to(self.state, self.state.now_ns + MS)
        self.state, events = complete(self.state, fence, records, ExecutionTiming((MS,), MS))
        self.state = heard(self.state, events, self.turns)
        check_invariants(self.state)

    def drain(self, turns: list[Turn]) -> None:
        waiting = list(turns)
        while waiting or self.state.requests.phase.any():
            while waiting and self.admit(waiting[0]):
                waiting.pop(0)
            self.step()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@pytest.mark.parametrize(("pages", "rows"), [(24, 3), (40, 8), (200, 60)])
def test_answers_are_the_cold_ones(seed: int, pages: int, rows: int) -> None:
    """Conversations that go on, fork anywhere and share a system prompt, at every size of pool and library."""
    rng = random.Random(1000 * pages + seed)
    host = Host(hybrid_state(rows, pages=pages, shares_parts=True, fraction=rng.choice([0.0, 0.05, 5.0])))
    system = tuple(rng.randrange(VOCABULARY) for _ in range(9))
    said, served = [system], []
    for _ in range(6):
        turns = []
        for _ in range(rng.randint(1, 4)):
            before = rng.choice(said)
            kept = before[: rng.randint(9, len(before))]
            message = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9)))
            turns.append(Turn(kept + message if len(kept) < 40 else system + message, rng.randint(1, 6)))
        host.drain(turns)
        served += turns
        said += [(*turn.prompt, *turn.answer) for turn in turns]
    for turn in served:
        assert tuple(turn.answer) == cold_answer(turn.prompt, turn.length)
    assert sum(turn.restored_len > 0 for turn in served) > len(served) // 4
    pool = host.state.pool
    assert (pool.used, pool.num_free + pool.num_kept) == (0, pages)


def test_hits_are_a_smooth_function_of_what_is_shared() -> None:
    """A prompt that shares n tokens with an earlier one computes all but the whole pages of them."""
    told = tuple(range(40))
    host = Host(hybrid_state(60, pages=700, shares_parts=True))
    host.drain([Turn(told, 1)])
    for shared in range(1, 3 * PAGE + 2):
        turn = Turn((*told[:shared], 50 + shared, 91, 92), 1)
        host.drain([turn])
        assert turn.restored_len == shared // PAGE * PAGE


def test_a_part_is_shared_without_a_restore_and_outlives_its_checkpoint() -> None:
    state = hybrid_state(1, shares_parts=True, pages=12)
    state, _, _ = run(asked(state, 18, 1)[0])
    (source,) = state.retention.checkpoints.pages
    demand = state.retention.checkpoints.demand_ns.tolist()
    state = advance_to(state, state.now_ns + MS)
    state, handle = asked(state, 30, 2, restore_from=1, restored_len=12)
    assert state.pool.tables[handle.slot].tolist() == list(source[:3])
    assert state.retention.checkpoints.pins.tolist() == [0]
    assert state.retention.checkpoints.demand_ns.tolist() == demand
    state, events, plans = run(state)
    kinds = [plan.shape.kind for plan in plans]
    assert ProgramKind.RESTORE not in kinds
    assert sum(lane.length for plan in plans for lane in plan.lanes if lane.role is LaneRole.PROMPT) == 18
    assert state.retention.counts.evicted == 1, "the only row went to the new prompt's own checkpoint"
    assert set(state.retention.checkpoints.pages[0]) >= set(source[:3])
    assert [event.endpoint for event in events if isinstance(event, CheckpointPublished)] == [30]


@pytest.mark.parametrize("restored_len", [0, 3, 10, 13, 20])
def test_a_part_is_whole_pages_of_what_is_there(restored_len: int) -> None:
    state, _, _ = run(asked(hybrid_state(2, shares_parts=True), 18, 1)[0])
    with pytest.raises(RequestError, match="covers 18 tokens"):
        asked(state, 30, 2, restore_from=1, restored_len=restored_len)


def test_parts_are_refused_where_state_is_more_than_pages() -> None:
    state, _, _ = run(asked(hybrid_state(2), 18, 1)[0])
    with pytest.raises(RequestError, match="covers 18 tokens"):
        asked(state, 30, 2, restore_from=1, restored_len=12)
    limits = dataclasses.replace(state.limits, shares_parts=True, draft_extent=2)
    with pytest.raises(ConfigError, match="draft's context"):
        new_state(hybrid_catalog(), limits)


def test_a_core_that_never_restores_shares_parts() -> None:
    """Programs for restores are for whole checkpoints; pages need none."""
    catalog = dataclasses.replace(
        hybrid_catalog(), shapes=tuple(s for s in hybrid_catalog().shapes if s.kind is not ProgramKind.RESTORE)
    )
    state, _, _ = run(asked(hybrid_state(4, shares_parts=True, catalog=catalog), 18, 1)[0])
    with pytest.raises(RequestError, match="no restore programs"):
        asked(state, 30, 2, restore_from=1, restored_len=18)
    state, _, _ = run(asked(state, 30, 2, restore_from=1, restored_len=12)[0])
    assert dict(zip(KINDS, state.counters.programs, strict=True))[ProgramKind.INITIALIZE] == 2
