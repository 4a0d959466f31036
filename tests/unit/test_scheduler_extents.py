"""Extents that contradict a program's kind are refused when the catalogue is loaded."""

from __future__ import annotations

import dataclasses

import pytest

from helios_jax.errors import ConfigError
from helios_jax.scheduler import Catalog, ProgramKind, ProgramShape, new_state
from helios_jax.scheduler.catalog import (
    Allocation,
    ProposalSource,
    mixed_shapes,
    prompt_buckets,
    serving_catalog,
    speculative_shapes,
)
from helios_jax.scheduler.extents import check_shape
from helios_jax.simulation.experiment import simulation_catalog
from tests.unit.scheduler_toy import small_catalog, small_limits

K, S, LEARNED = ProgramKind, ProgramShape, ProposalSource.LEARNED
DEVICE = Allocation.PREFIX_LIMIT
MIXED = S(K.MIXED, 4, 4, 3, 64 + 3 * 4, 64, LEARNED)
ROUND = S(K.SPECULATIVE, 4, 4, 3, 8, 0, LEARNED)

REFUSED: list[tuple[ProgramShape, str]] = [
    *[(dataclasses.replace(MIXED, batch_capacity=b, packed_capacity=0), "power of two") for b in (1, 3, 6)],
    (dataclasses.replace(MIXED, batch_capacity=128, packed_capacity=0), "1 to 64"),
    (S(K.MIXED, 2, 9, 8, 0, 64, LEARNED), "1 to 8, got 9"),
    (S(K.MIXED, 2, 0, 0, 0, 64), "at least 1, got 0"),
    *[(dataclasses.replace(MIXED, packed_capacity=0, prefill_capacity=t), "multiple of 64") for t in (0, 2, 70, 63)],
    (dataclasses.replace(MIXED, packed_capacity=1), "prompt and decoding rows, 76, got 1"),
    (S(K.MIXED, 4, 4, 3, 0, 64), "need a proposal source"),
    (dataclasses.replace(ROUND, packed_capacity=3), "4 to 16"),
    (dataclasses.replace(ROUND, packed_capacity=17), "4 to 16"),
    (dataclasses.replace(ROUND, packed_capacity=0), "4 to 16"),
    (dataclasses.replace(ROUND, token_capacity=0), "at least 1"),
    (dataclasses.replace(ROUND, prefill_capacity=64), "prefill_capacity must be 0"),
    (S(K.DECODE, 4, 1, 0, 0, 64), "prefill_capacity must be 0"),
    (S(K.PREFILL, 1, 64, 0, 0, 64), "prefill_capacity must be 0"),
    (S(K.DECODE, 0, 1), "1 to 64, got 0"), (S(K.DECODE, 65, 1), "1 to 64, got 65"),
    (S(K.DECODE, 4, 2), "must be 1, got 2"), (S(K.DECODE, 4, 1, 5, 3), "nothing is proposed"),
    (S(K.PREFILL, 1, 0), "at least 1"), (S(K.SCORED_PREFILL, 1, 0), "at least 1"), (S(K.VISION, 1, 0), "at least 1"),
    (S(K.SNAPSHOT, 1, 0, 0, 0, 0, LEARNED), "nothing is proposed"),
    (S(K.DECODE, 1, 1, allocation=DEVICE), "nothing is allocated"),
    (S(K.DECODE, -1, 1), "integers of at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "message"), REFUSED)
def test_extents_that_contradict_the_kind_are_refused(shape: ProgramShape, message: str) -> None:
    with pytest.raises(ConfigError, match=f"program {shape.name} .*{message}"):
        new_state(Catalog((*small_catalog(), shape)), small_limits())


def test_tests_may_leave_prompts_unaligned_and_nothing_else() -> None:
    toy = S(K.MIXED, 2, 4, 3, 0, 6, LEARNED)
    new_state(Catalog((*small_catalog(), toy), aligned=False), small_limits())
    with pytest.raises(ConfigError, match="multiple of 64, got 6"):
        new_state(Catalog((*small_catalog(), toy)), small_limits())
    with pytest.raises(ConfigError, match="decode width 4, got 3"):
        check_shape(dataclasses.replace(toy, prefill_capacity=3), aligned=False)


def test_the_catalogues_that_are_made_here_pass() -> None:
    """Also the simulation's with tables deeper than a mixed program's width."""
    for slots in (1, 5, 64):
        for depth in (0, 1, 7, 12):
            shapes = [*simulation_catalog(slots, 4096, depth), *serving_catalog(max_slots=slots, prefill_chunk=100)]
            for ragged in (None, *Allocation):
                shapes += speculative_shapes(
                    max_slots=slots, draft_tokens=depth, token_capacity=slots * (depth + 1), ragged=ragged
                )
            shapes += mixed_shapes(max_slots=slots, buckets=prompt_buckets(4096), draft_tokens=min(depth, 7))
            for shape in shapes:
                check_shape(shape)
    assert max(s.token_capacity for s in simulation_catalog(4, 256, 12).of_kind(K.MIXED)) == 8
