"""The whole life of state rows as a Hypothesis machine: hybrid requests, failures, ends at any time.

Beside the invariants, the books say what may be published (a prefix that its request has
consumed, once), and that nothing is held once every request is gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helios_jax.scheduler import (
    CompletionRecord,
    ExecutionTiming,
    FinishReason,
    LaneRole,
    RequestHandle,
    RequestSpec,
    State,
    admit,
    advance_to,
    can_admit,
    cancel,
    check_invariants,
    commit,
    complete,
    finish,
    plan_next,
    preempt,
)
from helios_jax.scheduler.adoption import adopt_checkpoint
from helios_jax.scheduler.captures import demand_checkpoint, identify_checkpoint
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.state_rows import RowUse
from helios_jax.scheduler.types import CheckpointPublished, CheckpointRole, ImageSpan, RequestRebound
from tests.unit.checkpoint_toy import hybrid_state
from tests.unit.scheduler_toy import MS, records_of, request

STOP = 5
ENDS = {
    "cancel": cancel,
    "preempt": preempt,
    "stop": lambda state, handle: finish(state, handle, FinishReason.STOP),
    "error": lambda state, handle: finish(state, handle, FinishReason.ERROR),
}


class RetentionMachine(RuleBasedStateMachine):
    @initialize(
        rows=st.integers(0, 5), fraction=st.sampled_from([0.0, 0.05, 1.0, 5.0]), snapshot=st.sampled_from([0, 0.1, 1]),
        stops=st.booleans(),
    )  # fmt: skip
    def start(self, rows: int, fraction: float, snapshot: float, stops: bool) -> None:
        self.state: State = hybrid_state(rows, fraction=fraction, snapshot_ms=snapshot, slots=3, stops_on_device=stops)
        self.running: dict[RequestHandle, RequestSpec] = {}
        self.flying: list[tuple[int, Any]] = []
        self.captured: set[tuple[RequestHandle, int]] = set()

    @rule(
        prompt=st.integers(2, 20), output=st.integers(1, 6), ends=st.lists(st.integers(1, 20), max_size=4),
        images=st.integers(0, 3), source=st.integers(0, 30),
    )  # fmt: skip
    def admits(self, prompt: int, output: int, ends: list[int], images: int, source: int) -> None:
        spans = tuple(ImageSpan(start, start + 3) for start in range(1, 1 + 5 * images, 5) if start + 3 <= prompt)
        spec = request(
            prompt, output, message_ends=tuple(sorted(end for end in ends if end <= prompt)),
            image_spans=spans if self.state.limits.state_rows else (),
            stop_token_ids=frozenset({STOP}), **self._source(prompt, spans, source),
        )  # fmt: skip
        if can_admit(self.state, spec):
            self.state, handle = admit(self.state, spec, self.state.now_ns)
            self.running[handle] = spec

    def _source(self, prompt: int, spans: tuple[ImageSpan, ...], choice: int) -> dict[str, int]:
        library = self.state.retention.checkpoints
        fits = [i for i, end in enumerate(library.endpoints.tolist())
                if end < prompt and not any(span.start < end < span.end for span in spans)]  # fmt: skip
        if not fits or choice % 3 == 0:
            return {}
        place = fits[choice % len(fits)]
        return {"restore_from": int(library.ids[place]), "restored_len": int(library.endpoints[place])}

    @rule(endpoint=st.integers(1, 70), sharing=st.integers(0, 20))
    def adopts(self, endpoint: int, sharing: int) -> None:
        """A state comes from outside, perhaps with pages that are here; without a place for it nothing changes."""
        library, before = self.state.retention.checkpoints, self.state
        pages = library.pages[sharing % len(library)] if len(library) and sharing % 3 else ()
        self.state, place = adopt_checkpoint(self.state, ("host", library.last_id), endpoint, pages[: endpoint // 4])
        check_invariants(self.state)
        assert (place is None) == (self.state is before)
        if place is not None:
            assert place.pages[: len(pages)] == pages[: endpoint // 4]
            assert len(set(place.pages)) == endpoint // 4

    @rule(duration=st.one_of(st.integers(0, MS), st.integers(0, 40 * 10**9)))
    def waits(self, duration: int) -> None:
        self.state = advance_to(self.state, self.state.now_ns + duration)

    @rule(times=st.integers(1, 8), token=st.integers(4, 9), spoil=st.integers(0, 12), device=st.sampled_from([0, 1, 3]))
    def serves(self, times: int, token: int, spoil: int, device: int) -> None:
        for step in range(times):
            self.submits()
            if self.flying:
                self.completes(token, spoil == step, device)

    @rule()
    def submits(self) -> None:
        for _ in range(self.state.limits.frames):
            plan = plan_next(self.state)
            if plan is not None:
                fence = self.state.last_fence + 1
                self.state = commit(self.state, plan, fence)
                self.flying.append((fence, plan))
                check_invariants(self.state)

    @precondition(lambda self: bool(self.flying))
    @rule(token=st.integers(4, 9), spoil=st.booleans(), device=st.sampled_from([0, 1, 3]))
    def completes(self, token: int, spoil: bool, device: int) -> None:
        fence, plan = self.flying.pop(0)
        records = list(records_of(plan, token))
        if spoil:
            records[0] = dataclasses.replace(records[0], valid=False, tokens=(), consumed=records[0].consumed)
        before = self.state
        for number, lane in enumerate(plan.lanes):
            at = int(before.requests.committed_len[lane.handle.slot])
            knows = before.limits.stops_on_device and fence % 2  # of the end; of one by the host it cannot
            if knows and lane.role is LaneRole.DECODE and before.requests.phase[lane.handle.slot] != Phase.DECODE:
                records[number] = CompletionRecord(lane.handle, 0, (), at, valid=records[number].valid)
        self.state = advance_to(self.state, self.state.now_ns + device * MS)
        self.state, events = complete(self.state, fence, records, ExecutionTiming((device * MS,), device * MS))
        spoiled = records[0].handle if spoil else None
        for event in events:
            if isinstance(event, CheckpointPublished):
                self._published(before, event, spoiled)
            elif isinstance(event, RequestRebound):
                self.running[event.fresh] = self.running.pop(event.handle)
        check_invariants(self.state)

    def _published(self, before: State, event: CheckpointPublished, spoiled: RequestHandle | None) -> None:
        slot, spec = event.handle.slot, self.running[event.handle]
        assert event.handle != spoiled
        assert (event.handle, event.endpoint) not in self.captured
        self.captured.add((event.handle, event.endpoint))
        assert event.endpoint == before.requests.committed_len[slot] > spec.restored_len
        ends = {end for end in spec.message_ends if spec.restored_len < end <= len(spec.prompt)}
        inside = {end for end in ends if not any(span.start < end < span.end for span in spec.image_spans)}
        match event.role:
            case CheckpointRole.ANCHOR:
                assert event.endpoint == max(inside, default=len(spec.prompt))
            case CheckpointRole.EXTRA:
                assert event.endpoint in inside
            case CheckpointRole.PROMPT_END:
                assert event.endpoint == len(spec.prompt)
            case CheckpointRole.TERMINAL:
                assert event.endpoint > len(spec.prompt)
                assert before.requests.phase[slot] == Phase.TERMINAL

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data(), how=st.sampled_from(sorted(ENDS)))
    def ends(self, data: st.DataObject, how: str) -> None:
        handle = data.draw(st.sampled_from(sorted(self.running)))
        if self.state.requests.generation[handle.slot] == handle.generation:
            self.state = ENDS[how](self.state, handle)

    @precondition(lambda self: len(self.state.retention.checkpoints) > 0)
    @rule(data=st.data(), number=st.integers(0, 3))
    def names(self, data: st.DataObject, number: int) -> None:
        """The host tells keys; equal lengths are sometimes one prefix."""
        library = self.state.retention.checkpoints
        place = data.draw(st.integers(0, len(library) - 1))
        if number and not library.pins.any():
            key = f"{library.endpoints[place]} tokens, text {number}".encode()
            self.state = identify_checkpoint(self.state, int(library.ids[place]), key)
        else:
            self.state = demand_checkpoint(self.state, int(library.ids[place]))

    @invariant()
    def holds(self) -> None:
        check_invariants(self.state)

    def teardown(self) -> None:
        """Everything that still runs ends: rows are free or published, nothing is pinned."""
        if not hasattr(self, "state"):
            return
        for handle in self.running:
            if self.state.requests.generation[handle.slot] == handle.generation:
                self.state = cancel(self.state, handle)
        for _ in range(40):
            self.submits()
            if not self.flying:
                break
            self.completes(7, False, 1)
        assert (self.state.requests.phase == Phase.FREE).all()
        assert {int(use) for use in self.state.retention.rows.use} <= {RowUse.FREE, RowUse.PUBLISHED}
        assert not self.state.retention.checkpoints.pins.any()
        assert self.state.pool.num_free + self.state.pool.num_kept == self.state.limits.pages


RetentionMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRetention = RetentionMachine.TestCase


@pytest.mark.slow
class TestRetentionAtLength(RetentionMachine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
