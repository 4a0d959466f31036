"""Snapshots and restores copy every bit of a state, several at once, and touch nothing else."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.device_state import DeviceState, abstract_state
from helios_jax.aot.programs import build_program
from helios_jax.aot.programs.initialize import SETTINGS
from helios_jax.models.interface import heads_of
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from tests.golden.tiny import tiny_checkpoint
from tests.unit.test_programs_memory import tree_bytes

BATCH = 3
PROMPT_LEN = 50  # of the requests that are restored
SNAPSHOT, RESTORE = (ProgramShape(kind, BATCH, 0) for kind in (ProgramKind.SNAPSHOT, ProgramKind.RESTORE))
DIMS = Dims(slots=4, pages_per_slot=3, num_pages=14, page_size=16, vocab_size=128, state_rows=5)


@functools.cache
def models() -> tuple[Any, Any]:
    model = open_source(tiny_checkpoint("qwen3_5_hybrid")).model
    return model, heads_of(model)


@functools.cache
def compiled(shape: ProgramShape, dtype: str) -> Any:
    model, heads = models()
    control = control_layout(shape, DIMS)
    arguments = (
        {},
        abstract_state(model, DIMS, dtype, heads),
        jax.ShapeDtypeStruct((control.int_size,), jnp.int32),
        jax.ShapeDtypeStruct((control.float_size,), jnp.float32),
    )
    return jax.jit(build_program(shape, model, DIMS, dtype, heads), donate_argnums=1).lower(*arguments).compile()


def random_state(dtype: str, seed: int) -> DeviceState:
    """Any bits at all in every leaf, NaN among them; only the counts are those of possible requests."""
    rng = np.random.default_rng(seed)

    def fill(leaf: Any) -> np.ndarray:
        if leaf.dtype == bool:
            return rng.random(leaf.shape) < 0.2
        return np.frombuffer(rng.bytes(int(np.prod(leaf.shape)) * leaf.dtype.itemsize), leaf.dtype).reshape(leaf.shape)

    state = jax.tree.map(fill, abstract_state(*models()[:1], DIMS, dtype, models()[1]))
    slots = DIMS.slots + 1
    prompt, committed = rng.integers(5, 20, slots), rng.integers(1, 40, slots)
    counts = np.zeros((slots, DIMS.vocab_size), np.int32)
    pending = rng.integers(0, DIMS.vocab_size, slots)
    for slot in range(slots):
        for token in rng.integers(0, DIMS.vocab_size, max(0, committed[slot] - prompt[slot])):
            counts[slot, token] += 1
        if committed[slot] >= prompt[slot] and slot % 2:
            counts[slot, pending[slot]] += 1
    return dataclasses.replace(
        state,
        prompt_len=prompt.astype(np.int32),
        committed_len=committed.astype(np.int32),
        pending_token=pending.astype(np.int32),
        output_counts=counts,
    )


def run(
    shape: ProgramShape, dtype: str, state: DeviceState, lanes: list[tuple[int, int, int]], prompt_len: int = PROMPT_LEN
) -> tuple[Any, Any]:
    """One execution over (slot, row, page) lanes; the new state on the host, and the completion."""
    ints, floats, parts = control_layout(shape, DIMS).new()
    parts["slot"][:] = DIMS.slots
    if shape is RESTORE:
        parts["prompt_len"][:], parts["top_k"][:], parts["temperature"][:] = prompt_len, 7, 0.5
    for lane, (slot, row, page) in enumerate(lanes):
        parts["slot"][lane], parts["row"][lane], parts["page"][lane] = slot, row, page
    after, out = compiled(shape, dtype)({}, jax.tree.map(jnp.array, state), ints, floats)
    return jax.tree.map(np.array, after), completion_layout(shape, DIMS).split(*map(np.asarray, out))


def same_bits(a: Any, b: Any) -> None:
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def leaves_at(tree: Any, index: int) -> list[np.ndarray]:
    return [np.asarray(leaf)[index] for leaf in jax.tree.leaves(tree)]


def committed_tokens(state: DeviceState, slot: int) -> np.ndarray:
    """Which tokens occur, counted from what `random_state` put there."""
    counts = np.array(state.output_counts[slot])
    if state.committed_len[slot] >= state.prompt_len[slot] and slot % 2:
        counts[state.pending_token[slot]] -= 1
    return np.array(state.prompt_seen[slot]) | (counts > 0)


def same_pages_and_rows(mine: Any, page: int, row: int, theirs: Any, their_page: int, their_row: int) -> None:
    """A page of each pool, and a row of each table that a snapshot holds as it is."""
    pools = ((mine.kv, mine.draft_kv), page), ((theirs.kv, theirs.draft_kv), their_page)
    tables = [
        ((getattr(mine, name), row), (getattr(theirs, name), their_row))
        for name in ("recurrent", "mtp_hidden", "committed_len", "previous_token")
    ]
    for held, expected in (pools, *tables):
        for one, other in zip(leaves_at(*held), leaves_at(*expected), strict=True):
            same_bits(one, other)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_state_goes_round_with_every_bit(dtype: str) -> None:
    """Two snapshots at once, then both restored into each other's slots and into other pages."""
    before = random_state(dtype, 1)
    taken, out = run(SNAPSHOT, dtype, before, [(1, 4, 7), (DIMS.slots, 2, 9), (2, 1, 12)])
    (saved,) = taken.saved
    for (slot, row, page), lane in (((1, 4, 7), 0), ((2, 1, 12), 2)):
        same_pages_and_rows(saved, row, row, before, page, slot)
        np.testing.assert_array_equal(saved.seen[row], committed_tokens(before, slot))
        assert (out["slot"][lane], out["row"][lane]) == (slot, row)
        assert out["committed_len"][lane] == before.committed_len[slot]
    assert (out["row"][1], out["committed_len"][1]) == (0, 0)

    back, out = run(RESTORE, dtype, taken, [(2, 4, 3), (1, 1, 13)])
    for slot, row, page, source, source_page in ((2, 4, 3, 1, 7), (1, 1, 13, 2, 12)):
        same_pages_and_rows(back, page, slot, before, source_page, source)
        np.testing.assert_array_equal(back.prompt_seen[slot], committed_tokens(before, source))
        assert (back.prompt_len[slot], back.top_k[slot], back.temperature[slot]) == (PROMPT_LEN, 7, 0.5)
        short, _ = run(RESTORE, dtype, taken, [(slot, row, page)], prompt_len=1)
        assert short.prompt_len[slot] == before.committed_len[source]  # all that was restored counts as prompt
        assert (back.pending_token[slot], back.output_counts[slot].any()) == (0, False)
        assert out["committed_len"].tolist()[[2, 1].index(slot)] == before.committed_len[source]
        assert row in out["row"]


