"""Promises of KV pages: what an admission promises, what keeps room, how far a stream may write.

A request holds the pages that its submitted programs write, and never fewer than it needs. What it
is *promised* (`Requests.reserved_pages`) is at least that; all promises together fit the pool, so
a plan that stays within them can always be committed. A promise

1. covers the prompt and one decode step when the request is admitted: no prompt runs dry;
2. grows when a plan that writes further is committed, out of the pages that nobody was promised;
3. starts higher for a request that was preempted before: half of its remaining output after the
   first time, its worst case after `MAX_PREEMPTIONS`. Such a request never runs dry again.

Admission leaves `headroom`, the next page of every stream that may still grow: a newcomer does not
take what somebody needs for the next step. Planning shares the unpromised pages out among the streams,
the longest admitted first (`page_room`); shares are disjoint, so whatever cohort is chosen fits.
A stream without a share for one more token is *starved*: no plan names it until pages come
back or somebody is preempted (`preemption`).

Source: specification, "Planning and the execution queue": reservations cover the full execution
ceiling and the declared draft storage. docs/adr/0012.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler.resources import pages_for
from helios_jax.scheduler.state import State
from helios_jax.scheduler.types import Limits, RequestSpec

MAX_PREEMPTIONS = 2  # of one request for lack of pages; then its worst case is promised


def worst_pages(spec: RequestSpec, limits: Limits) -> int:
    """Pages of a request that generates all that it may, drafts included."""
    return pages_for(len(spec.prompt) + spec.max_tokens + limits.draft_extent, limits.page_size)


def promised_pages(spec: RequestSpec, limits: Limits) -> int:
    """Pages that an admission promises: prompt and first step, and more of the output after each preemption."""
    first = len(spec.prompt) + min(1, spec.max_tokens) + limits.draft_extent
    least, worst = pages_for(first, limits.page_size), worst_pages(spec, limits)
    times = min(spec.preemptions, MAX_PREEMPTIONS)
    return least + pages_for((worst - least) * times, MAX_PREEMPTIONS)


def headroom(state: State) -> int:
    """Pages that admission leaves to the residents: what each that may grow needs next, one at least."""
    requests, limits = state.requests, state.limits
    growth = requests.worst_pages - requests.reserved_pages
    step = -(-(requests.written_len + 1 + limits.draft_extent) // limits.page_size) - requests.reserved_pages
    needs = np.minimum(np.maximum(step, 1), growth)
    return int(needs[running(state)].sum())


def running(state: State) -> np.ndarray:
    """bool [slots], residents that have not ended: those that consume, produce, or wait for their state."""
    return state.requests.active | state.requests.waits_outside


def spare_pages(state: State) -> int:
    """Pages that nobody was promised: neither in a table, be it one or several, nor promised beyond one.

    What checkpoints alone keep is among them: they give way (`page_pressure`).
    """
    beyond = int((state.requests.reserved_pages - state.pool.held).sum())
    return state.limits.pages - state.pool.used - beyond


def pages_of_source(state: State, spec: RequestSpec) -> tuple[int, ...]:
    """Pages that a request shares from its admission on: those of the checkpoint, or of the part, it begins with."""
    if not spec.restore_from:
        return ()
    known = state.retention.checkpoints
    pages = known.pages[library.index_of(known, spec.restore_from)]
    return pages[: spec.restored_len // state.limits.page_size]


def admission_pages(state: State, spec: RequestSpec) -> int:
    """Unpromised pages that an admission takes: what it is promised, less the pages that other tables hold too."""
    shared = np.array(pages_of_source(state, spec), np.int64)
    return promised_pages(spec, state.limits) - int(np.count_nonzero(state.pool.users[shared]))


class PageRoom(NamedTuple):
    """How far each stream may write; int64 [slots].

    Attributes:
        end: Position up to which a lane may write, its draft storage included; 0 for a starved stream.
        lacking: Pages that a starved stream misses for one more token after those before it were
            served, else 0.
    """

    end: np.ndarray
    lacking: np.ndarray


def page_room(state: State) -> PageRoom | None:
    """The shares of the unpromised pages, or None when there are enough for every ceiling.

    1. In order of admission every stream gets the pages of one more token (and its draft storage), until
       the first that there is not enough for.
    2. What is left goes towards the widest ceilings, in the same order.

    A state is a value, so it is computed once for it.
    """
    key = vars(state)
    if _MEMO not in key:
        key[_MEMO] = _shares(state)
    shares: PageRoom | None = key[_MEMO]
    return shares


_MEMO = "_page_room"  # not a field: it takes no part in a state's value


def _shares(state: State) -> PageRoom | None:
    requests, limits = state.requests, state.limits
    streams = np.flatnonzero(requests.streams)
    spare, widest = spare_pages(state), int(state.programs.width.max())
    if spare >= len(streams) * pages_for(widest + limits.draft_extent + limits.page_size, limits.page_size):
        return None  # nobody can want more than that
    streams = streams[requests.admission[streams].argsort()]
    ends = requests.committed_len[streams] + limits.draft_extent
    promised = requests.reserved_pages[streams]
    left = requests.max_tokens[streams] - requests.output_len[streams]
    step = np.maximum(-(-(ends + 1) // limits.page_size) - promised, 0)
    wide = np.maximum(-(-(ends + np.minimum(widest, left)) // limits.page_size) - promised, step)
    needed = step.cumsum()
    served = (step == 0) | (needed <= spare)
    lacking = np.where(served, 0, np.minimum(needed - spare, step))
    more = np.where(served, wide - step, 0)
    rest = spare - int(step[served].sum())
    more = np.clip(rest - (more.cumsum() - more), 0, more)
    shares = np.where(served, promised + step + more, 0) * limits.page_size
    end, missing = np.zeros((2, limits.slots), np.int64)
    end[streams], missing[streams] = shares, lacking
    return PageRoom(end, missing)
