"""The mixed program: one prompt row beside the lanes of a round, in one pass of the target.

A chunk of n prompt tokens is a lane whose pending token is the chunk's last one, at position
start + n - 1, and which brings the n - 1 tokens before it along. So from the logits on the prompt row
is a lane of a round without proposals: its first token is judged, committed and reported as theirs are.

1. Proposals of the decoding lanes, and their target rows, as in a round.
2. One pass of the target over the packed rows of all lanes, in lane order: F prompt tokens at most, and
   up to W rows of each other lane. Attention goes by phase, everything else is shared.
3. The vocabulary meets the rows of a round, and of the prompt row the last one, if it samples.
4. The drafter follows the prompt chunk as in a prefill, the accepted rows as in a round.
5. Commit: as in a round; the prompt row commits its whole chunk, whether it samples or not.

A lane whose slot is out of range, or whose `query_len` is 0, is inactive: it writes to scratch, and so
does the capacity that no lane uses. Source: specification, "Mixed execution contract".

Axis letters: B lanes, F prompt tokens, W target rows a lane, T packed rows of all lanes, D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs.attention import mixed_attend
from helios_jax.aot.programs.drafters import Drafter, Fed, check_draft, make_drafter, split
from helios_jax.aot.programs.lanes import Lanes, read_lanes
from helios_jax.aot.programs.packing import Packed, address_tokens, assemble, pack
from helios_jax.aot.programs.prefill import count_prompt
from helios_jax.aot.programs.recurrence import mixed_recur, run_target, span_of, write_rounds
from helios_jax.aot.programs.speculative import (
    check_source,
    commit,
    describe_block,
    keep_context,
    make_proposals,
    packed_mask,
    report,
    target_rows,
)
from helios_jax.aot.programs.tiling import chunk_rows, prefill_tiling, verify_tiling
from helios_jax.aot.programs.types import Params, Program, Result
from helios_jax.aot.programs.verification import Block, judge, pack_block
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import ProgramShape, ProposalSource, lane_width


class Prompt(NamedTuple):
    """The prompt row.

    Attributes:
        here: [B] True at its lane, if there is one.
        row: [] its row of the slot table, scratch without one.
        length, start: [] tokens of its chunk, 0 without one, and the position of the first.
        samples: [] whether the chunk ends the prompt.
        token: [F] its tokens.
    """

    here: jax.Array
    row: jax.Array
    length: jax.Array
    start: jax.Array
    samples: jax.Array
    token: jax.Array

    @property
    def end(self) -> jax.Array:
        """[] the position behind the chunk."""
        return self.start + self.length

    @property
    def last(self) -> jax.Array:
        """[] the chunk's last token."""
        return self.token[jnp.clip(self.length - 1, 0, self.token.shape[0] - 1)]


class Rows(NamedTuple):
    """The packed rows of all lanes.

    Attributes:
        lengths: [B] rows of each lane.
        start: [B] position of each lane's first row.
        packed: Where the rows belong.
        token: [T] input token of each row.
        of_prompt: [T] which rows are the prompt's.
    """

    lengths: jax.Array
    start: jax.Array
    packed: Packed
    token: jax.Array
    of_prompt: jax.Array


def check_mixed(shape: ProgramShape, model: Model, draft: Draft | None) -> None:
    """Refuses shapes and drafts of which no program can be made.

    Raises:
        ValueError: What does not fit, with the numbers.
    """
    rows, width, prompt = shape.batch_capacity, shape.token_capacity, shape.prefill_capacity
    whole = prompt + (rows - 1) * width
    if prompt < width or shape.packed_capacity != whole:
        raise ValueError(
            f"{shape.name}: a prompt of at least {width} tokens, and {whole} packed rows, are needed;"
            f" got {prompt} and {shape.packed_capacity}"
        )
    check_source(shape, draft)
    check_draft(model, draft)


