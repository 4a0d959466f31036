"""The contract between a model family and the programs that run it.

A model knows its equations and weights; it does not know pages, slots, batches or
sampling. Programs pass it packed tokens and an `attend` function that owns the cache.

Axis letters: T packed query tokens, N query heads, K kv heads, H head dim, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class MtpHeads(Protocol):
    """Multi-token-prediction heads of a model: a draft on the target's hidden rows, with a cache of its own.

    Row i reads the target's final normed hidden of position i and the token of position i + 1, and
    predicts the token of position i + 2. Its output takes the place of the hidden when the heads go on
    by themselves. Embedding and output matrix are the target's: logits are `Model.logits` of the output.
    """

    family: str
    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    attention_layers: tuple[AttentionSpec, ...]

    def abstract_params(self, dtype: jax.typing.DTypeLike) -> Params:
        """The heads' own parameter tree as ShapeDtypeStructs; allocates nothing."""

    def predict(
        self, params: Params, target: Params, tokens: jax.Array, positions: jax.Array, hidden: jax.Array,
        caches: tuple[LayerCache, ...], attend: Attend,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:  # fmt: skip
        """One pass.

        Args:
            params, target: Parameters of the heads, and of the model that they belong to.
            tokens: [T] int32, each one position behind its row.
            positions: [T] int32 of the rows: that of `hidden`, in the target's count.
            hidden: [T, D] the target's, or the heads' own output one row earlier.

        Returns:
            Normed output [T, D], and the caches.
        """


Draft = Model | MtpHeads  # what proposes beside a target


def heads_of(model: Model) -> MtpHeads | None:
    """The multi-token-prediction heads of a model; None where it has none."""
    return getattr(model, "mtp", None)
