"""A draft model beside the target: its proposals, and the upkeep of its own context.

The draft's keys and values lie in `DeviceState.draft_kv`, at the addresses that the page tables
give the target's. What a round may leave out: a round of D proposals runs the draft on the
pending token and on proposals 1 .. D - 1, so if all D are accepted, the last one is missing.
Hence the invariant (see `DeviceState.draft_kv`) and its repair: every round, width-one rounds
and plain decode included, begins by running the draft on the last committed token, again or for
the first time, and the pending one.

A proposal is drawn by the request's own settings from the draft's logits, with penalties that
see the proposals before it; greedy requests get the draft's best token.

Axis letters: B lanes, D proposals a lane, V vocabulary, P page-table entries.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.abi import Dims
from helios_jax.aot.device_state import DeviceState, LayerPages
from helios_jax.aot.programs.attention import decode_attend, verify_attend
from helios_jax.aot.programs.lanes import Lanes, address_lanes
from helios_jax.aot.programs.packing import Packed, address_tokens, pack
from helios_jax.aot.programs.proposals import Proposals, of_tokens, room
from helios_jax.aot.programs.sampling import PURPOSE_DRAFT, Rows, draw, is_random, log_weights, shape_logits
from helios_jax.aot.programs.tiling import decode_tiling, verify_tiling
from helios_jax.models.interface import Model, Params

OVERLAP = 2  # tokens that a round gives the draft first: the last committed and the pending one


class Weights(NamedTuple):
    """The parameters of a core's models; `draft` is empty without a draft model."""

    target: Params
    draft: Params


def split(params: Params, draft: Model | None) -> Weights:
    """What a program is given: the target's tree, or {"target", "draft"} in a core with a draft model."""
    return Weights(params, ()) if draft is None else Weights(params["target"], params["draft"])


def check_draft(model: Model, draft: Model | None) -> None:
    """Refuses a draft whose tokens mean something else.

    Raises:
        ValueError: The vocabularies have different sizes.
    """
    if draft is not None and draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model has {draft.vocab_size} tokens and the target {model.vocab_size};"
            " a draft model needs the target's vocabulary"
        )


def absorb(draft: Model, params: Params, state: DeviceState, lanes: Lanes, dims: Dims) -> tuple[DeviceState, jax.Array]:
    """Completes the draft's context up to and with the pending tokens.

    Returns:
        The state, and the draft's hidden rows [B, D model] of the pending tokens.
    """
    num_lanes = lanes.row.shape[0]
    query_len = jnp.where(lanes.active, jnp.minimum(lanes.position + 1, OVERLAP), 0)
    start = jnp.maximum(lanes.position - 1, 0)
    packed = pack(query_len, start, OVERLAP * num_lanes)
    previous = jnp.clip(state.previous_token[lanes.row], 0, dims.vocab_size - 1)
    is_pending = packed.position == lanes.position[packed.row]
    tokens = jnp.where(is_pending, lanes.pending[packed.row], previous[packed.row])
    state, hidden = run_packed(draft, params, state, lanes.tables, packed, (query_len, start), tokens, OVERLAP, dims)
    last = jnp.clip(packed.offset + query_len - 1, 0, tokens.shape[0] - 1)
    return state, hidden[last]


def run_packed(
    draft: Model, params: Params, state: DeviceState, tables: jax.Array, packed: Packed,
    extent: tuple[jax.Array, jax.Array], tokens: jax.Array, width: int, dims: Dims,
) -> tuple[DeviceState, jax.Array]:  # fmt: skip
    """Runs the draft on packed rows of at most `width` consecutive tokens a lane; fills its context.

    Args:
        tables: [B, P] page ids.
        extent: [B] tokens of each lane, and the position of the first.
        tokens: [T] packed tokens.
    """
    query_len, start = extent
    address = address_tokens(tables, packed.row, packed.position, packed.valid, dims.page_size, dims.num_pages)
    tiling = verify_tiling(dims, tables.shape[0], width)
    attend = verify_attend(tables, packed, query_len, start, address, tiling)
    hidden, kv = draft.forward(params, tokens, packed.position, state.draft_kv, attend)
    return dataclasses.replace(state, draft_kv=kv), hidden


class _Draft(NamedTuple):
    """What a draft step hands to the next one: see `Proposals` for the first three."""

    token: jax.Array
    probability: jax.Array
    log_q: jax.Array
    hidden: jax.Array
    kv: tuple[LayerPages, ...]


def propose(
    draft: Model, params: Params, state: DeviceState, lanes: Lanes, depth: int, calibration: jax.Array, dims: Dims
) -> tuple[DeviceState, Proposals]:
    """`depth` proposals of each lane that has pages for them, one draft step each.

    Cost: one pass of the draft over 2 B rows, and depth - 1 over B rows, in a loop.
    """
    count = room(lanes, depth, dims)
    state, hidden = absorb(draft, params, state, lanes, dims)
    num_lanes = lanes.row.shape[0]
    flat = (num_lanes, depth)
    begin = _Draft(
        jnp.full(flat, -1, jnp.int32),
        jnp.zeros(flat, jnp.float32),
        jnp.zeros((depth, num_lanes, dims.vocab_size), jnp.float32),
        hidden,
        state.draft_kv,
    )
    context = dataclasses.replace(state, kv=(), draft_kv=())  # the pools travel in the loop's carry, or not at all

    def step(number: jax.Array, carry: _Draft) -> _Draft:
        carry = _choose(draft, params, context, lanes, number, carry)
        if depth == 1:
            return carry
        return lax.cond(
            number + 1 < depth,
            lambda carry: _advance(draft, params, lanes, count, number + 1, carry, dims),
            lambda carry: carry,
            carry,
        )

    last = lax.fori_loop(0, depth, step, begin)
    proposals = of_tokens(last.token, last.probability, count, calibration)
    return dataclasses.replace(state, draft_kv=last.kv), proposals._replace(log_q=last.log_q)


def _advance(
    draft: Model, params: Params, lanes: Lanes, count: jax.Array, number: jax.Array, carry: _Draft, dims: Dims
) -> _Draft:
    """Runs the draft on proposal `number` (from 1) of each lane."""
    valid = lanes.active & (number <= count)
    position = jnp.where(valid, lanes.position + number, 0)
    token = lax.dynamic_index_in_dim(carry.token, number - 1, axis=1, keepdims=False)
    address = address_lanes(lanes, position, valid, dims)
    attend = decode_attend(lanes.tables, position, valid, address, decode_tiling(dims, lanes.row.shape[0]))
    hidden, kv = draft.forward(params, jnp.where(valid, token, 0), position, carry.kv, attend)
    return carry._replace(hidden=hidden, kv=kv)


def _choose(draft: Model, params: Params, state: DeviceState, lanes: Lanes, number: jax.Array, carry: _Draft) -> _Draft:
    """Proposal `number` + 1 of each lane from the draft's hidden rows: its token, its probability, its distribution."""
    depth = carry.token.shape[1]
    before = jnp.where(jnp.arange(depth) < number, carry.token, -1)
    rows = Rows(lanes.row, lanes.active, lanes.position + number + 1, before)
    shaped = shape_logits(draft.logits(params, carry.hidden), rows, state)
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
