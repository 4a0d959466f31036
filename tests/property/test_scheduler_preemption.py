"""Pages under pressure: the shares against a loop, and random lives with pools that are too small for them.

A life is what an engine does: preempt, admit, plan, commit, complete, with up to two frames outstanding.
Committing must never fail for lack of pages, whatever was planned; somebody must always be able to go on.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.errors import CapacityError
from helios_jax.scheduler import (
    FinishReason,
    GeneratedToken,
    Limits,
    PolicyConfig,
    RequestFinished,
    RequestHandle,
    RequestSpec,
    State,
    admit,
    advance_to,
    cancel,
    check_invariants,
    commit,
    finish,
    new_state,
    plan_next,
    preempt,
    resumed,
    victim,
)
from helios_jax.scheduler.reservation import MAX_PREEMPTIONS, page_room
from helios_jax.scheduler.state import DECODE
from tests.property import machine_kit as kit
from tests.property.machine_jobs import Flight, Job
from tests.unit.every_kind_toy import complete_any
from tests.unit.scheduler_toy import measured, request, small_limits, small_state

COLUMNS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(1, 20), st.integers(1, 100)), min_size=1, max_size=6,
    unique_by=lambda row: row[3],
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(COLUMNS, st.integers(0, 12), st.integers(0, 5))
def test_shares_are_disjoint_and_the_oldest_are_served_first(rows: list[tuple], spare: int, extent: int) -> None:
    """Against a loop that hands out one page at a time; (committed, promised beyond, output left, admission)."""
    base = small_state(slots=6)
    requests = base.requests.draft()
    for slot, (committed, beyond, left, number) in enumerate(rows):
        requests.phase[slot], requests.committed_len[slot], requests.admission[slot] = DECODE, committed, number
        requests.max_tokens[slot] = left
        requests.reserved_pages[slot] = -(-committed // 4) + beyond
    pages = int(requests.reserved_pages.sum()) + spare
    limits = small_limits(slots=6, pages=pages)
    limits = dataclasses.replace(limits, draft_extent=extent)
    room = page_room(dataclasses.replace(base, requests=requests.sealed(), limits=limits))
    rest, blocked, granted = spare, False, {}
    order = sorted(range(len(rows)), key=lambda slot: rows[slot][3])
    for slot in order:
        committed, beyond, _, _ = rows[slot]
        need = max(0, -(-(committed + 1 + extent) // 4) - (-(-committed // 4) + beyond))
        blocked |= need > rest
        if need and blocked:
            assert room is not None
            assert (room.end[slot], room.lacking[slot] > 0) == (0, True)
            continue
        rest -= need
        granted[slot] = -(-committed // 4) + beyond + need
    for slot in order:  # programs of the small catalogue decode one token: nothing is wider
        if slot in granted and room is not None:
            assert room.end[slot] == 4 * granted[slot]
            assert room.lacking[slot] == 0


class Life:
    """A scheduler under pressure, and what its requests have produced."""

    def __init__(self, seed: int, **changes: object) -> None:
        self.rng = rng = random.Random(seed)
        size, extent = rng.choice([2, 4]), rng.choice([0, 2, 3])
        self.limits = Limits(
            slots=rng.choice([3, 5, 8]), pages=-(-(36 + extent) // size) + rng.randint(0, 4), page_size=size,
            max_context=40, draft_extent=extent, frames=rng.choice([1, 2]),
        )  # fmt: skip
        policy = PolicyConfig(
            speculation=rng.choice(["adaptive", "adaptive", "off", "fixed"]),
            output_token_value=rng.choice([0.5, 64.0]),
            **changes,  # type: ignore[arg-type]
        )
        catalog = kit.catalogue(mixed=rng.random() < 0.3, plain=True)
        self.state = measured(new_state(catalog, self.limits, policy), kit.draw_durations(rng, catalog).__getitem__)
        self.waiting: list[tuple[int, RequestSpec]] = []
        self.running: dict[RequestHandle, tuple[int, RequestSpec]] = {}
        self.out: dict[int, list[int]] = {}
        self.wanted: dict[int, int] = {}
        self.preempted: Counter[int] = Counter()
        self.states = self.ended = 0

    def arrive(self, number: int) -> None:
        for _ in range(number):
            spec = request(self.rng.randint(1, 6), self.rng.choice([1, 12, 20, 30]))
            key = len(self.wanted)
            self.wanted[key], self.out[key] = spec.max_tokens, []
            self.waiting.append((key, spec))

    def checked(self, state: State) -> None:
        self.state, self.states = state, self.states + 1
        check_invariants(state)

    def make_room(self) -> None:
        while (handle := victim(self.state)) is not None:
            key, spec = self.running.pop(handle)
            output = self.out[key][spec.output_len :]
            self.waiting.insert(0, (key, resumed(spec, output)))
            self.waiting.sort(key=lambda entry: entry[0])
            self.preempted[key] += 1
            self.checked(preempt(self.state, handle))

    def admit(self) -> None:
        while self.waiting:
            _, spec = self.waiting[0]
            try:
                state, handle = admit(self.state, spec, self.state.now_ns)
            except CapacityError:
                return
            self.running[handle] = self.waiting.pop(0)
            self.checked(state)

    def step(self) -> bool:
        self.make_room()
        self.admit()
        while (plan := plan_next(self.state)) is not None:
            self.checked(commit(self.state, plan, self.state.last_fence + 1))
        if not self.state.frames:
            assert not self.running
            assert not self.waiting, "somebody can always go on"
            return False
        self.complete()
        return True

    def complete(self) -> None:
        frame = self.state.frames[0]
        jobs = [self._job(lane.handle) for lane in frame.plan.lanes]
        flight = Flight(frame.fence, frame.plan, jobs, [], frame.dispatched_ns, frame.alone)
        report = kit.draw_report(self.rng, self, flight, calm=True)  # type: ignore[arg-type]
        self.checked(advance_to(self.state, self.state.now_ns + 10**6))
        state, events = complete_any(self.state, frame.fence, *report)
        for event in events:
            if event.handle not in self.running:
                continue
            key, _ = self.running[event.handle]
            if isinstance(event, GeneratedToken):
                assert event.index == len(self.out[key]), "each token is delivered once"
                self.out[key].append(event.token)
            elif isinstance(event, RequestFinished):
                del self.running[event.handle]
                assert len(self.out[key]) == self.wanted[key]
                self.ended += 1
        self.checked(state)

    def _job(self, handle: RequestHandle) -> Job:
        """What the report needs to know of a lane."""
        slot, requests = handle.slot, self.state.requests
        spec = self.state.specs[slot]
        assert spec is not None
        consumed, committed = int(requests.consumed_len[slot]), int(requests.committed_len[slot])
        return Job(0, spec, handle, "", consumed, committed, 0, 0, 0, False, None,  # type: ignore[arg-type]
                   out=[0] * int(requests.output_len[slot]))  # fmt: skip


def live(seed: int, requests: int) -> Life:
    """A whole life: requests come in two waves, some are cancelled or stopped, all others end complete."""
    life = Life(seed)
    life.arrive(requests)
    steps = 0
    while life.step():
        steps += 1
        assert steps < 200 * requests, "no progress"
        if steps == 10:
            life.arrive(requests // 2)
        if life.running and life.rng.random() < 0.03:
            handle = life.rng.choice(list(life.running))
            key, _ = life.running.pop(handle)
            how = life.rng.random() < 0.5
            life.checked(cancel(life.state, handle) if how else finish(life.state, handle, FinishReason.STOP))
            life.wanted[key] = -1
    assert life.state.pool.num_free == life.limits.pages
    assert not life.state.requests.reserved_pages.any()
    assert max(life.preempted.values(), default=0) <= MAX_PREEMPTIONS
    for key, most in life.wanted.items():
        assert most in (-1, len(life.out[key]))
    return life


@pytest.mark.parametrize("seed", range(4))
def test_lives_under_pressure_end_complete(seed: int) -> None:
    assert live(seed, 8).ended > 0


@pytest.mark.slow
def test_ten_thousand_states_never_lack_pages() -> None:
    states = preempted = seed = 0
    while states < 10_000:
        life = live(1000 + seed, 16)
        states, preempted, seed = states + life.states, preempted + sum(life.preempted.values()), seed + 1
    assert preempted > 100
