"""Shapes of speculative and mixed catalogues: the specification's check values, envelopes, one function each."""

from __future__ import annotations

import pytest

from helios_jax.scheduler.catalog import (
    PROMPT_BUCKETS,
    Allocation,
    ProgramKind,
    ProposalSource,
    mixed_shapes,
    physical_tokens,
    speculative_shapes,
)


def test_the_check_value_of_mixed_shapes() -> None:
    """Four requests, 4096-token chunks, five draft tokens, token capacity six, ten buckets: 22 and 20."""
    drafted = mixed_shapes(max_slots=4, buckets=PROMPT_BUCKETS, draft_tokens=5, token_capacity=6)
    plain = mixed_shapes(max_slots=4, buckets=PROMPT_BUCKETS)
    assert (len(set(drafted)), len(set(plain))) == (22, 20)
    wider = [shape for shape in drafted if shape.token_capacity > 1]
    assert [(s.batch_capacity, s.token_capacity, s.prefill_capacity) for s in wider] == [(2, 2, 512), (2, 3, 512)]
    assert {s.proposal_source for s in drafted} == {ProposalSource.LEARNED}
    assert {s.proposal_source for s in plain} == {ProposalSource.NONE}
    for shape in (*drafted, *plain):
        assert shape.kind is ProgramKind.MIXED
        assert shape.packed_capacity == shape.prefill_capacity + (shape.batch_capacity - 1) * shape.token_capacity
        assert shape.packed_capacity == physical_tokens(shape)
        assert shape.proposal_depth == shape.token_capacity - 1
        assert shape.prefill_capacity >= shape.token_capacity


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [((64,), 64), ((64, 128), 64), ((64, 256), 64), ((64, 128, 256), 128), ((128, 192, 448), 192)],
)
def test_wider_widths_use_the_balanced_bucket(buckets: tuple[int, ...], expected: int) -> None:
    """Smallest worst ratio to the shortest and longest bucket; a tie takes the smaller."""
    shapes = mixed_shapes(max_slots=2, buckets=buckets, draft_tokens=1, token_capacity=4)
    assert [shape.prefill_capacity for shape in shapes if shape.token_capacity == 2] == [expected]


def test_speculative_shapes_stay_within_the_envelope() -> None:
    shapes = speculative_shapes(max_slots=6, draft_tokens=3, token_capacity=16, ragged=Allocation.PREFIX_LIMIT)
    found = {(s.batch_capacity, s.token_capacity, s.proposal_depth, s.packed_capacity) for s in shapes}
    assert len(found) == len(shapes)
    width_one = {(b, 1, 0, b) for b in (1, 2, 4, 8)}
    rectangular = {(b, w, w - 1, b * w) for b in (1, 2, 4, 8) for w in (2, 3, 4) if b * w <= 16}
    ragged = {(2, 4, 3, 4), (4, 4, 3, 8), (8, 4, 3, 16)}
    assert found == width_one | rectangular | ragged
    assert all((s.allocation is Allocation.PREFIX_LIMIT) == (s.packed_capacity < s.batch_capacity * s.token_capacity)
               for s in shapes)  # fmt: skip


def test_an_odd_envelope_is_itself_a_ragged_extent_and_host_lengths_are_the_other_way() -> None:
    shapes = speculative_shapes(
        max_slots=4, draft_tokens=7, token_capacity=6, source=ProposalSource.COPY, ragged=Allocation.QUERY_LENGTH
    )
    ragged = {(s.batch_capacity, s.packed_capacity) for s in shapes if s.token_capacity == 8}
    assert ragged == {(2, 4), (2, 6), (4, 6)}
    assert {s.proposal_source for s in shapes} == {ProposalSource.COPY}
    assert all(s.allocation is Allocation.QUERY_LENGTH for s in shapes)


def test_no_drafts_leave_width_one_only() -> None:
    shapes = speculative_shapes(max_slots=4, draft_tokens=0, token_capacity=64, ragged=Allocation.QUERY_LENGTH)
    assert [(s.batch_capacity, s.token_capacity, s.proposal_depth) for s in shapes] == [(1, 1, 0), (2, 1, 0), (4, 1, 0)]
