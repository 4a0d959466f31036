"""The synthetic device: its row allocation against a naive greedy, its clock, and what its books refuse."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import Lane, LaneRole, ProgramKind, ProgramShape, RequestHandle, RequestSpec
from helios_jax.scheduler.catalog import Allocation, ProposalSource
from helios_jax.scheduler.types import ImageSpan, ScheduledPlan, SelectionReason
from helios_jax.simulation import FakeDevice, LinearCosts
from helios_jax.simulation.acceptance import AcceptanceSampler, AcceptanceTable
from helios_jax.simulation.device import allocate_rows

K = ProgramKind
A, B = RequestHandle(0, 1), RequestHandle(1, 1)
MS = 1_000_000


def plan(shape: ProgramShape, *lanes: Lane) -> ScheduledPlan:
    return ScheduledPlan(shape, lanes, (0,) * len(lanes), 0, 0.0, 0.0, SelectionReason.ORDINARY, False)


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def started(**options: Any) -> FakeDevice:
    """A device on which both requests are initialised and A has consumed six tokens."""
    device = FakeDevice(LinearCosts(), 4, slots=2, **options)
    for handle in (A, B):
        device.admit(handle, RequestSpec(prompt=np.zeros(20, np.int32), max_tokens=50), handle.slot + 1)
    lanes = [Lane(handle, LaneRole.INITIALIZE, 0, 0, False) for handle in (A, B)]
    device.run(plan(ProgramShape(K.INITIALIZE, 2, 0), *lanes), {})
    device.run(plan(PREFILL, Lane(A, LaneRole.PROMPT, 0, 6, True)), {A: pages(1, 2)})
    return device


PREFILL = ProgramShape(K.PREFILL, 1, 8)
DECODE = ProgramShape(K.DECODE, 1, 1)
RAGGED = ProgramShape(
    K.SPECULATIVE, 2, 4, 3, 5, proposal_source=ProposalSource.LEARNED, allocation=Allocation.PREFIX_LIMIT
)


def naive_rows(confidence: np.ndarray, ceilings: list[int], packed: int) -> list[int]:
    """One row at a time to the lane whose next prefix is the likeliest."""
    rows = [1] * len(ceilings)
    while sum(rows) < packed:
        frontier = [
            (-float(np.prod(confidence[lane, :width])), width, lane)
            for lane, width in enumerate(rows)
            if width < ceilings[lane]
        ]
        if not frontier:
            break
        rows[min(frontier)[2]] += 1
    return rows


def test_rows_go_to_the_likeliest_causal_frontier() -> None:
    rng = random.Random(0)
    for _ in range(500):
        lanes, depth = rng.randint(1, 6), rng.randint(1, 4)
        values = [0.25, 0.5, 1.0] if rng.random() < 0.5 else None  # equal ones test the ties
        confidence = np.array(
            [[rng.choice(values) if values else rng.random() for _ in range(depth)] for _ in range(lanes)]
        )
        ceilings = [rng.randint(1, depth + 1) for _ in range(lanes)]
        packed = rng.randint(lanes, lanes * (depth + 1))
        assert allocate_rows(confidence, ceilings, packed).tolist() == naive_rows(confidence, ceilings, packed)


def test_frames_run_one_after_the_other() -> None:
    device = started(host_ns=100)
    lane = Lane(A, LaneRole.DECODE, 6, 1, True)
    first = device.submit(plan(DECODE, lane), {A: pages(1, 2)}, 100 * MS)
    second = device.submit(plan(DECODE, lane._replace(start=7)), {A: pages(1, 2)}, 101 * MS)
    third = device.submit(plan(DECODE, lane._replace(start=8)), {A: pages(1, 2, 3)}, 200 * MS)
    cost = LinearCosts()(DECODE)
    assert (first.started_ns, first.at_ns) == (100 * MS, 100 * MS + cost + 100)
    assert (second.started_ns, second.at_ns) == (100 * MS + cost, 100 * MS + 2 * cost + 100)
    assert second.timing.wall_ns == second.at_ns - 101 * MS
    assert [done.timing.queued for done in (first, second, third)] == [False, True, False]
    assert third.started_ns == 200 * MS


def test_a_round_reports_what_was_judged_and_its_sidecars() -> None:
    table = AcceptanceTable("t", (0.7, 0.5, 0.3), "eagle3")
    device = started(sampler=AcceptanceSampler(table, 1), survival=True)
    device.run(plan(PREFILL, Lane(B, LaneRole.PROMPT, 0, 5, True)), {B: pages(5, 6)})
    lanes = (Lane(A, LaneRole.DECODE, 6, 4, True), Lane(B, LaneRole.DECODE, 5, 2, True))
    done = device.submit(plan(RAGGED, *lanes), {A: pages(1, 2, 3), B: pages(5, 6)}, 0)
    confidence, verdicts = AcceptanceSampler(table, 1).draw(np.array([1, 2]), np.array([6, 5]), 3)
    widths = naive_rows(confidence, [4, 2], 5)
    for row, record in enumerate(done.records):
        accepted = 0
        while accepted < widths[row] - 1 and verdicts[row, accepted]:
            accepted += 1
        assert (record.offered, record.accepted) == (widths[row] - 1, accepted)
        assert len(record.tokens) == record.consumed == accepted + 1
        assert record.committed_len == lanes[row].start + accepted + 1
        assert record.tokens == tuple(device.token(record.handle, lanes[row].start + i) for i in range(1, accepted + 2))
    assert done.confidence is not None
    assert done.confidence[0, :2] == pytest.approx(confidence, rel=1e-6)
    assert done.confidence[1, :2] == pytest.approx(np.cumprod(confidence, axis=1), rel=1e-6)
    assert done.survival is not None
    assert np.isnan(done.survival[1, widths[1] - 1 :]).all()


def test_a_burst_ends_at_a_stop_token() -> None:
    device = FakeDevice(LinearCosts(), 4, slots=1)
    shape = ProgramShape(K.SPECULATIVE, 1, 4, 3, 4, proposal_source=ProposalSource.LEARNED)
    probe = FakeDevice(LinearCosts(), 4)
    probe.admit(A, RequestSpec(prompt=np.zeros(4, np.int32), max_tokens=9), 3)
    stop = probe.token(A, 6)
    spec = RequestSpec(prompt=np.zeros(4, np.int32), max_tokens=9, stop_token_ids=frozenset({stop}))
    device.admit(A, spec, 3)
    device.run(plan(ProgramShape(K.INITIALIZE, 1, 0), Lane(A, LaneRole.INITIALIZE, 0, 0, False)), {})
    device.run(plan(PREFILL, Lane(A, LaneRole.PROMPT, 0, 4, True)), {A: pages(1)})
    (record,) = device.submit(plan(shape, Lane(A, LaneRole.DECODE, 4, 4, True)), {A: pages(1, 2)}, 0).records
    assert record.tokens[-1] == stop
    assert (len(record.tokens), record.accepted, record.committed_len) == (2, 3, 6)


@pytest.mark.parametrize(
    ("shape", "lane", "table", "message"),
    [
        (PREFILL, Lane(A, LaneRole.PROMPT, 5, 4, False), pages(1, 2, 3), "starts elsewhere than 6"),
        (PREFILL, Lane(RequestHandle(1, 9), LaneRole.PROMPT, 0, 4, False), pages(7), "no initialise or restore"),
        (PREFILL, Lane(A, LaneRole.PROMPT, 6, 4, False), pages(1, 2), "it ends at 10"),
        (PREFILL, Lane(B, LaneRole.PROMPT, 0, 4, False), pages(1), "page 1 of .* is given to"),
        (PREFILL, Lane(A, LaneRole.PROMPT, 6, 4, False), pages(9, 2, 3), "lost page 9 to None"),
        (DECODE, Lane(A, LaneRole.DECODE, 7, 1, True), pages(1, 2), "starts elsewhere than 6"),
        (ProgramShape(K.SNAPSHOT, 1, 0), Lane(A, LaneRole.SNAPSHOT, 4, 0, False, 1), None, "copies a state at 6"),
        (ProgramShape(K.SNAPSHOT, 1, 0), Lane(A, LaneRole.SNAPSHOT, 6, 0, False, 0), None, "no destination row"),
        (ProgramShape(K.RESTORE, 1, 0), Lane(B, LaneRole.RESTORE, 6, 0, False, 2), None, "nothing was copied to"),
    ],
)
def test_contradictions_stop_the_device(shape: ProgramShape, lane: Lane, table: Any, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        started().run(plan(shape, lane), {lane.handle: table})


def test_a_late_start_is_a_bound_only_behind_a_round() -> None:
    """Queued behind a round that may stop short, a lane's planned start is its latest one."""
    device, table = started(), {A: pages(1, 2, 3)}
    device.submit(plan(DECODE, Lane(A, LaneRole.DECODE, 6, 1, True)), table, 0)
    done = device.submit(plan(DECODE, Lane(A, LaneRole.DECODE, 9, 1, True)), table, 0)
    assert done.records[0].committed_len == 8


