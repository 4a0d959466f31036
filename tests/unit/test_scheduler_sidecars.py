"""Completions of speculative rounds: what they teach, which way they must come, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import (
    Catalog,
    CompletionRecord,
    Constraint,
    Limits,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    ScheduledPlan,
    State,
    cancel,
    commit,
    complete,
    complete_packed_round,
    complete_packed_round_with_survival,
    complete_with_survival,
    new_state,
    plan_next,
    state_digest,
)
from helios_jax.scheduler.catalog import Allocation, ProposalSource
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_rounds_oracle import speculative
from tests.unit.scheduler_toy import admitted, measured, request, timing

DEPTH = 3
STOP = 5


def flying(
    allocation: Allocation = Allocation.QUERY_LENGTH, *, source: ProposalSource = ProposalSource.LEARNED,
    constraints: tuple[Constraint, ...] = (Constraint.NONE,) * 2, packed: int = 8, wide_ns: int = 5_000_001,
    max_tokens: tuple[int, ...] = (40, 40),
) -> tuple[State, ScheduledPlan, list[RequestHandle]]:  # fmt: skip
    """Two decoders in a round of three proposals each (or of width one, if wide ones are slow), fence 1 outstanding."""
    needed = (ProgramShape(ProgramKind.INITIALIZE, 1, 0), ProgramShape(ProgramKind.PREFILL, 1, 8))
    catalog = Catalog((*needed, speculative(2, 1, 0), speculative(2, 4, DEPTH, packed, source, allocation)))
    state = new_state(catalog, Limits(slots=3, pages=60, page_size=4, max_context=80))
    specs = [
        request(5, most, stop_token_ids=frozenset({STOP}), constraints=c)
        for c, most in zip(constraints, max_tokens, strict=True)
    ]
    state, handles = admitted(state, *specs)
    requests = state.requests.draft()
    for slot, _ in handles:
        requests.phase[slot], requests.consumed_len[slot] = Phase.DECODE, 5
        requests.committed_len[slot], requests.output_len[slot], requests.proposals[slot] = 5, 1, 9
    state = dataclasses.replace(state, requests=requests.sealed())
    state = measured(state, lambda shape: wide_ns if shape.proposal_depth else 5_000_000)
    plan = plan_next(state)
    assert plan is not None
    assert plan.shape.proposal_depth == (DEPTH if wide_ns < 10**8 else 0)
    return commit(state, plan, 1), plan, handles


def round_records(handles: list[RequestHandle], *outcomes: tuple[int, int, int]) -> list[CompletionRecord]:
    """One record an (offered, accepted, tokens); a shortened output ends in the stop token."""
    records = []
    for handle, (offered, accepted, count) in zip(handles, outcomes, strict=True):
        tokens = (7,) * count if count == accepted + 1 else (7,) * (count - 1) + (STOP,)
        records.append(CompletionRecord(handle, count, tokens, 5 + count, offered=offered, accepted=accepted))
    return records


def sidecar(joint: float = 0.5) -> np.ndarray:
    own = np.full((3, DEPTH), joint, np.float32)
    return np.stack([own, np.cumprod(own, axis=1)])


def aged(weight: float, tokens: int) -> float:
    return weight * 2.0 ** (-tokens / 128)


def test_a_round_teaches_its_source_only_and_ages_by_what_it_generated() -> None:
    for source, row in ((ProposalSource.LEARNED, 0), (ProposalSource.COPY, 1)):
        state, _, handles = flying(source=source)
        after, _ = complete(state, 1, round_records(handles, (3, 1, 2), (3, 3, 4)), timing())
        mean, weight = after.acceptance.accept_mean, after.acceptance.accept_weight
        np.testing.assert_allclose(mean[0, row], [2 / 3, 0.5 / 3, 0.25 / 3])
        np.testing.assert_allclose(mean[1, row], [2 / 3, 1.5 / 3, 1.25 / 3])
        np.testing.assert_allclose(weight[:2, row], [[aged(3, 2)] * 3, [aged(3, 4)] * 3])
        np.testing.assert_allclose(weight[:2, 1 - row], [[aged(2, 2)] * 3, [aged(2, 4)] * 3])
        assert np.array_equal(mean[:, 1 - row], state.acceptance.accept_mean[:, 1 - row])
        assert np.array_equal(mean[2], state.acceptance.accept_mean[2])


def test_a_stop_inside_the_accepted_prefix_hides_the_rest() -> None:
    state, _, handles = flying()
    after, events = complete(state, 1, round_records(handles, (3, 2, 2), (3, 0, 1)), timing())
    assert len(events) == 4  # two tokens and an end; one token
    np.testing.assert_allclose(after.acceptance.accept_mean[0, 0], [2 / 3, 1.5 / 3, 0.125])
    np.testing.assert_allclose(after.acceptance.accept_mean[1, 0], [1 / 3, 0.5 / 3, 0.25 / 3])


def test_survival_rows_replace_verdicts_where_they_are_numbers() -> None:
    state, _, handles = flying()
    survival = np.array([[0.9, 0.6, np.nan], [np.nan, 0.2, 0.1], [np.nan] * 3])
    after, _ = complete_with_survival(state, 1, round_records(handles, (3, 1, 2), (2, 0, 1)), timing(), survival)
    np.testing.assert_allclose(after.acceptance.accept_mean[0, 0], [1.9 / 3, 1.1 / 3, 0.25 / 3])
    np.testing.assert_allclose(after.acceptance.accept_mean[1, 0], [1 / 3, 0.7 / 3, 0.125])


def test_confidence_is_learned_up_to_the_frozen_ceiling() -> None:
    """The population learns from unconstrained requests only."""
    state, plan, handles = flying(
        Allocation.PREFIX_LIMIT, constraints=(Constraint.NONE, Constraint.TARGET_ONLY), packed=6
    )
    assert [lane.length for lane in plan.lanes] == [4, 4]  # ceilings may sum above P
    after, _ = complete_packed_round(state, 1, round_records(handles, (2, 0, 1), (2, 2, 3)), timing(), sidecar())
    estimates = after.acceptance
    np.testing.assert_allclose(estimates.forecast_mean[:2], [[0.5, 0.25, 0.125]] * 2)
    np.testing.assert_allclose(estimates.forecast_weight[:2], [[aged(3, 1)] * 3, [aged(3, 3)] * 3])
    assert np.array_equal(estimates.prior, state.acceptance.prior)  # it predicted just this
    after, _ = complete_packed_round_with_survival(
        state, 1, round_records(handles, (2, 0, 1), (2, 2, 3)), timing(), sidecar(1.0), np.full((3, DEPTH), 0.3)
    )
    halves = np.array([0.5, 0.25, 0.125])
    np.testing.assert_allclose(after.acceptance.prior, halves + (1 - halves) / 64)
    np.testing.assert_allclose(after.acceptance.forecast_mean[:2], [(2 * halves + 1) / 3] * 2)
    np.testing.assert_allclose(after.acceptance.accept_mean[0, 0], [1.3 / 3, 0.8 / 3, 0.125])


def test_nothing_is_learned_above_a_ceiling_that_a_request_s_own_limit_lowers() -> None:
    state, plan, handles = flying(Allocation.PREFIX_LIMIT, max_tokens=(3, 40))
    assert [lane.length for lane in plan.lanes] == [2, 4]
    after, _ = complete_packed_round(state, 1, round_records(handles, (1, 0, 1), (3, 0, 1)), timing(), sidecar(1.0))
    estimates = after.acceptance
    np.testing.assert_allclose(estimates.forecast_mean[:2], [[2 / 3, 0.25, 0.125], [2 / 3, 0.5, 1.25 / 3]])
    lessons = 1 - (63 / 64) ** np.array([2, 1, 1])
    halves = np.array([0.5, 0.25, 0.125])
    np.testing.assert_allclose(estimates.prior, halves + lessons * (1 - halves))


def test_a_cancelled_lane_teaches_nothing() -> None:
    state, _, handles = flying(Allocation.PREFIX_LIMIT)
    state = cancel(state, handles[0])
    after, _ = complete_packed_round(state, 1, round_records(handles, (3, 3, 4), (3, 3, 4)), timing(), sidecar(1.0))
    assert np.array_equal(after.acceptance.accept_mean[0], state.acceptance.accept_mean[0])
    halves = np.array([0.5, 0.25, 0.125])
    np.testing.assert_allclose(after.acceptance.prior, halves + (1 - halves) / 64)  # one lane's lesson


def rises(planes: np.ndarray) -> None:
    planes[1, 0, 2] = planes[1, 0, 1] + 0.01


def lacks_a_number(planes: np.ndarray) -> None:
    planes[0, 1, 0] = np.nan


def exceeds_one(planes: np.ndarray) -> None:
    planes[1, 0, 0] = 1.01


@pytest.mark.parametrize("spoil", [rises, lacks_a_number, exceeds_one])
def test_malformed_confidence_leaves_the_state_untouched(spoil: Callable[[np.ndarray], None]) -> None:
    state, _, handles = flying(Allocation.PREFIX_LIMIT)
    planes, before = sidecar(), state_digest(state)
    spoil(planes)
    with pytest.raises(InvariantError):
        complete_packed_round(state, 1, round_records(handles, (3, 1, 2), (3, 1, 2)), timing(), planes)
    assert state_digest(state) == before


@pytest.mark.parametrize("rows", [[0.5, 0.6, 0.1], [0.5, -0.1, 0.0], [2.0, 0.1, 0.1], [0.5, 0.5, np.inf]])
def test_malformed_survival_leaves_the_state_untouched(rows: list[float]) -> None:
    state, _, handles = flying()
    before = state_digest(state)
    with pytest.raises(InvariantError, match="survival"):
        complete_with_survival(state, 1, round_records(handles, (3, 1, 2), (3, 1, 2)), timing(), np.array([rows] * 3))
    assert state_digest(state) == before


def test_each_program_has_its_way_to_complete() -> None:
    """A device that allocates owes its confidence; a program without proposals has no sidecar to give."""
    state, _, handles = flying(Allocation.PREFIX_LIMIT)
    records = round_records(handles, (3, 1, 2), (3, 1, 2))
    for wrong in (
        lambda: complete(state, 1, records, timing()),
        lambda: complete_with_survival(state, 1, records, timing(), np.full((3, DEPTH), 0.5)),
        lambda: complete_packed_round(state, 1, records, timing(), sidecar()[:, :2]),
        lambda: complete_packed_round(state, 1, records, timing(), sidecar()[..., :2]),
        lambda: complete_packed_round_with_survival(state, 1, records, timing(), sidecar(), np.full((3, 1), 0.5)),
    ):
        with pytest.raises(InvariantError):
            wrong()
    plain, plan, _ = flying(wide_ns=10**9)
    one = [CompletionRecord(lane.handle, 1, (7,), lane.start + 1) for lane in plan.lanes]
    with pytest.raises(InvariantError, match="no proposals"):
        complete_packed_round(plain, 1, one, timing(), sidecar())
    after, _ = complete(plain, 1, one, timing())
    assert np.array_equal(after.acceptance.accept_mean, plain.acceptance.accept_mean)
    assert after.acceptance.accept_weight[0, 0, 0] == aged(2, 1)


def test_a_frame_that_the_device_lost_has_no_sidecar_to_give() -> None:
    """After a device error every lane is invalid; the requests fail, the scheduler goes on."""
    state, plan, handles = flying(Allocation.PREFIX_LIMIT)
    lost = [
        CompletionRecord(lane.handle, lane.length, (), lane.start + lane.length, valid=False) for lane in plan.lanes
    ]
    after, events = complete(state, 1, lost, timing(0))
    assert [(event.handle, str(event.reason)) for event in events] == [(handle, "error") for handle in handles]
    assert np.array_equal(after.acceptance.forecast_mean, state.acceptance.forecast_mean)
    one = [dataclasses.replace(lost[0], valid=True, consumed=1, tokens=(7,), committed_len=6), lost[1]]
    with pytest.raises(InvariantError, match="complete_packed_round"):
        complete(state, 1, one, timing())


def test_an_unknown_fence_is_ignored_with_any_sidecar() -> None:
    state, _, _ = flying()
    after, events = complete_packed_round(state, 7, (), timing(), np.zeros((1, 1, 1)))
    assert (after.counters.ignored_completions, events) == (1, ())
