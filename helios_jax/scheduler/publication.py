"""Publication: visible output corrects the delivery history of the interval that made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler.service import corrected_deliveries
from helios_jax.scheduler.state import State
from helios_jax.scheduler.types import Fence, RequestHandle


def published_output(state: State, handle: RequestHandle, fence: Fence) -> State:
    """Report the first visible output of a request from the fence completed last; see `published_outputs`."""
    return published_outputs(state, (handle,), fence)


def published_outputs(state: State, handles: Sequence[RequestHandle], fence: Fence) -> State:
    """Report the first visible output of each of `handles` from the fence completed last.

    Replaces that interval's delivery update by one served delivery, computed from the price
    before the interval, and resets the output age to now. Later output of the same burst and
    a handle that no longer holds its slot change nothing.

    Raises:
        InvariantError: Another frame completed since, or the fence served no tokens to a
            handle; report publications before the next completion.
    """
    interval = state.interval
    if interval is None or interval.fence != fence:
        last = interval.fence if interval else "none"
        raise InvariantError(f"publication of fence {fence} reported after the completion of {last}")
    served = interval.served.tolist()
    for handle in handles:
        if not 0 <= handle.slot < state.limits.slots or served[handle.slot] != handle.generation:
            raise InvariantError(f"fence {fence} served no tokens to {handle}")
    named = np.array([handle.slot for handle in handles], np.int64)
    requests = state.requests
    current = (requests.generation[named] == interval.served[named]) & requests.streams[named]
    slots = named[current & ~interval.published[named]]
    if not len(slots):
        return state
    visible_ns, published, delivery_r = (
        column.copy() for column in (requests.visible_ns, interval.published, requests.delivery_r)
    )
    visible_ns[slots], published[slots] = state.now_ns, True
    if interval.duration_ms > 0:
        delivery_r[slots] = corrected_deliveries(
            interval.delivery_r[slots], interval.duration_ms, interval.delivery_n[slots], state.policy.adaptation_ms
        )
    for column in (visible_ns, published, delivery_r):
        column.setflags(write=False)
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(requests, visible_ns=visible_ns, delivery_r=delivery_r),
        interval=dataclasses.replace(interval, published=published),
    )
