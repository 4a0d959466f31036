"""The initialize program: a request takes over a slot.

Every row of the slot table is rewritten, so nothing of the previous occupant remains. The
pages need no cleaning: attention reads only what the request itself has written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs.packing import assemble
from helios_jax.aot.programs.types import Params, Program, Result
from helios_jax.scheduler.catalog import ProgramShape

SETTINGS = (
    "prompt_len",
    "top_k",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bias_ids",
    "bias_values",
)


def build_initialize(shape: ProgramShape, dims: Dims) -> Program:
    """The program that resets the slots of its rows and stores their settings."""
    control, completion = control_layout(shape, dims), completion_layout(shape, dims)

    def initialize(params: Params, state: DeviceState, ints: jax.Array, floats: jax.Array) -> Result:
        fields = control.split(ints, floats)
        slot = fields["slot"]
        row = jnp.where((slot >= 0) & (slot < dims.slots), slot, dims.slots)
        state = with_settings(state, row, fields)
        for name in ("mtp_hidden", "recurrent"):
            blank = jax.tree.map(lambda kept: kept.at[row].set(jnp.zeros((), kept.dtype)), getattr(state, name))
            state = dataclasses.replace(state, **{name: blank})
        return state, assemble(completion, {"slot": slot})

    return initialize


def with_settings(state: DeviceState, row: jax.Array, fields: Mapping[str, jax.Array]) -> DeviceState:
    """Slots `row` [B] with the settings of new requests, which have consumed and sampled nothing yet."""
    changed = {name: getattr(state, name).at[row].set(fields[name]) for name in SETTINGS}
    changed["seed"] = state.seed.at[row].set(jax.lax.bitcast_convert_type(fields["seed"], jnp.uint32))
    for name in ("pending_token", "previous_token", "committed_len", "prompt_seen", "output_counts"):
        column = getattr(state, name)
        changed[name] = column.at[row].set(jnp.zeros((), column.dtype))
    return dataclasses.replace(state, **changed)
