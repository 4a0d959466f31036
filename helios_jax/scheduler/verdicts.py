"""What a completed frame teaches about proposals: acceptance by the target, confidence of the draft.

Between `completion`, which knows frames and records, and `speculation`, which knows arrays.
Only lanes whose request still runs teach; a frame without proposals ages the estimates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.records import has_ended, needs_confidence
from helios_jax.scheduler.sidecars import checked_confidence, checked_survival
from helios_jax.scheduler.speculation import (
    COPY,
    LEARNED,
    Acceptance,
    observe_acceptance,
    observe_forecast,
)
from helios_jax.scheduler.state import Frame, State
from helios_jax.scheduler.types import UNTYPICAL, CompletionRecord, LaneRole


def check_sidecars(
    state: State, frame: Frame, records: Sequence[CompletionRecord], confidence: np.ndarray | None,
    survival: np.ndarray | None,
) -> None:  # fmt: skip
    """Validate the sidecars of a frame, before anything changes.

    A frame that the device lost, with no valid lane, has none to give.

    Raises:
        InvariantError: A sidecar is missing, belongs to a program without proposals, or does not hold
            non-increasing probabilities for every lane.
    """
    shape, lanes = frame.plan.shape, np.zeros(state.limits.slots, np.bool_)
    if needs_confidence(frame) and confidence is None and any(record.valid for record in records):
        raise InvariantError(f"{shape.name} allocates its rows itself: complete it by complete_packed_round")
    if not shape.proposal_depth:
        if confidence is not None or survival is not None:
            raise InvariantError(f"{shape.name} makes no proposals, its completion has a sidecar")
        return
    offered = np.zeros(len(lanes), np.int64)
    for lane, record in zip(frame.plan.lanes, records, strict=True):
        if lane.role is LaneRole.DECODE:
            lanes[lane.handle.slot] = record.valid
            offered[lane.handle.slot] = record.offered * record.valid
    if confidence is not None:
        checked_confidence(confidence, lanes, shape.proposal_depth)
    if survival is not None:
        checked_survival(survival, offered)


def learned(
    state: State, frame: Frame, records: Sequence[CompletionRecord], generated: np.ndarray,
    confidence: np.ndarray | None, survival: np.ndarray | None,
) -> Acceptance:  # fmt: skip
    """The estimates after a completed frame whose sidecars were checked.

    Args:
        records: In lane order.
        generated: int64 [slots] output tokens of this frame.
        confidence, survival: Sidecars, or None.
    """
    estimates, shape = state.acceptance, frame.plan.shape
    if not estimates.depth:
        return estimates
    columns = np.zeros((3, state.limits.slots), np.int64)
    ceilings, offered, accepted = columns
    if shape.proposal_depth:
        phases = state.requests.phase.tolist()
        taught = [
            (lane.handle[0], lane.length, record.offered, record.accepted)
            for lane, record in zip(frame.plan.lanes, records, strict=True)
            if lane.role is LaneRole.DECODE and record.valid and not has_ended(phases[lane.handle[0]], lane.role)
        ]
        slots, *counts = zip(*taught, strict=True) if taught else ((), (), (), ())
        columns[:, np.array(slots, np.int64)] = counts
    teaches = (state.requests.constraints & int(UNTYPICAL)) == 0
    if confidence is not None:
        estimates = observe_forecast(estimates, confidence, ceilings, teaches, shape.proposal_depth)
    # Output that ended inside the accepted prefix hides what would have come of the rest.
    censored = generated < 1 + accepted
    source = COPY if shape.proposal_source is ProposalSource.COPY else LEARNED
    return observe_acceptance(
        estimates, source, offered, np.minimum(accepted, generated), censored, generated, survival, teaches
    )
