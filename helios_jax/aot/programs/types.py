"""The shape of every physical program, and how it is tiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Concatenate

import jax

from helios_jax.aot.device_state import DeviceState
from helios_jax.models.interface import Params

Vectors = tuple[jax.Array, jax.Array]  # int32 and float32, see aot/abi.py
Result = tuple[DeviceState, Vectors]
Program = Callable[Concatenate[Params, DeviceState, jax.Array, jax.Array, ...], Result]  # and bits if it samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static extents of the attention loops; results do not depend on them beyond rounding.

    Attributes:
        key_block: Keys an iteration reads, a multiple of the page size.
        query_tile: Prompt tokens that share one pass over their keys.
        lane_group: (lane, key block) pairs a decode iteration works on.
    """

    key_block: int
    query_tile: int
    lane_group: int
