"""Rotary position embedding: frequencies, their scaling, and the rotation itself.

Symbols: theta = `theta`, d = head dimension H, i = 0 .. d/2 - 1.
  inv_i = theta^(-2i/d)
  linear: inv_i / factor.
  llama3: with the wavelength w = 2 pi / inv_i, original context c and factor f
    w < c / high            inv_i                 (fast dimensions keep their speed)
    w > c / low             inv_i / f
    between                 (1 - s) inv_i / f + s inv_i,   s = (c / w - low) / (high - low)
  partial: d = share of H (Qwen3-Next, Qwen3.5: a quarter); dimensions from d on are not rotated.
  factors: inv_i / freq_factors[i], the form in which GGUF files store the llama3 scaling.
Rotation pairs dimension i with i + d/2 (the "rotate half" layout of Hugging Face):
  x'_i = x_i cos(p inv_i) - x_{i+d/2} sin(p inv_i);  x'_{i+d/2} = x_{i+d/2} cos + x_i sin
Source: Su et al. 2021 (arXiv:2104.09864); llama3 scaling as published with Llama 3.1.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.errors import CheckpointError

SCALINGS = ("default", "linear", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Frequencies of the rotary embedding.

    Attributes:
        scaling: One of `SCALINGS`.
        theta: Base of the geometric series.
        factor: By how much positions (linear) or slow dimensions (llama3) are stretched.
        low_freq_factor, high_freq_factor, original_context: llama3 only.
        freq_factors: H/2 divisors of the frequencies, applied last; empty = none.
        rotated_share: Share of the head dimension that is rotated, in (0, 1].
    """

    scaling: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    freq_factors: tuple[float, ...] = ()
    rotated_share: float = 1.0

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise CheckpointError(f"rope scaling {self.scaling!r} is not supported; supported: {', '.join(SCALINGS)}")
        if not (math.isfinite(self.theta) and self.theta > 0 and math.isfinite(self.factor) and self.factor > 0):
            raise CheckpointError(f"rope theta {self.theta} and factor {self.factor} must be positive and finite")
        if not 0 < self.rotated_share <= 1:
            raise CheckpointError(f"partial_rotary_factor {self.rotated_share} must lie in (0, 1]")
        if self.scaling == "llama3" and not (0 < self.low_freq_factor < self.high_freq_factor):
            raise CheckpointError(
                f"llama3 rope needs 0 < low_freq_factor < high_freq_factor, not {self.low_freq_factor}, "
                f"{self.high_freq_factor}"
            )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular speeds [d / 2], float32: radians a position of each rotated pair; d = H but for partial rotation.

    Computed on the host in float64, so that they are the same constants on every backend.

    Raises:
        CheckpointError: `freq_factors` has another length than d / 2, or d is no even number.
    """
    rotated = int(head_dim * rope.rotated_share)
    if rotated < 2 or rotated % 2:
        raise CheckpointError(f"{rotated} of {head_dim} head dimensions are to be rotated; the rotation needs pairs")
    inv = rope.theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.scaling == "linear":
        inv = inv / rope.factor
    elif rope.scaling == "llama3":
        wavelength = 2 * np.pi / inv
        smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        # s <= 0 is the slow side and s >= 1 the fast side: the clip makes the three cases one
        smooth = np.clip(smooth, 0.0, 1.0)
        inv = (1 - smooth) * inv / rope.factor + smooth * inv
    if rope.freq_factors:
        if len(rope.freq_factors) != inv.size:
            raise CheckpointError(f"rope has {len(rope.freq_factors)} frequency factors; head_dim needs {inv.size}")
        inv = inv / np.asarray(rope.freq_factors, np.float64)
    return inv.astype(np.float32)


def rotation(positions: jax.Array, inv_freq: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """positions [T] int32, inv_freq [d / 2] -> cos, sin [T, 1, d / 2] float32, shared by all layers."""
    angles = positions.astype(jnp.float32)[:, None, None] * inv_freq
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [T, heads, H], its first d dimensions rotated by cos, sin [T, 1, d / 2]; in float32, returned in x's dtype.

    Hugging Face rounds cos and sin to the model's dtype first; we do not, so bfloat16
    results differ in the last bit, float32 results do not.
    """
    rotated = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :rotated].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if rotated == x.shape[-1] else jnp.concatenate([turned, x[..., rotated:]], axis=-1)
