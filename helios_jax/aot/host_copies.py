"""Cache pages and state rows out to host memory and back, beside the programs of a core.

Four small executables work on the device state between frames: pages out, a row out, pages in, a row in. They are
ordered with frames by the state that they read or replace, so a page that is copied out holds what it held when
the copy was submitted, whatever runs next. Copying out waits for nothing; copying in is queued ahead of
the next frame.

Leaves of equal shape and type travel as one array, [indices, leaves, ...]: a model of 30 layers would otherwise
be 60 transfers a page. Pages go in chunks of one size, the rest of the last one being scratch.

Life of a copy: 1. `take_out` submits; 2. `Parcel.read`, in whatever thread, waits for the transfer and gives a
`Content` a page and one of the row; 3. `put_in` writes them to other pages and another row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.aot.counters import compile_counter
from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.memory import tree_bytes

CHUNK_BYTES = 32 << 20  # of pages that one copy moves: a transient array of that size is on the device
LEAST_IN_FLIGHT_BYTES = 64 << 20
IN_FLIGHT_SHARE = 16  # else one part in so many of the state: a plan leaves a tenth of the device for temporaries
Content = tuple[np.ndarray, ...]  # one page, or one row: an array a group of leaves
Packed = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class HostCopies:
    """The executables for the state of one core.

    Attributes:
        take_pages, take_row: (state, int32 [n]) -> packed leaves; they donate nothing.
        put_pages, put_row: (state, int32 [n], packed leaves) -> state; they donate the state.
        chunk: Pages that one call moves; rows go one by one.
        page_bytes, row_bytes: Of one `Content`.
        most_bytes: What should be on its way to the host at a time: it is on the device twice.
    """

    take_pages: Any
    take_row: Any
    put_pages: Any
    put_row: Any
    chunk: int
    page_bytes: int
    row_bytes: int
    most_bytes: int

    def take_out(self, state: DeviceState, row: int, pages: Sequence[int]) -> Parcel:
        """Start the copies of a row and of pages to the host.

        Args:
            state: The device state; it may be donated as soon as this returns.
        """
        parts = [self.take_pages(state, self._indices(part)) for part in self._chunks(pages)]
        content = self.take_row(state, np.array([row], np.int32))
        for array in jax.tree.leaves((parts, content)):
            array.copy_to_host_async()
        return Parcel(parts, content, len(pages))

    def put_in(
        self, state: DeviceState, row: int, pages: Sequence[int], contents: Sequence[Content], kept: Content
    ) -> DeviceState:
        """The state with `contents` in `pages` and `kept` in `row`; the old one is donated once all is on its way.

        Raises:
            RuntimeError: XLA's, most often for memory, with the old state as it was.
        """
        chunks = self._chunks(pages)
        places = [self._indices(part) for part in chunks]
        starts = range(0, len(pages), self.chunk)
        packed = [self._packed(contents[start : start + self.chunk]) for start in starts]
        # All of it is there before anything is donated: what fails up to here costs nothing.
        parts, content = jax.block_until_ready(jax.device_put((packed, tuple(array[None] for array in kept))))
        for place, part in zip(places, parts, strict=True):
            state = self.put_pages(state, place, part)
        return self.put_row(state, np.array([row], np.int32), content)

    def _chunks(self, pages: Sequence[int]) -> list[Sequence[int]]:
        return [pages[start : start + self.chunk] for start in range(0, len(pages), self.chunk)]

    def _indices(self, pages: Sequence[int]) -> np.ndarray:
        indices = np.zeros(self.chunk, np.int32)  # page 0 is scratch
        indices[: len(pages)] = pages
        return indices

    def _packed(self, contents: Sequence[Content]) -> tuple[np.ndarray, ...]:
        """Contents of up to a chunk of pages as arrays of a whole chunk."""
        arrays = []
        for group in zip(*contents, strict=True):
            array = np.empty((self.chunk, *group[0].shape), group[0].dtype)
            np.stack(group, out=array[: len(group)])
            array[len(group) :] = 0
            arrays.append(array)
        return tuple(arrays)


class Parcel:
    """Pages and a row on their way to the host."""

    def __init__(self, parts: Sequence[Packed], row: Packed, num_pages: int) -> None:
        self._parts, self._row, self._num_pages = parts, row, num_pages

    def read(self) -> tuple[list[Content], Content]:
        """Contents of the pages, in their order, and of the row; waits for the transfers.

        Every content is a copy of its own, so that one can be dropped without the others.

        Raises:
            RuntimeError: XLA's; the copy failed, the device state did not change.
        """
        pages: list[Content] = []
        for part in self._parts:
            arrays = [np.asarray(array) for array in part]
            count = min(len(arrays[0]), self._num_pages - len(pages)) if arrays else self._num_pages
            pages += [tuple(array[index].copy() for array in arrays) for index in range(count)]
        return pages, tuple(np.asarray(array)[0].copy() for array in self._row)


def compile_host_copies(state: DeviceState) -> HostCopies:
    """Compile the copies for an abstract state with state rows (less than a second each).

    Raises:
        ValueError: The state has no rows to copy.
    """
    if not state.saved:
        raise ValueError("a core without state rows has no checkpoints to keep on the host")
    page_bytes, row_bytes = _bytes_of_one(_pages(state)), _bytes_of_one(state.saved)
    chunk = max(1, min(CHUNK_BYTES // max(1, page_bytes), _length(_pages(state)) - 1))

    def take_pages(state: DeviceState, at: jax.Array) -> Packed:
        return _pack(_pages(state), at)

    def take_row(state: DeviceState, at: jax.Array) -> Packed:
        return _pack(state.saved, at)

    def put_pages(state: DeviceState, at: jax.Array, packed: Packed) -> DeviceState:
        kv, draft_kv = _unpack(_pages(state), at, packed)
        return dataclasses.replace(state, kv=kv, draft_kv=draft_kv)

    def put_row(state: DeviceState, at: jax.Array, packed: Packed) -> DeviceState:
        return dataclasses.replace(state, saved=_unpack(state.saved, at, packed))

    def compiled(call: Any, count: int, tree: Any, puts: bool) -> Any:
        at = jax.ShapeDtypeStruct((count,), jnp.int32)
        packed = (jax.eval_shape(_pack, tree, at),) if puts else ()
        return jax.jit(call, donate_argnums=(0,) if puts else ()).lower(state, at, *packed).compile()

    with compile_counter().expected():
        return HostCopies(
            take_pages=compiled(take_pages, chunk, _pages(state), puts=False),
            take_row=compiled(take_row, 1, state.saved, puts=False),
            put_pages=compiled(put_pages, chunk, _pages(state), puts=True),
            put_row=compiled(put_row, 1, state.saved, puts=True),
            chunk=chunk,
            page_bytes=page_bytes,
            row_bytes=row_bytes,
            most_bytes=max(LEAST_IN_FLIGHT_BYTES, tree_bytes(state) // IN_FLIGHT_SHARE),
        )


def _pages(state: DeviceState) -> Any:
    """The pools whose first axis is the page."""
    return state.kv, state.draft_kv


def _length(tree: Any) -> int:
    return min((leaf.shape[0] for leaf in jax.tree.leaves(tree)), default=2)


def _bytes_of_one(tree: Any) -> int:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)
    return tree_bytes(one)


def _groups(tree: Any) -> list[list[int]]:
    """Positions of the leaves by what one index of them is; in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        groups.setdefault((leaf.shape[1:], leaf.dtype), []).append(position)
    return list(groups.values())


