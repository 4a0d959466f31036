"""Log-probabilities of the raw logits: of the chosen token, its rank, and the best alternatives.

Raw means before penalties, bias and temperature, vLLM's default. Axis letters: R rows,
V vocabulary, T packed prompt tokens, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.abi import TOP_LOGPROBS
from helios_jax.aot.programs.sampling import STATUS_NOT_FINITE

SCORE_TILE = 64  # rows of logits that a scored prefill holds at once


class Logprobs(NamedTuple):
    """Log-probabilities of each row.

    Attributes:
        logprob: [R] float32 of the row's token; 0 where there is none.
        rank: [R] int32, 1 + tokens with a larger logit; 0 where there is none.
        top_ids: [R, TOP_LOGPROBS] int32 by falling probability, ties by id; -1 past the vocabulary.
        top_logprobs: [R, TOP_LOGPROBS] float32; -inf past the vocabulary.
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def nothing(rows: int) -> Logprobs:
    """What is reported of rows whose log-probabilities nobody asked for: zeros."""
    flat, wide = (rows,), (rows, TOP_LOGPROBS)
    return Logprobs(
        jnp.zeros(flat, jnp.float32),
        jnp.zeros(flat, jnp.int32),
        jnp.zeros(wide, jnp.int32),
        jnp.zeros(wide, jnp.float32),
    )


def describe(logits: jax.Array, token: jax.Array) -> Logprobs:
    """Log-probabilities of `logits` [R, V] with the chosen `token` [R]; -1 = none."""
    normalizer = jax.nn.logsumexp(logits, axis=1)
    there = token >= 0
    mine = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=1)
    rank = 1 + jnp.sum(logits > mine, axis=1, dtype=jnp.int32)
    count = min(TOP_LOGPROBS, logits.shape[1])
    values, ids = lax.top_k(logits, count)
    pad = ((0, 0), (0, TOP_LOGPROBS - count))
    return Logprobs(
        jnp.where(there, mine[:, 0] - normalizer, 0.0),
        jnp.where(there, rank, 0),
        jnp.pad(ids.astype(jnp.int32), pad, constant_values=-1),
        jnp.pad(values - normalizer[:, None], pad, constant_values=-jnp.inf),
    )


def describe_if(wanted: jax.Array, logits: jax.Array, token: jax.Array) -> Logprobs:
    """`describe` when `wanted` [] is set, zeros otherwise, at no cost."""
    return lax.cond(wanted, lambda: describe(logits, token), lambda: nothing(logits.shape[0]))


class Scores(NamedTuple):
    """Log-probabilities of T prompt positions, and their status [T] (not finite = 1)."""

    logprobs: Logprobs
    status: jax.Array


def score(hidden: jax.Array, target: jax.Array, used: jax.Array, to_logits: Callable[[jax.Array], jax.Array]) -> Scores:
    """Log-probabilities of `target` [T] after each of the `hidden` [T, D] rows.

    Only SCORE_TILE rows of logits exist at a time, so memory does not grow with the prompt.

    Args:
        target: -1 = no target: only the alternatives are reported.
        used: [] rows that hold tokens; tiles past them are not computed.
    """
    tile, rows = min(SCORE_TILE, hidden.shape[0]), hidden.shape[0]
    padding = -rows % tile
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    target = jnp.pad(target, (0, padding), constant_values=-1)

    def step(number: jax.Array, out: Scores) -> Scores:
        logits = to_logits(lax.dynamic_slice_in_dim(hidden, number * tile, tile))
        finite = jnp.isfinite(logits).all(axis=1)
        new = Scores(
            describe(logits, lax.dynamic_slice_in_dim(target, number * tile, tile)),
            jnp.where(finite, 0, STATUS_NOT_FINITE).astype(jnp.int32),
        )
        return jax.tree.map(lambda o, n: lax.dynamic_update_slice_in_dim(o, n, number * tile, 0), out, new)

    empty = Scores(nothing(rows + padding), jnp.zeros(rows + padding, jnp.int32))
    scores = lax.fori_loop(0, -(-used // tile), step, empty)
    return jax.tree.map(lambda leaf: leaf[:rows], scores)
