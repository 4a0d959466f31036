"""The dense pre-norm decoder that Llama, Mistral, Qwen2 and Qwen3 share.

x_0 = embed[tokens]; in each layer x += attention(norm(x)), x += feed_forward(norm(x));
logits = lm_head(norm(x_L)). Families differ only by the fields of `DecoderConfig`.

Life of a `DecoderModel`: 1. a family file makes a config; 2. the module tree is built once,
abstractly; 3. inside each traced program it is merged with the arrays it is given. Layers
are unrolled over per-layer arrays: a scan over stacked weights copies each layer's weights
on CPU (docs/LOG.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

import jax
import numpy as np
from flax import nnx

from helios_jax.errors import CheckpointError
from helios_jax.models.graph import ModuleGraph
from helios_jax.models.interface import Attend, AttentionSpec, LayerCache, Params
from helios_jax.models.layers import Attention, Embedding, FeedForward, Linear, RMSNorm, linear
from helios_jax.models.rope import RopeConfig, inverse_frequencies, rotation

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that decides the equations and shapes of one dense decoder.

    Attributes:
        family: Name of the registered family.
        vocab_size, hidden_size, intermediate_size: V, D, F.
        num_heads, num_kv_heads, head_dim: N, K, H; N is a multiple of K, H is even.
        windows: One entry a layer: keys at positions <= query - window are masked; None = all seen.
        qkv_bias, output_bias, mlp_bias: Which projections add a bias.
        qk_norm: RMSNorm over H on q and k before the rotation (Qwen3).
        zero_centred_norms: Norms multiply by 1 + w (Qwen3-Next, Qwen3.5).
        output_gate: q_proj also gives a gate of [N, H]; its sigmoid multiplies what the heads mixed (the same).
        mtp_layers: Decoder layers of the multi-token-prediction heads, 0 or 1.
        tie_word_embeddings: The output matrix is the embedding matrix.

    Raises:
        CheckpointError: The fields contradict each other; the message names them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    zero_centred_norms: bool = False
    output_gate: bool = False
    mtp_layers: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise CheckpointError(
                    f"{name} is {getattr(self, name)} in the model configuration; it must be positive"
                )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} kv heads")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd; the rotary embedding needs pairs")
        if len(self.windows) != self.num_layers:
            raise CheckpointError(f"{len(self.windows)} layer types are given for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise CheckpointError(f"a sliding window must be positive: {self.windows}")
        if self.mtp_layers not in (0, 1):
            raise CheckpointError(f"multi-token prediction with {self.mtp_layers} layers is not supported; one is")
        inverse_frequencies(self.rope, self.head_dim)  # raises where the factors do not fit

    def digest(self) -> str:
        """sha256 over the configuration; equal digests mean equal programs."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def attention_spec(config: DecoderConfig, layer: int, window: int | None = None) -> AttentionSpec:
    """What attention needs to know of one layer."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    return AttentionSpec(layer, heads, kv_heads, dim, dim**-0.5, window)


def norm_of(config: DecoderConfig, width: int, dtype: jax.typing.DTypeLike) -> RMSNorm:
    """An RMSNorm over `width` in the family's convention."""
    return RMSNorm(width, config.rms_norm_eps, dtype, config.zero_centred_norms)


class DecoderLayer(nnx.Module):
    """One attention and one feed-forward part, each behind its norm and beside its residual."""

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        self.input_layernorm = norm_of(config, config.hidden_size, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = norm_of(config, config.hidden_size, dtype)
        self.mlp = FeedForward(config, dtype)

    def __call__(
        self,
        x: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        spec: AttentionSpec,
        cache: LayerCache,
        attend: Attend,
    ) -> tuple[jax.Array, LayerCache]:
        """x [T, D] -> ([T, D], cache)."""
        attended, cache = self.self_attn(self.input_layernorm(x), cos_sin, spec, cache, attend)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype) for _ in range(config.num_layers)])
        self.norm = norm_of(config, config.hidden_size, dtype)


class CausalDecoder(nnx.Module):
    """A `Decoder` and its output matrix; the root of the parameter tree."""

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        self.model = Decoder(config, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, False, dtype)


class DecoderModel:
    """The `Model` of every dense family: configuration and graph, never weights."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._graph = ModuleGraph(lambda: CausalDecoder(config, np.float32))
        self.family = config.family
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.attention_layers = tuple(attention_spec(config, i, window) for i, window in enumerate(config.windows))

    def abstract_params(self, dtype: jax.typing.DTypeLike) -> Params:
        """The parameter tree as ShapeDtypeStructs of `dtype`; allocates nothing."""
        return self._graph.abstract_params(dtype)

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, caches: tuple[LayerCache, ...], attend: Attend
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """tokens, positions [T] int32 -> (final normed hidden [T, D], caches).

        Rows are independent except inside `attend`, so lanes may be packed in any order.
        """
        module: Decoder = self._graph.merge(params).model
        cos_sin = rotation(positions, inverse_frequencies(self.config.rope, self.config.head_dim))
        x, new_caches = module.embed_tokens(tokens), []
        for layer, spec, cache in zip(module.layers, self.attention_layers, caches, strict=True):
            x, cache = layer(x, cos_sin, spec, cache, attend)
            new_caches.append(cache)
        return module.norm(x), tuple(new_caches)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 logits [R, V], accumulated in float32."""
        output = params["model"]["embed_tokens"] if self.config.tie_word_embeddings else params["lm_head"]
        return linear(hidden, output["weight"], np.float32)
