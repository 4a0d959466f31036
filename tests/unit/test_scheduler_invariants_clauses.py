"""Planted corruptions of the clauses that the other lists leave out, in states of every kind.

Found by removing each clause of each invariant in turn: these are the corruptions that only it sees.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import ImageSpan, LaneRole, SelectionReason, State, check_invariants, preempt
from helios_jax.scheduler.resources import give_back
from helios_jax.scheduler.state import OWNED_COLUMNS, REASONS, Phase
from helios_jax.scheduler.state_rows import RowUse
from tests.unit.every_kind_toy import (
    IN_FLIGHT,
    decode_lanes,
    decoders,
    every_kind_state,
    fly,
    healthy,
    in_phase,
    run_until,
)
from tests.unit.scheduler_toy import MS, admitted, request
from tests.unit.test_scheduler_invariants import Corruption, column, counter, lanes, sealed
from tests.unit.test_scheduler_invariants_ledgers import last_frame, ledger


def _decoding() -> State:
    """Two streams, nothing in flight; slots 2 and 3 are free."""
    return decoders(2)[0]


def _queued() -> State:
    """Two decode frames of the same stream in flight."""
    state, handles = decoders(2)
    state = fly(state, "decode", *decode_lanes(state, handles, 1, 1))
    return fly(state, "decode", *[lane._replace(start=lane.start + 1) for lane in state.frames[0].plan.lanes])


def _prompting() -> State:
    """A prompt of 12 tokens, the first four of them consumed."""
    state, _ = admitted(every_kind_state(state_rows=0), request(12, 4))
    return run_until(state, lambda s: 0 < int(s.requests.consumed_len[0]) < 12)


def _restoring(*, external: bool = False) -> State:
    return admitted(every_kind_state(), request(9, 4, restored_len=4, external=external))[0]


def _armed() -> State:
    """Between two windows of images, a row armed for the end of the prompt."""
    return healthy(IN_FLIGHT["snapshot_window"]())


def _published() -> State:
    """Two published captures; a restore waits for the first."""
    state, _ = admitted(every_kind_state(), request(8, 4), request(8, 4))
    state = run_until(state, lambda s: len(s.retention.checkpoints) == 2)
    first = state.retention.checkpoints
    spec = request(12, 4, restore_from=int(first.ids[0]), restored_len=int(first.endpoints[0]))
    return admitted(state, spec)[0]


def _snapshot_due() -> State:
    state, handles = admitted(every_kind_state(), request(8, 4))
    return run_until(state, in_phase(Phase.SNAPSHOT, *handles))


def _terminal() -> State:
    state, (handle,) = admitted(every_kind_state(), request(5, 9))
    state = run_until(state, lambda s: int(s.requests.output_len[0]) == 4 and s.requests.phase[0] == Phase.DECODE)
    return preempt(state, handle)


def _initializing() -> State:
    return admitted(every_kind_state(state_rows=0), request(8, 4))[0]


BASES: dict[str, Callable[[], State]] = {
    "decoding": _decoding, "queued": _queued, "prompting": _prompting, "restoring": _restoring, "armed": _armed,
    "external": lambda: _restoring(external=True), "published": _published, "snapshot due": _snapshot_due,
    "terminal": _terminal, "initializing": _initializing, **IN_FLIGHT,
}  # fmt: skip
state_of = functools.cache(lambda base: BASES[base]())


def every(*corruptions: Corruption) -> Corruption:
    return lambda state: functools.reduce(lambda done, corrupt: corrupt(done), corruptions, state)


def costs(**first: Any) -> Corruption:
    """Columns of the first program."""

    def corrupt(state: State) -> State:
        columns = {name: getattr(state.costs, name).copy() for name in first}
        for name, value in first.items():
            columns[name][0] = value
            columns[name].setflags(write=False)
        return dataclasses.replace(state, costs=dataclasses.replace(state.costs, **columns))

    return corrupt


def shorter(prompt_len: int) -> Corruption:
    """The first request's prompt ends earlier, in the columns and in the spec."""

    def corrupt(state: State) -> State:
        spec = dataclasses.replace(state.specs[0], prompt=np.arange(prompt_len, dtype=np.int32))
        state = dataclasses.replace(state, specs=(spec, *state.specs[1:]))
        return every(column("prompt_len", 0, prompt_len), column("endpoint", 0, prompt_len))(state)

    return corrupt


