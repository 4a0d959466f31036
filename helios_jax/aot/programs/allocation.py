"""Which proposals get a target row: the device's part of a round whose rows P are fewer than its ceilings.

Every lane gets the row of its pending token. Then the best immediate causal frontier, the next
proposal of some lane, is admitted again and again: highest joint prefix probability first, ties
to the shorter prefix, then to the lower request slot, until P rows are given or every ceiling
is reached. Identities and cohort are the host's and never change here.

Source: specification, "Speculative graph coverage". Axis letters: B lanes, D proposals a lane.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

INFINITY_BITS = 0x7F800000
NEVER = jnp.iinfo(jnp.int32).max


class _Progress(NamedTuple):
    """Rows given to each lane [B], and rows that are left []."""

    lengths: jax.Array
    left: jax.Array


def probability_key(values: jax.Array) -> jax.Array:
    """int32 keys in the order of the probabilities `values`; negative ones and NaN count as 0.

    Integers, because a processor may read denormal floats as zeros and call them equal.
    """
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    return jnp.where((bits < 0) | (bits > INFINITY_BITS), 0, bits)


def allocate(joint: jax.Array, ceiling: jax.Array, slot: jax.Array, budget: jax.Array | int) -> jax.Array:
    """Target rows of each lane.

    Args:
        joint: [B, D] float32 probability that the proposals up to each depth are all right; must not
            rise along a lane for the result to be the best `budget` rows. D may be 0.
        ceiling: [B] most rows of each lane, its pending token's included; at most D + 1, 0 = no lane.
        slot: [B] request slots, distinct where the ceiling is positive.
        budget: P, at least the number of lanes.

    Returns:
        [B] int32 rows, pending token's included; 0 where there is no lane.

    Cost: nothing if all ceilings fit, else one iteration of O(B) a row given beyond the first.
    """
    key = jnp.pad(probability_key(joint), ((0, 0), (0, 1)), constant_values=-1)
    ceiling = jnp.clip(ceiling, 0, joint.shape[1] + 1).astype(jnp.int32)
    least = jnp.minimum(ceiling, 1)
    lengths = jnp.where(ceiling.sum() <= budget, ceiling, least)

    def unfinished(progress: _Progress) -> jax.Array:
        return (progress.left > 0) & (progress.lengths < ceiling).any()

    def admit(progress: _Progress) -> _Progress:
        lengths = progress.lengths
        frontier = jnp.take_along_axis(key, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
        frontier = jnp.where(lengths < ceiling, frontier, -1)
        best = frontier == frontier.max()
        shortest = jnp.where(best, lengths, NEVER)
        best &= lengths == shortest.min()
        chosen = jnp.argmin(jnp.where(best, slot, NEVER))
        return _Progress(lengths.at[chosen].add(1), progress.left - 1)

    return lax.while_loop(unfinished, admit, _Progress(lengths, budget - lengths.sum())).lengths


def fit(lengths: jax.Array, budget: int) -> jax.Array:
    """Exact host lengths [B], cut at the row `budget`: a mistake of the host must not leave the program's arrays."""
    before = jnp.cumsum(lengths) - lengths
    return jnp.clip(lengths, 0, jnp.maximum(budget - before, 0)).astype(jnp.int32)
