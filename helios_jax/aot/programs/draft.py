"""Proposals of a drafter: one step each, drawn as the request draws its own tokens.

A proposal is drawn by the request's own settings from the drafter's logits, with penalties that
see the proposals before it; greedy requests get the drafter's best token.

Axis letters: B lanes, D proposals a lane, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.device_state import DeviceState, LayerPages
from helios_jax.aot.programs.drafters import Drafter
from helios_jax.aot.programs.lanes import Lanes
from helios_jax.aot.programs.proposals import Proposals, of_tokens, room
from helios_jax.aot.programs.sampling import PURPOSE_DRAFT, Rows, draw, is_random, log_weights, shape_logits


class _Step(NamedTuple):
    """What a draft step hands to the next one: see `Proposals` for the first three."""

    token: jax.Array
    probability: jax.Array
    log_q: jax.Array
    hidden: jax.Array
    kv: tuple[LayerPages, ...]


def propose(
    drafter: Drafter, state: DeviceState, lanes: Lanes, depth: int, calibration: jax.Array
) -> tuple[DeviceState, Proposals]:
    """`depth` proposals of each lane that has pages for them, one draft step each.

    Cost: one pass of the drafter over the tokens that complete its context, and depth - 1 over B rows, in a loop.
    """
    count = room(lanes, depth, drafter.dims)
    state, hidden = drafter.complete(state, lanes)
    num_lanes = lanes.row.shape[0]
    flat = (num_lanes, depth)
    begin = _Step(
        jnp.full(flat, -1, jnp.int32),
        jnp.zeros(flat, jnp.float32),
        jnp.zeros((depth, num_lanes, drafter.dims.vocab_size), jnp.float32),
        hidden,
        state.draft_kv,
    )
    # the pools travel in the loop's carry, or not at all
    context = dataclasses.replace(state, kv=(), draft_kv=(), recurrent=())

    def step(number: jax.Array, carry: _Step) -> _Step:
        carry = _choose(drafter, context, lanes, number, carry)
        if depth == 1:
            return carry
        return lax.cond(
            number + 1 < depth,
            lambda carry: _advance(drafter, lanes, count, number + 1, carry),
            lambda carry: carry,
            carry,
        )

    last = lax.fori_loop(0, depth, step, begin)
    proposals = of_tokens(last.token, last.probability, count, calibration)
    return dataclasses.replace(state, draft_kv=last.kv), proposals._replace(log_q=last.log_q)


def _advance(drafter: Drafter, lanes: Lanes, count: jax.Array, number: jax.Array, carry: _Step) -> _Step:
    """Runs the drafter on proposal `number` (from 1) of each lane."""
    valid = lanes.active & (number <= count)
    token = lax.dynamic_index_in_dim(carry.token, number - 1, axis=1, keepdims=False)
    hidden, kv = drafter.advance(carry.kv, lanes, number, valid, token, carry.hidden)
    return carry._replace(hidden=hidden, kv=kv)


def _choose(drafter: Drafter, state: DeviceState, lanes: Lanes, number: jax.Array, carry: _Step) -> _Step:
    """Proposal `number` + 1 of each lane from the drafter's output rows: token, probability, distribution."""
    depth = carry.token.shape[1]
    before = jnp.where(jnp.arange(depth) < number, carry.token, -1)
    rows = Rows(lanes.row, lanes.active, lanes.position + number + 1, before)
    shaped = shape_logits(drafter.logits(carry.hidden), rows, state)
    greedy = jnp.argmax(shaped, axis=1).astype(jnp.int32)
    random = is_random(rows, state)

    def drawn() -> tuple[jax.Array, jax.Array]:
        weights = log_weights(shaped, rows, state)
        token = draw(weights, rows, state, PURPOSE_DRAFT)
        return jnp.where(random, token, greedy), jax.nn.log_softmax(weights, axis=1)

    token, log_q = lax.cond(random.any(), drawn, lambda: (greedy, jnp.zeros_like(shaped)))
    mine = jnp.take_along_axis(shaped, token[:, None], axis=1)[:, 0]
    probability = jnp.exp(jnp.minimum(mine - jax.nn.logsumexp(shaped, axis=1), 0.0))  # no rounding above 1
    return carry._replace(
        token=lax.dynamic_update_index_in_dim(carry.token, token, number, axis=1),
        probability=lax.dynamic_update_index_in_dim(carry.probability, probability, number, axis=1),
        log_q=lax.dynamic_update_index_in_dim(carry.log_q, log_q, number, axis=0),
    )
