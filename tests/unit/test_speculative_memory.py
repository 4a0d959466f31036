"""Rounds update both pools in place, hold no more of the vocabulary than plain decode a row, and can be stored."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from helios_jax.aot.abi import control_layout
from helios_jax.aot.device_state import abstract_state, new_state
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from tests.unit.programs_toy import Toy, no_bits, toy_params
from tests.unit.speculative_toy import LEARNED, RAGGED, RECTANGLE, compiled, other_params
from tests.unit.test_programs_memory import DIMS, WideToy, tree_bytes

PREFILL = ProgramShape(ProgramKind.PREFILL, 1, 64)


@pytest.mark.parametrize(
    ("shape", "draft", "dtype"),
    [
        (RAGGED, None, "bfloat16"),
        (LEARNED, Toy(), "float32"),
        (LEARNED, Toy(), "bfloat16"),
        (PREFILL, Toy(), "float32"),
    ],
    ids=lambda value: value.name if isinstance(value, ProgramShape) else None,
)
def test_both_pools_are_updated_in_place(shape: ProgramShape, draft: Any, dtype: str) -> None:
    memory = compiled(shape, Toy(), DIMS, dtype, draft).memory_analysis()
    state = abstract_state(Toy(), DIMS, dtype, draft)
    assert memory.alias_size_in_bytes == tree_bytes(state)
    assert memory.temp_size_in_bytes < tree_bytes(state.kv[0][0]) / 2


@pytest.mark.long
def test_a_row_costs_what_a_lane_of_plain_decode_costs() -> None:
    """16 rows against 16 lanes; a learned round adds its D x B distributions and nothing else of that size."""
    dims = dataclasses.replace(DIMS, num_pages=65, vocab_size=WideToy().vocab_size, pages_per_slot=64)
    learned = dataclasses.replace(LEARNED, packed_capacity=16)
    programs = [(ProgramShape(ProgramKind.DECODE, 16, 1), None), (RECTANGLE, None), (learned, WideToy())]
    decode, copy, drawn = (
        compiled(shape, WideToy(), dims, "float32", draft).memory_analysis().temp_size_in_bytes
        for shape, draft in programs
    )
    row = 4 * dims.vocab_size
    assert copy < decode + row
    assert drawn < decode + (learned.proposal_depth * learned.batch_capacity + 2) * row


def test_a_stored_round_runs_after_loading() -> None:
    program = compiled(LEARNED, Toy(), DIMS, "float32", Toy())
    loaded = deserialize_and_load(*pickle.loads(pickle.dumps(serialize(program))))
    ints, floats, parts = control_layout(LEARNED, DIMS).new()
    parts["slot"][:], parts["limit"][:], parts["calibration"][:] = np.arange(4), 4, (1, 0)
    parts["page_table"][...] = 1 + np.arange(parts["page_table"].size).reshape(parts["page_table"].shape)
    weights = jax.tree.map(jax.numpy.asarray, {"target": toy_params(), "draft": other_params()})
    results = []
    for call in (program, loaded):
        after, outputs = call(weights, new_state(Toy(), DIMS, "float32", Toy()), ints, floats, *no_bits(LEARNED, DIMS))
        results.append([np.asarray(a) for a in (*outputs, after.pending_token, after.committed_len)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
