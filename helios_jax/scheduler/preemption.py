"""Preemption for lack of pages: who gives way, and what is admitted again in its place.

1. Before it plans, the host asks `victim` and preempts whom it names, until nobody is named.
2. The victim's pages come back at once, or with its terminal snapshot if one is earned. Behind
   outstanding frames nobody is named: if somebody has to give way, planning lets the window drain
   first (`must_drain`), so that no pages are parked behind a frame and no token is computed in vain.
3. The host puts the request back at the head of its queue, as `resumed` describes it: prompt and
   output so far are the new prompt, and the output goes on behind them.

A victim is the request that loses the least work: the tokens to recompute, those that a published
checkpoint brings back not among them; of equal losses the latest admitted. Never named is one that
has ended (its pages are on their way), one that was preempted `MAX_PREEMPTIONS` times, and one
whose pages nobody else could use.

Every request makes progress. A request gives way `MAX_PREEMPTIONS` times at most, because only
those that did less often are named, and then holds the promise of its worst case until it ends. Among residents
that no plan can name, two that may still grow have a victim between them; a single one that may grow finds
the rest of the pool promised to others whose promises suffice, which therefore end, or finds
it free, since a request fits the pool alone. So some resident always goes on, all end, and the
head of the queue is admitted when the pool is empty at the latest.

docs/adr/0012.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler.reservation import MAX_PREEMPTIONS, page_room, running
from helios_jax.scheduler.state import EXTERNAL, INITIALIZE, RESTORE, RETIRING, TERMINAL, State
from helios_jax.scheduler.types import RequestHandle, RequestSpec


def victim(state: State) -> RequestHandle | None:
    """The request that must be preempted so that a starved stream gets its next page; None if nobody must.

    With frames outstanding nobody is named: their completion comes first.
    """
    return None if state.frames else _victim(state)


def must_drain(projected: State) -> bool:
    """Whether somebody would be preempted once the outstanding frames are complete (`queue.project`)."""
    return _victim(projected) is not None


def _victim(state: State) -> RequestHandle | None:
    room = page_room(state)
    if room is None or not room.lacking.any():
        return None
    requests = state.requests
    starved = np.flatnonzero(room.lacking)
    first = starved[requests.admission[starved].argmin()]
    ending = (requests.phase == TERMINAL) | (requests.phase == RETIRING)
    if requests.reserved_pages[ending].sum() >= room.lacking[first]:
        return None  # enough is on its way
    growing = running(state) & (requests.reserved_pages < requests.worst_pages)
    candidates = [slot for slot in np.flatnonzero(running(state)).tolist() if _may_give_way(state, slot, growing)]
    if not candidates:
        return None
    slot = min(candidates, key=lambda slot: (work_lost(state, slot), -int(requests.admission[slot])))
    return RequestHandle(slot, int(requests.generation[slot]))


def _may_give_way(state: State, slot: int, growing: np.ndarray) -> bool:
    """Whether preempting the occupant is allowed, and leaves somebody who can use its pages."""
    spec = state.specs[slot]
    assert spec is not None  # an occupied slot has its spec: invariant 4
    others = int(np.count_nonzero(growing)) - int(growing[slot])
    return spec.preemptions < MAX_PREEMPTIONS and others > 0


def work_lost(state: State, slot: int) -> int:
    """Tokens that would have to be computed again if the occupant of a slot were preempted now."""
    requests, spec, kept = state.requests, state.specs[slot], state.retention
    assert spec is not None  # an occupied slot has its spec: invariant 4
    windowed = requests.private_row[slot] > 0 and requests.restore_row[slot] == requests.private_row[slot]
    if requests.phase[slot] in (INITIALIZE, EXTERNAL) or (requests.phase[slot] == RESTORE and not windowed):
        return 0  # nothing has run
    known = kept.checkpoints
    restorable = [
        int(known.endpoints[library.index_of(known, checkpoint)])
        for checkpoint in kept.used[slot]
        if library.is_published(known, checkpoint)
    ]
    outside = 0 if spec.restore_from else spec.restored_len
    return int(requests.committed_len[slot]) - max(restorable, default=outside)


def resumed(spec: RequestSpec, output: Sequence[int], *, checkpoint: tuple[int, int] = (0, 0)) -> RequestSpec:
    """The spec with which a preempted request is admitted again, to go on with the same tokens.

    Output that exists is prompt from now on; `output_len` tells the programs that it counts as output
    (penalties, positions of random numbers). A prompt that was scored to its end is not scored
    again; one that was not is scored from its beginning. State that came from outside the device is brought
    from there again: without it, the images that it covers might not fit the storage.

    Args:
        spec: As it was admitted the last time.
        output: Tokens sampled since then, the pending one included.
        checkpoint: Identity and endpoint of a published one to restore from; (0, 0) recomputes everything that
            did not come from outside.
    """
    tokens = np.asarray(output, np.int32)
    identity, endpoint = checkpoint
    outside = not identity and not spec.restore_from
    return dataclasses.replace(
        spec,
        prompt=np.concatenate([np.asarray(spec.prompt, np.int32), tokens]),
        max_tokens=spec.max_tokens - len(tokens),
        output_len=spec.output_len + len(tokens),
        scored=spec.scored and not len(tokens),
        restored_len=spec.restored_len if outside else endpoint,
        restore_from=identity,
        external=spec.external and outside,
        preemptions=spec.preemptions + 1,
    )
