"""The decoding lanes of a program: whose pending token is next, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims
from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs.packing import Address, address_tokens


class Lanes(NamedTuple):
    """Lanes that each have one pending token.

    Attributes:
        row: [B] row of the slot table, scratch where inactive.
        active: [B].
        position: [B] of the pending token, 0 where inactive: the tokens before it are in the cache.
        pending: [B] the pending token, 0 where inactive.
        tables: [B, P] page ids.
    """

    row: jax.Array
    active: jax.Array
    position: jax.Array
    pending: jax.Array
    tables: jax.Array


def read_lanes(fields: Mapping[str, jax.Array], wanted: jax.Array | bool, state: DeviceState, dims: Dims) -> Lanes:
    """The lanes that the control fields `slot` and `page_table` name.

    Args:
        wanted: [B] False where the lane has nothing to do even if its slot is a real one.
    """
    slot = fields["slot"]
    active = (slot >= 0) & (slot < dims.slots) & wanted
    row = jnp.where(active, slot, dims.slots)
    position = jnp.where(active, state.committed_len[row], 0)
    pending = jnp.where(active, jnp.clip(state.pending_token[row], 0, dims.vocab_size - 1), 0)
    return Lanes(row, active, position, pending, fields["page_table"])


def address_lanes(lanes: Lanes, position: jax.Array, valid: jax.Array, dims: Dims) -> Address:
    """Addresses of one token a lane, at `position` [B]; where not `valid` [B], scratch."""
    lane = jnp.arange(lanes.row.shape[0])
    return address_tokens(lanes.tables, lane, position, valid, dims.page_size, dims.num_pages)
