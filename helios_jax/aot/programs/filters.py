"""Which tokens may be sampled: min-p, top-k and top-p without sorting the vocabulary.

A full sort of [R, V] costs XLA's CPU many times what sampling otherwise does. Thresholds are
found instead by bisection over the bits of an order-preserving integer key: 32 counts (or
sums of probability) over the row, whatever the distribution. Axis letters: R rows, V vocabulary.

Ties are broken towards the lower token id, exactly: a kept set is "every token above the
threshold, and the first so many of those equal to it". Hence top_k = 1 is greedy, and top-k
keeps exactly k.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Measure = Callable[[jax.Array], jax.Array]  # [R, V] mask -> [R] count or mass, monotone in the mask


def order_key(values: jax.Array) -> jax.Array:
    """uint32 keys in the order of the float32 `values`, all above 0; both zeros are equal."""
    # a select: XLA folds `values + 0.0` away, and -0.0 with it
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _bisect(bits: int, enough: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Largest [R] uint32 below 2^bits for which the monotone `enough` [R] holds; 0 if none does."""

    def step(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, found)

    return lax.fori_loop(0, bits, step, jnp.zeros(rows, jnp.uint32))


def _first_tied(tied: jax.Array, wanted: jax.Array) -> jax.Array:
    """The first `wanted` [R] tokens of each row of `tied` [R, V], by token id."""
    rows, size = tied.shape
    index = jnp.arange(size, dtype=jnp.uint32)
    # the largest bound below which there are not yet `wanted` of them; ids up to it are kept
    bound = _bisect(size.bit_length(), lambda c: jnp.sum(tied & (index < c[:, None]), axis=1) < wanted, rows)
    return tied & (index <= bound[:, None])


def keep_top_k(values: jax.Array, kept: jax.Array, top_k: jax.Array) -> jax.Array:
    """Of the tokens in `kept` [R, V], the `top_k` [R] with the largest values; 0 = all of them."""
    rows, size = values.shape
    key = jnp.where(kept, order_key(values), 0)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, kept.sum(axis=1)), size).astype(jnp.int32)
    threshold = _bisect(32, lambda c: jnp.sum(key >= c[:, None], axis=1) >= wanted, rows)[:, None]
    above = key > threshold
    tied = kept & (key == threshold)
    chosen = above | _first_tied(tied, wanted - above.sum(axis=1, dtype=jnp.int32))
    return jnp.where((top_k > 0)[:, None], kept & chosen, kept)


def keep_top_p(values: jax.Array, kept: jax.Array, top_p: jax.Array) -> jax.Array:
    """Of the tokens in `kept` [R, V], the fewest, largest first, whose share reaches `top_p` [R].

    Args:
        values: [R, V] log-weights of which the row's largest is 0; shares are of exp(values) over `kept`.
        top_p: In (0, 1]; 1 = all of them.
    """
    rows = values.shape[0]
    weight = jnp.where(kept, jnp.exp(values), 0.0)
    key = jnp.where(kept, order_key(values), 0)

    def mass(mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, weight, 0.0), axis=1)

    wanted = top_p * weight.sum(axis=1)
    threshold = _bisect(32, lambda c: mass(key >= c[:, None]) >= wanted, rows)[:, None]
    above = key > threshold
    tied = kept & (key == threshold)
    each = jnp.max(jnp.where(tied, weight, 0.0), axis=1)
    lacking = jnp.ceil((wanted - mass(above)) / jnp.maximum(each, jnp.finfo(jnp.float32).tiny))
    count = jnp.clip(lacking, 1, tied.sum(axis=1)).astype(jnp.int32)
    return jnp.where((top_p < 1)[:, None], kept & (above | _first_tied(tied, count)), kept)


def keep_min_p(values: jax.Array, min_p: jax.Array) -> jax.Array:
    """[R, V] True where a token's probability is at least `min_p` [R] times the row's largest."""
    floor = values.max(axis=1) + jnp.log(jnp.maximum(min_p, jnp.finfo(jnp.float32).tiny))
    return (values >= floor[:, None]) | (min_p <= 0)[:, None]
