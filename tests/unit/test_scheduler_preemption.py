"""Promises of pages, starved streams and victims, each rule by an example that can be counted by hand.

Pages have 4 tokens. A request of 5 prompt tokens is promised 2 pages (6 positions) when it is admitted.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helios_jax.errors import CapacityError, RequestError, StalePlanError
from helios_jax.scheduler import (
    Catalog,
    ImageSpan,
    ProgramShape,
    RequestHandle,
    RequestSpec,
    Scheduler,
    State,
    admit,
    can_admit,
    cancel,
    check_invariants,
    commit,
    new_state,
    plan_next,
    preempt,
    resumed,
    state_digest,
    victim,
)
from helios_jax.scheduler.catalog import mixed_shapes
from helios_jax.scheduler.preemption import work_lost
from helios_jax.scheduler.reservation import MAX_PREEMPTIONS, headroom, page_room, promised_pages, spare_pages
from helios_jax.scheduler.state import EXTERNAL, FREE, TERMINAL
from tests.unit.every_kind_toy import every_kind_state, healthy, in_phase, run_until
from tests.unit.scheduler_toy import admitted, measured, request, small_catalog, small_limits, small_state, step

MS = 1_000_000


def run_dry(state: State, most: int = 60) -> State:
    """Serve until some stream has no page for its next token."""
    for _ in range(most):
        room = page_room(state)
        if room is not None and room.lacking.any():
            return state
        state, _, _ = step(state)
        check_invariants(state)
    raise AssertionError("nobody ran dry")


def two_streams(*, pages: int = 6, spec: RequestSpec | None = None, **limits: int) -> tuple[State, list[RequestHandle]]:
    """Two requests that together want more pages than there are."""
    first = request(5, 15)
    return admitted(small_state(pages=pages, **limits), first, first if spec is None else spec)


def test_an_admission_promises_the_prompt_and_a_step() -> None:
    limits = small_limits(pages=20)
    promised = [promised_pages(request(n, 10), limits) for n in (1, 3, 4, 7, 8)]
    assert promised == [1, 1, 2, 2, 3]
    drafting = dataclasses.replace(limits, draft_extent=3)
    assert promised_pages(request(1, 10), drafting) == 2, "1 prompt token, 1 more, 3 of drafts"
    assert promised_pages(request(4, 0, scored=True), limits) == 1, "no output, no step"


def test_each_preemption_is_promised_more() -> None:
    """Half of the pages for the rest of the output after one, all of them from MAX_PREEMPTIONS on."""
    spec, limits = request(5, 27), small_limits(pages=20)  # 8 pages at worst, 2 at first
    promised = [promised_pages(dataclasses.replace(spec, preemptions=n), limits) for n in range(5)]
    assert promised == [2, 5, 8, 8, 8]
    assert MAX_PREEMPTIONS == 2


def test_admission_leaves_the_next_page_of_everybody() -> None:
    """12 pages: three requests of 2 pages leave 6, of which one each is kept: three more of 1 page do not fit."""
    state, _ = admitted(small_state(pages=9, slots=4), *[request(5, 20)] * 3)
    assert (spare_pages(state), headroom(state)) == (3, 3)
    assert not can_admit(state, request(1, 1))
    with pytest.raises(CapacityError, match="a slot and 1 pages; 1 slots and 3 pages are free, 3 of them for the next"):
        admit(state, request(1, 1), 0)
    one_less = cancel(state, RequestHandle(1, 1))
    assert can_admit(one_less, request(9, 1)), "5 free, 2 kept"
    assert not can_admit(one_less, request(13, 1))


def test_who_cannot_grow_needs_no_headroom() -> None:
    state, _ = admitted(small_state(pages=5), request(5, 3), request(5, 3))  # worst 2 pages each
    assert headroom(state) == 0
    assert can_admit(state, request(3, 1))


def test_a_pool_for_full_contexts_never_refuses_or_preempts() -> None:
    """Every slot can hold a whole context: whatever the mix, all slots are given out and nobody is short."""
    limits = {"slots": 4, "pages": 4 * 16, "max_context": 64}
    rng = np.random.default_rng(1)
    for _ in range(5):
        state = small_state(**limits)
        for _ in range(4):
            prompt = int(rng.integers(1, 60))
            state, _ = admit(state, request(prompt, int(rng.integers(1, 64 - prompt + 1))), 0)
        for _ in range(25):
            assert victim(state) is None
            if plan_next(state) is None:
                break
            state, _, _ = step(state)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """Q3, and a request that fits alone is never refused for good."""
    state = small_state(pages=4)
    with pytest.raises(
        RequestError, match="10 prompt tokens and max_tokens 7 need 5 pages of 4 tokens, the cache has 4"
    ):
        admit(state, request(10, 7), 0)
    with pytest.raises(RequestError, match="preemptions must be an integer"):
        admit(state, request(3, 3, preemptions=-1), 0)
    assert can_admit(state, request(10, 6))
    assert can_admit(state, request(10, 6, preemptions=9))


def test_promises_grow_with_the_output_and_pages_are_recounted() -> None:
    state, handles = two_streams(pages=20)
    for _ in range(12):
        state, _, _ = step(state)
        check_invariants(state)
        held = [len(state.pool.tables[handle.slot]) for handle in handles]
        written = state.requests.written_len[:2].tolist()
        assert held == [-(-tokens // 4) for tokens in written]
    assert state.requests.reserved_pages[:2].tolist() == held
    assert min(held) > 2


def test_the_youngest_of_equal_streams_gives_way() -> None:
    """Two equal streams, 6 pages: each holds 3 when a fourth is needed, and the first keeps going."""
    state, (old, young) = two_streams()
    state = run_dry(state)
    assert state.requests.reserved_pages[:2].tolist() == [3, 3]
    assert spare_pages(state) == 0
    assert victim(state) == young
    state = preempt(state, young)
    assert victim(state) is None
    assert spare_pages(state) == 3
    while state.requests.phase[old.slot] != FREE:
        state, _, _ = step(state)
        check_invariants(state)
    assert state.pool.num_free == 6


def test_least_work_lost_gives_way_whatever_its_age() -> None:
    """The older request has a shorter prompt: it loses less."""
    state, (short, long) = admitted(small_state(pages=7), request(1, 20), request(9, 11))
    state = run_dry(state)
    assert work_lost(state, short.slot) < work_lost(state, long.slot)
    assert victim(state) == short


def test_a_newcomer_without_work_gives_way_first() -> None:
    """It was admitted when there was room; since then the stream before it has grown into the headroom."""
    state, (stream,) = admitted(small_state(pages=5), request(5, 15))
    while state.requests.output_len[stream.slot] < 8:  # 12 positions: 3 pages
        state, _, _ = step(state)
    state, (fresh,) = admitted(state, request(1, 10))
    assert (spare_pages(state), work_lost(state, fresh.slot)) == (1, 0)
    requests = state.requests.draft()
    requests.reserved_pages[fresh.slot] += 1  # somebody was promised the last page
    state = dataclasses.replace(state, requests=requests.sealed())
    assert victim(state) == fresh


def test_state_that_can_be_brought_back_is_no_loss() -> None:
    """A published checkpoint of its own makes the longer request the cheaper one."""
    state, (short, long) = admitted(every_kind_state(pages=40), request(3, 24), request(16, 24))
    state = run_until(state, lambda s: int(s.requests.output_len[long.slot]) > 2)
    assert [int(end) for end in state.retention.checkpoints.endpoints] == [3, 16]
    assert work_lost(state, short.slot) == state.requests.committed_len[short.slot] - 3
    assert work_lost(state, long.slot) == state.requests.committed_len[long.slot] - 16


def test_nothing_is_lost_of_a_state_that_has_not_come() -> None:
    state, (outside,) = admitted(every_kind_state(), request(9, 4, restored_len=8, external=True))
    assert state.requests.phase[outside.slot] == EXTERNAL
    assert work_lost(state, outside.slot) == 0


def test_the_only_one_never_gives_way() -> None:
    """It fits alone, so it cannot run dry."""
    state, (alone,) = admitted(small_state(pages=5), request(5, 15))
    while state.requests.phase[alone.slot] != FREE:
        assert victim(state) is None
        state, _, _ = step(state)


def test_who_gave_way_often_enough_is_left_alone() -> None:
    """The second has the promise of its worst case: the first has to make room although it lost more."""
    state, (first, _) = two_streams(pages=8, spec=request(5, 15, preemptions=MAX_PREEMPTIONS))
    assert state.requests.reserved_pages[:2].tolist() == [2, 5]
    state = run_dry(state)
    assert victim(state) is None, "its pages are of no use to anybody: it waits for the other to end"
    plan = plan_next(state)
    assert plan is not None
    assert [lane.handle.slot for lane in plan.lanes] == [1]
    while state.requests.phase[1] != FREE:
        state, _, _ = step(state)
    assert page_room(state) is None or not page_room(state).lacking.any()  # type: ignore[union-attr]
    state, plan, _ = step(state)
    assert plan.lanes[0].handle == first


def test_pages_on_their_way_spare_everybody() -> None:
    """A request that ended and waits for its snapshot will bring back more than is missing."""
    state, (ending, old, young) = admitted(
        every_kind_state(pages=14, draft_extent=0, slots=4), request(9, 2), *[request(5, 34)] * 2
    )
    state = run_until(state, in_phase(TERMINAL, ending))
    requests = state.requests.draft()
    requests.reserved_pages[old.slot] += spare_pages(state)
    short = dataclasses.replace(state, requests=requests.sealed())
    short = _written_to_the_brim(short, young.slot)
    room = page_room(short)
    assert room is not None
    assert room.lacking[young.slot] == 1
    assert victim(short) is None
    gone = dataclasses.replace(
        short.requests, phase=np.where(short.requests.phase == TERMINAL, FREE, short.requests.phase)
    )
    assert victim(dataclasses.replace(short, requests=gone)) in (old, young)


def _written_to_the_brim(state: State, slot: int) -> State:
    """The stream of a slot has filled its promise: its next token needs a page."""
    requests = state.requests.draft()
    requests.committed_len[slot] = requests.written_len[slot] = 4 * requests.reserved_pages[slot]
    return dataclasses.replace(state, requests=requests.sealed())


def test_the_window_drains_before_anybody_gives_way() -> None:
    """O6: pages parked behind a frame cause no preemption; behind it nothing is planned either."""
    state, (_, young) = two_streams()
    state = measured(state, lambda shape: MS * shape.batch_capacity)
    while True:
        plan = plan_next(state)
        assert plan is not None
        in_flight = commit(state, plan, state.last_fence + 1)
        if plan_next(in_flight) is None and not plan.required_empty_queue:
            break
        state, _, _ = step(state)
    assert victim(in_flight) is None
    state, _, _ = step(state)
    assert victim(state) == young


@pytest.mark.parametrize("mixed", [(), mixed_shapes(max_slots=4, buckets=(64,))])
def test_a_frame_that_certainly_ends_a_request_brings_its_pages(mixed: tuple[ProgramShape, ...]) -> None:
    """O6: the first has one token to go, which is in flight: nobody gives way, and nothing has to drain."""
    state = new_state(Catalog((*small_catalog(), *mixed)), small_limits(pages=6))
    state, (_, young) = admitted(state, request(5, 7), request(5, 15))
    state = measured(state, lambda shape: MS)
    while state.requests.output_len[0] < 6:
        state, _, _ = step(state)
    requests = state.requests.draft()
    requests.reserved_pages[young.slot] += spare_pages(state)
    state = _written_to_the_brim(dataclasses.replace(state, requests=requests.sealed()), young.slot)
    plan = plan_next(state)
    assert plan is not None
    assert [lane.handle.slot for lane in plan.lanes] == [0]
    in_flight = commit(state, plan, state.last_fence + 1)
    assert victim(in_flight) is None
    assert plan_next(in_flight) is None  # one is over behind that frame, the other one has no page yet
    state, _, _ = step(state)
    assert state.requests.phase[0] == FREE
    assert victim(state) is None
    assert plan_next(state) is not None


def test_a_plan_whose_pages_went_to_others_is_stale() -> None:
    state, (stream,) = admitted(small_state(pages=4), request(5, 9))
    while state.requests.committed_len[stream.slot] < 8:
        state, _, _ = step(state)
    plan = plan_next(state)
    assert plan is not None
    commit(state, plan, state.last_fence + 1)
    requests = state.requests.draft()
    requests.reserved_pages[1] = 2  # promised to another one meanwhile
    taken = dataclasses.replace(state, requests=requests.sealed())
    before = state_digest(taken)
    with pytest.raises(StalePlanError, match="needs 1 pages beyond its promises, 0 are free; plan again"):
        commit(taken, plan, taken.last_fence + 1)
    assert state_digest(taken) == before


def test_resumed_is_the_same_request_with_its_output_as_prompt() -> None:
    spec = request(5, 10, message_ends=(2, 5), stop_token_ids=frozenset({9}), system_end=2)
    once = resumed(spec, [7, 8, 6])
    assert once.prompt.tolist() == [0, 1, 2, 3, 4, 7, 8, 6]
    assert (once.max_tokens, once.output_len, once.preemptions) == (7, 3, 1)
    twice = resumed(once, [5])
    assert twice.prompt.tolist() == [0, 1, 2, 3, 4, 7, 8, 6, 5]
    assert (twice.max_tokens, twice.output_len, twice.preemptions) == (6, 4, 2)
    assert twice.message_ends == spec.message_ends
    assert twice.stop_token_ids == spec.stop_token_ids
    back = resumed(request(9, 4, restored_len=8, external=True), [])
    assert (back.restored_len, back.restore_from, back.external, back.preemptions) == (8, 0, True, 1)
    evicted = resumed(request(9, 4, restored_len=8, restore_from=2), [])
    assert (evicted.restored_len, evicted.restore_from, evicted.external) == (0, 0, False)
    assert resumed(spec, [7], checkpoint=(3, 5)).restored_len == 5


def test_images_that_came_with_a_state_from_outside_are_not_encoded_again() -> None:
    """Without rows for windows of images, only the restored state makes this request possible."""
    spans = (ImageSpan(0, 4), ImageSpan(4, 8))
    spec = request(9, 3, image_spans=spans, restored_len=4)
    state = every_kind_state(state_rows=0)
    assert can_admit(state, spec)
    assert can_admit(state, resumed(spec, []))
    with pytest.raises(RequestError, match="more features than the storage holds"):
        can_admit(state, dataclasses.replace(spec, restored_len=0))


def test_scoring_goes_on_only_where_it_was_not_complete() -> None:
    assert resumed(request(5, 3, scored=True), []).scored
    assert not resumed(request(5, 3, scored=True), [4]).scored


def test_a_resumed_request_numbers_its_output_on() -> None:
    """Indexes go on where they were, and the output ends at the same length."""
    state, (handle,) = admitted(small_state(pages=20), request(5, 6))
    tokens = []
    while len(tokens) < 3:
        state, _, events = step(state, token=len(tokens))
        tokens += [event for event in events if hasattr(event, "index")]
    state = preempt(state, handle)
    assert state.pool.num_free == 20
    state, _ = admitted(state, resumed(request(5, 6), [event.token for event in tokens]))
    while state.requests.phase[0] != FREE:
        state, _, events = step(state, token=len(tokens))
        tokens += [event for event in events if hasattr(event, "index")]
        check_invariants(state)
    assert [event.index for event in tokens] == list(range(6))
    assert state.counters.preempted == 1


def test_admission_that_fails_leaves_the_state() -> None:
    """O2: pure functions return a new state or none; the holder keeps what it had."""
    scheduler = Scheduler.from_state(two_streams()[0])
    before, digest = scheduler.state, state_digest(scheduler.state)
    with pytest.raises(CapacityError):
        scheduler.admit(request(20, 2), 0)
    assert scheduler.state is before
    assert state_digest(scheduler.state) == digest
    assert scheduler.victim() is None


def test_rounds_are_cut_to_the_pages_at_hand() -> None:
    """Ceilings and draft storage stay within the promises until a stream has no room for one more token."""
    state, (one, two) = admitted(every_kind_state(pages=9, state_rows=0), *[request(5, 14)] * 2)
    for _ in range(40):
        room = page_room(state)
        if room is not None and room.lacking.any():
            break
        plan = plan_next(state)
        assert plan is not None
        state = healthy(commit(state, plan, state.last_fence + 1))
        check_invariants(state)
        assert state.requests.reserved_pages.sum() <= 9
    assert victim(state) in (one, two)