def limited(max_tokens: int) -> Corruption:
    def corrupt(state: State) -> State:
        spec = dataclasses.replace(state.specs[0], max_tokens=max_tokens)
        return column("max_tokens", 0, max_tokens)(dataclasses.replace(state, specs=(spec, *state.specs[1:])))

    return corrupt


def top(**changes: Any) -> Corruption:
    return lambda state: dataclasses.replace(state, **changes)


def limit(**changes: int) -> Corruption:
    return lambda state: dataclasses.replace(state, limits=dataclasses.replace(state.limits, **changes))


def freed(slot: int) -> Corruption:
    """The slot is given away completely, whatever runs."""

    def corrupt(state: State) -> State:
        requests, specs = state.requests.draft(), list(state.specs)
        for name in OWNED_COLUMNS:
            getattr(requests, name)[slot] = 0
        requests.token_r[slot] = requests.delivery_r[slot] = np.nan
        specs[slot] = None
        return dataclasses.replace(
            state, requests=requests.sealed(), specs=tuple(specs), pool=give_back(state.pool, [slot])
        )

    return corrupt


def rows(row: int, **values: int) -> Corruption:
    def corrupt(state: State) -> State:
        columns = {name: getattr(state.retention.rows, name).copy() for name in values}
        for name, value in values.items():
            columns[name][row - 1] = value
            columns[name].setflags(write=False)
        return kept(rows=dataclasses.replace(state.retention.rows, **columns))(state)

    return corrupt


def kept(**changes: Any) -> Corruption:
    return lambda state: dataclasses.replace(state, retention=dataclasses.replace(state.retention, **changes))


def checkpoints(**columns: Any) -> Corruption:
    def corrupt(state: State) -> State:
        known = state.retention.checkpoints
        changed = {name: sealed(value) if isinstance(value, list) else value for name, value in columns.items()}
        return kept(checkpoints=dataclasses.replace(known, **changed))(state)

    return corrupt


def writeable_rows(state: State) -> State:
    return kept(rows=dataclasses.replace(state.retention.rows, use=state.retention.rows.use.copy()))(state)


def longer(state: State) -> State:
    column = sealed([*state.requests.visible_ns, 0])
    return dataclasses.replace(state, requests=dataclasses.replace(state.requests, visible_ns=column))


def late_cut(state: State) -> State:
    cuts = list(state.retention.cuts)
    cuts[0] = (*cuts[0][:-1], cuts[0][-1]._replace(endpoint=99))
    return kept(cuts=tuple(cuts))(state)


def interval_behind(state: State) -> State:
    assert state.interval is not None
    return dataclasses.replace(state, interval=dataclasses.replace(state.interval, fence=state.last_fence))


def two_probes(state: State) -> State:
    reasons = (SelectionReason.TIMING_REFRESH, SelectionReason.ACCEPTANCE_LEARNING)
    frames = [
        dataclasses.replace(f, plan=dataclasses.replace(f.plan, reason=reason))
        for f, reason in zip(state.frames, reasons, strict=True)
    ]
    state = dataclasses.replace(state, frames=tuple(frames))
    return every(ledger("refresh", episode=frames[0].fence), ledger("learning", episode=frames[1].fence))(state)


def rich(balance: int) -> Corruption:
    """Much ordinary time was credited."""

    def corrupt(state: State) -> State:
        spent = list(state.counters.execution_ns)
        spent[REASONS.index(SelectionReason.ORDINARY)] = 10**13
        state = dataclasses.replace(state, counters=dataclasses.replace(state.counters, execution_ns=tuple(spent)))
        return every(ledger("learning", ordinary_ns=10**13, balance=balance))(state)

    return corrupt


