"""Every program updates its state in place, in bounded memory, and can be stored and loaded."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from helios_jax.aot.abi import Dims, control_layout
from helios_jax.aot.device_state import abstract_state, new_state
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from tests.unit.programs_toy import Toy, compiled, no_bits, toy_params

SHAPES = [
    ProgramShape(ProgramKind.INITIALIZE, 1, 0),
    ProgramShape(ProgramKind.PREFILL, 4, 64),
    ProgramShape(ProgramKind.PREFILL, 1, 128),
    ProgramShape(ProgramKind.SCORED_PREFILL, 1, 64),
    ProgramShape(ProgramKind.DECODE, 1, 1),
    ProgramShape(ProgramKind.DECODE, 4, 1),
]
# a pool of 32 MB (float32), so that a copy of it, or of one layer, cannot hide among temporaries
DIMS = Dims(slots=4, pages_per_slot=16, num_pages=4097, page_size=32, vocab_size=61)


def tree_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_state_is_updated_in_place(shape: ProgramShape, dtype: str) -> None:
    memory = compiled(shape, Toy(), DIMS, dtype).memory_analysis()
    state = abstract_state(Toy(), DIMS, dtype)
    assert memory.alias_size_in_bytes == tree_bytes(state)
    layer = tree_bytes(state.kv[0][0])
    assert memory.temp_size_in_bytes < layer / 2


@dataclasses.dataclass(frozen=True)
class WideToy(Toy):
    """A vocabulary so large that the logits of a whole prompt could not be missed."""

    vocab_size: int = 20_000

    def abstract_params(self, dtype: Any) -> Any:
        params = super().abstract_params(dtype)
        wide = jax.ShapeDtypeStruct((self.vocab_size, params["head"].shape[1]), params["head"].dtype)
        return params | {"head": wide, "embed": wide}


def temporaries(shape: ProgramShape) -> int:
    dims = dataclasses.replace(DIMS, num_pages=65, vocab_size=WideToy().vocab_size, pages_per_slot=64)
    return compiled(shape, WideToy(), dims, "float32").memory_analysis().temp_size_in_bytes


def test_scored_prefill_never_holds_the_logits_of_a_prompt() -> None:
    small = temporaries(ProgramShape(ProgramKind.SCORED_PREFILL, 1, 128))
    large = temporaries(ProgramShape(ProgramKind.SCORED_PREFILL, 1, 2048))
    logits = 2048 * WideToy().vocab_size * 4
    assert large < logits / 8
    assert large - small < logits / 50  # the rest grows with hidden rows, not with the vocabulary


def test_prefill_meets_the_vocabulary_only_at_the_last_positions() -> None:
    assert temporaries(ProgramShape(ProgramKind.PREFILL, 4, 1024)) < 1024 * WideToy().vocab_size * 4 / 8


def test_page_memory_does_not_depend_on_the_context() -> None:
    """No program gathers a context: 16 times the page table, the same temporaries."""
    shape = ProgramShape(ProgramKind.DECODE, 4, 1)
    long = dataclasses.replace(DIMS, pages_per_slot=16 * DIMS.pages_per_slot)
    sizes = [compiled(shape, Toy(), d, "float32").memory_analysis().temp_size_in_bytes for d in (DIMS, long)]
    assert sizes[1] - sizes[0] < 64 * 1024  # the table itself


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[5]], ids=lambda s: s.name)
def test_a_stored_program_runs_after_loading(shape: ProgramShape) -> None:
    dims = dataclasses.replace(DIMS, num_pages=65)
    program = compiled(shape, Toy(), dims, "float32")
    loaded = deserialize_and_load(*pickle.loads(pickle.dumps(serialize(program))))
    ints, floats, parts = control_layout(shape, dims).new()
    parts["slot"][:] = np.arange(shape.batch_capacity)
    if "query_len" in parts:
        parts["query_len"][0], parts["sample"][0] = 5, 1
    parts["page_table"][...] = 1 + np.arange(parts["page_table"].size).reshape(parts["page_table"].shape) % 64
    results = []
    for call in (program, loaded):
        state, weights = new_state(Toy(), dims, "float32"), jax.tree.map(jax.numpy.asarray, toy_params())
        after, (out_ints, out_floats) = call(weights, state, ints, floats, *no_bits(shape, dims))
        assert state.pending_token.is_deleted()
        results.append([np.asarray(a) for a in (out_ints, out_floats, *jax.tree.leaves(after))])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
