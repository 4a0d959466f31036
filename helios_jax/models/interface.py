"""The contract between a model family and the programs that run it.

A model knows its equations and weights; it does not know pages, slots, batches or
sampling. Programs pass it packed tokens and an `attend` function that owns the cache.

Axis letters: T packed query tokens, N query heads, K kv heads, H head dim, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

Params = Any  # nested dict of arrays: names follow the Hugging Face checkpoint
LayerCache = Any  # what one layer keeps between programs; opaque to the model


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static facts of one attention layer.

    Attributes:
        layer: Index of the layer.
        num_heads: N query heads.
        num_kv_heads: K key/value heads; query head n reads kv head n // (N // K).
        head_dim: H.
        scale: Factor on the scores.
        window: Keys at positions <= query - window are masked; None = full attention.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


# (spec, q [T, N, H], k [T, K, H], v [T, K, H], cache) -> (out [T, N, H], cache).
# k and q are already rotated. The function writes k and v into the cache, then attends.
Attend = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, LayerCache], tuple[jax.Array, LayerCache]]


class Model(Protocol):
    """One loaded architecture; holds configuration only, never weights."""

    family: str
    vocab_size: int
    max_position_embeddings: int
    attention_layers: tuple[AttentionSpec, ...]

    def abstract_params(self, dtype: jax.typing.DTypeLike) -> Params:
        """The parameter tree as ShapeDtypeStructs; allocates nothing."""

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, caches: tuple[LayerCache, ...], attend: Attend
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """tokens, positions [T] int32 -> (final normed hidden [T, D], caches)."""

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 logits [R, V]."""
