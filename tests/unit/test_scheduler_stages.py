"""The stages before and between inferences, event by event: images, windows, restores, copies, cancellation."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from helios_jax.errors import CapacityError, RequestError, StalePlanError
from helios_jax.scheduler import (
    Catalog,
    CheckpointPublished,
    CompletionRecord,
    Event,
    FinishReason,
    GeneratedToken,
    ImageSpan,
    Lane,
    LaneRole,
    Limits,
    ProgramKind,
    ProgramShape,
    RequestFinished,
    RequestHandle,
    RequestRebound,
    RequestSpec,
    ScheduledPlan,
    State,
    admit,
    advance_to,
    can_admit,
    cancel,
    check_invariants,
    commit,
    complete,
    external_ready,
    finish,
    new_state,
    plan_next,
    preempt,
    published_output,
    state_digest,
)
from helios_jax.scheduler.stages import feature_offset
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.state_rows import RowUse
from tests.unit.scheduler_toy import MS, admitted, measured, records_of, request, small_catalog, small_limits, timing

KINDS = ProgramKind


def stage_catalog(*, prefill: tuple[tuple[int, int], ...] = ((1, 4), (1, 8), (4, 8)), mixed: bool = False) -> Catalog:
    shapes = [ProgramShape(KINDS.VISION, b, t) for b, t in ((1, 2), (1, 4), (2, 4))]
    shapes += [ProgramShape(kind, b, 0) for kind in (KINDS.SNAPSHOT, KINDS.RESTORE) for b in (1, 2)]
    shapes += [ProgramShape(KINDS.MIXED, 2, 1, prefill_capacity=8)] if mixed else []
    return Catalog((*small_catalog(prefill=prefill), *shapes), aligned=False)


def stage_limits(*, rows: int = 0, features: int = 8, slots: int = 4) -> Limits:
    return dataclasses.replace(small_limits(slots=slots), state_rows=rows, feature_tokens=features)


def stage_state(*, rows: int = 0, features: int = 8, catalog: Catalog | None = None) -> State:
    return new_state(catalog or stage_catalog(), stage_limits(rows=rows, features=features))


def spans(*pairs: tuple[int, int]) -> tuple[ImageSpan, ...]:
    return tuple(ImageSpan(*pair) for pair in pairs)


class Run:
    """Drives a state frame by frame; invariants hold after every event."""

    def __init__(self, state: State, *specs: RequestSpec) -> None:
        self.state, self.handles = admitted(state, *specs)
        self.plans: list[ScheduledPlan] = []
        self.events: list[Event] = []
        check_invariants(self.state)

    def step(self, spoil: Callable[[Lane, CompletionRecord], CompletionRecord] | None = None) -> ScheduledPlan:
        """Plan, commit and complete one frame, its records changed by `spoil`."""
        plan = self.commit()
        records = records_of(plan)
        if spoil:
            records = tuple(spoil(lane, record) for lane, record in zip(plan.lanes, records, strict=True))
        self.complete(records)
        return plan

    def commit(self) -> ScheduledPlan:
        plan = plan_next(self.state)
        assert plan is not None
        self.state = commit(self.state, plan, self.state.last_fence + 1)
        check_invariants(self.state)
        self.plans.append(plan)
        return plan

    def complete(self, records: tuple[CompletionRecord, ...] | None = None) -> tuple[Event, ...]:
        self.state = advance_to(self.state, self.state.now_ns + 2 * MS)
        records = records_of(self.plans[-1]) if records is None else records
        self.state, events = complete(self.state, self.state.last_fence, records, timing(2.0))
        check_invariants(self.state)
        self.events += events
        return events

    def until(self, phase: Phase, slot: int = 0) -> Run:
        while self.state.requests.phase[slot] != phase:
            self.step()
        return self

    def to_the_end(self) -> Run:
        for _ in range(200):
            if plan_next(self.state) is None:
                break
            self.step()
        assert plan_next(self.state) is None
        return self

    @property
    def kinds(self) -> list[str]:
        return [str(plan.shape.kind) for plan in self.plans]

    def lanes(self, role: LaneRole) -> list[Lane]:
        return [lane for plan in self.plans for lane in plan.lanes if lane.role is role]

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def everything_is_free(state: State) -> bool:
    used = np.isin(state.retention.rows.use, (RowUse.FREE, RowUse.PUBLISHED))
    free = state.pool.num_free + state.pool.num_kept == state.limits.pages
    return bool((state.requests.phase == Phase.FREE).all() and used.all() and free)


# ---- one window


def test_life_of_a_request_with_images_in_one_window() -> None:
    """Initialise, one vision program an image, prefills that keep images whole, decode; no copies."""
    spec = request(20, 3, image_spans=spans((1, 4), (4, 6), (10, 13)))
    run = Run(stage_state(), spec).to_the_end()
    assert run.kinds[:4] == ["initialize", "vision", "vision", "vision"]
    assert not {"snapshot", "restore"} & set(run.kinds)
    assert [(lane.row, lane.length) for lane in run.lanes(LaneRole.VISION)] == [(0, 3), (1, 2), (2, 3)]
    assert [feature_offset(spec, run.state.limits, image) for image in range(3)] == [0, 3, 5]
    assert run.of(RequestRebound) == []
    assert [event.index for event in run.of(GeneratedToken)] == [0, 1, 2]
    assert sum(lane.length for lane in run.lanes(LaneRole.PROMPT)) == 20
    assert everything_is_free(run.state)


def test_each_vision_program_takes_images_that_it_holds() -> None:
    """Two requests, images of 2 and 4 features: the small program is only offered the small one."""
    state = measured(stage_state(), lambda shape: shape.batch_capacity * MS)
    run = Run(state, request(8, 1, image_spans=spans((0, 2))), request(8, 1, image_spans=spans((0, 4)))).to_the_end()
    for plan in run.plans:
        if plan.shape.kind is KINDS.VISION:
            assert all(lane.length <= plan.shape.token_capacity for lane in plan.lanes)


def test_what_no_program_or_storage_holds_is_refused() -> None:
    state = stage_state(features=3)
    with pytest.raises(RequestError, match="4 features, this core takes at most 3"):
        admit(state, request(9, 1, image_spans=spans((0, 4))), 0)
    with pytest.raises(RequestError, match="no state rows"):
        admit(state, request(9, 1, image_spans=spans((0, 2), (2, 4))), 0)
    with pytest.raises(RequestError, match="lies inside image 0"):
        admit(state, request(9, 1, image_spans=spans((0, 2)), system_end=1), 0)


# ---- several windows

WINDOWED = request(30, 4, image_spans=spans((2, 6), (6, 10), (12, 16), (20, 24), (26, 28)), output_len=2)


def test_life_of_a_request_with_images_in_several_windows() -> None:
    """8 features a window: images 0-1, 2-3 and 4. Copy, restore and a fresh handle between two of them.

    The last restore gives the private row back, which then takes the capture at the end of the prompt.
    """
    run = Run(stage_state(rows=1), WINDOWED)
    private = int(run.state.requests.private_row[0])
    assert private == 1
    run.to_the_end()
    stages = [kind for kind in run.kinds if kind not in ("prefill", "decode")]
    window = ["snapshot", "restore"]
    assert stages == ["initialize", "vision", "vision", *window, "vision", "vision", *window, "vision", "snapshot"]
    copies = [(lane.role, lane.row, lane.start) for lane in run.lanes(LaneRole.SNAPSHOT) + run.lanes(LaneRole.RESTORE)]
    assert copies == [(LaneRole.SNAPSHOT, 1, at) for at in (12, 26, 30)] + [
        (LaneRole.RESTORE, 1, at) for at in (12, 26)
    ]
    assert [lane.row for lane in run.lanes(LaneRole.VISION)] == [0, 1, 2, 3, 4]
    assert [feature_offset(WINDOWED, run.state.limits, image) for image in range(5)] == [0, 4, 0, 4, 0]
    handles = [RequestHandle(0, 1), RequestHandle(0, 2), RequestHandle(0, 3)]
    assert run.of(RequestRebound) == [RequestRebound(*handles[:2]), RequestRebound(*handles[1:])]
    assert [lane.handle for lane in run.lanes(LaneRole.VISION)] == [handles[0]] * 2 + [handles[1]] * 2 + [handles[2]]
    assert run.state.retention.counts.windows == 2
    assert [event.endpoint for event in run.of(CheckpointPublished)] == [30]  # private copies publish nothing
    assert everything_is_free(run.state)


def test_the_request_keeps_its_counters_over_its_windows() -> None:
    """Prompt tokens are consumed once each, output counts on from the original position, pages stay."""
    run = Run(stage_state(rows=1), WINDOWED).until(Phase.SNAPSHOT)
    table = run.state.pool.tables[0]
    assert run.state.requests.consumed_len[0] == 12
    histories = [run.state.requests.token_r[0]]
    for _ in range(2):  # a participant of both copies: starved, so its price rises
        run.step()
        histories.append(run.state.requests.token_r[0])
    assert histories[0] < histories[1] < histories[2]
    requests = run.state.requests
    assert requests.phase[0] == Phase.VISION
    assert (requests.consumed_len[0], requests.committed_len[0], requests.output_len[0]) == (12, 12, 0)
    assert np.array_equal(run.state.pool.tables[0], table)
    run.to_the_end()
    ends = np.cumsum([0] + [lane.length for lane in run.lanes(LaneRole.PROMPT)])
    assert [lane.start for lane in run.lanes(LaneRole.PROMPT)] == ends[:-1].tolist()
    assert ends[-1] == 30
    assert [event.index for event in run.of(GeneratedToken)] == [2, 3, 4, 5]
    assert {event.handle for event in run.of(GeneratedToken)} == {RequestHandle(0, 3)}


def test_window_copies_need_an_empty_queue_and_feedback() -> None:
    run = Run(stage_state(rows=1), WINDOWED).to_the_end()
    for plan in run.plans:
        if plan.shape.kind not in (KINDS.DECODE,):
            assert plan.required_empty_queue


def test_a_plan_or_handle_from_before_the_restore_is_stale() -> None:
    run = Run(stage_state(rows=1), WINDOWED).until(Phase.RESTORE)
    plan = plan_next(run.state)
    assert plan is not None
    run.step()
    with pytest.raises(StalePlanError):
        commit(run.state, plan, run.state.last_fence + 1)
    assert cancel(run.state, run.handles[0]) is run.state
    assert everything_is_free(cancel(run.state, RequestHandle(0, 2)))


def test_several_windows_wait_for_a_private_row() -> None:
    state, handles = admitted(stage_state(rows=1), WINDOWED)
    assert not can_admit(state, WINDOWED)
    with pytest.raises(CapacityError, match="state row"):
        admit(state, WINDOWED, 0)
    assert can_admit(state, request(9, 1))
    assert can_admit(cancel(state, handles[0]), WINDOWED)


def test_a_window_can_begin_where_the_one_before_ends() -> None:
    """Images side by side: the last token of one window is followed by the first image of the next."""
    spec = request(18, 2, image_spans=spans((0, 4), (4, 8), (8, 12), (12, 16)))
    run = Run(stage_state(rows=1), spec).to_the_end()
    assert [lane.start for lane in run.lanes(LaneRole.SNAPSHOT)] == [8, 18]
    assert run.of(RequestFinished)[0].reason is FinishReason.LENGTH


def test_a_private_copy_that_fails_ends_the_request() -> None:
    """Unlike an optional capture: without its state the next window cannot be opened."""
    run = Run(stage_state(rows=1), WINDOWED).until(Phase.SNAPSHOT)
    run.step(lambda lane, record: dataclasses.replace(record, valid=False))
    assert run.of(RequestFinished) == [RequestFinished(RequestHandle(0, 1), FinishReason.ERROR)]
    assert everything_is_free(run.state)


# ---- where prefills stop


@pytest.mark.parametrize("seed", range(10))
def test_no_chunk_splits_an_image_or_passes_a_boundary(seed: int) -> None:
    check_chunks(seed)


@pytest.mark.slow
def test_no_chunk_of_many_prompts_splits_an_image_or_passes_a_boundary() -> None:
    for seed in range(100, 250):
        check_chunks(seed)


def check_chunks(seed: int) -> None:
    """Random prompts, windows, programs and durations; every request ends, and every invariant holds meanwhile."""
    rng = random.Random(seed)
    tokens = sorted(rng.sample(range(4, 13), 2))
    catalog = stage_catalog(prefill=tuple((b, t) for t in tokens for b in (1, 3)), mixed=rng.random() < 0.5)
    state = stage_state(rows=rng.randint(2, 4), features=rng.randint(4, 9), catalog=catalog)
    state = measured(state, lambda _: rng.choice((0, rng.randint(1, 20) * MS)))
    specs = [random_images(rng) for _ in range(3)]
    run = Run(state)
    waiting, owners = list(specs), {}
    for _ in range(400):
        if waiting and can_admit(run.state, waiting[0]):
            run.state, handle = admit(run.state, waiting[0], run.state.now_ns)
            owners[handle] = waiting.pop(0)
        if plan_next(run.state) is None:
            break
        before = len(run.events)
        run.step()
        for event in run.events[before:]:
            if isinstance(event, RequestRebound):
                owners[event.fresh] = owners[event.handle]
    assert not waiting
    assert len(run.of(RequestFinished)) == 3
    stops: dict[int, set[int]] = {id(spec): set() for spec in specs}
    for lane in run.lanes(LaneRole.PROMPT):
        spec, end = owners[lane.handle], lane.start + lane.length
        assert not any(span.start < end < span.end for span in spec.image_spans)
        assert not lane.start < spec.system_end < end
        stops[id(spec)].add(end)
    for spec in specs:
        assert {spec.system_end, len(spec.prompt)} - {0} <= stops[id(spec)]


def random_images(rng: random.Random) -> RequestSpec:
    prompt_len, at, images = rng.randint(8, 40), 0, []
    while (at := at + rng.randint(0, 4)) < prompt_len - 4:
        images.append(ImageSpan(at, at + rng.randint(1, 4)))
        at = images[-1].end
    free = [p for p in range(1, prompt_len) if not any(span.start < p < span.end for span in images)]
    ends = tuple(sorted(rng.sample(free, min(2, len(free)))))
    return request(prompt_len, rng.randint(1, 4), image_spans=tuple(images), system_end=rng.choice((0, *free)),
                   message_ends=ends)  # fmt: skip


def test_the_system_part_ends_a_chunk() -> None:
    run = Run(stage_state(), request(20, 1, system_end=7)).to_the_end()
    assert 7 in [lane.start + lane.length for lane in run.lanes(LaneRole.PROMPT)]


# ---- restores


def test_a_restored_prefix_earns_no_service() -> None:
    """The restore is an interval without service: the price rises by D / (n tau); prefill consumes the rest only."""
    state = measured(stage_state(), lambda shape: 2 * MS)
    run = Run(state, request(20, 1, restored_len=9))
    run.commit()
    frame = run.state.frames[0]
    run.complete()
    assert run.state.requests.token_r[0] == pytest.approx(
        frame.first_token_r[0] + 2.0 / (frame.token_n[0] * state.policy.adaptation_ms)
    )
    run.to_the_end()
    assert run.kinds[0] == "restore"
    assert sum(lane.length for lane in run.lanes(LaneRole.PROMPT)) == 11
    assert run.lanes(LaneRole.PROMPT)[0].start == 9


def test_images_behind_a_restored_prefix_are_not_encoded_again() -> None:
    spec = request(20, 1, restored_len=9, image_spans=spans((1, 4), (5, 9), (9, 12)))
    run = Run(stage_state(), spec).to_the_end()
    assert [lane.row for lane in run.lanes(LaneRole.VISION)] == [2]
    assert feature_offset(spec, run.state.limits, 2) == 0


def test_external_state_takes_part_once_it_has_arrived() -> None:
    """Outside the participants and the plans until then; inside both afterwards."""
    run = Run(stage_state(), request(20, 1, restored_len=9, external=True))
    assert plan_next(run.state) is None
    run.state, other = admit(run.state, request(6, 1), run.state.now_ns)
    run.commit()
    assert run.state.frames[0].participants.tolist() == [0, 1, 0, 0]
    assert [lane.handle for lane in run.plans[0].lanes] == [other]
    run.complete()
    assert np.isnan(run.state.requests.token_r[0])
    run.state = external_ready(run.state, run.handles[0])
    check_invariants(run.state)
    assert external_ready(run.state, run.handles[0]) is run.state
    run.to_the_end()
    assert sum(lane.length for lane in run.lanes(LaneRole.PROMPT) if lane.handle == run.handles[0]) == 11


# ---- captures


def capturing(num: int = 1, *, max_tokens: int = 40) -> Run:
    """Measured programs, cheap snapshots, rows for everybody: prompts end in a capture, decode earns a terminal one."""
    state = measured(stage_state(rows=6), lambda shape: MS // 10 if shape.kind is KINDS.SNAPSHOT else 2 * MS)
    return Run(state, *[request(16, max_tokens, message_ends=(8,))] * num)


def failed_copy(lane: Lane, record: CompletionRecord) -> CompletionRecord:
    return dataclasses.replace(record, valid=lane.role is not LaneRole.SNAPSHOT)


def test_a_failed_copy_never_fails_the_request() -> None:
    """Every snapshot fails, optional and terminal ones: the request ends as it would without them."""
    run = capturing()
    while plan_next(run.state) is not None:
        run.step(failed_copy)
    assert "snapshot" in run.kinds
    assert [event.reason for event in run.of(RequestFinished)] == [FinishReason.LENGTH]
    assert len(run.of(GeneratedToken)) == 40
    assert len(run.state.retention.checkpoints) == 0
    assert everything_is_free(run.state)


def test_an_ended_request_waits_for_its_terminal_snapshot_and_leaves() -> None:
    run = capturing().until(Phase.TERMINAL)
    ended = run.of(RequestFinished)
    assert len(ended) == 1
    assert run.state.requests.terminal_ns[0] == run.state.now_ns  # its age starts when its end is known
    later = advance_to(run.state, run.state.now_ns + 7 * MS)
    fence = run.state.last_fence
    assert published_output(later, run.handles[0], fence).requests.terminal_ns[0] == run.state.now_ns
    plan = run.step()
    assert [(lane.role, lane.row > 0) for lane in plan.lanes] == [(LaneRole.SNAPSHOT, True)]
    assert run.of(RequestFinished) == ended
    assert everything_is_free(run.state)


def test_preemption_starts_the_terminal_age_without_completing_the_response() -> None:
    run = capturing(max_tokens=47).until(Phase.DECODE)
    for _ in range(20):
        run.step()
    run.state = preempt(advance_to(run.state, run.state.now_ns + 5 * MS), run.handles[0])
    check_invariants(run.state)
    assert run.state.requests.phase[0] == Phase.TERMINAL
    assert run.state.requests.terminal_ns[0] == run.state.now_ns
    run.to_the_end()
    assert run.of(RequestFinished) == []
    assert everything_is_free(run.state)


def test_terminal_rows_earn_no_service() -> None:
    """An ended request is no participant: its history stands still while others run."""
    run = capturing(2)
    run.until(Phase.DECODE, 0).until(Phase.DECODE, 1)
    for _ in range(20):
        run.step()
    run.state = finish(run.state, run.handles[0], FinishReason.STOP)
    check_invariants(run.state)
    assert run.state.requests.phase[0] == Phase.TERMINAL
    history = run.state.requests.token_r[0]
    run.commit()
    assert run.state.frames[-1].participants[0] == 0
    run.complete()
    assert run.state.requests.token_r[0] == history or np.isnan(run.state.requests.token_r[0])


# ---- cancellation

STAGES = [Phase.INITIALIZE, Phase.VISION, Phase.PROMPT, Phase.SNAPSHOT, Phase.RESTORE, Phase.DECODE]


@pytest.mark.parametrize("ends", [cancel, preempt, lambda s, h: finish(s, h, FinishReason.ERROR)])
@pytest.mark.parametrize("flying", [False, True])
@pytest.mark.parametrize("phase", STAGES)
def test_cancellation_in_every_stage_returns_everything(phase: Phase, flying: bool, ends: Callable) -> None:
    """Idle or while its frame runs: selection stops at once, resources return with the last fence."""
    run = Run(stage_state(rows=1), WINDOWED).until(phase)
    handle = RequestHandle(0, int(run.state.requests.generation[0]))
    if flying:
        run.commit()
    run.state = ends(run.state, handle)
    check_invariants(run.state)
    assert not run.state.requests.active[0]
    assert run.state.requests.phase[0] == (Phase.RETIRING if flying else Phase.FREE)
    if flying:
        assert run.complete() == ()
    assert ends(run.state, handle) is run.state
    assert everything_is_free(run.to_the_end().state)
    assert run.of(RequestFinished) == []


def test_cancellation_before_external_state_arrives() -> None:
    run = Run(stage_state(), request(20, 1, restored_len=9, external=True))
    run.state = cancel(run.state, run.handles[0])
    check_invariants(run.state)
    assert everything_is_free(run.state)
    digest = state_digest(run.state)
    assert state_digest(external_ready(run.state, run.handles[0])) == digest


def test_an_ended_request_is_not_cancelled_again() -> None:
    """Its response is complete; the snapshot goes on, and its slot is freed by it."""
    run = capturing().until(Phase.TERMINAL)
    assert cancel(run.state, run.handles[0]) is run.state
    run.commit()
    assert cancel(run.state, run.handles[0]) is run.state
    run.complete()
    assert everything_is_free(run.state)
