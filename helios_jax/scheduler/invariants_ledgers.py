"""Invariants of the exploration ledgers and of the execution queue, recounted (see `invariants`)."""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.catalog import ProposalSource, packed_rows
from helios_jax.scheduler.cost import is_fresh
from helios_jax.scheduler.programs import index_of
from helios_jax.scheduler.refresh import CAP_NS, NO_EPISODE, PROBES, Ledger
from helios_jax.scheduler.state import REASONS, Frame, State
from helios_jax.scheduler.types import FEEDBACK, LaneRole, SelectionReason

_SHARES = {SelectionReason.TIMING_REFRESH: (2, 1000), SelectionReason.ACCEPTANCE_LEARNING: (1, 100)}


def budgets(state: State) -> str | None:
    """No ledger is above its cap, holds more than it earned, or spent more than its bound."""
    ordinary = state.counters.execution_ns[REASONS.index(SelectionReason.ORDINARY)]
    for reason in PROBES:
        ledger, spent = state.ledgers.of(reason), state.counters.execution_ns[REASONS.index(reason)]
        part, whole = _SHARES[reason]  # share / (1 - share) = part / (whole - part)
        unit = (whole - part) // part
        if ledger.divisor != unit or ledger.balance > CAP_NS * unit:
            return f"{reason}: {ledger.balance_ns} ns of credit at a cap of {CAP_NS}, 1 / {ledger.divisor} earned"
        if not 0 <= ledger.ordinary_ns <= ordinary or ledger.spent_ns != spent:
            return f"{reason}: credited {ledger.ordinary_ns} of {ordinary} ns, charged {ledger.spent_ns} of {spent}"
        if ledger.balance > ledger.ordinary_ns - ledger.spent_ns * unit:
            return f"{reason}: a balance of {ledger.balance_ns} ns was never earned: {ledger}"
        if ledger.spent_ns * unit > ledger.ordinary_ns + ledger.last_episode_ns * unit:
            return f"{reason}: {ledger.spent_ns} ns spent of {ledger.ordinary_ns}, last {ledger.last_episode_ns}"
    return None


def episodes(state: State) -> str | None:
    """At most one episode is open, and it is the outstanding frame that was selected for it."""
    probing = [(frame.plan.reason, frame.fence) for frame in state.frames if frame.plan.reason in PROBES]
    opened = [(reason, _episode(state.ledgers.of(reason))) for reason in PROBES]
    opened = [(reason, fence) for reason, fence in opened if fence != NO_EPISODE]
    if len(opened) > 1 or opened != probing:
        return f"episodes {opened} are open, probes {probing} are outstanding"
    if state.ledgers.was_empty and state.frames:
        return f"the ledgers found the state empty, fence {state.frames[-1].fence} is outstanding"
    return None


def _episode(ledger: Ledger) -> int:
    return ledger.episode


def queue(state: State) -> str | None:
    """A frame that needs feedback is alone; expected service is that of the frame's own lanes."""
    for frame in state.frames:
        if len(state.frames) > 1 and (frame.alone or frame.plan.required_empty_queue or _depends(state, frame)):
            return f"fence {frame.fence}, {frame.plan.shape.name}, needs feedback and shares the window"
        problem = _expectation(state, frame)
        if problem:
            return f"fence {frame.fence}: {problem}"
    ends = [frame.dispatched_ns for frame in state.frames]
    return f"dispatch times {ends} run backwards" if ends != sorted(ends) else None


def _depends(state: State, frame: Frame) -> bool:
    index = index_of(state.catalog, frame.plan.shape)
    slots = [lane.handle.slot for lane in frame.plan.lanes if lane.role is LaneRole.DECODE]
    copies = frame.plan.shape.proposal_source is ProposalSource.COPY and frame.plan.shape.proposal_depth > 0
    if len(slots) != len(frame.plan.lanes) or copies:
        return True
    # The freshness that counts is that of the dispatch; an estimate observed since is fresher still.
    stale = not is_fresh(state.costs, index, frame.dispatched_ns, state.policy.estimate_ttl_ns)
    return stale or bool((state.requests.constraints[slots] & int(FEEDBACK)).any())


def _expectation(state: State, frame: Frame) -> str | None:
    most = np.zeros(state.limits.slots)
    for lane in frame.plan.lanes:
        if lane.role is LaneRole.DECODE:
            most[lane.handle.slot] = min(lane.length, packed_rows(frame.plan.shape))
    tokens, deliveries = frame.expected_tokens, frame.expected_deliveries
    if not np.array_equal(frame.most_tokens, most):
        return f"at most {frame.most_tokens} tokens, the lanes say {most}"
    if any(column.flags.writeable for column in (tokens, deliveries, frame.most_tokens)):
        return "its expected service is writeable"
    if (tokens < (most > 0)).any() or (tokens > most).any() or (deliveries != (most > 0)).any():
        return f"expected tokens {tokens} and deliveries {deliveries} of at most {most}"
    return None