def build_mixed(shape: ProgramShape, model: Model, dims: Dims, draft: Draft | None = None) -> Program:
    """The mixed program of `shape`.

    Args:
        draft: The core's draft model or heads, if it has them; `params` is then {"target": ..., "draft": ...}.
            A program without a proposal source is one of plain decoding: it leaves their context alone.

    Raises:
        ValueError: See `check_mixed`.
    """
    check_mixed(shape, model, draft)
    control, completion = control_layout(shape, dims), completion_layout(shape, dims)
    width, num_lanes = lane_width(shape), shape.batch_capacity
    prompt_tiling = prefill_tiling(dims, 1, shape.prefill_capacity)
    round_tiling = verify_tiling(dims, num_lanes, width)
    proposing = draft if shape.proposal_source is not ProposalSource.NONE else None

    def mixed(params: Params, state: DeviceState, ints: jax.Array, floats: jax.Array, bits: jax.Array) -> Result:
        fields, weights = control.split(ints, floats), split(params, draft)
        prompt = read_prompt(fields, dims)
        decoders = read_lanes(fields, (fields["query_len"] > 0) & ~is_prompt_row(fields), state, dims)
        drafter = make_drafter(proposing, model, weights, dims)
        state, proposals = make_proposals(shape, fields, decoders, state, dims, drafter)
        lengths = target_rows(shape, fields["query_len"], fields["slot"], decoders, proposals)
        lanes = join(decoders, prompt)
        block = pack_block(lanes, proposals, jnp.where(prompt.here, prompt.samples, lengths), num_lanes * width)
        rows = pack_rows(lengths, decoders, prompt, block, shape.packed_capacity)
        packed, tables = rows.packed, lanes.tables
        address = address_tokens(tables, packed.row, packed.position, packed.valid, dims.page_size, dims.num_pages)
        attend = mixed_attend(
            tables, packed, prompt.here, rows.lengths, rows.start, address, prompt_tiling, round_tiling
        )
        span = span_of(lanes.row, rows.lengths, rows.start, packed)
        recur = mixed_recur(span, prompt.here, chunk_rows(1, shape.prefill_capacity), width)
        hidden, state, left = run_target(model, weights.target, state, rows.token, packed.position, attend, recur)

        state = count_prompt(state, lanes.row[packed.row], packed, packed.valid & rows.of_prompt, rows.token)
        judged = hidden[_judged_rows(rows, block, prompt)]
        logits = model.logits(weights.target, judged)
        mask = packed_mask(bits, fields["masked"], block, shape.token_capacity)
        verdict = judge(logits, block, proposals, state, width, mask)
        details = describe_block(fields["want_logprobs"][0] > 0, logits, block, verdict, shape.token_capacity)
        if drafter is not None:
            state = follow_prompt(drafter, state, prompt, lanes, rows, hidden)
            again = proposals.log_q is None or drafter.corrects
            state = keep_context(drafter, state, lanes, _without_prompt(block, prompt), verdict, judged, width, again)
        state = write_rounds(state, left, span, verdict.emitted, prompt.here)
        state = commit_prompt(commit(state, lanes, verdict), prompt)
        values = report(shape, dims, fields["slot"], lanes, proposals, verdict)
        values["committed_len"] = jnp.where(prompt.here, prompt.end, values["committed_len"])
        return state, assemble(completion, values | details._asdict())

    return mixed


def is_prompt_row(fields: Mapping[str, jax.Array]) -> jax.Array:
    """[B] True at the index that `prefill_row` names."""
    return jnp.arange(fields["slot"].shape[0]) == fields["prefill_row"][0]


def read_prompt(fields: Mapping[str, jax.Array], dims: Dims) -> Prompt:
    """The prompt row that the control fields name, if its slot is a real one and it has tokens."""
    slot, query_len, named = fields["slot"], fields["query_len"], is_prompt_row(fields)
    here = named & (slot >= 0) & (slot < dims.slots) & (query_len > 0)
    there = here.any()
    return Prompt(
        here=here,
        row=jnp.where(there, jnp.where(here, slot, 0).sum(), dims.slots),
        length=jnp.clip(jnp.where(here, query_len, 0).sum(), 0, fields["tokens"].shape[0]),
        start=jnp.where(there, fields["start"][0], 0),
        samples=(there & (fields["sample"][0] > 0)).astype(jnp.int32),
        token=jnp.clip(fields["tokens"], 0, dims.vocab_size - 1),
    )