def stale_frame(state: State) -> State:
    """Dispatched when the program's last observation was a minute old."""
    index = state.catalog.shapes.index(state.frames[-1].plan.shape)
    observed = state.costs.observed_ns.copy()
    observed[index] = -60_000 * MS
    observed.setflags(write=False)
    return dataclasses.replace(state, costs=dataclasses.replace(state.costs, observed_ns=observed))


AS_PROMPTS = lanes(lambda planned: tuple(lane._replace(role=LaneRole.PROMPT) for lane in planned))


CORRUPTIONS: list[tuple[int, str, str, Corruption]] = [
    (3, "a token written without a page", "decoding", column("written_len", 0, 99)),
    (3, "a token in flight that nothing covers", "decode", column("written_len", 0, 5)),
    (4, "an unknown phase", "decoding", column("phase", 0, 10)),
    (4, "a free slot that kept a delivery price", "decoding", column("delivery_r", 3, 1.0)),
    (4, "a free slot that kept a spec", "decoding", lambda s: dataclasses.replace(s, specs=(*s.specs[:3], s.specs[0]))),
    (5, "another limit than the spec's", "decoding", column("max_tokens", 0, 12)),
    (5, "a stream without output", "decoding", every(column("output_len", 0, 0), column("committed_len", 0, 4))),
    (5, "a stream at its limit", "decoding", lambda s: limited(int(s.requests.output_len[0]))(s)),
    (5, "a prompt with output", "prompting", column("output_len", 0, 1)),
    (5, "a prompt consumed but not in the cache", "prompting", column("committed_len", 0, 3)),
    (5, "a prompt in the cache but not consumed", "prompting", column("consumed_len", 0, 3)),
    (5, "a prompt that is over", "prompting", lambda s: shorter(int(s.requests.consumed_len[0]))(s)),
    (5, "a boundary behind", "prompting", column("boundary", 0, 1)),
    (5, "a boundary here", "prompting", lambda s: column("boundary", 0, int(s.requests.consumed_len[0]))(s)),
    (5, "a boundary outside the prompt", "prompting", column("boundary", 0, 13)),
    (5, "a new request that has consumed", "initializing", column("consumed_len", 0, 1)),
    (5, "a new request with output", "initializing", column("output_len", 0, 1)),
    (5, "a restore with output", "restoring", column("output_len", 0, 1)),
    (5, "a restore of nothing", "restoring", every(column("consumed_len", 0, 0), column("committed_len", 0, 0))),
    (5, "an external state with output", "external", column("output_len", 0, 1)),
    (5, "an external state of nothing", "external", every(column("consumed_len", 0, 0), column("committed_len", 0, 0))),
    (5, "images for a stream", "vision", column("output_len", 0, 1)),
    (5, "no image left to encode", "vision", lambda s: column("images_done", 0, int(s.requests.window_images[0]))(s)),
    *[
        (5, f"{name} of {value} in {base}", base, column(name, 0, value))
        for base in ("terminal", "ended_in_flight") for name in ("consumed_len", "output_len") for value in (-1, 99)
    ],
    (6, "more frames than the window has", "queued", limit(frames=1)),
    (6, "a last fence that nobody submitted", "decode", lambda s: top(last_fence=s.last_fence + 1)(s)),
    (6, "a frame that is over already", "decode", interval_behind),
    (6, "a slot freed in flight", "decode", freed(0)),
    (8, "a negative number of samples", "decoding", costs(num_samples=-1, estimate_ns=0)),
    (8, "a sample of no time", "decoding", costs(samples_ns=[-5, *[0] * 8], estimate_ns=-5)),
    (8, "ten samples", "decoding", costs(num_samples=10, samples_ns=[5] * 9, estimate_ns=5)),
    (11, "a slot too many", "decoding", longer),
    (11, "a writeable estimate", "decoding", lambda s: dataclasses.replace(
        s, costs=dataclasses.replace(s.costs, estimate_ns=s.costs.estimate_ns.copy()))),
    (14, "credit above the cap", "decoding", rich(6 * MS * 99)),
    (14, "negative time credited", "decoding", ledger("learning", ordinary_ns=-1, balance=-99 * MS)),
    (15, "two probes under way", "queued", two_probes),
    (16, "a prompt in a shared window", "queued", AS_PROMPTS),
    (16, "a stale program in a shared window", "queued", stale_frame),
    (16, "a frame that needed feedback", "queued", last_frame(alone=True)),
    (17, "a row too few", "snapshot due", limit(state_rows=5)),
    (17, "a writeable column of rows", "snapshot due", writeable_rows),
    (17, "an unknown use", "snapshot due", rows(4, use=9, slot=0, generation=1)),
    (17, "a row of nobody", "snapshot due", rows(4, use=int(RowUse.ARMED), slot=3)),
    (17, "a row of a request that is gone", "snapshot due", lambda s: rows(
        4, use=int(RowUse.ARMED), slot=0, generation=1, endpoint=8)(every(freed(0), counter(cancelled=1))(s))),
    (18, "a copy that nobody submitted", "snapshot due", lambda s: rows(
        int(s.requests.state_row[0]), use=int(RowUse.COPYING))(s)),
    (18, "a copy into a row that is only armed", "snapshot", lambda s: rows(
        int(s.requests.state_row[0]), use=int(RowUse.ARMED))(s)),
    (19, "two guards of one request", "snapshot due", every(*[
        rows(row, use=int(RowUse.GUARDED), slot=0, generation=1, endpoint=8) for row in (3, 4)])),
    (19, "a destination that is not armed", "snapshot due", column("state_row", 0, 4)),
    (19, "a row armed behind the state", "armed", lambda s: rows(
        int(np.flatnonzero(s.retention.rows.use == RowUse.ARMED)[0]) + 1, endpoint=3)(s)),
    (20, "ids that fall", "published", lambda s: checkpoints(ids=s.retention.checkpoints.ids[::-1].tolist())(s)),
    (20, "an id of nothing", "published", checkpoints(ids=[0, 1])),
    (20, "an id that was never given", "published", checkpoints(last_id=1)),
    (20, "one key for two rows", "published", lambda s: checkpoints(
        keys=("same", "same"), roles=[0, 1])(s)),
    (20, "a checkpoint of no tokens", "published", lambda s: checkpoints(
        endpoints=[int(s.retention.checkpoints.endpoints[0]), 0])(s)),
    (20, "a pin on what is gone", "published", lambda s: kept(pinned=sealed([0, 0, 99, 0]))(
        checkpoints(pins=[0, 0])(s))),
    (21, "a cut outside the prompt", "snapshot due", late_cut),
    (21, "negative credit", "decoding", kept(credit_ns=sealed([-1.0, 0, 0, 0], np.float64))),
    (22, "the middle of an image", "armed", lambda s: dataclasses.replace(s, specs=(dataclasses.replace(
        s.specs[0], image_spans=(ImageSpan(0, 3), ImageSpan(3, 7))), *s.specs[1:]))),
]  # fmt: skip


@pytest.mark.parametrize("base", sorted({base for _, _, base, _ in CORRUPTIONS}))
def test_the_uncorrupted_states_pass(base: str) -> None:
    check_invariants(state_of(base))


@pytest.mark.parametrize(
    ("number", "base", "corrupt"),
    [pytest.param(number, base, corrupt, id=f"{number}-{name}") for number, name, base, corrupt in CORRUPTIONS],
)
def test_planted_corruption_is_found(number: int, base: str, corrupt: Corruption) -> None:
    with pytest.raises(InvariantError, match=f"invariant {number} "):
        check_invariants(corrupt(state_of(base)))
