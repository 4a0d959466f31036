"""Planted corruptions of the exploration ledgers and of the execution queue."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import SelectionReason, State, advance_to, check_invariants, commit, plan_next
from helios_jax.scheduler.refresh import credit
from helios_jax.scheduler.types import Constraint
from tests.unit.scheduler_toy import DECODE, MS, decoding_state, measured
from tests.unit.test_scheduler_invariants import Corruption, column, counter, frame, sealed

REFRESH = SelectionReason.TIMING_REFRESH


def queued_state() -> State:
    """Two decode frames in flight for two requests; some credit was earned, and a refresh has run."""
    state, _ = decoding_state(2)
    state = measured(state, lambda _: 2 * MS)
    ledgers = credit(state.ledgers, 10 * MS)
    spent = dataclasses.replace(ledgers.refresh, spent_ns=3 * MS, last_episode_ns=3 * MS)
    spent = dataclasses.replace(spent, balance=spent.balance - 3 * MS * spent.divisor)
    counters = dataclasses.replace(
        state.counters, execution_ns=(10 * MS, state.counters.execution_ns[1], 3 * MS, 0),
        executions=(*state.counters.executions[:2], 1, state.counters.executions[3]),
        programs=tuple(n + (i == 0) for i, n in enumerate(state.counters.programs)),
    )  # fmt: skip
    state = dataclasses.replace(state, ledgers=dataclasses.replace(ledgers, refresh=spent), counters=counters)
    for _ in range(2):
        plan = plan_next(state)
        assert plan is not None
        assert plan.shape.kind is DECODE
        state = commit(state, plan, state.last_fence + 1)
    return state


def ledger(which: str, **changes: Any) -> Corruption:
    def corrupt(state: State) -> State:
        changed = dataclasses.replace(getattr(state.ledgers, which), **changes)
        return dataclasses.replace(state, ledgers=dataclasses.replace(state.ledgers, **{which: changed}))

    return corrupt


def expected(name: str, values: list[float]) -> Corruption:
    return frame(lambda f: dataclasses.replace(f, **{name: sealed(values, np.float64)}))


def last_frame(**changes: Any) -> Corruption:
    return lambda s: dataclasses.replace(s, frames=(*s.frames[:-1], dataclasses.replace(s.frames[-1], **changes)))


def earlier(state: State) -> State:
    state = advance_to(state, state.now_ns + 1)
    return last_frame(dispatched_ns=state.now_ns - 1)(
        frame(lambda f: dataclasses.replace(f, dispatched_ns=state.now_ns))(state)
    )


CORRUPTIONS: list[tuple[int, str, Corruption]] = [
    (14, "more credit than the cap", ledger("learning", balance=6 * MS * 99)),
    (14, "another share", ledger("learning", divisor=100)),
    (14, "credit that was never earned", ledger("learning", balance=10 * MS + 1)),
    (14, "an episode that nobody paid", ledger("refresh", balance=10 * MS)),
    (14, "more credited than executed", ledger("learning", ordinary_ns=10 * MS + 1)),
    (14, "an execution that was not charged", ledger("refresh", spent_ns=2 * MS)),
    (14, "a bound exceeded", ledger("refresh", last_episode_ns=2 * MS)),
    (14, "ordinary time lost", counter(execution_ns=(9 * MS, 1, 3 * MS, 0))),
    (15, "an episode without a frame", ledger("refresh", episode=99)),
    (15, "two episodes", lambda s: ledger("learning", episode=s.frames[0].fence)(
        ledger("refresh", episode=s.frames[0].fence)(s))),
    (15, "a probe without an episode", lambda s: last_frame(
        plan=dataclasses.replace(s.frames[-1].plan, reason=REFRESH))(s)),
    (15, "empty with frames in flight", lambda s: dataclasses.replace(
        s, ledgers=dataclasses.replace(s.ledgers, was_empty=True))),
    (16, "a frame behind one that needs feedback", frame(lambda f: dataclasses.replace(f, alone=True))),
    (16, "a plan that asked for an empty window", lambda s: last_frame(
        plan=dataclasses.replace(s.frames[-1].plan, required_empty_queue=True))(s)),
    (16, "a grammar in a shared window", column("constraints", 0, int(Constraint.GRAMMAR))),
    (16, "dispatches out of order", earlier),
    (16, "fewer tokens than a round commits", expected("expected_tokens", [0.5, 1.0, 0.0, 0.0])),
    (16, "more tokens than the ceiling", expected("expected_tokens", [1.0, 2.0, 0.0, 0.0])),
    (16, "a bound beyond the ceiling", frame(lambda f: dataclasses.replace(f, most_tokens=sealed([1, 2, 0, 0])))),
    (16, "service outside the lanes", expected("expected_tokens", [1.0, 1.0, 1.0, 0.0])),
    (16, "two deliveries of one burst", expected("expected_deliveries", [2.0, 1.0, 0.0, 0.0])),
    (16, "writeable expectations", frame(lambda f: dataclasses.replace(f, expected_tokens=f.expected_tokens.copy()))),
]  # fmt: skip


def test_the_uncorrupted_state_passes() -> None:
    state = queued_state()
    check_invariants(state)
    assert [len(f.plan.lanes) for f in state.frames] == [2, 2]


@pytest.mark.parametrize(("number", "name", "corrupt"), CORRUPTIONS, ids=[f"{n}-{name}" for n, name, _ in CORRUPTIONS])
def test_planted_corruption_is_found(number: int, name: str, corrupt: Corruption) -> None:
    with pytest.raises(InvariantError, match=f"invariant {number} "):
        check_invariants(corrupt(queued_state()))