def join(decoders: Lanes, prompt: Prompt) -> Lanes:
    """All lanes: the prompt row as one whose pending token is the last of its chunk."""
    here = prompt.here
    return Lanes(
        row=jnp.where(here, prompt.row, decoders.row),
        active=decoders.active | here,
        position=jnp.where(here, prompt.end - 1, decoders.position),
        pending=jnp.where(here, prompt.last, decoders.pending),
        tables=decoders.tables,
    )


def pack_rows(lengths: jax.Array, decoders: Lanes, prompt: Prompt, block: Block, num_rows: int) -> Rows:
    """The `num_rows` packed rows of all lanes by prefix sums, in lane order.

    Args:
        lengths: [B] target rows of the decoding lanes.
        block: Their rows of the round; of the prompt row it has at most the last.
    """
    lengths = jnp.where(prompt.here, prompt.length, lengths)
    start = jnp.where(prompt.here, prompt.start, decoders.position)
    packed = pack(lengths, start, num_rows)
    of_prompt = prompt.here[packed.row] & packed.valid
    index = jnp.where(packed.valid, packed.position - start[packed.row], 0)
    decoding = block.token[jnp.clip(block.packed.offset[packed.row] + index, 0, block.token.shape[0] - 1)]
    token = jnp.where(of_prompt, prompt.token[jnp.clip(index, 0, prompt.token.shape[0] - 1)], decoding)
    return Rows(lengths, start, packed, token, of_prompt)


def _judged_rows(rows: Rows, block: Block, prompt: Prompt) -> jax.Array:
    """[B x W] the packed row of each row of the block: of the prompt row its last."""
    lane = block.packed.row
    depth = jnp.where(prompt.here[lane], prompt.length - 1, block.depth)
    return jnp.clip(rows.packed.offset[lane] + depth, 0, rows.token.shape[0] - 1)


def _without_prompt(block: Block, prompt: Prompt) -> Block:
    """The same rows; nothing is written for the prompt's."""
    valid = block.packed.valid & ~prompt.here[block.packed.row]
    return block._replace(lengths=jnp.where(prompt.here, 0, block.lengths), packed=block.packed._replace(valid=valid))


def follow_prompt(
    drafter: Drafter, state: DeviceState, prompt: Prompt, lanes: Lanes, rows: Rows, hidden: jax.Array
) -> DeviceState:
    """The drafter's context of the prompt chunk, and the target's hidden of its last token, as prefill leaves them.

    Args:
        hidden: [T, D] the target's rows.
    """
    capacity = prompt.token.shape[0]
    length = jnp.where(prompt.here, prompt.length, 0)
    packed = pack(length, rows.start, capacity)
    first = jnp.where(prompt.here, rows.packed.offset, 0).sum()
    mine = jax.lax.dynamic_slice_in_dim(hidden, first, capacity)
    fed = Fed(lanes.row, lanes.tables, packed, length, rows.start, prompt.token)
    state = drafter.follow_prompt(state, fed, mine, prefill_tiling(drafter.dims, 1, capacity))
    last = jnp.clip(prompt.length - 1, 0, capacity - 1)
    return drafter.remember(state, prompt.row[None], mine[last][None])


def commit_prompt(state: DeviceState, prompt: Prompt) -> DeviceState:
    """The chunk is committed; without a prompt row, scratch takes it."""
    return dataclasses.replace(
        state,
        committed_len=state.committed_len.at[prompt.row].set(prompt.end),
        previous_token=state.previous_token.at[prompt.row].set(prompt.last),
    )
