"""The decode program: one token a lane.

1. Each active lane's pending token goes through the model at position `committed_len`, and
   its keys and values into the lane's page.
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
from helios_jax.aot.programs.logprobs import describe_if
from helios_jax.aot.programs.packing import address_tokens, assemble
from helios_jax.aot.programs.sampling import Rows, record, sample
from helios_jax.aot.programs.tiling import decode_tiling
from helios_jax.aot.programs.types import Params, Program, Result
from helios_jax.models.interface import Model
from helios_jax.scheduler.catalog import ProgramShape


def build_decode(shape: ProgramShape, model: Model, dims: Dims) -> Program:
    """The decode program of `shape.batch_capacity` lanes."""
    control, completion = control_layout(shape, dims), completion_layout(shape, dims)
    lanes = shape.batch_capacity
    tiling = decode_tiling(dims, lanes)

    def decode(params: Params, state: DeviceState, ints: jax.Array, floats: jax.Array) -> Result:
        fields = control.split(ints, floats)
        slot, tables = fields["slot"], fields["page_table"]
        active = (slot >= 0) & (slot < dims.slots)
        row = jnp.where(active, slot, dims.slots)
        position = jnp.where(active, state.committed_len[row], 0)
        token = jnp.where(active, jnp.clip(state.pending_token[row], 0, dims.vocab_size - 1), 0)
        lane = jnp.arange(lanes)
        address = address_tokens(tables, lane, position, active, dims.page_size, dims.num_pages)
        attend = decode_attend(tables, position, active, address, tiling)
        hidden, kv = model.forward(params, token, position, state.kv, attend)
        logits = model.logits(params, hidden)

        rows = Rows(row, active, position + 1)
        sampled = sample(logits, rows, state)
        details = describe_if(fields["want_logprobs"][0] > 0, logits, sampled.token)
        committed = jnp.where(active, position + 1, 0)
        state = dataclasses.replace(state, kv=kv, committed_len=state.committed_len.at[row].set(committed))
        state = record(state, rows, sampled.token)
        values = {"slot": slot, "committed_len": committed} | sampled._asdict() | details._asdict()
        return state, assemble(completion, values)

    return decode
