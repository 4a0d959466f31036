"""Recurrent state of slots: which rows of it a program reads, how it advances, and when it is written.

Each recurrent layer keeps a row a slot (and the scratch row): the last rows before its convolution and
its matrix, `DeviceState.recurrent`. No phase is padded to another's shape:

- decode: one token a lane, the recurrence as it stands (`token_recur`).
- prompts: chunks of one row at a time, the state handed on in the table itself (`prompt_recur`). A row
  that starts at position 0 starts from an empty state, whatever its slot holds.
- rounds: the rows of all lanes are read against the state before them, which stays (`round_recur`).
  Afterwards `write_rounds` advances it over the accepted ones alone, from the few rows that the layers
  have left (keys, corrections, decays, rows before the convolution). docs/adr/0017 has the reasons.
- mixed programs: the prompt row as a prompt, the other lanes as a round (`mixed_recur`).

Inactive lanes have length 0, and the scratch row where something must be written.

Axis letters: B lanes, T packed rows, W rows a lane, N key heads, R value heads a key head, K, V their widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.device_state import DeviceState, RecurrentTable
from helios_jax.aot.programs.packing import Packed, owner
from helios_jax.models.gated_delta import (
    Deltas,
    Heads,
    convolve,
    last_rows,
    read_chunk,
    split_heads,
    step,
    write_chunk,
)
from helios_jax.models.interface import (
    Attend,
    LayerCache,
    Model,
    Params,
    Recur,
    RecurrentRows,
    RecurrentSpec,
    run_model,
)


class Span(NamedTuple):
    """Consecutive tokens of each lane among the packed rows.

    Attributes:
        row: [B] row of the state tables, scratch where inactive.
        length: [B] rows of each lane, 0 where inactive.
        offset: [B] where they begin.
        fresh: [B] whether nothing is before them.
        lane, depth: [T] whose a row is, and its index there.
    """

    row: jax.Array
    length: jax.Array
    offset: jax.Array
    fresh: jax.Array
    lane: jax.Array
    depth: jax.Array


class Unwritten(NamedTuple):
    """What a round leaves of a layer until its verdict is known.

    Attributes:
        table: The state before the round.
        mixed: [T, channels] the rows before the convolution.
        deltas: Of each lane's rows, leaves [B, W, ...].
    """

    table: RecurrentTable
    mixed: jax.Array
    deltas: Deltas


def span_of(row: jax.Array, length: jax.Array, start: jax.Array, packed: Packed) -> Span:
    """The span of `length` [B] tokens a lane from positions `start` [B] on, packed as `packed` says."""
    depth = jnp.where(packed.valid, packed.position - start[packed.row], 0)
    return Span(row, length, packed.offset, start == 0, packed.row, depth)


def run_target(
    model: Model, params: Params, state: DeviceState, tokens: jax.Array, positions: jax.Array, attend: Attend,
    recur: Recur,
) -> tuple[jax.Array, DeviceState, tuple[LayerCache, ...]]:  # fmt: skip
    """One pass over the cache of `state`.

    Returns:
        Hidden rows [T, D], the state with the new keys and values, and what `recur` left of each recurrent layer.
    """
    caches = (*state.kv, *state.recurrent)
    hidden, caches = run_model(model, params, tokens, positions, caches, attend, recur)
    count = len(state.kv)
    return hidden, dataclasses.replace(state, kv=caches[:count]), caches[count:]


def _narrow_rows(table: jax.Array, dtype: jnp.dtype, row: jax.Array) -> jax.Array:
    rows = table.at[row].get(mode="promise_in_bounds")
    return lax.bitcast_convert_type(rows, dtype) if rows.dtype == jnp.uint16 else rows


def _put_rows(table: jax.Array, row: jax.Array, rows: jax.Array) -> jax.Array:
    if table.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows, jnp.uint16)
    return table.at[row].set(rows, mode="promise_in_bounds")


def _before(table: RecurrentTable, span: Span, dtype: jnp.dtype) -> jax.Array:
    """[B, kernel - 1, channels] the rows before each lane's first; zeros where there is nothing."""
    rows = _narrow_rows(table[0], dtype, span.row)
    return jnp.where((span.fresh | (span.length == 0))[:, None, None], jnp.zeros((), dtype), rows)


