"""Invariant of page promises, recounted from the specs (see `invariants`)."""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.reservation import MAX_PREEMPTIONS
from helios_jax.scheduler.resources import pages_for
from helios_jax.scheduler.state import FREE, State


def promises(state: State) -> str | None:
    """Promises are within what their specs allow, and admissions number the residents."""
    requests, size = state.requests, state.limits.page_size
    residents = np.flatnonzero(requests.phase != FREE)
    for slot in residents.tolist():
        spec, mine = state.specs[slot], int(requests.reserved_pages[slot])
        if spec is None:
            return f"slot {slot} has no spec"
        worst = pages_for(len(spec.prompt) + spec.max_tokens + state.limits.draft_extent, size)
        first = pages_for(len(spec.prompt) + min(1, spec.max_tokens) + state.limits.draft_extent, size)
        least = worst if spec.preemptions >= MAX_PREEMPTIONS else first
        if requests.worst_pages[slot] != worst or not least <= mine <= worst:
            return f"slot {slot} is promised {mine} pages, {least} at least, of {requests.worst_pages[slot]} ({worst})"
    numbers = requests.admission[residents]
    if len(np.unique(numbers)) != len(numbers) or ((numbers < 1) | (numbers > state.counters.admitted)).any():
        return f"admissions {numbers} of {state.counters.admitted}"
    return None
