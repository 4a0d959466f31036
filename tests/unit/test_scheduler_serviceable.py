"""What could never be served is refused when it is configured or admitted, and a shrunken offer at commit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helios_jax.errors import ConfigError, InvariantError, RequestError, StalePlanError
from helios_jax.scheduler import (
    Catalog,
    Constraint,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    State,
    admit,
    commit,
    configure_policy,
    new_state,
    offer_copy,
    plan_next,
)
from helios_jax.scheduler.catalog import Allocation, ProposalSource
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import MS, admitted, measured, request, small_limits, small_state, step

K, LEARNED, COPY = ProgramKind, ProposalSource.LEARNED, ProposalSource.COPY
ORDINARY = ProgramShape(K.DECODE, 4, 1)
WIDTH_ONE = ProgramShape(K.SPECULATIVE, 4, 1, 0, 4, 0, LEARNED)
ROUND = ProgramShape(K.SPECULATIVE, 4, 4, 3, 16, 0, LEARNED)
NARROW = ProgramShape(K.SPECULATIVE, 4, 2, 1, 8, 0, LEARNED)
DEVICE = ProgramShape(K.SPECULATIVE, 4, 4, 3, 8, 0, LEARNED, Allocation.PREFIX_LIMIT)
TIGHT = ProgramShape(K.SPECULATIVE, 2, 4, 3, 3, 0, LEARNED)  # no complete prefix fits
COPIED = ProgramShape(K.SPECULATIVE, 4, 4, 3, 16, 0, COPY)


def state_of(*rounds: ProgramShape, mode: str = "adaptive") -> State:
    catalog = Catalog((ProgramShape(K.INITIALIZE, 1, 0), ProgramShape(K.PREFILL, 1, 8), *rounds))
    return new_state(catalog, small_limits(), PolicyConfig(speculation=mode))


def runs_to_its_end(state: State, **spec: Any) -> bool:
    state, _ = admitted(state, request(5, 4, **spec))
    for _ in range(30):
        if state.requests.phase[0] == Phase.FREE:
            return True
        if plan_next(state) is None:
            return False
        state, _, _ = step(state)
    return False


MODES = [
    ("off", (ROUND,), False), ("off", (ROUND, WIDTH_ONE), True), ("off", (ROUND, ORDINARY), True),
    ("off", (DEVICE,), False), ("fixed", (DEVICE,), False), ("fixed", (DEVICE, WIDTH_ONE), True),
    ("fixed", (ROUND, DEVICE), True), ("fixed", (TIGHT,), False), ("fixed", (TIGHT, WIDTH_ONE), False),
    ("fixed", (TIGHT, NARROW), False), ("fixed", (TIGHT, ROUND), True), ("fixed", (COPIED,), True),
    ("fixed", (TIGHT, COPIED), True), ("adaptive", (TIGHT,), True),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "rounds", "served"), MODES)
def test_a_mode_that_could_never_decode_is_refused(mode: str, rounds: tuple[ProgramShape, ...], served: bool) -> None:
    """And what is accepted runs to its end."""
    if served:
        assert runs_to_its_end(state_of(*rounds, mode=mode))
        return
    with pytest.raises(ConfigError, match=rf"speculation '{mode}' decodes with .* or choose speculation 'adaptive'"):
        state_of(*rounds, mode=mode)
    with pytest.raises(ConfigError, match=f"speculation '{mode}'"):
        configure_policy(state_of(*rounds), PolicyConfig(speculation=mode))


REQUESTS = [
    ((ROUND,), Constraint.NO_LEARNED, False), ((COPIED,), Constraint.NO_COPY, False),
    ((ROUND, COPIED), Constraint.NO_LEARNED, True), ((ROUND, COPIED), Constraint.NO_COPY, True),
    ((ROUND, COPIED), Constraint.NO_COPY | Constraint.NO_LEARNED, False),
    ((ROUND, WIDTH_ONE), Constraint.NO_LEARNED, True), ((ROUND,), Constraint.NO_COPY, True),
]  # fmt: skip


@pytest.mark.parametrize(("rounds", "constraints", "served"), REQUESTS)
def test_a_request_that_refuses_every_program_is_refused(
    rounds: tuple[ProgramShape, ...], constraints: Constraint, served: bool
) -> None:
    state = state_of(*rounds)
    if served:
        assert runs_to_its_end(state, constraints=constraints)
        return
    with pytest.raises(RequestError, match="allow the proposals, or load a decode or width-one program") as caught:
        admit(state, request(5, 4, constraints=constraints), 0)
    assert caught.value.param == "constraints"
    admit(state, request(5, 1, constraints=constraints), 0)  # its only token comes from the prompt


@pytest.mark.parametrize("ends", [(-5, 999), ("x",), (3, 2), (6,), (1.0,), (True,), (2, None)])
def test_message_ends_are_integers_in_order_within_the_prompt(ends: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError, match="message_ends must be integers from 0 to 5 in order") as caught:
        admit(small_state(), request(5, 4, message_ends=ends), 0)
    assert caught.value.param == "message_ends"


@pytest.mark.parametrize("ends", [(), (5,), (2, 2, 4), (np.int64(3),), (0, 5)])
def test_possible_message_ends_are_admitted(ends: tuple[Any, ...]) -> None:
    admit(small_state(), request(5, 4, message_ends=ends), 0)


@pytest.mark.parametrize("constraints", [Constraint(1 << 20), 128, -1, True, 1.0, None])
def test_unknown_constraints_are_refused(constraints: Any) -> None:
    with pytest.raises(RequestError, match="constraints must be a combination of GRAMMAR, ") as caught:
        admit(small_state(), request(5, 4, constraints=constraints), 0)
    assert caught.value.param == "constraints"


def copying() -> tuple[State, Any]:
    state, (handle,) = admitted(state_of(ORDINARY, COPIED), request(5, 20))
    for _ in range(2):
        state, _, _ = step(state)
    return measured(state, lambda _: MS), handle


@pytest.mark.parametrize("proposals", [-1, 1.5, True, 10**30, 65, None, "3"])
def test_an_offer_is_an_integer_up_to_the_context(proposals: Any) -> None:
    state, handle = copying()
    with pytest.raises(InvariantError, match="an integer of 0 to 64 is possible"):
        offer_copy(state, handle, proposals)
    assert offer_copy(state, handle, np.int64(2)).requests.proposals[handle.slot] == 2


@pytest.mark.parametrize(("later", "fresh"), [(0, False), (2, False), (3, True), (7, True)])
def test_a_plan_for_more_proposals_than_are_offered_is_stale(later: int, fresh: bool) -> None:
    state, handle = copying()
    state = offer_copy(state, handle, 3)
    plan = plan_next(state)
    assert plan is not None
    assert plan.lanes[0].length == 4
    state = offer_copy(state, handle, later)
    if fresh:
        assert commit(state, plan, state.last_fence + 1).frames
        return
    with pytest.raises(StalePlanError, match=f"counts on 3 copied proposals, {later} are offered; plan again"):
        commit(state, plan, state.last_fence + 1)
    again = plan_next(state)
    assert again is not None
    assert commit(state, again, state.last_fence + 1).frames
