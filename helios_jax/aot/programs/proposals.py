"""What a round proposes, how sure it is, and how the host's calibration changes that.

Joint prefix probability of depth d = c_1 c_2 ... c_d, with c the calibrated confidences:

    c = sigmoid(scale * logit(p) + shift)

p is the draft model's probability of its proposal, or the host's estimate of a copied one. The
two parameters are the host's, one pair a source; (1, 0) is the identity, exactly.

Axis letters: B lanes, D proposals a lane, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims
from helios_jax.aot.programs.lanes import Lanes
from helios_jax.aot.programs.packing import address_tokens

MAX_LOGIT = 87.0  # sigmoid is 0 or 1 in float32 beyond; keeps scale 0 times infinity out


class Proposals(NamedTuple):
    """The proposals of a round, before any of them is judged.

    Attributes:
        token: [B, D] int32, -1 behind the last proposal of a lane.
        available: [B] proposals of each lane.
        confidence: [B, D] float32 calibrated confidence, 0 behind the last proposal.
        log_q: [D, B, V] log-probabilities that drew each token, where the lane samples; None if
            proposals are not drawn: then each has all the probability of its own distribution.
    """

    token: jax.Array
    available: jax.Array
    confidence: jax.Array
    log_q: jax.Array | None = None

    @property
    def joint(self) -> jax.Array:
        """[B, D] float32 running products of the confidences: never rising along a lane."""
        return jnp.cumprod(self.confidence, axis=1) if self.confidence.shape[1] else self.confidence


def room(lanes: Lanes, depth: int, dims: Dims) -> jax.Array:
    """[B] proposals, at most `depth`, for which the lane has pages behind its pending token."""
    if not depth:
        return jnp.zeros(lanes.row.shape[0], jnp.int32)
    position = lanes.position[:, None] + 1 + jnp.arange(depth, dtype=jnp.int32)
    lane = jnp.broadcast_to(jnp.arange(position.shape[0])[:, None], position.shape)
    valid = jnp.broadcast_to(lanes.active[:, None], position.shape)
    address = address_tokens(lanes.tables, lane, position, valid, dims.page_size, dims.num_pages)
    return _leading(address.page > 0)


def calibrate(probability: jax.Array, calibration: jax.Array) -> jax.Array:
    """Confidence of `probability` [...] under the host's (scale, shift) [2]; a NaN stays one."""
    scale, shift = calibration[0], calibration[1]
    logit = jnp.clip(jnp.log(probability) - jnp.log1p(-probability), -MAX_LOGIT, MAX_LOGIT)
    mapped = jax.nn.sigmoid(scale * logit + shift)
    return jnp.where((scale == 1) & (shift == 0), probability, mapped)


def of_tokens(token: jax.Array, probability: jax.Array, count: jax.Array, calibration: jax.Array) -> Proposals:
    """Proposals of which the first `count` [B] of each lane are there."""
    there = jnp.arange(token.shape[1]) < count[:, None]
    confidence = jnp.where(there, calibrate(probability, calibration), 0.0)
    return Proposals(jnp.where(there, token, -1), count, confidence)


def copied(token: jax.Array, probability: jax.Array, calibration: jax.Array, lanes: Lanes, dims: Dims) -> Proposals:
    """The supplied prefixes `token` [B, D], ended by the first id outside the vocabulary."""
    count = _leading((token >= 0) & (token < dims.vocab_size))
    return of_tokens(token, probability, jnp.minimum(count, room(lanes, token.shape[1], dims)), calibration)


def none(num_lanes: int) -> Proposals:
    """No proposals at all: D = 0."""
    empty = jnp.zeros((num_lanes, 0), jnp.int32)
    return Proposals(empty, jnp.zeros(num_lanes, jnp.int32), empty.astype(jnp.float32))


def _leading(there: jax.Array) -> jax.Array:
    """[B] how many columns of `there` [B, D] are True before the first False."""
    return jnp.cumprod(there.astype(jnp.int32), axis=1).sum(axis=1)