@pytest.mark.parametrize("shape", [SNAPSHOT, RESTORE], ids=["snapshot", "restore"])
def test_nothing_else_changes(shape: ProgramShape) -> None:
    """Slot 3, row 2, page 5: others keep their bits, settings too; inactive lanes touch scratch alone."""
    before = random_state("float32", 2)
    after, _ = run(shape, "float32", before, [(3, 2, 5), (-1, 3, 6), (0, DIMS.state_rows + 1, 8)])
    by_slot = ("recurrent", "mtp_hidden", "pending_token", "previous_token", "committed_len", "prompt_seen", "seed")
    by_slot = (*by_slot, "output_counts", *SETTINGS)
    may_change: dict[str, list[int]] = {"saved": [0, 2]}
    if shape is RESTORE:
        may_change = {"kv": [0, 5], "draft_kv": [0, 5]} | {name: [3, DIMS.slots] for name in by_slot}
    for name in before.__dataclass_fields__:
        pairs = zip(jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(after, name)), strict=True)
        for old, new in pairs:
            rest = np.delete(np.arange(old.shape[0]), may_change.get(name, []))
            same_bits(old[rest], new[rest])


@pytest.mark.parametrize("shape", [SNAPSHOT, RESTORE], ids=["snapshot", "restore"])
def test_copies_are_made_in_place(shape: ProgramShape) -> None:
    """The donated state comes back as it is; temporaries are about the rows that are copied."""
    memory = compiled(shape, "float32").memory_analysis()
    state = abstract_state(models()[0], DIMS, "float32", models()[1])
    assert memory.alias_size_in_bytes >= tree_bytes(state)
    assert memory.temp_size_in_bytes < tree_bytes(state) / 2


def test_a_core_without_state_rows_has_no_copies_and_no_space_for_them() -> None:
    dims = dataclasses.replace(DIMS, state_rows=0)
    assert abstract_state(models()[0], dims, "float32").saved == ()
    with pytest.raises(ValueError, match="a core without state rows"):
        build_program(SNAPSHOT, models()[0], dims, "float32")
