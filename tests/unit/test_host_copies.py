"""Pages and state rows go to the host and back with every bit, in order with what else runs on the state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.counters import compile_counter
from helios_jax.aot.device_state import DeviceState, abstract_state
from helios_jax.aot.host_copies import HostCopies, compile_host_copies
from helios_jax.aot.runner import DeviceRunner
from helios_jax.errors import DeviceError
from tests.unit.test_programs_memory import tree_bytes
from tests.unit.test_state_copies import DIMS, leaves_at, models, random_state, same_bits


@functools.cache
def copies(dtype: str = "float32") -> HostCopies:
    model, heads = models()
    return compile_host_copies(abstract_state(model, DIMS, dtype, heads))


def on_device(state: DeviceState) -> DeviceState:
    return jax.tree.map(jnp.array, state)


def bits_at(tree: Any, index: int) -> list[bytes]:
    return [leaf.tobytes() for leaf in leaves_at(tree, index)]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pages", [[], [3], [*range(13, 0, -1), *range(1, 8)]])
def test_every_bit_goes_round(dtype: str, pages: list[int]) -> None:
    """Into another state, other pages and another row, which change and nothing else does."""
    one = copies(dtype)
    source, target = random_state(dtype, 1), random_state(dtype, 2)
    contents, kept = one.take_out(on_device(source), 4, pages).read()
    assert {sum(array.nbytes for array in content) for content in contents} <= {one.page_bytes}
    assert sum(array.nbytes for array in kept) == one.row_bytes
    places = [1 + page % 13 for page in pages]
    after = jax.tree.map(np.asarray, one.put_in(on_device(target), 2, places, contents, kept))
    for page, place in zip(pages, places, strict=True):
        assert bits_at((after.kv, after.draft_kv), place) == bits_at((source.kv, source.draft_kv), page)
    assert bits_at(after.saved, 2) == bits_at(source.saved, 4)
    may_change = {"kv": [0, *places], "draft_kv": [0, *places], "saved": [2]}
    for name in target.__dataclass_fields__:
        for old, new in zip(*(jax.tree.leaves(getattr(s, name)) for s in (target, after)), strict=True):
            rest = np.delete(np.arange(old.shape[0]), may_change.get(name, []))
            same_bits(old[rest], new[rest])


def test_a_copy_holds_what_was_there_when_it_was_submitted() -> None:
    """Everything is overwritten right behind it, by donating programs, before anybody reads the copy."""
    source, other = random_state("float32", 3), random_state("float32", 4)
    state = on_device(source)
    parcel = copies().take_out(state, 5, [7, 8, 9])
    contents, kept = copies().take_out(on_device(other), 1, [1, 2, 3]).read()
    for _ in range(3):
        state = copies().put_in(state, 5, [9, 8, 7], contents, kept)
    taken, row = parcel.read()
    again, same = copies().take_out(on_device(source), 5, [7, 8, 9]).read()
    assert [[array.tobytes() for array in content] for content in (*taken, row)] == [
        [array.tobytes() for array in content] for content in (*again, same)
    ]
    assert bits_at(state.saved, 5) == bits_at(other.saved, 1)


def test_chunks_and_their_rest() -> None:
    assert copies().chunk == DIMS.num_pages - 1
    assert [len(part) for part in copies()._chunks(list(range(1, 30)))] == [13, 13, 3]


def test_the_state_is_not_copied_and_nothing_compiles_later() -> None:
    state = abstract_state(models()[0], DIMS, "float32", models()[1])
    made = copies()
    for put, moved in ((made.put_pages, made.chunk * made.page_bytes), (made.put_row, made.row_bytes)):
        memory = put.memory_analysis()
        assert memory.alias_size_in_bytes >= tree_bytes(state)
        assert memory.temp_size_in_bytes < 2 * moved + 1024
    source = on_device(random_state("float32", 5))
    before = compile_counter().total
    contents, kept = made.take_out(source, 1, [1, 2]).read()
    made.put_in(source, 2, [3, 4], contents, kept)
    assert compile_counter().total == before


def test_a_core_without_state_rows_has_nothing_to_copy() -> None:
    dims = dataclasses.replace(DIMS, state_rows=0)
    with pytest.raises(ValueError, match="a core without state rows"):
        compile_host_copies(abstract_state(models()[0], dims, "float32"))


def test_a_runner_copies_between_its_frames() -> None:
    source = random_state("float32", 6)
    runner = DeviceRunner({}, {}, lambda: on_device(source), DIMS)
    runner.host_copies = copies()
    contents, kept = runner.take_out(4, [2, 3]).read()
    runner.put_in(1, [5, 6], contents, kept)
    assert [bits_at(runner._state.kv, page) for page in (5, 6)] == [bits_at(source.kv, page) for page in (2, 3)]
    assert bits_at(runner._state.saved, 1) == bits_at(source.saved, 4)
    runner.close()
    with pytest.raises(DeviceError, match="closed"):
        runner.take_out(4, [2, 3])


def test_a_failed_copy_costs_the_state_only_if_it_was_donated() -> None:
    def fails(state: DeviceState, *rest: Any) -> DeviceState:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    runner = DeviceRunner({}, {}, lambda: on_device(random_state("float32", 7)), DIMS)
    runner.host_copies = copies()
    contents, kept = runner.take_out(4, [2]).read()
    runner.host_copies = dataclasses.replace(copies(), take_row=fails, put_pages=fails)
    with pytest.raises(DeviceError, match="cannot be copied to the host: RESOURCE_EXHAUSTED"):
        runner.take_out(4, [2])
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        runner.put_in(1, [5], contents, kept)
    runner.host_copies = dataclasses.replace(copies(), put_row=fails)  # the pages are in: the state was donated
    with pytest.raises(DeviceError, match="from the host could not be written"):
        runner.put_in(1, [5], contents, kept)
    with pytest.raises(DeviceError, match="the device state was lost"):
        runner.put_in(1, [5], contents, kept)
    runner.reset()
    runner.host_copies = copies()
    runner.put_in(1, [5], contents, kept)
    runner.close()
