"""Static extents chosen for a program's loops; the numbers are measured, see docs/LOG.md."""

from __future__ import annotations

import dataclasses

import jax

from helios_jax.aot.abi import Dims
from helios_jax.aot.programs.types import Tiling

# Keys a block: fewer iterations against work on keys past the context's end. On CPU, where an
# iteration is cheap, 64 against 256 keys saves a decode of 8 short lanes of SmolLM2 a fifth.
DECODE_KEYS_CPU = 64
DECODE_KEYS = 256
PREFILL_KEYS = 256
MIN_QUERY_TILE = 16
MAX_QUERY_TILE = 128
MAX_LANE_GROUP = 16
MIN_CHUNK = 16
MAX_CHUNK = 64  # work inside a chunk grows with its square; the published kernels use the same


def _key_block(dims: Dims, keys: int) -> int:
    """`keys` rounded down to pages, at least one page, no more than a context."""
    pages = min(dims.pages_per_slot, max(1, keys // dims.page_size))
    return pages * dims.page_size


def decode_tiling(dims: Dims, lanes: int) -> Tiling:
    """Tiling of a decode program of `lanes` lanes."""
    keys = DECODE_KEYS_CPU if jax.default_backend() == "cpu" else DECODE_KEYS
    return Tiling(key_block=_key_block(dims, keys), query_tile=1, lane_group=min(lanes, MAX_LANE_GROUP))


def verify_tiling(dims: Dims, lanes: int, width: int) -> Tiling:
    """Tiling of up to `width` consecutive tokens of each of `lanes` lanes."""
    return dataclasses.replace(decode_tiling(dims, lanes), query_tile=width)


def prefill_tiling(dims: Dims, rows: int, tokens: int) -> Tiling:
    """Tiling of a prefill of `tokens` tokens in up to `rows` rows.

    A tile belongs to one row, so many short rows want small tiles and one long row large ones.
    """
    tile = min(MAX_QUERY_TILE, max(MIN_QUERY_TILE, tokens // rows))
    return Tiling(key_block=_key_block(dims, PREFILL_KEYS), query_tile=min(tile, tokens), lane_group=1)


def chunk_rows(rows: int, tokens: int) -> int:
    """Tokens of a recurrent chunk in a prefill of `tokens` tokens in up to `rows` rows: a power of two."""
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << (max(1, tokens // rows).bit_length() - 1)))