def token_recur(row: jax.Array, active: jax.Array) -> Recur:
    """One token of each lane, row i of the packed rows lane i's; `row`, `active` [B]."""

    def recur(spec: RecurrentSpec, rows: RecurrentRows, table: RecurrentTable) -> tuple[jax.Array, RecurrentTable]:
        lanes = row.shape[0]
        each = jnp.arange(lanes, dtype=jnp.int32)
        one, none = active.astype(jnp.int32), jnp.zeros(lanes, bool)
        span = Span(row, one, each, none, each, jnp.zeros_like(each))
        before = _before(table, span, rows.mixed.dtype)
        mixed = convolve(rows.mixed, before, rows.taps, span.offset, span.length, span.depth)
        heads = split_heads(spec, mixed, rows.decay, rows.beta)
        matrix = jnp.where(_over(active, 4), table[1][row], 0.0)
        out, matrix = step(heads, matrix)
        kept = last_rows(rows.mixed, before, span.offset, span.length)
        table = (_put_rows(table[0], row, kept), _put_rows(table[1], row, matrix))
        return out.reshape(lanes, spec.num_value_heads, spec.value_dim), table

    return recur


def prompt_recur(span: Span, chunk: int) -> Recur:
    """Prompt rows of any length, `chunk` tokens at a time.

    Cost: sum over lanes of length / chunk iterations of one chunk.
    """

    def recur(spec: RecurrentSpec, rows: RecurrentRows, table: RecurrentTable) -> tuple[jax.Array, RecurrentTable]:
        before = _before(table, span, rows.mixed.dtype)
        out, matrix = _prompt(spec, _heads(spec, rows, before, span), table[1], span, chunk)
        kept = last_rows(rows.mixed, before, span.offset, span.length)
        return _flat(spec, out), (_put_rows(table[0], span.row, kept), matrix)

    return recur


def round_recur(span: Span, width: int) -> Recur:
    """Up to `width` rows of each lane; the state stays as it is and an `Unwritten` comes back."""

    def recur(spec: RecurrentSpec, rows: RecurrentRows, table: RecurrentTable) -> tuple[jax.Array, Unwritten]:
        heads = _heads(spec, rows, _before(table, span, rows.mixed.dtype), span)
        out, deltas = _round(heads, table[1], span, width)
        return _flat(spec, out), Unwritten(table, rows.mixed, deltas)

    return recur


def mixed_recur(span: Span, is_prompt: jax.Array, chunk: int, width: int) -> Recur:
    """The lane that `is_prompt` [B] names as `prompt_recur`, the others as `round_recur`.

    The matrix of the prompt's row is written here, its rows before the convolution by `write_rounds`.
    """
    prompt = span._replace(length=jnp.where(is_prompt, span.length, 0))
    others = span._replace(length=jnp.where(is_prompt, 0, span.length))

    def recur(spec: RecurrentSpec, rows: RecurrentRows, table: RecurrentTable) -> tuple[jax.Array, Unwritten]:
        heads = _heads(spec, rows, _before(table, span, rows.mixed.dtype), span)
        said, matrix = _prompt(spec, heads, table[1], prompt, chunk)
        out, deltas = _round(heads, matrix, others, width)
        out = jnp.where(_over(is_prompt[span.lane], 3), said, out)
        return _flat(spec, out), Unwritten((table[0], matrix), rows.mixed, deltas)

    return recur


