"""The decode program: one token a lane.

1. Each active lane's pending token goes through the model at position `committed_len`, and
   its keys and values into the lane's page.
   A drafter, if the core has one, runs on it too, so that a later round finds its context.
2. The next token is sampled, becomes the pending one and is counted; `committed_len` grows by one.

A lane whose slot is out of range is inactive: it writes to the scratch page and scratch row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs.attention import decode_attend
from helios_jax.aot.programs.drafters import check_draft, make_drafter, split
from helios_jax.aot.programs.lanes import address_lanes, read_lanes
from helios_jax.aot.programs.logprobs import describe_if
from helios_jax.aot.programs.masks import Mask
from helios_jax.aot.programs.packing import assemble
from helios_jax.aot.programs.recurrence import run_target, token_recur
from helios_jax.aot.programs.sampling import Rows, record, sample
from helios_jax.aot.programs.tiling import decode_tiling
from helios_jax.aot.programs.types import Params, Program, Result
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import ProgramShape


def build_decode(shape: ProgramShape, model: Model, dims: Dims, draft: Draft | None = None) -> Program:
    """The decode program of `shape.batch_capacity` lanes; see `build_program` for `draft`."""
    check_draft(model, draft)
    control, completion = control_layout(shape, dims), completion_layout(shape, dims)
    tiling = decode_tiling(dims, shape.batch_capacity)

    def decode(params: Params, state: DeviceState, ints: jax.Array, floats: jax.Array, bits: jax.Array) -> Result:
        fields, weights = control.split(ints, floats), split(params, draft)
        lanes = read_lanes(fields, True, state, dims)
        row, active, position = lanes.row, lanes.active, lanes.position
        drafter = make_drafter(draft, model, weights, dims)
        if drafter is not None:
            state, _ = drafter.complete(state, lanes)
        address = address_lanes(lanes, position, active, dims)
        attend = decode_attend(lanes.tables, position, active, address, tiling)
        recur = token_recur(row, active)
        hidden, state, recurrent = run_target(model, weights.target, state, lanes.pending, position, attend, recur)
        logits = model.logits(weights.target, hidden)

        rows = Rows(row, active, position + 1)
        sampled = sample(logits, rows, state, Mask(bits, fields["masked"][0] > 0))
        details = describe_if(fields["want_logprobs"][0] > 0, logits, sampled.token)
        committed = jnp.where(active, position + 1, 0)
        state = dataclasses.replace(
            state,
            recurrent=recurrent,
            committed_len=state.committed_len.at[row].set(committed),
            previous_token=state.previous_token.at[row].set(lanes.pending),
        )
        if drafter is not None:
            state = drafter.remember(state, row, hidden)
        state = record(state, rows, sampled.token)
        values = {"slot": fields["slot"], "committed_len": committed} | sampled._asdict() | details._asdict()
        return state, assemble(completion, values)

    return decode
