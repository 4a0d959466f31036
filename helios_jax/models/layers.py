"""The building blocks of dense decoders: linear, embedding, norm, attention, feed-forward.

Modules hold parameters as flax Params with the names of Hugging Face checkpoints, so that a
path in the tree is a tensor name in the file. They are only built abstractly
(`nnx.eval_shape`) and merged with real arrays inside a traced program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from helios_jax.models.interface import Attend, AttentionSpec, LayerCache
from helios_jax.models.rope import rotate

if TYPE_CHECKING:
    from helios_jax.models.decoder import DecoderConfig


def linear(x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x [T, in] @ weight [out, in] transposed -> [T, out].

    Everything accumulates in float32. float32 factors ask for full precision (accelerators would
    round them otherwise). Two measured facts of bfloat16 on CPU (docs/LOG.md): a product that
    asks for a float32 result runs 7 to 47 times faster than one that asks for bfloat16 at
    16384 x 576, 2 to 7 times at 1536 x 576; and one row takes the slow path whatever it asks
    for, so a single row is padded to two.

    Args:
        out_dtype: Type of the result; None = x's type.
    """
    rows = x.shape[0]
    narrow = x.dtype != jnp.float32
    if rows == 1 and narrow:
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    out = lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out[:rows].astype(out_dtype or x.dtype)


class Linear(nnx.Module):
    """y = x W^T + b with weight [out, in] and an optional bias [out]."""

    def __init__(self, num_in: int, num_out: int, bias: bool, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, in] -> [T, out]."""
        y = linear(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Rows of weight [V, D] by token id; also the output matrix of models that tie the two."""

    def __init__(self, num_rows: int, width: int, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((num_rows, width), dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [T] int32 -> [T, D]. Ids are checked on the host; a stray one reads the nearest row."""
        return self.weight[...].at[tokens].get(mode="clip")


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) times w, the mean in float32.

    Plain: cast(x_hat) * w. Zero-centred: cast(x_hat * (1 + w)), the product in float32 too.
    """

    def __init__(self, width: int, eps: float, dtype: jax.typing.DTypeLike, zero_centred: bool = False) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., width] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.zero_centred:
            return (wide * scale * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * self.weight[...]


class FeedForward(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, width: int, bias: bool, dtype: jax.typing.DTypeLike) -> None:
        self.gate_proj = Linear(hidden_size, width, bias, dtype)
        self.up_proj = Linear(hidden_size, width, bias, dtype)
        self.down_proj = Linear(width, hidden_size, bias, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nnx.Module):
    """Projections, optional norms of q and k over H, rotation, optional gate; the scores belong to `attend`.

    With a gate, row n of q_proj's output [N, 2 H] is head n's query, then its gate.
    """

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        d, h = config.hidden_size, config.head_dim
        self.q_proj = Linear(d, config.num_heads * h * (2 if config.output_gate else 1), config.qkv_bias, dtype)
        self.k_proj = Linear(d, config.num_kv_heads * h, config.qkv_bias, dtype)
        self.v_proj = Linear(d, config.num_kv_heads * h, config.qkv_bias, dtype)
        self.o_proj = Linear(config.num_heads * h, d, config.output_bias, dtype)
        self.output_gate = config.output_gate
        norms = (config.rms_norm_eps, dtype, config.zero_centred_norms)
        self.q_norm = RMSNorm(h, *norms) if config.qk_norm else None
        self.k_norm = RMSNorm(h, *norms) if config.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        spec: AttentionSpec,
        cache: LayerCache,
        attend: Attend,
    ) -> tuple[jax.Array, LayerCache]:
        """x [T, D], rotation = cos, sin [T, 1, rotated / 2] -> ([T, D], cache)."""
        rows = x.shape[0]
        q, gate = self.q_proj(x).reshape(rows, spec.num_heads, -1), None
        if self.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        k = self.k_proj(x).reshape(rows, spec.num_kv_heads, spec.head_dim)
        v = self.v_proj(x).reshape(rows, spec.num_kv_heads, spec.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(spec, rotate(q, *rotation), rotate(k, *rotation), v, cache)
        out = out.astype(x.dtype)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(rows, -1)), cache
