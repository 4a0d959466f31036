"""The target's verdict on packed rows: which proposals stand, and what follows the last that does.

A lane of length n has n consecutive rows: its pending token's, then those of its first n - 1
proposals. Row j (from 0) judges proposal j + 1 against the target's distribution p after the
history that ends with proposal j. The chain ends at the first rejection or at row n - 1; the
token of that row is a replacement or a bonus, drawn by the target. Hence every emitted token has
the target's distribution:

- greedy, and proposals that were not drawn (copies: q has one point): the row's own token is taken
  as plain decode takes it, with plain decode's noise, and the proposal stands if it is that
  token. P(accept) = p(proposal) = min(1, p / q), a rejection leaves p without the proposal, and
  the output is that of plain decode token for token, sampled or not.
- drawn proposals of a sampling request: accept with probability min(1, p / q); after a rejection
  draw from max(p - q, 0), normalised (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023,
  arXiv 2302.01318).

A row whose logits are not finite, or whose mask allows no token, cannot be used, nor can the rows
behind it; if it is row 0 the lane fails, as in plain decode.

Axis letters: B lanes, W target rows a lane, T = P packed rows, D proposals a lane, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs.lanes import Lanes
from helios_jax.aot.programs.masks import Mask, allow
from helios_jax.aot.programs.packing import Packed, pack
from helios_jax.aot.programs.proposals import Proposals
from helios_jax.aot.programs.sampling import (
    PURPOSE_ACCEPT,
    PURPOSE_SAMPLE,
    Rows,
    draw,
    failure,
    is_random,
    log_weights,
    shape_logits,
    uniform,
)


class Block(NamedTuple):
    """The packed rows of a round.

    Attributes:
        lengths: [B] rows of each lane.
        packed: Where the rows belong; `packed.row` is the lane.
        depth: [T] 0 for a pending token's row, j for that of proposal j.
        token: [T] input token of each row.
        rows: [T] the rows as the sampler knows them: the proposals up to the row count as output.
    """

    lengths: jax.Array
    packed: Packed
    depth: jax.Array
    token: jax.Array
    rows: Rows


class Verdict(NamedTuple):
    """What the target decided about a block.

    Attributes:
        token: [B, W] emitted tokens in order, -1 behind the last one.
        emitted: [B] how many: accepted + 1, or 0 if the lane failed.
        offered: [B] proposals that were judged.
        accepted: [B] how many of them stand.
        survival: [B, D] running products of min(1, p / q) over the judged proposals, 0 behind them.
        status: [B], see STATUS_* in sampling.
    """

    token: jax.Array
    emitted: jax.Array
    offered: jax.Array
    accepted: jax.Array
    survival: jax.Array
    status: jax.Array


class _Grid(NamedTuple):
    """The rows by lane and depth [B, W]: their packed index, and whether they judge a proposal."""

    packed: jax.Array
    judges: jax.Array


class _Rows(NamedTuple):
    """A verdict row by row [T]: whether its proposal stands, min(1, p / q), and the token if the chain ends here."""

    accept: jax.Array
    ratio: jax.Array
    token: jax.Array


def pack_block(lanes: Lanes, proposals: Proposals, lengths: jax.Array, num_rows: int) -> Block:
    """The rows of `lengths` [B], whose sum is at most `num_rows`."""
    packed = pack(lengths, lanes.position, num_rows)
    lane, depth = packed.row, jnp.where(packed.valid, packed.position - lanes.position[packed.row], 0)
    pending = lanes.pending[lane]
    if not proposals.token.shape[1]:
        return Block(lengths, packed, depth, pending, Rows(lanes.row[lane], packed.valid, packed.position + 1))
    drafts = proposals.token[lane]
    mine = jnp.take_along_axis(drafts, jnp.maximum(depth - 1, 0)[:, None], axis=1)[:, 0]
    before = jnp.where(jnp.arange(drafts.shape[1]) < depth[:, None], drafts, -1)
    rows = Rows(lanes.row[lane], packed.valid, packed.position + 1, before)
    return Block(lengths, packed, depth, jnp.where(depth > 0, jnp.maximum(mine, 0), pending), rows)


def grid_index(block: Block, width: int) -> jax.Array:
    """[B, W] the packed row of each lane and depth; a stray one behind the lane's rows."""
    index = block.packed.offset[:, None] + jnp.arange(width, dtype=jnp.int32)
    return jnp.clip(index, 0, block.depth.shape[0] - 1)


