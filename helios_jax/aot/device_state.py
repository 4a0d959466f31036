"""What stays on the device between programs: the paged KV pool, the slot table and recurrent state.

One `DeviceState` is donated to every program and comes back from it, so a step updates a
few rows in place and never copies the pool. It knows nothing of requests or fences: the
host says which slot and which pages a lane uses.

Scratch: page 0 of every pool and row S of every slot table take the writes of inactive
lanes and padded tokens. What they hold is never read as data; tests poison them with NaN.

16-bit pools are stored as uint16 and bitcast row by row. XLA's CPU scatter of jax 0.10.2
converts a whole bfloat16 pool through float32; a bitcast costs nothing on any backend.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from helios_jax.aot.abi import MAX_LOGIT_BIAS, Dims
from helios_jax.models.interface import Draft, Model, MtpHeads, RecurrentSpec, recurrent_layers_of

LayerPages = tuple[jax.Array, jax.Array]
RecurrentTable = tuple[jax.Array, jax.Array]


@flax.struct.dataclass
class SavedRows:
    """Complete states that were set aside: row 0 is scratch, rows 1 .. R hold one each. See `programs/state_copies.py`.

    Attributes:
        kv, draft_kv: As the state's, one page a row: [R+1, page_size, K, H].
        recurrent, mtp_hidden: As the state's, with state rows instead of slots.
        committed_len, previous_token: [R+1] int32.
        seen: [R+1, V] bool, the token occurs among the committed ones.
    """

    kv: tuple[LayerPages, ...]
    draft_kv: tuple[LayerPages, ...]
    recurrent: tuple[RecurrentTable, ...]
    mtp_hidden: tuple[jax.Array, ...]
    committed_len: jax.Array
    previous_token: jax.Array
    seen: jax.Array


@flax.struct.dataclass
class DeviceState:
    """Everything that a program may change. Rows of the slot table: S slots, then scratch.

    Attributes:
        kv: A layer: (k_pages, v_pages), each [num_pages, page_size, K, H] in the storage dtype.
        pending_token: [S+1] int32, sampled but not yet in the cache.
        previous_token: [S+1] int32, the token at position committed_len - 1; what a draft model's
            cache may still lack after a round whose proposals were all accepted.
        committed_len: [S+1] int32, tokens whose keys and values are in the cache.
        prompt_len: [S+1] int32, positions before it are prompt, later ones count as output.
        seed: [S+1, 2] uint32, the words of the request's random key.
        top_k: [S+1] int32, 0 = off.
        temperature, top_p, min_p: [S+1] float32; temperature 0 = greedy.
        repetition_penalty, presence_penalty, frequency_penalty: [S+1] float32.
        bias_ids, bias_values: [S+1, MAX_LOGIT_BIAS]; id -1 = unused.
        prompt_seen: [S+1, V] bool, the token occurs in the prompt.
        output_counts: [S+1, V] int32, occurrences in the output, the pending token included.
        draft_kv: As `kv`, of the layers of a draft model or of multi-token-prediction heads, over the
            same page tables; empty in a core without them. Before every program it holds rows
            0 .. committed_len - 2 of each slot, and what it holds beyond is not read.
        mtp_hidden: With such heads one array [S+1, D], the target's final hidden of position
            committed_len - 1; else empty.
        recurrent: A recurrent layer of the target: (rows before its convolution [S+1, kernel - 1, channels]
            in the storage dtype, matrices [S+1, key heads, value heads a key head, key_dim, value_dim]
            float32), after the slot's committed tokens; empty for models without such layers.
        saved: One `SavedRows` in a core with state rows; else empty.
    """

    kv: tuple[LayerPages, ...]
    pending_token: jax.Array
    previous_token: jax.Array
    committed_len: jax.Array
    prompt_len: jax.Array
    seed: jax.Array
    top_k: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    prompt_seen: jax.Array
    output_counts: jax.Array
    draft_kv: tuple[LayerPages, ...] = ()
    mtp_hidden: tuple[jax.Array, ...] = ()
    recurrent: tuple[RecurrentTable, ...] = ()
    saved: tuple[SavedRows, ...] = ()


def storage_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Dtype of the pool's arrays for values of `dtype`: 16-bit values are kept as uint16."""
    wide = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if wide.itemsize == 2 else wide