def write_rounds(
    state: DeviceState, left: Sequence[Unwritten], span: Span, kept: jax.Array, of_prompt: jax.Array | None = None
) -> DeviceState:
    """The state after the first `kept` [B] rows of each lane; lanes that keep none stay as they were.

    Args:
        left: What the round left of each layer.
        of_prompt: [B] the prompt row of a mixed program: all its rows are kept and its matrix is written already.
    """
    if not left:
        return state
    prompt = jnp.zeros_like(kept, bool) if of_prompt is None else of_prompt
    kept = jnp.where(prompt, span.length, jnp.minimum(kept, span.length))
    scratch = state.pending_token.shape[0] - 1
    row = jnp.where(kept > 0, span.row, scratch)
    rows_kept = jnp.where(prompt, 0, kept)
    matrix_row = jnp.where(rows_kept > 0, span.row, scratch)

    def write(layer: Unwritten) -> RecurrentTable:
        before = _before(layer.table, span, layer.mixed.dtype)
        after = last_rows(layer.mixed, before, span.offset, kept)
        matrix = write_chunk(layer.deltas, rows_kept, layer.table[1][matrix_row])
        return _put_rows(layer.table[0], row, after), _put_rows(layer.table[1], matrix_row, matrix)

    return dataclasses.replace(state, recurrent=tuple(write(layer) for layer in left))


def _over(mask: jax.Array, axes: int) -> jax.Array:
    """`mask` [B] with `axes` further axes."""
    return mask.reshape(*mask.shape, *[1] * axes)


def _flat(spec: RecurrentSpec, out: jax.Array) -> jax.Array:
    """[T, N, R, V] -> [T, value heads, V]."""
    return out.reshape(out.shape[0], spec.num_value_heads, spec.value_dim)


def _heads(spec: RecurrentSpec, rows: RecurrentRows, before: jax.Array, span: Span) -> Heads:
    mixed = convolve(rows.mixed, before, rows.taps, span.offset, span.length, span.depth)
    return split_heads(spec, mixed, rows.decay, rows.beta)


def _prompt(spec: RecurrentSpec, heads: Heads, table: jax.Array, span: Span, chunk: int) -> tuple[jax.Array, jax.Array]:
    """The rows of `span` chunk by chunk: out [T, N, R, V], and the matrices with their lanes' rows advanced."""
    num_rows, num_lanes = heads.k.shape[0], span.row.shape[0]
    ends = jnp.cumsum(-(-span.length // chunk))
    # a chunk may reach past its lane: into the next lane's rows, which come later and overwrite it
    padded = Heads(*(jnp.pad(leaf, [(0, chunk)] + [(0, 0)] * (leaf.ndim - 1)) for leaf in heads))
    reach = jnp.arange(chunk, dtype=jnp.int32)

    def advance(item: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, table = carry
        lane = jnp.minimum(owner(item, ends), num_lanes - 1)
        done = (item - (ends[lane] - -(-span.length[lane] // chunk))) * chunk
        at, row = span.offset[lane] + done, span.row[lane]
        mine = Heads(*(lax.dynamic_slice_in_dim(leaf, at, chunk) for leaf in padded))
        mine = mine.where(reach < span.length[lane] - done)
        state = lax.dynamic_index_in_dim(table, row, keepdims=False)
        state = jnp.where(span.fresh[lane] & (done == 0), jnp.zeros_like(state), state)
        value, deltas = read_chunk(mine, state)
        state = write_chunk(deltas, jnp.asarray(chunk), state)
        out = lax.dynamic_update_slice_in_dim(out, value, at, 0)
        return out, lax.dynamic_update_index_in_dim(table, state, row, 0)

    out = jnp.zeros((num_rows + chunk, *heads.v.shape[1:]), jnp.float32)
    out, table = lax.fori_loop(0, ends[-1], advance, (out, table))
    return out[:num_rows], table


def _round(heads: Heads, table: jax.Array, span: Span, width: int) -> tuple[jax.Array, Deltas]:
    """The rows of `span` against the matrices before them: out [T, N, R, V], and what would advance these."""
    reach = jnp.arange(width, dtype=jnp.int32)
    index = span.offset[:, None] + reach
    there = reach < span.length[:, None]
    grid = Heads(*(leaf.at[index].get(mode="clip") for leaf in heads)).where(there)
    state = jnp.where(_over(span.length > 0, 4), table[span.row], 0.0)
    out, deltas = read_chunk(grid, state)
    return out[span.lane, jnp.clip(span.depth, 0, width - 1)], deltas
