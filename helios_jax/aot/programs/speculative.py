"""The complete speculative round as one program.

1. Proposals: the supplied prefixes (copy), or one draft step each (learned); width one has none.
2. Confidence of each, and joint prefix probabilities.
3. Target rows of each lane: the host's exact lengths, or the device's choice below the ceilings.
4. One pass of the target over the packed rows of all lanes.
5. The verdict: accepted proposals, and one token of the target's own behind them.
6. Commit: the pool keeps the accepted prefix (keys and values of rejected rows lie beyond
   `committed_len`, where nothing reads them before they are overwritten); recurrent state advances
   over it; emitted tokens are counted, the last one is pending.
7. Sidecars for the scheduler.

A drafter's context is kept by every round, whatever the source (see `drafters.py`).
A lane whose slot is out of range, or whose limit is 0, is inactive: it writes to scratch.

The steps are functions so that a mixed program can share one target pass with a prompt row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs import proposals as proposing
from helios_jax.aot.programs.allocation import allocate, fit
from helios_jax.aot.programs.attention import verify_attend
from helios_jax.aot.programs.draft import propose
from helios_jax.aot.programs.drafters import Drafter, Fed, check_draft, make_drafter, split
from helios_jax.aot.programs.lanes import Lanes, read_lanes
from helios_jax.aot.programs.logprobs import Logprobs, describe_if
from helios_jax.aot.programs.masks import Mask
from helios_jax.aot.programs.packing import address_tokens, assemble
from helios_jax.aot.programs.proposals import Proposals
from helios_jax.aot.programs.recurrence import round_recur, run_target, span_of, write_rounds
from helios_jax.aot.programs.tiling import verify_tiling
from helios_jax.aot.programs.types import Params, Program, Result
from helios_jax.aot.programs.verification import Block, Verdict, grid_index, judge, pack_block
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import Allocation, ProgramShape, ProposalSource, lane_width


def check_round(shape: ProgramShape, model: Model, draft: Draft | None) -> None:
    """Refuses shapes and drafts of which no program can be made.

    Raises:
        ValueError: What does not fit, with the numbers.
    """
    rows = shape.packed_capacity
    if not shape.batch_capacity <= rows <= shape.batch_capacity * shape.token_capacity:
        raise ValueError(f"{shape.name}: {rows} packed rows must lie between B and B x W")
    check_source(shape, draft)
    check_draft(model, draft)


def check_source(shape: ProgramShape, draft: Draft | None) -> None:
    """Refuses proposals that nobody could make.

    Raises:
        ValueError: They have no source, or a learned one without a draft.
    """
    depth, source = shape.proposal_depth, shape.proposal_source
    if depth and source is ProposalSource.NONE:
        raise ValueError(f"{shape.name}: {depth} proposals need a source")
    if depth and source is ProposalSource.LEARNED and draft is None:
        raise ValueError(f"{shape.name}: learned proposals need a draft model or heads")


def build_speculative(shape: ProgramShape, model: Model, dims: Dims, draft: Draft | None = None) -> Program:
    """The round of `shape`.

    Args:
        draft: The core's draft model or heads, if it has them; `params` is then {"target": ..., "draft": ...}.

    Raises:
        ValueError: See `check_round`.
    """
    check_round(shape, model, draft)
    control, completion = control_layout(shape, dims), completion_layout(shape, dims)
    width = lane_width(shape)
    tiling = verify_tiling(dims, shape.batch_capacity, width)

    def speculative(params: Params, state: DeviceState, ints: jax.Array, floats: jax.Array, bits: jax.Array) -> Result:
        fields, weights = control.split(ints, floats), split(params, draft)
        lanes = read_lanes(fields, fields["limit"] > 0, state, dims)
        drafter = make_drafter(draft, model, weights, dims)
        state, proposals = make_proposals(shape, fields, lanes, state, dims, drafter)
        lengths = target_rows(shape, fields["limit"], fields["slot"], lanes, proposals)
        block = pack_block(lanes, proposals, lengths, shape.packed_capacity)
        packed, tables = block.packed, lanes.tables
        address = address_tokens(tables, packed.row, packed.position, packed.valid, dims.page_size, dims.num_pages)
        attend = verify_attend(tables, packed, lengths, lanes.position, address, tiling)
        span = span_of(lanes.row, lengths, lanes.position, packed)
        hidden, state, left = run_target(
            model, weights.target, state, block.token, packed.position, attend, round_recur(span, width)
        )
        logits = model.logits(weights.target, hidden)

        mask = packed_mask(bits, fields["masked"], block, shape.token_capacity)
        verdict = judge(logits, block, proposals, state, width, mask)
        details = describe_block(fields["want_logprobs"][0] > 0, logits, block, verdict, shape.token_capacity)
        if drafter is not None:
            own = proposals.log_q is not None
            state = keep_context(drafter, state, lanes, block, verdict, hidden, width, not own or drafter.corrects)
        state = write_rounds(state, left, span, verdict.emitted)
        state = commit(state, lanes, verdict)
        values = report(shape, dims, fields["slot"], lanes, proposals, verdict)
        return state, assemble(completion, values | details._asdict())

    return speculative


def make_proposals(
    shape: ProgramShape, fields: Mapping[str, jax.Array], lanes: Lanes, state: DeviceState, dims: Dims,
    drafter: Drafter | None,
) -> tuple[DeviceState, Proposals]:  # fmt: skip
    """The round's proposals, and the drafter's context up to the pending tokens at least."""
    depth = shape.proposal_depth
    if depth and shape.proposal_source is ProposalSource.LEARNED and drafter is not None:
        return propose(drafter, state, lanes, depth, fields["calibration"])
    if drafter is not None:
        state, _ = drafter.complete(state, lanes)
    if not depth:
        return state, proposing.none(shape.batch_capacity)
    return state, proposing.copied(fields["proposal"], fields["confidence"], fields["calibration"], lanes, dims)


def target_rows(
    shape: ProgramShape, limit: jax.Array, slot: jax.Array, lanes: Lanes, proposals: Proposals
) -> jax.Array:
    """[B] target rows of each lane, at most `limit` [B], 0 where inactive; their sum is at most P."""
    ceiling = jnp.clip(limit, 0, jnp.minimum(proposals.available + 1, lane_width(shape)))
    ceiling = jnp.where(lanes.active, ceiling, 0)
    if shape.allocation is Allocation.QUERY_LENGTH:
        return fit(ceiling, shape.packed_capacity)
    return allocate(proposals.joint, ceiling, slot, shape.packed_capacity)


def packed_mask(bits: jax.Array, masked: jax.Array, block: Block, columns: int) -> Mask:
    """The mask of the packed rows, from the `columns` = W rows a lane that the host sends."""
    return Mask(bits, masked[0] > 0).rows(block.packed.row * columns + jnp.minimum(block.depth, columns - 1))


def keep_context(
    drafter: Drafter, state: DeviceState, lanes: Lanes, block: Block, verdict: Verdict, hidden: jax.Array, width: int,
    again: bool,
) -> DeviceState:  # fmt: skip
    """The drafter's context of what the target has read and accepted.

    Args:
        hidden: [P, D] the target's rows.
        again: Whether the rows must be run for it; not if its own proposals left them as they should be.
    """
    packed = block.packed
    if again and width > 1:
        fed = Fed(lanes.row, lanes.tables, packed, block.lengths, lanes.position, block.token)
        state = drafter.follow(state, fed, hidden, width)
    last = jnp.clip(packed.offset + verdict.emitted - 1, 0, hidden.shape[0] - 1)
    scratch = state.pending_token.shape[0] - 1
    return drafter.remember(state, jnp.where(verdict.emitted > 0, lanes.row, scratch), hidden[last])


def commit(state: DeviceState, lanes: Lanes, verdict: Verdict) -> DeviceState:
    """Emitted tokens become committed but for the last, which is pending; all of them count as output."""
    scratch, vocabulary = state.pending_token.shape[0] - 1, state.output_counts.shape[1]
    emits = verdict.emitted > 0
    row = jnp.where(emits, lanes.row, scratch)
    last = jnp.maximum(verdict.emitted - 1, 0)
    pending = jnp.take_along_axis(verdict.token, last[:, None], axis=1)[:, 0]
    before = jnp.take_along_axis(verdict.token, jnp.maximum(last - 1, 0)[:, None], axis=1)[:, 0]
    counted = jnp.where(verdict.token >= 0, verdict.token, vocabulary)  # past the end: dropped
    return dataclasses.replace(
        state,
        pending_token=state.pending_token.at[row].set(jnp.maximum(pending, 0)),
        previous_token=state.previous_token.at[row].set(jnp.where(last > 0, before, lanes.pending)),
        committed_len=state.committed_len.at[row].set(lanes.position + verdict.emitted),
        output_counts=state.output_counts.at[row[:, None], counted].add(1, mode="drop"),
    )


def describe_block(wanted: jax.Array, logits: jax.Array, block: Block, verdict: Verdict, columns: int) -> Logprobs:
    """Log-probabilities of the emitted tokens: leaves [B, columns, ...], zeros where there is none."""
    width = verdict.token.shape[1]
    lane, depth = block.packed.row, jnp.minimum(block.depth, width - 1)
    token = jnp.where(block.packed.valid, verdict.token[lane, depth], -1)
    by_row, index = describe_if(wanted, logits, token), grid_index(block, width)

    def place(leaf: jax.Array) -> jax.Array:
        there = (verdict.token >= 0).reshape(*verdict.token.shape, *[1] * (leaf.ndim - 1))
        grid = jnp.where(there, leaf[index], jnp.zeros((), leaf.dtype))
        return jnp.pad(grid, [(0, 0), (0, columns - width), *[(0, 0)] * (leaf.ndim - 1)])

    return Logprobs(*map(place, by_row))


def report(
    shape: ProgramShape, dims: Dims, slot: jax.Array, lanes: Lanes, proposals: Proposals, verdict: Verdict
) -> dict[str, jax.Array]:
    """The completion's fields but for the log-probabilities; sidecars are indexed by request slot."""
    missing = shape.token_capacity - verdict.token.shape[1]

    def by_slot(rows: jax.Array) -> jax.Array:
        table = jnp.zeros((dims.slots + 1, rows.shape[1]), jnp.float32)
        return table.at[lanes.row].set(rows)[: dims.slots]

    return {
        "slot": slot,
        "tokens": jnp.pad(verdict.token, ((0, 0), (0, missing)), constant_values=-1),
        "num_tokens": verdict.emitted,
        "offered": verdict.offered,
        "accepted": verdict.accepted,
        "committed_len": jnp.where(lanes.active, lanes.position + verdict.emitted, 0),
        "status": verdict.status,
        "confidence": jnp.stack([by_slot(proposals.confidence), by_slot(proposals.joint)]),
        "survival": by_slot(verdict.survival),
    }
