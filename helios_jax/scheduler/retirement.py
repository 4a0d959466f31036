"""The end of a request: a last snapshot if it is worth one, then its slot, pages and rows are free.

1. `retire` stops selection. A request that ended well, or is preempted, becomes TERMINAL if a
   snapshot of its last state is earned (`terminal.wait_for_terminal`); others are RETIRING.
2. `release` frees the slots of RETIRING requests that no outstanding fence names.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from helios_jax.scheduler import captures, terminal
from helios_jax.scheduler.capture_draft import Draft
from helios_jax.scheduler.page_pressure import follow
from helios_jax.scheduler.resources import give_back
from helios_jax.scheduler.state import OWNED_COLUMNS, RETIRING, TERMINAL, Frame, Requests, State
from helios_jax.scheduler.types import RequestHandle


def retire(state: State, slot: int, *, keep_state: bool) -> State:
    """End the occupant of a slot now; `keep_state` allows a terminal capture."""
    requests, draft = state.requests.draft(), Draft(state)
    requests.epoch[slot] += 1
    end_request(draft, requests, slot, state.frames, keep_state=keep_state)
    pool = follow(state.pool, draft.checkpoints)
    return release(dataclasses.replace(state, requests=requests.sealed(), pool=pool, retention=draft.sealed()))


def end_request(
    draft: Draft, requests: Requests, slot: int, outstanding: tuple[Frame, ...], *, keep_state: bool
) -> None:
    """Set the phase of a request that ends, in place; its terminal age starts here."""
    handle = RequestHandle(slot, int(requests.generation[slot]))
    ahead = [lane for frame in outstanding for lane in frame.plan.lanes if lane.handle.slot == slot]
    if keep_state and terminal.wait_for_terminal(draft, requests, handle, ahead=ahead):
        requests.phase[slot], requests.terminal_ns[slot] = TERMINAL, draft.state.now_ns
    else:
        requests.phase[slot] = RETIRING


def awaits_capture(state: State, handle: RequestHandle) -> bool:
    """Whether an ended request waits for its terminal snapshot, whose end completes its response."""
    slot, generation = handle
    return bool(state.requests.generation[slot] == generation and state.requests.phase[slot] == TERMINAL)


def release(state: State) -> State:
    """Free every retiring slot whose last submitted fence is complete."""
    retiring = np.flatnonzero(state.requests.phase == RETIRING)
    if not len(retiring):
        return state
    owned = {lane.handle.slot for frame in state.frames for lane in frame.plan.lanes}
    slots = [slot for slot in retiring.tolist() if slot not in owned]
    if not slots:
        return state
    requests, specs, draft = state.requests.draft(), list(state.specs), Draft(state)
    for slot in slots:
        captures.release(draft, RequestHandle(slot, int(requests.generation[slot])))
        specs[slot] = None
    for name in OWNED_COLUMNS:
        getattr(requests, name)[slots] = 0
    requests.token_r[slots] = requests.delivery_r[slots] = np.nan
    return dataclasses.replace(
        state,
        requests=requests.sealed(),
        specs=tuple(specs),
        pool=give_back(state.pool, slots),
        retention=draft.sealed(),
    )
