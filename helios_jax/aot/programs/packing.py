"""Packed prompts, page addresses, and the flat vectors at a program's border.

Tokens of all rows of a prefill lie one after the other in row order; prefix sums of the
query lengths say whose a token is. Axis letters: B rows, T packed tokens, P page-table
entries a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Layout


class Packed(NamedTuple):
    """Where the packed tokens of a prefill belong.

    Attributes:
        row: [T] request row of each token; 0 for padding.
        position: [T] position of each token in its request; 0 for padding.
        valid: [T] False for padding behind the last row's tokens.
        offset: [B] index of each row's first token.
        total: [] tokens of all rows.
    """

    row: jax.Array
    position: jax.Array
    valid: jax.Array
    offset: jax.Array
    total: jax.Array


def owner(index: jax.Array, ends: jax.Array) -> jax.Array:
    """Which of the consecutive ranges with these `ends` [B] holds each index; B beyond the last."""
    return jnp.sum(index[..., None] >= ends, axis=-1, dtype=jnp.int32)


def pack(query_len: jax.Array, start: jax.Array, num_tokens: int) -> Packed:
    """Assigns `num_tokens` packed tokens to rows of `query_len` [B] tokens from `start` [B] on."""
    ends = jnp.cumsum(query_len)
    offset = ends - query_len
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    row = owner(index, ends)
    valid = row < query_len.shape[0]
    row = jnp.where(valid, row, 0)
    position = jnp.where(valid, start[row] + index - offset[row], 0)
    return Packed(row, position, valid, offset, ends[-1])


class Address(NamedTuple):
    """A place in the pool for each token: page [T] and offset inside it [T]."""

    page: jax.Array
    offset: jax.Array


def address_tokens(
    tables: jax.Array, row: jax.Array, position: jax.Array, valid: jax.Array, page_size: int, num_pages: int
) -> Address:
    """Pool addresses of tokens; invalid ones and positions outside the table go to scratch page 0.

    Args:
        tables: [B, P] page ids of each row.
        row, position, valid: [T] as in `Packed`.
    """
    entry = position // page_size
    inside = valid & (entry < tables.shape[1])
    page = tables[row, jnp.minimum(entry, tables.shape[1] - 1)]
    page = jnp.where(inside & (page > 0) & (page < num_pages), page, 0)
    return Address(page, position % page_size)


def assemble(layout: Layout, values: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The int32 and float32 vectors of a completion; fields that are not given are zero."""

    def join(fields: tuple, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        parts = []
        for field in fields:
            value = values.get(field.name)
            value = jnp.zeros(field.shape, dtype) if value is None else value
            if value.shape != field.shape:
                raise ValueError(f"completion field {field.name} has shape {value.shape}, not {field.shape}")
            parts.append(value.astype(dtype).ravel())
        return jnp.concatenate(parts) if parts else jnp.zeros(size, dtype)

    return join(layout.ints, layout.int_size, jnp.int32), join(layout.floats, layout.float_size, jnp.float32)
