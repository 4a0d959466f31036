"""The slow, plain attention beside the fast one: whole scores in memory, no pages.

Two `attend` functions for `Model.forward`, both for one sequence: `attend_causal` keeps
nothing and sees only the packed tokens; `attend_dense` keeps keys and values of everything
so far in plain arrays that grow. The parity tests hold the paged programs against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.models.interface import AttentionSpec, LayerCache, Model, Params

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


def empty_caches(model: Model, dtype: Any = np.float32) -> tuple[DenseCache, ...]:
    """A `DenseCache` of no tokens for every layer."""
    shapes = [(0, spec.num_kv_heads, spec.head_dim) for spec in model.attention_layers]
    return tuple(DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)


def sequence_logits(model: Model, params: Params, tokens: Sequence[int]) -> jax.Array:
    """float32 logits [T, V] after every token of one sequence, in one pass without a cache."""
    ids = jnp.asarray(tokens, jnp.int32)
    hidden, _ = model.forward(
        params, ids, jnp.arange(len(tokens)), (None,) * len(model.attention_layers), attend_causal
    )
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
        caches = (None,) * len(model.attention_layers)
        hidden, _ = model.forward(params, ids, jnp.arange(total), caches, attend_causal)
        return jnp.argmax(model.logits(params, jax.lax.dynamic_slice_in_dim(hidden, last, 1))[0])

    for length in range(len(prompt), total):
        known[length] = next_token(params, known, np.int32(length - 1))
    return known[len(prompt) :].tolist()
