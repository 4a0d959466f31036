"""Grammars in frames: the packed masks of a plan's lanes, and the copies that grammars let through.

A sequence's matcher stands where its delivered tokens end. A request with a grammar needs completion
feedback, so no frame of it is outstanding when the next one is built: the matcher stands where the device
does. In a round the masks of all depths are computed here along the proposals, and taken back.

A preempted sequence keeps its matcher; its resumed prompt holds the output so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from helios_jax.aot.abi import Dims, mask_shape
from helios_jax.engine.request import Sequence as Output
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.types import LaneRole, RequestHandle, ScheduledPlan

EVERYTHING = np.uint32(0xFFFFFFFF)
Copies = Callable[[RequestHandle], Sequence[int]]


def has_masks(plan: ScheduledPlan, sequences: Mapping[RequestHandle, Output]) -> bool:
    """Whether any lane that samples has a grammar."""
    return any(lane.emits and sequences[lane.handle].matcher is not None for lane in plan.lanes)


def frame_bits(
    plan: ScheduledPlan, sequences: Mapping[RequestHandle, Output], dims: Dims, copies: Copies
) -> np.ndarray | None:
    """The mask of a frame, see `aot.abi.mask_shape`; None if no lane has a grammar.

    Lanes without one may sample everything. Behind what a grammar lets through of a lane's proposals
    nothing is allowed, so the device stops there.

    Args:
        copies: The tokens that a lane of a copy round is supplied with.
    """
    extents = mask_shape(plan.shape, dims)
    if extents is None or not has_masks(plan, sequences):
        return None
    bits = np.full(extents, EVERYTHING, np.uint32)
    rounds = plan.shape.kind in (ProgramKind.SPECULATIVE, ProgramKind.MIXED)
    width = plan.shape.token_capacity if rounds else 1
    for number, lane in enumerate(plan.lanes):
        matcher = sequences[lane.handle].matcher
        if matcher is None or not lane.emits:
            continue
        rows = bits[number * width : (number + 1) * width]
        rows[:] = 0
        drafted = rounds and lane.role is LaneRole.DECODE and plan.shape.proposal_depth
        matcher.fill_along(rows, copies(lane.handle) if drafted else ())
    return bits
