"""The Gated DeltaNet layer: projections, gates and the output norm; the recurrence belongs to `recur`.

    u = in_proj_qkv x;  z = in_proj_z x;  beta = sigmoid(in_proj_b x)
    g = -exp(A_log) softplus(in_proj_a x + dt_bias)
    out = out_proj(rmsnorm(o) * w * act(z)),  o = recur(u, g, beta)

The norm is over the width of a value head, plain (w, not 1 + w), and its weights are shared by the
heads. Qwen3-Next packs the projections by key head: [q | k | v of its value heads | z of them], [b | a].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from helios_jax.models.gated_delta import GatedDeltaConfig
from helios_jax.models.interface import LayerCache, Recur, RecurrentRows, RecurrentSpec
from helios_jax.models.layers import Linear


class Taps(nnx.Module):
    """Weights [channels, 1, kernel] of a depthwise convolution without bias."""

    def __init__(self, channels: int, kernel: int, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((channels, 1, kernel), dtype))


class HeadNorm(nnx.Module):
    """rmsnorm(o) * w * act(z) over the last axis, in float32."""

    def __init__(self, width: int, eps: float, gate: str, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps, self.gate = eps, gate

    def __call__(self, out: jax.Array, z: jax.Array) -> jax.Array:
        """out [T, heads, V] float32, z the same shape -> z's dtype."""
        scale = lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + self.eps)
        normed = (out * scale).astype(z.dtype) * self.weight[...]
        act = jax.nn.sigmoid if self.gate == "sigmoid" else jax.nn.silu
        return (normed.astype(jnp.float32) * act(z.astype(jnp.float32))).astype(z.dtype)


class GatedDeltaNet(nnx.Module):
    """What checkpoints call `linear_attn`."""

    def __init__(self, config: GatedDeltaConfig, hidden_size: int, eps: float, dtype: jax.typing.DTypeLike) -> None:
        spec, heads = config.spec(0), config.num_value_heads
        values = heads * config.value_dim
        self.config = config
        if config.packed_projections:
            self.in_proj_qkvz = Linear(hidden_size, spec.channels + values, False, dtype)
            self.in_proj_ba = Linear(hidden_size, 2 * heads, False, dtype)
        else:
            self.in_proj_qkv = Linear(hidden_size, spec.channels, False, dtype)
            self.in_proj_z = Linear(hidden_size, values, False, dtype)
            self.in_proj_b = Linear(hidden_size, heads, False, dtype)
            self.in_proj_a = Linear(hidden_size, heads, False, dtype)
        self.conv1d = Taps(spec.channels, config.kernel, dtype)
        self.A_log = nnx.Param(jnp.zeros((heads,), dtype))
        self.dt_bias = nnx.Param(jnp.zeros((heads,), dtype))
        self.norm = HeadNorm(config.value_dim, eps, config.gate, dtype)
        self.out_proj = Linear(values, hidden_size, False, dtype)

    def __call__(
        self, x: jax.Array, spec: RecurrentSpec, state: LayerCache, recur: Recur
    ) -> tuple[jax.Array, LayerCache]:
        """x [T, D] -> ([T, D], state)."""
        mixed, z, b, a = self._project(x)
        rate = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        decay = -jnp.exp(self.A_log[...].astype(jnp.float32)) * rate
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        out, state = recur(spec, RecurrentRows(mixed, decay, beta, self.conv1d.weight[...][:, 0]), state)
        gated = self.norm(out, z.reshape(out.shape))
        return self.out_proj(gated.reshape(x.shape[0], -1)), state

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """x [T, D] -> queries | keys | values [T, channels], z [T, values], b and a [T, value heads]."""
        if not self.config.packed_projections:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        config, rows = self.config, x.shape[0]
        groups = config.num_value_heads // config.num_key_heads
        widths = (config.key_dim, config.key_dim, groups * config.value_dim, groups * config.value_dim)
        cuts = [sum(widths[: i + 1]) for i in range(3)]
        packed = self.in_proj_qkvz(x).reshape(rows, config.num_key_heads, -1)
        q, k, v, z = (part.reshape(rows, -1) for part in jnp.split(packed, cuts, axis=-1))
        both = self.in_proj_ba(x).reshape(rows, config.num_key_heads, 2, groups)
        return jnp.concatenate([q, k, v], axis=-1), z, both[:, :, 0].reshape(rows, -1), both[:, :, 1].reshape(rows, -1)