def test_a_snapshot_restores_into_another_request() -> None:
    device = started()
    device.run(plan(ProgramShape(K.SNAPSHOT, 1, 0), Lane(A, LaneRole.SNAPSHOT, 6, 0, False, 3)), {})
    shape = ProgramShape(K.RESTORE, 1, 0)
    with pytest.raises(InvariantError, match="restores a state of 6 tokens"):
        device.run(plan(shape, Lane(B, LaneRole.RESTORE, 5, 0, False, 3)), {B: pages(5, 6)})
    device.run(plan(shape, Lane(B, LaneRole.RESTORE, 6, 0, False, 3)), {B: pages(5, 6)})
    records, _ = device.run(plan(PREFILL, Lane(B, LaneRole.PROMPT, 6, 2, False)), {B: pages(5, 6)})
    assert records[0].committed_len == 8


def test_images_are_whole_and_encoded_before_they_are_consumed() -> None:
    device = FakeDevice(LinearCosts(), 4)
    spec = RequestSpec(prompt=np.zeros(20, np.int32), max_tokens=5, image_spans=(ImageSpan(2, 6), ImageSpan(8, 11)))
    device.admit(A, spec, 0)
    device.run(plan(ProgramShape(K.INITIALIZE, 1, 0), Lane(A, LaneRole.INITIALIZE, 0, 0, False)), {})
    vision, table = ProgramShape(K.VISION, 1, 16), {A: pages(1, 2, 3, 4, 5)}
    with pytest.raises(InvariantError, match="consumes image 0, which was not encoded"):
        device.run(plan(PREFILL, Lane(A, LaneRole.PROMPT, 0, 7, False)), table)
    with pytest.raises(InvariantError, match="encodes image 0 of 4 features"):
        device.run(plan(vision, Lane(A, LaneRole.VISION, 0, 3, False, 0)), {})
    device.run(plan(vision, Lane(A, LaneRole.VISION, 0, 4, False, 0)), {})
    with pytest.raises(InvariantError, match="encodes image 0 again"):
        device.run(plan(vision, Lane(A, LaneRole.VISION, 0, 4, False, 0)), {})
    with pytest.raises(InvariantError, match="splits image 0"):
        device.run(plan(PREFILL, Lane(A, LaneRole.PROMPT, 0, 4, False)), table)
    device.run(plan(PREFILL, Lane(A, LaneRole.PROMPT, 0, 7, False)), table)
    fresh = RequestHandle(0, 2)
    device.rebind(A, fresh)
    with pytest.raises(InvariantError, match="image 1, which was not encoded"):
        device.run(plan(PREFILL, Lane(fresh, LaneRole.PROMPT, 7, 8, False)), {fresh: table[A]})


def test_pages_of_a_freed_request_may_belong_to_others() -> None:
    device = started()
    device.forget(A)
    records, _ = device.run(plan(PREFILL, Lane(B, LaneRole.PROMPT, 0, 4, False)), {B: pages(1)})
    assert records[0].committed_len == 4
