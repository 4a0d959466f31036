"""The contract between a model family and the programs that run it.

A model knows its equations and weights; it does not know pages, slots, batches or
sampling. Programs pass it packed tokens and an `attend` function that owns the cache; models
with recurrent layers get a `recur` function beside it, which owns the recurrent state.

Axis letters: T packed query tokens, N query heads, K kv heads, H head dim, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@dataclasses.dataclass(frozen=True)
class RecurrentSpec:
    """Static facts of one recurrent layer (Gated DeltaNet).

    Attributes:
        layer: Index of the layer.
        num_key_heads: N heads of queries and keys.
        num_value_heads: Heads of values, a multiple of N; head n x R + r of R a key head reads key head n.
        key_dim, value_dim: Width of a key and of a value head.
        kernel: Taps of the causal convolution; its state is the last kernel - 1 rows before it.
    """

    layer: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Width of the rows that the convolution reads: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class RecurrentRows(NamedTuple):
    """What a recurrent layer projects of the packed tokens.

    Attributes:
        mixed: [T, channels] queries | keys | values before the convolution.
        decay: [T, value heads] float32 logarithm of the state's decay, at most 0.
        beta: [T, value heads] float32 strength of the update, in (0, 1).
        taps: [channels, kernel] weights of the convolution; the last one multiplies the token itself.
    """

    mixed: jax.Array
    decay: jax.Array
    beta: jax.Array
    taps: jax.Array


# (spec, rows, state) -> (out [T, value heads, value_dim] float32, state).
# The function convolves, advances the state over each lane's tokens in order, and reads it after each.
Recur = Callable[[RecurrentSpec, RecurrentRows, LayerCache], tuple[jax.Array, LayerCache]]


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


class HybridModel(Model, Protocol):
    """A model of which some layers are recurrent. `recurrent_layers_of` tells them from others."""

    recurrent_layers: tuple[RecurrentSpec, ...]

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, caches: tuple[LayerCache, ...], attend: Attend,
        recur: Recur | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:  # fmt: skip
        """As `Model.forward`; `caches` are those of the attention layers, then those of the recurrent ones."""


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


def recurrent_layers_of(model: Draft | None) -> tuple[RecurrentSpec, ...]:
    """The recurrent layers of a model; none of most."""
    return getattr(model, "recurrent_layers", ())


def run_model(
    model: Model, params: Params, tokens: jax.Array, positions: jax.Array, caches: tuple[LayerCache, ...],
    attend: Attend, recur: Recur | None,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:  # fmt: skip
    """`Model.forward`, with `recur` where the model has recurrent layers; see `HybridModel`."""
    if not recurrent_layers_of(model):
        return model.forward(params, tokens, positions, caches, attend)
    hybrid: Any = model
    return hybrid.forward(params, tokens, positions, caches, attend, recur)
