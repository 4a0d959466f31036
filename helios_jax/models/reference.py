"""The slow, plain attention and recurrence beside the fast ones: whole scores in memory, no pages, no chunks.

Two `attend` functions for `Model.forward`, both for one sequence: `attend_causal` keeps
nothing and sees only the packed tokens; `attend_dense` keeps keys and values of everything
so far in plain arrays that grow. `recur_plain` is the recurrence itself, one token after the
other. The parity tests hold the paged programs against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.models.gated_delta import split_heads, step
from helios_jax.models.interface import (
    AttentionSpec,
    LayerCache,
    Model,
    Params,
    RecurrentRows,
    RecurrentSpec,
    recurrent_layers_of,
    run_model,
)

MASKED = -math.inf


class DenseCache(NamedTuple):
    """Keys and values of one sequence in one layer: [S, K, H] each, S = tokens so far."""

    k: jax.Array
    v: jax.Array


def scores_and_mix(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, start: int) -> jax.Array:
    """softmax(scale q k^T + mask) v in float32, the definition itself.

    Args:
        q: [T, N, H]; row t stands at position start + t.
        k, v: [S, K, H]; row s stands at position s.

    Returns:
        [T, N, H] in q's dtype.
    """
    queries, keys = q.shape[0], k.shape[0]
    grouped = q.astype(jnp.float32).reshape(queries, spec.num_kv_heads, -1, spec.head_dim)
    high = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgh,skh->kgts", grouped, k.astype(jnp.float32), precision=high) * spec.scale
    at, seen = start + jnp.arange(queries)[:, None], jnp.arange(keys)[None, :]
    visible = seen <= at
    if spec.window is not None:
        visible &= seen > at - spec.window
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
    mixed = jnp.einsum("kgts,skh->tkgh", weights, v.astype(jnp.float32), precision=high)
    return mixed.reshape(q.shape).astype(q.dtype)


def attend_causal(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache
) -> tuple[jax.Array, LayerCache]:
    """An `Attend` over one sequence that starts at position 0; the cache passes through unused."""
    return scores_and_mix(spec, q, k, v, 0), cache


def attend_dense(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, cache: DenseCache
) -> tuple[jax.Array, DenseCache]:
    """An `Attend` that appends to a `DenseCache` and reads all of it."""
    start = cache.k.shape[0]
    grown = DenseCache(jnp.concatenate([cache.k, k]), jnp.concatenate([cache.v, v]))
    return scores_and_mix(spec, q, grown.k, grown.v, start), grown


class PlainState(NamedTuple):
    """State of one sequence in one recurrent layer.

    Attributes:
        rows: [kernel - 1, channels] the last rows before the convolution.
        matrix: [key heads, value heads a key head, key_dim, value_dim] float32.
    """

    rows: jax.Array
    matrix: jax.Array


def empty_state(spec: RecurrentSpec, dtype: Any = np.float32) -> PlainState:
    """The state before a sequence's first token."""
    groups = spec.num_value_heads // spec.num_key_heads
    matrix = jnp.zeros((spec.num_key_heads, groups, spec.key_dim, spec.value_dim), jnp.float32)
    return PlainState(jnp.zeros((spec.kernel - 1, spec.channels), dtype), matrix)


def recur_plain(
    spec: RecurrentSpec, rows: RecurrentRows, state: PlainState | None
) -> tuple[jax.Array, PlainState | None]:
    """A `Recur` over one sequence, token by token; without a state it begins with an empty one and keeps none."""
    begin = empty_state(spec, rows.mixed.dtype) if state is None else state
    seen = jnp.concatenate([begin.rows, rows.mixed]).astype(jnp.float32)
    count = rows.mixed.shape[0]
    windows = jnp.stack([seen[i : i + count] for i in range(spec.kernel)], axis=-1)
    mixed = jax.nn.silu((windows * rows.taps.astype(jnp.float32)).sum(axis=-1)).astype(rows.mixed.dtype)
    heads = split_heads(spec, mixed, rows.decay, rows.beta)
    advance = lambda matrix, token: step(token, matrix)[::-1]  # noqa: E731
    matrix, out = jax.lax.scan(advance, begin.matrix, heads)
    out = out.reshape(count, spec.num_value_heads, spec.value_dim)
    return out, None if state is None else PlainState(seen[count:].astype(rows.mixed.dtype), matrix)


def no_caches(model: Model) -> tuple[None, ...]:
    """For a pass over a whole sequence that keeps nothing."""
    return (None,) * (len(model.attention_layers) + len(recurrent_layers_of(model)))


def empty_caches(model: Model, dtype: Any = np.float32) -> tuple[DenseCache | PlainState, ...]:
    """A `DenseCache` of no tokens for every attention layer, then an empty state for every recurrent one."""
    shapes = [(0, spec.num_kv_heads, spec.head_dim) for spec in model.attention_layers]
    caches = tuple(DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)
    return (*caches, *(empty_state(spec, dtype) for spec in recurrent_layers_of(model)))


def sequence_logits(model: Model, params: Params, tokens: Sequence[int]) -> jax.Array:
    """float32 logits [T, V] after every token of one sequence, in one pass without a cache."""
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(len(tokens))
    hidden, _ = run_model(model, params, ids, positions, no_caches(model), attend_causal, recur_plain)
    return model.logits(params, hidden)


def greedy_tokens(model: Model, params: Params, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` most probable tokens, one whole forward pass each.

    The sequence is padded to its final length (causal: what follows cannot matter), so one
    program serves all steps. Cost: O(num_tokens * (len(prompt) + num_tokens)^2).
    """
    total = len(prompt) + num_tokens
    known = np.zeros(total, np.int32)
    known[: len(prompt)] = prompt

    @jax.jit
    def next_token(params: Params, ids: jax.Array, last: jax.Array) -> jax.Array:
        hidden, _ = run_model(model, params, ids, jnp.arange(total), no_caches(model), attend_causal, recur_plain)
        return jnp.argmax(model.logits(params, jax.lax.dynamic_slice_in_dim(hidden, last, 1))[0])

    for length in range(len(prompt), total):
        known[length] = next_token(params, known, np.int32(length - 1))
    return known[len(prompt) :].tolist()
