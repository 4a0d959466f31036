"""Each numbered invariant has a planted corruption that sets off exactly its alarm."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import RequestHandle, State, check_invariants, commit, plan_next
from helios_jax.scheduler import invariants as invariants_module
from helios_jax.scheduler.catalog import ProgramShape
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import DECODE, admitted, decoding_state, measured, request

Corruption = Callable[[State], State]


def busy_state() -> State:
    """Slots 0 and 1 decode in flight, slot 2 waits with a message end, slot 3 is free."""
    state, _ = decoding_state(2)
    state, _ = admitted(state, request(9, 4, message_ends=(4,)))
    state = measured(state, lambda _: 2_000_000)
    plan = plan_next(state)
    while plan is not None and plan.shape.kind is not DECODE:
        requests = state.requests.draft()
        requests.visible_ns[:2] -= 10**9
        state = dataclasses.replace(state, now_ns=state.now_ns + 10**9, requests=requests.sealed())
        plan = plan_next(state)
    assert plan is not None
    return commit(state, plan, state.last_fence + 1)


def column(name: str, slot: int, value: Any) -> Corruption:
    def corrupt(state: State) -> State:
        requests = state.requests.draft()
        getattr(requests, name)[slot] = value
        return dataclasses.replace(state, requests=requests.sealed())

    return corrupt


def pool(**changes: Any) -> Corruption:
    return lambda state: dataclasses.replace(state, pool=dataclasses.replace(state.pool, **changes))


def sealed(values: Any, dtype: Any = np.int64) -> np.ndarray:
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array


def table(slot: int, change: Callable[[np.ndarray], Any]) -> Corruption:
    def corrupt(state: State) -> State:
        tables = list(state.pool.tables)
        tables[slot] = sealed(change(tables[slot]), np.int32)
        held = sealed([len(pages) for pages in tables])
        owned, users = np.concatenate(tables), np.zeros(len(state.pool.users), np.int32)
        np.add.at(users, owned[owned < len(users)], 1)
        counted = {"users": sealed(users, np.int32), "used": int(np.count_nonzero(users))}
        changed = dataclasses.replace(state.pool, tables=tuple(tables), held=held, **counted)
        return dataclasses.replace(state, pool=changed)

    return corrupt


def move_page(state: State) -> State:
    """A page goes from the stack to a slot that does not need it: still a partition."""
    page = state.pool.free[state.pool.num_free - 1]
    state = pool(num_free=state.pool.num_free - 1)(state)
    return table(2, lambda pages: [*pages, page])(state)


def cost(name: str, value: int) -> Corruption:
    def corrupt(state: State) -> State:
        values = getattr(state.costs, name).copy()
        values[0] = value
        return dataclasses.replace(state, costs=dataclasses.replace(state.costs, **{name: sealed(values)}))

    return corrupt


def counter(**changes: Any) -> Corruption:
    return lambda state: dataclasses.replace(state, counters=dataclasses.replace(state.counters, **changes))


def frame(change: Callable[[Any], Any]) -> Corruption:
    return lambda state: dataclasses.replace(state, frames=tuple(map(change, state.frames)))


def lanes(change: Callable[[Any], Any]) -> Corruption:
    return frame(lambda f: dataclasses.replace(f, plan=dataclasses.replace(f.plan, lanes=change(f.plan.lanes))))


def unseal(state: State) -> State:
    return dataclasses.replace(state, requests=state.requests.draft())


CORRUPTIONS: list[tuple[int, str, Corruption]] = [
    (1, "a page owned twice", table(0, lambda pages: [pages[0], pages[0]])),
    (1, "a page lost", table(0, lambda pages: pages[:1])),
    (1, "a page of another pool", table(0, lambda pages: [pages[0], 999])),
    (1, "a page freed while owned", lambda s: pool(num_free=s.pool.num_free + 1)(s)),
    (1, "a holder forgotten", lambda s: pool(users=sealed(s.pool.users - (s.pool.users > 0), np.int32))(s)),
    (1, "a used page uncounted", lambda s: pool(used=s.pool.used - 1)(s)),
    (2, "a ledger off by one", lambda s: pool(held=sealed(s.pool.held + 1))(s)),
    (2, "less reserved than held", column("reserved_pages", 0, 1)),
    (2, "more reserved than there is", column("reserved_pages", 0, 64)),
    (3, "a page held early", move_page),
    (3, "a committed token without page", column("committed_len", 2, 1)),
    (4, "an unknown phase", column("phase", 3, 9)),
    (4, "a free slot that kept a length", column("prompt_len", 3, 5)),
    (4, "a free slot that kept a price", column("token_r", 3, 1.0)),
    (4, "a spec lost", lambda s: dataclasses.replace(s, specs=(None, *s.specs[1:]))),
    (4, "an occupant without generation", column("generation", 2, 0)),
    (5, "output beyond the cache", column("output_len", 0, 5)),
    (5, "a prompt length that is not the spec's", column("prompt_len", 2, 8)),
    (5, "decoding with a part of the prompt", column("consumed_len", 0, 1)),
    (6, "a fence out of order", frame(lambda f: dataclasses.replace(f, fence=f.fence + 1))),
    (6, "a slot handed on in flight", column("generation", 0, 7)),
    (6, "a slot that forgot its fence", column("last_fence", 0, 0)),
    (6, "a retiring slot that nothing holds", column("phase", 2, int(Phase.RETIRING))),
    (6, "too many frames", lambda s: dataclasses.replace(s, frames=s.frames * 2)),
    (7, "a price of zero", column("token_r", 0, 0.0)),
    (7, "an infinite price", column("token_r", 0, np.inf)),
    (7, "a delivery history without output", column("delivery_r", 2, 1.0)),
    (8, "an estimate that is not the median", cost("estimate_ns", 77)),
    (8, "a window without samples", cost("num_samples", 0)),
    (8, "a window too long", cost("num_samples", 10)),
    (9, "an ending counted twice", counter(cancelled=1)),
    (9, "an execution lost", counter(executions=(0, 0, 0, 0))),
    (9, "a generation skipped", column("generation", 2, 5)),
    (10, "a use in the future", column("last_use_ns", 0, 2**60)),
    (10, "an output in the future", column("visible_ns", 0, 2**60)),
    (10, "an observation in the future", cost("observed_ns", 2**60)),
    (10, "an attempt in the future", cost("attempted_ns", 2**60)),
    (11, "a writeable column", unseal),
    (11, "a column of another type", lambda s: dataclasses.replace(
        s, requests=dataclasses.replace(s.requests, epoch=sealed(s.requests.epoch, np.int32)))),
    (12, "an endpoint skipped", lambda s: column("phase", 2, int(Phase.PROMPT))(column("endpoint", 2, 9)(s))),
    (13, "a program outside the catalogue", frame(lambda f: dataclasses.replace(
        f, plan=dataclasses.replace(f.plan, shape=ProgramShape(DECODE, 3, 1))))),
    (13, "a lane twice", lanes(lambda rows: (rows[0], rows[0]))),
    (13, "more rows than the program has", frame(lambda f: dataclasses.replace(
        f, plan=dataclasses.replace(f.plan, shape=ProgramShape(DECODE, 1, 1))))),
    (26, "less promised than the prompt needs", column("reserved_pages", 2, 2)),
    (26, "more promised than the worst case", column("reserved_pages", 1, 17)),
    (26, "another worst case", column("worst_pages", 1, 1)),
    (26, "an admission twice", column("admission", 1, 1)),
    (26, "an admission in the future", column("admission", 2, 9)),
    (26, "less promised than its worst case to one that gave way twice", lambda s: dataclasses.replace(
        s, specs=(*s.specs[:2], dataclasses.replace(s.specs[2], preemptions=2), s.specs[3]))),
]  # fmt: skip


def test_the_uncorrupted_state_passes() -> None:
    state = busy_state()
    check_invariants(state)
    assert len(state.frames) == 1
    assert {lane.handle for lane in state.frames[0].plan.lanes} == {RequestHandle(0, 1), RequestHandle(1, 1)}


@pytest.mark.parametrize(("number", "name", "corrupt"), CORRUPTIONS, ids=[f"{n}-{name}" for n, name, _ in CORRUPTIONS])
def test_planted_corruption_is_found(number: int, name: str, corrupt: Corruption) -> None:
    with pytest.raises(InvariantError, match=f"invariant {number} "):
        check_invariants(corrupt(busy_state()))


def test_every_invariant_has_a_corruption() -> None:
    """The modules beside this one with the same prefix hold the corruptions of their topics."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_scheduler_invariants*.py"))
    planted = [importlib.import_module(f"tests.unit.{name}").CORRUPTIONS for name in names]
    numbers = {number for corruptions in planted for number, *_ in corruptions}
    assert numbers == set(range(1, len(invariants_module._CHECKS) + 1))
