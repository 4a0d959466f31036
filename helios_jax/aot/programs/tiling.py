"""Static extents chosen for a program's loops; the numbers are measured, see docs/LOG.md."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims
from helios_jax.aot.programs.types import Tiling

KEY_BLOCK = 256  # keys a block: fewer iterations against keys past the context's end
MIN_QUERY_TILE = 16
MAX_QUERY_TILE = 64
MAX_LANE_GROUP = 16


def _key_block(dims: Dims) -> int:
    """KEY_BLOCK rounded down to pages, no more than a context."""
    pages = min(dims.pages_per_slot, max(1, KEY_BLOCK // dims.page_size))
    return pages * dims.page_size


def decode_tiling(dims: Dims, lanes: int) -> Tiling:
    """Tiling of a decode program of `lanes` lanes."""
    return Tiling(key_block=_key_block(dims), query_tile=1, lane_group=min(lanes, MAX_LANE_GROUP))


def prefill_tiling(dims: Dims, rows: int, tokens: int) -> Tiling:
    """Tiling of a prefill of `tokens` tokens in up to `rows` rows.

    A tile belongs to one row, so many short rows want small tiles and one long row large ones.
    """
    tile = min(MAX_QUERY_TILE, max(MIN_QUERY_TILE, tokens // rows))
    return Tiling(key_block=_key_block(dims), query_tile=min(tile, tokens), lane_group=1)


def least_rows(dtype: str) -> int:
    """Rows that a matrix product should have at least: on CPU a one-row 16-bit product is ten times slower."""
    return 2 if jax.default_backend() == "cpu" and jnp.dtype(dtype).itemsize == 2 else 1
