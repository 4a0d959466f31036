"""Numbered invariants of a state, recounted from its structure.

`check_invariants` runs after every event of a simulation and in tests; each invariant has a
test that plants the corruption it guards against. None reads the counter that it checks.

 1. Pages: 1..pages are free or held, by tables and state rows; how often, the ledger knows.
 2. Reservations: no table exceeds its slot's promise; pages in tables and promised beyond them fit the pool.
 3. Coverage: tables hold exactly the pages of the tokens committed or being written.
 4. Occupancy: a free slot is blank; an occupied one has its spec, a generation, a known phase.
 5. Lengths agree with each other, with the spec and with the phase.
 6. Fences: in order, within the window; a retiring slot is named by an outstanding fence, and
    every lane in flight still owns its slot.
 7. Prices are unset or within [1e-300, 1e300]; only streams with output have a delivery history.
 8. Durations: an estimate is the median of its window, zero exactly when the window is empty.
 9. Every admitted request is running or has ended exactly once; executions add up.
10. No recorded time lies in the future.
11. Columns are read-only, of the right type and one row a slot.
12. The next endpoint is the one that the spec's message ends give.
13. Plans in flight are in the catalogue, fit their program, and lanes are distinct.
14. Exploration: no credit above the cap or beyond what was earned, P <= share / (1 - share) O + D.
15. One exploration episode at most is open, and it is the outstanding frame selected for it.
16. A frame that needs feedback is alone; expected service is within the bounds of its lanes.
17. Each state row has one use; rows of requests are of present ones, published ones are named by checkpoints.
18. The rows in copy are exactly the destinations of the snapshots in flight.
19. A request has one destination at most, at or ahead of its state; no prefill passes it.
20. Checkpoints: ids grow; key, row and length go together; pins are those of waiting restores.
21. Every possible cut is captured, skipped or ahead; free slots keep no captures.
22. Images: windows are those that the storage gives; no prompt is consumed ahead of its images.
23. Boundaries: a prompt stops at the next mandatory position at the latest, never inside an image.
24. Copies: who waits for one has its row, who has further windows a private one; only ended requests have an end;
    a stream is at most one snapshot away from decoding.
25. Acceptance: means are probabilities, weights within the cap, the prior falls; unused slots know nothing.
26. Promises cover a prompt and its first step, or the worst case of a request that gave way often enough, and never
    more than that; admissions number the residents.
27. Sharing: state rows keep the pages that their checkpoints name, as many as their length has; a page with several
    holders lies before everything that is still to be written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler.cost import WINDOW, median_ns
from helios_jax.scheduler.invariants_acceptance import estimates
from helios_jax.scheduler.invariants_ledgers import budgets, episodes, queue
from helios_jax.scheduler.invariants_pages import page_holders, promises, sharing
from helios_jax.scheduler.invariants_rows import captures, published, row_columns, row_fences, row_uses
from helios_jax.scheduler.invariants_stages import boundaries, copies, images
from helios_jax.scheduler.programs import misfit
from helios_jax.scheduler.resources import pages_for
from helios_jax.scheduler.service import MAX_R, MIN_R
from helios_jax.scheduler.state import (
    DECODE,
    EXTERNAL,
    FREE,
    INITIALIZE,
    OWNED_COLUMNS,
    PROMPT,
    REQUEST_COLUMNS,
    RESTORE,
    RETIRING,
    SNAPSHOT,
    TERMINAL,
    VISION,
    Phase,
    State,
)
from helios_jax.scheduler.types import LaneRole, RequestSpec


def check_invariants(state: State) -> None:
    """Recount every invariant.

    Raises:
        InvariantError: With the number and the numbers of the first one that does not hold.
    """
    for number, check in enumerate(_CHECKS, start=1):
        problem = check(state)
        if problem:
            raise InvariantError(f"invariant {number} does not hold: {problem}")


def _reservations(state: State) -> str | None:
    held = np.array([len(table) for table in state.pool.tables])
    if not np.array_equal(held, state.pool.held):
        return f"tables hold {held}, the ledger says {state.pool.held}"
    promised = state.requests.reserved_pages
    if (held > promised).any():
        return f"tables hold {held}, promised are {promised}"
    total = int((promised - held).sum()) + len(np.unique(np.concatenate(state.pool.tables)))
    if total > state.limits.pages:
        return f"{total} pages are in tables or promised beyond them, of {state.limits.pages}"
    return None


def _coverage(state: State) -> str | None:
    written, requests = state.requests.written_len, state.requests
    reach = requests.committed_len.copy()
    for frame in state.frames:
        for lane in frame.plan.lanes:
            if lane.role in (LaneRole.PROMPT, LaneRole.DECODE):
                reach[lane.handle.slot] = max(reach[lane.handle.slot], lane.start + lane.length)
    owned = requests.phase != FREE
    if (reach > written)[owned & (requests.phase != RESTORE)].any():
        return f"positions up to {reach} are in use, written are {written}"
    needed = np.array([pages_for(int(tokens), state.limits.page_size) for tokens in written])
    held = np.array([len(table) for table in state.pool.tables])
    # A restore takes its pages when it is committed, not when the request is admitted.
    exact = owned & (requests.phase != RESTORE) & (requests.phase != EXTERNAL) & (requests.phase != RETIRING)
    if (held > needed).any() or (held != needed)[exact].any():
        return f"slots hold {held} pages, {needed} are written"
    return None


def _occupancy(state: State) -> str | None:
    requests = state.requests
    if not ((requests.phase >= FREE) & (requests.phase <= RETIRING)).all():
        return f"unknown phase in {requests.phase}"
    for slot in range(state.limits.slots):
        if requests.phase[slot] == FREE:
            blank = all(getattr(requests, name)[slot] == 0 for name in OWNED_COLUMNS)
            blank &= bool(np.isnan(requests.token_r[slot]) and np.isnan(requests.delivery_r[slot]))
            if not blank or state.specs[slot] is not None:
                return f"free slot {slot} is not blank"
        elif state.specs[slot] is None or requests.generation[slot] < 1:
            return f"occupied slot {slot} has generation {requests.generation[slot]}, spec {state.specs[slot]}"
    return None


def _shares(state: State, spec: RequestSpec) -> bool:
    """Whether a request may have begun with pages of a part of a checkpoint."""
    return state.limits.shares_parts and spec.restore_from > 0 and spec.restored_len % state.limits.page_size == 0


def _lengths(state: State) -> str | None:
    r = state.requests
    for slot in np.flatnonzero(r.phase != FREE).tolist():
        spec, phase = state.specs[slot], r.phase[slot]
        prompt, consumed, committed, output = (
            int(column[slot]) for column in (r.prompt_len, r.consumed_len, r.committed_len, r.output_len)
        )
        if spec is None or (prompt, int(r.max_tokens[slot])) != (len(spec.prompt), spec.max_tokens):
            return f"slot {slot} disagrees with its spec"
        decoding = consumed == prompt and committed == prompt + output - 1 and 1 <= output < spec.max_tokens
        prompting = consumed == committed < prompt and output == 0
        agrees = {
            INITIALIZE: prompting and (not consumed or _shares(state, spec)),
            RESTORE: prompting and consumed > 0,
            EXTERNAL: prompting and consumed > 0,
            VISION: prompting and r.images_done[slot] < r.window_images[slot],
            SNAPSHOT: prompting or decoding,
            PROMPT: prompting and consumed < r.boundary[slot] <= prompt,
            DECODE: decoding,
            TERMINAL: 0 <= consumed <= prompt and 0 <= output <= spec.max_tokens,
            RETIRING: 0 <= consumed <= prompt and 0 <= output <= spec.max_tokens,
        }
        if not agrees[Phase(phase)]:
            lengths = f"{consumed} consumed of {prompt}, {committed} committed, {output} out"
            return f"slot {slot}, {Phase(phase).name}: {lengths}"
    return None


def _fences(state: State) -> str | None:
    fences = [frame.fence for frame in state.frames]
    if (
        len(fences) > state.limits.frames
        or fences != sorted(set(fences))
        or (fences and fences[-1] != state.last_fence)
    ):
        return f"fences {fences} in a window of {state.limits.frames}, the last was {state.last_fence}"
    if state.interval and any(fence <= state.interval.fence for fence in fences):
        return f"fences {fences} are outstanding although {state.interval.fence} is complete"
    last = {lane.handle.slot: frame.fence for frame in state.frames for lane in frame.plan.lanes}
    for frame in state.frames:
        for slot, generation in (lane.handle for lane in frame.plan.lanes):
            if state.requests.generation[slot] != generation or state.requests.phase[slot] == FREE:
                return f"fence {frame.fence} names ({slot}, {generation}), which lost its slot"
    for slot, fence in last.items():
        if state.requests.last_fence[slot] != fence:
            return f"slot {slot} has last fence {state.requests.last_fence[slot]}, it is in {fence}"
    leaked = [s for s in np.flatnonzero(state.requests.phase == RETIRING).tolist() if s not in last]
    return f"slots {leaked} retire although no fence holds them" if leaked else None


def _prices(state: State) -> str | None:
    for name in ("token_r", "delivery_r"):
        r = getattr(state.requests, name)
        known = r[~np.isnan(r)]
        if ((known < MIN_R) | (known > MAX_R)).any():
            return f"{name} holds {known}"
    quiet = ~np.isnan(state.requests.delivery_r) & (state.requests.output_len == 0)
    return f"slots {np.flatnonzero(quiet)} have a delivery history without output" if quiet.any() else None


def _durations(state: State) -> str | None:
    costs = state.costs
    for index in range(len(state.catalog)):
        count = int(costs.num_samples[index])
        window = costs.samples_ns[index, : max(0, count)].tolist()
        if not 0 <= count <= WINDOW or any(sample <= 0 for sample in window):
            return f"program {index} has {count} samples {window}"
        expected = median_ns(window) if window else 0
        if costs.estimate_ns[index] != expected:
            return f"program {index} is estimated {costs.estimate_ns[index]} ns, its window gives {expected}"
    return None


def _totals(state: State) -> str | None:
    c = state.counters
    ended = sum(c.finished) + c.cancelled + c.preempted
    running = int(np.count_nonzero(state.requests.active | (state.requests.phase == EXTERNAL)))
    if c.admitted != ended + running:
        return f"{c.admitted} admitted, {ended} ended and {running} running"
    if c.admitted + c.rebound != int(state.requests.generation.sum()):
        return f"{c.admitted} admitted, {c.rebound} rebound, {state.requests.generation.sum()} generations given out"
    if sum(c.programs) != sum(c.executions) + len(state.frames):
        return f"{sum(c.programs)} programs committed, {sum(c.executions)} executed, {len(state.frames)} in flight"
    return None


def _times(state: State) -> str | None:
    for name, column in (
        ("last_use_ns", state.requests.last_use_ns),
        ("visible_ns", state.requests.visible_ns),
        ("observed_ns", state.costs.observed_ns),
        ("attempted_ns", state.costs.attempted_ns),
        ("dispatched_ns", np.array([frame.dispatched_ns for frame in state.frames], np.int64)),
    ):
        if (column > state.now_ns).any():
            return f"{name} {column.max()} lies after now, {state.now_ns}"
    return None


def _columns(state: State) -> str | None:
    for name in REQUEST_COLUMNS:
        column = getattr(state.requests, name)
        wanted = {"scored": np.bool_, "token_r": np.float64, "delivery_r": np.float64}.get(name, np.int64)
        if column.dtype != wanted or column.shape != (state.limits.slots,) or column.flags.writeable:
            return f"{name} is {column.dtype} {column.shape}, writeable {column.flags.writeable}"
    others = [state.pool.free, state.pool.held, *state.pool.tables, state.costs.estimate_ns, state.costs.samples_ns]
    return "a page or cost column is writeable" if any(column.flags.writeable for column in others) else None


def _endpoints(state: State) -> str | None:
    for slot in np.flatnonzero(state.requests.phase == PROMPT).tolist():
        spec, consumed = state.specs[slot], int(state.requests.consumed_len[slot])
        if spec is None:
            return f"slot {slot} has no spec"
        ends = sorted(end for end in (*spec.message_ends, len(spec.prompt)) if consumed < end <= len(spec.prompt))
        if state.requests.endpoint[slot] != ends[0]:
            return f"slot {slot} has endpoint {state.requests.endpoint[slot]}, the spec gives {ends[0]}"
    return None


def _plans(state: State) -> str | None:
    for frame in state.frames:
        plan = frame.plan
        if plan.shape not in state.catalog.shapes:
            return f"{plan.shape.name} is not in the catalogue"
        problem = misfit(plan.shape, plan.lanes, plan.prompt_row)
        if problem:
            return f"{plan.shape.name} runs {problem}"
    return None


_CHECKS: tuple[Callable[[State], str | None], ...] = (
    page_holders,
    _reservations,
    _coverage,
    _occupancy,
    _lengths,
    _fences,
    _prices,
    _durations,
    _totals,
    _times,
    _columns,
    _endpoints,
    _plans,
    budgets,
    episodes,
    queue,
    row_uses,
    row_fences,
    row_columns,
    published,
    captures,
    images,
    boundaries,
    copies,
    estimates,
    promises,
    sharing,
)
