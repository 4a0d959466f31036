"""Which tokens a row may sample, as the host's grammars say: packed bits applied to its logits.

The mask acts on the shaped logits, before anything is chosen or filtered, so greedy rows, draws,
the judgement of proposals and residual distributions all see one and the same distribution.

Axis letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.abi import MASK_BITS


class Mask(NamedTuple):
    """Allowed tokens of rows.

    Attributes:
        bits: [R, ceil(V / 32)] uint32, see `mask_shape` in aot/abi.py.
        used: bool scalar; where False the bits are not read and everything is allowed.
    """

    bits: jax.Array
    used: jax.Array

    def rows(self, index: jax.Array) -> Mask:
        """The mask of rows `index` [R'] of this one."""
        return self._replace(bits=self.bits[index])


def allow(shaped: jax.Array, mask: Mask | None) -> tuple[jax.Array, jax.Array]:
    """Logits with -inf where a token is not allowed, and whether each row may sample anything.

    A row that may sample nothing keeps its logits, so that no NaN arises where nobody reads the result.

    Args:
        shaped: [R, V] float32.
        mask: None = everything is allowed.
    """
    if mask is None:
        return shaped, jnp.ones(shaped.shape[0], bool)

    def masked() -> tuple[jax.Array, jax.Array]:
        allowed = unpack(mask.bits, shaped.shape[1])
        possible = allowed.any(axis=1)
        return jnp.where(allowed | ~possible[:, None], shaped, -jnp.inf), possible

    return lax.cond(mask.used, masked, lambda: (shaped, jnp.ones(shaped.shape[0], bool)))


def unpack(bits: jax.Array, size: int) -> jax.Array:
    """[R, size] bool of packed `bits` [R, ceil(size / 32)]."""
    token = jnp.arange(MASK_BITS, dtype=jnp.uint32)
    each = (bits[:, :, None] >> token) & jnp.uint32(1)
    return each.reshape(bits.shape[0], -1)[:, :size] == 1