def judge(
    logits: jax.Array, block: Block, proposals: Proposals, state: DeviceState, width: int, mask: Mask | None = None
) -> Verdict:
    """The verdict on a block.

    Args:
        logits: [T, V] float32, raw, after each row's token.
        width: W, the most rows of a lane.
        mask: What each packed row may sample; None = everything.
    """
    index, step = grid_index(block, width), jnp.arange(width, dtype=jnp.int32)
    finite = jnp.isfinite(logits).all(axis=1)
    shaped, possible = allow(shape_logits(logits, block.rows, state), mask)
    usable = _leading((finite & possible)[index] & (step < block.lengths[:, None]))
    offered = jnp.maximum(usable - 1, 0)
    depth, lane = block.depth, block.packed.row
    proposal = jnp.full(depth.shape, -1, jnp.int32)
    if proposals.token.shape[1]:
        following = jnp.minimum(depth, proposals.token.shape[1] - 1)
        proposal = jnp.where(depth < offered[lane], proposals.token[lane, following], -1)
    grid = _Grid(index, step < offered[:, None])
    if proposals.log_q is None:
        rows = _judge_points(shaped, block, proposal, state)
    else:
        rows = _judge_drawn(shaped, block, proposal, proposals.log_q, grid, state)

    accepted = _leading(rows.accept[index] & grid.judges)
    active = block.lengths > 0
    emitted = jnp.where(usable > 0, accepted + 1, 0)
    kept = jnp.where(step < accepted[:, None], proposal[index], rows.token[index])
    ratio = jnp.where(grid.judges, rows.ratio[index], 0.0)
    return Verdict(
        token=jnp.where(step < emitted[:, None], kept, -1),
        emitted=emitted,
        offered=offered,
        accepted=accepted,
        survival=_columns(jnp.cumprod(ratio, axis=1), proposals.token.shape[1]),
        status=failure(active, finite[index[:, 0]], possible[index[:, 0]]),
    )


def _judge_points(shaped: jax.Array, block: Block, proposal: jax.Array, state: DeviceState) -> _Rows:
    """Rows whose proposals were not drawn: plain decode's token decides."""
    greedy = jnp.argmax(shaped, axis=1).astype(jnp.int32)
    random = is_random(block.rows, state)

    def drawn() -> tuple[jax.Array, jax.Array]:
        weights = log_weights(shaped, block.rows, state)
        token = jnp.where(random, draw(weights, block.rows, state, PURPOSE_SAMPLE), greedy)
        return token, jnp.where(random, _probability(weights, proposal), token == proposal)

    token, ratio = lax.cond(random.any(), drawn, lambda: (greedy, (greedy == proposal).astype(jnp.float32)))
    return _Rows((token == proposal) & (proposal >= 0), ratio, token)


def _judge_drawn(
    shaped: jax.Array, block: Block, proposal: jax.Array, log_q: jax.Array, grid: _Grid, state: DeviceState
) -> _Rows:
    """Rows whose proposals were drawn from `log_q` [D, B, V] where the request samples.

    The residual distribution is made only at the last row of each lane, so that no array beside
    the logits, the weights and `log_q` has a vocabulary a row.
    """
    greedy = jnp.argmax(shaped, axis=1).astype(jnp.int32)
    random, rows = is_random(block.rows, state), block.rows
    matches = (greedy == proposal) & (proposal >= 0)

    def drawn() -> _Rows:
        weights = log_weights(shaped, rows, state)
        following = jnp.minimum(block.depth, log_q.shape[0] - 1)
        q = jnp.exp(log_q[following, block.packed.row, jnp.maximum(proposal, 0)])
        p = _probability(weights, proposal)
        # a proposal that was drawn has q > 0; where q is not a number the proposal falls
        certain = uniform(state.seed[rows.slot], rows.position, PURPOSE_ACCEPT) * q < p
        accept = jnp.where(random, certain & (proposal >= 0), matches)
        ratio = jnp.where(p < q, p / q, jnp.where(p >= q, 1.0, 0.0))
        accepted = _leading(accept[grid.packed] & grid.judges)
        last = jnp.take_along_axis(grid.packed, accepted[:, None], axis=1)[:, 0]
        ending = jax.tree.map(lambda leaf: leaf[last], rows)
        log_p, lane = weights[last], jnp.arange(last.shape[0])
        fallen = accepted < grid.judges.sum(axis=1)
        log_r = _residual(log_p, log_q[jnp.minimum(accepted, log_q.shape[0] - 1), lane])
        token = draw(jnp.where(fallen[:, None], log_r, log_p), ending, state, PURPOSE_SAMPLE)
        there = jnp.where(block.lengths > 0, last, greedy.shape[0])  # past the end: dropped
        ended = greedy.at[there].set(token, mode="drop")
        return _Rows(accept, jnp.where(random, ratio, matches), jnp.where(random, ended, greedy))

    return lax.cond(random.any(), drawn, lambda: _Rows(matches, matches.astype(jnp.float32), greedy))


def _probability(weights: jax.Array, token: jax.Array) -> jax.Array:
    """[T] probability of `token` under softmax(weights [T, V]); of token 0 where it is -1."""
    mine = jnp.take_along_axis(weights, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
    return jnp.exp(jnp.minimum(mine - jax.nn.logsumexp(weights, axis=1), 0.0))  # no rounding above 1


def _residual(weights: jax.Array, log_q: jax.Array) -> jax.Array:
    """[B, V] log of max(p - q, 0), p = softmax(weights); p's own where nothing is left but rounding, or q is broken."""
    q = jnp.exp(log_q)
    rest = jnp.maximum(jax.nn.softmax(weights, axis=1) - q, 0.0)
    there = (rest > 0).any(axis=1, keepdims=True) & jnp.isfinite(q).all(axis=1, keepdims=True)
    return jnp.where(there, jnp.log(rest), weights)


def _leading(there: jax.Array) -> jax.Array:
    """[B] how many columns of `there` [B, W] are True before the first False."""
    return jnp.cumprod(there.astype(jnp.int32), axis=1).sum(axis=1)


def _columns(values: jax.Array, count: int) -> jax.Array:
    """The first `count` columns of `values` [B, W], zeros where there are fewer."""
    return jnp.pad(values, ((0, 0), (0, max(0, count - values.shape[1]))))[:, :count]