def _rows(count: int, kind: jax.typing.DTypeLike, *extent: int) -> Any:
    """`count` rows and a scratch row."""
    return jax.ShapeDtypeStruct((count + 1, *extent), jnp.dtype(kind))


def _pools(of: Draft | None, dims: Dims, dtype: jax.typing.DTypeLike, pages: int) -> Any:
    extents = [(spec.num_kv_heads, spec.head_dim) for spec in of.attention_layers] if of is not None else []
    shapes = [(pages, dims.page_size, heads, dim) for heads, dim in extents]
    return tuple((jax.ShapeDtypeStruct(shape, storage_dtype(dtype)),) * 2 for shape in shapes)


def _recurrent(model: Model, dtype: jax.typing.DTypeLike, count: int) -> Any:
    def table(spec: RecurrentSpec) -> Any:
        groups = spec.num_value_heads // spec.num_key_heads
        matrix = _rows(count, jnp.float32, spec.num_key_heads, groups, spec.key_dim, spec.value_dim)
        return _rows(count, storage_dtype(dtype), spec.kernel - 1, spec.channels), matrix

    return tuple(table(spec) for spec in recurrent_layers_of(model))


def _hidden(draft: Draft | None, dtype: jax.typing.DTypeLike, count: int) -> Any:
    return (_rows(count, dtype, draft.hidden_size),) if isinstance(draft, MtpHeads) else ()


def _saved(model: Model, dims: Dims, dtype: jax.typing.DTypeLike, draft: Draft | None) -> Any:
    count = dims.state_rows
    return (
        SavedRows(
            kv=_pools(model, dims, dtype, count + 1),
            draft_kv=_pools(draft, dims, dtype, count + 1),
            recurrent=_recurrent(model, dtype, count),
            mtp_hidden=_hidden(draft, dtype, count),
            committed_len=_rows(count, jnp.int32),
            previous_token=_rows(count, jnp.int32),
            seen=_rows(count, jnp.bool_, dims.vocab_size),
        ),
    )


def abstract_state(model: Model, dims: Dims, dtype: jax.typing.DTypeLike, draft: Draft | None = None) -> DeviceState:
    """The state as ShapeDtypeStructs; allocates nothing.

    Args:
        dtype: Dtype of weights, activations and cached keys and values.
        draft: The draft model, or heads, of a core that has them.
    """

    row = functools.partial(_rows, dims.slots)
    return DeviceState(
        kv=_pools(model, dims, dtype, dims.num_pages),
        recurrent=_recurrent(model, dtype, dims.slots),
        draft_kv=_pools(draft, dims, dtype, dims.num_pages),
        mtp_hidden=_hidden(draft, dtype, dims.slots),
        saved=_saved(model, dims, dtype, draft) if dims.state_rows else (),
        pending_token=row(jnp.int32),
        previous_token=row(jnp.int32),
        committed_len=row(jnp.int32),
        prompt_len=row(jnp.int32),
        seed=row(jnp.uint32, 2),
        top_k=row(jnp.int32),
        temperature=row(jnp.float32),
        top_p=row(jnp.float32),
        min_p=row(jnp.float32),
        repetition_penalty=row(jnp.float32),
        presence_penalty=row(jnp.float32),
        frequency_penalty=row(jnp.float32),
        bias_ids=row(jnp.int32, MAX_LOGIT_BIAS),
        bias_values=row(jnp.float32, MAX_LOGIT_BIAS),
        prompt_seen=row(jnp.bool_, dims.vocab_size),
        output_counts=row(jnp.int32, dims.vocab_size),
    )


def new_state(model: Model, dims: Dims, dtype: jax.typing.DTypeLike, draft: Draft | None = None) -> DeviceState:
    """A state of empty pages and slots; traceable, so that one program can fill the device."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_state(model, dims, dtype, draft))
    return dataclasses.replace(
        zeros, bias_ids=zeros.bias_ids - 1, top_p=zeros.top_p + 1, repetition_penalty=zeros.repetition_penalty + 1
    )