def _pack(tree: Any, at: jax.Array) -> Packed:
    """Indices `at` [n] of every leaf: an array [n, leaves, ...] a group."""
    leaves = [_as_bits(leaf) for leaf in jax.tree.leaves(tree)]
    return tuple(jnp.stack([_picked(leaves[p], at) for p in group], axis=1) for group in _groups(tree))


def _unpack(tree: Any, at: jax.Array, packed: Packed) -> Any:
    """The tree with indices `at` of every leaf replaced."""
    leaves, structure = jax.tree.flatten(tree)
    for group, array in zip(_groups(tree), packed, strict=True):
        for number, position in enumerate(group):
            leaf = leaves[position]
            changed = _replaced(_as_bits(leaf), at, array[:, number])
            leaves[position] = changed.view(leaf.dtype) if changed.dtype != leaf.dtype else changed
    return jax.tree.unflatten(structure, leaves)


def _as_bits(leaf: jax.Array) -> jax.Array:
    """16-bit floats as integers: XLA's CPU scatter would convert all of them to float32 and back."""
    return leaf.view(jnp.uint16) if leaf.dtype in (jnp.bfloat16, jnp.float16) else leaf


def _picked(leaf: jax.Array, at: jax.Array) -> jax.Array:
    if len(at) == 1:  # a slice compiles faster than a gather
        return jax.lax.dynamic_index_in_dim(leaf, at[0], keepdims=True)
    return leaf.at[at].get(mode="promise_in_bounds")


def _replaced(leaf: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    if len(at) == 1:
        return jax.lax.dynamic_update_slice_in_dim(leaf, values, at[0], axis=0)
    return leaf.at[at].set(values, mode="promise_in_bounds")
