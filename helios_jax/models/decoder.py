"""The pre-norm decoder that Llama, Mistral and the Qwen families share.

x_0 = embed[tokens]; in each layer x += mixer(norm(x)), x += feed_forward(norm(x));
logits = lm_head(norm(x_L)). The mixer is attention or, in hybrid models, Gated DeltaNet; the
feed-forward part is dense or a mixture of experts. Families differ only by the fields of `DecoderConfig`.

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
from helios_jax.models.delta_net import GatedDeltaNet
from helios_jax.models.experts import ExpertsConfig, MixtureOfExperts
from helios_jax.models.gated_delta import GatedDeltaConfig
from helios_jax.models.graph import ModuleGraph
from helios_jax.models.interface import Attend, AttentionSpec, LayerCache, Params, Recur, RecurrentSpec
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
    """Everything that decides the equations and shapes of one decoder.

    Attributes:
        family: Name of the registered family.
        vocab_size, hidden_size, intermediate_size: V, D, F.
        num_heads, num_kv_heads, head_dim: N, K, H; N is a multiple of K, H is even.
        windows: One entry a layer: keys at positions <= query - window are masked; None = all seen, or no attention.
        qkv_bias, output_bias, mlp_bias: Which projections add a bias.
        qk_norm: RMSNorm over H on q and k before the rotation (Qwen3).
        zero_centred_norms: Norms multiply by 1 + w (Qwen3-Next, Qwen3.5).
        output_gate: q_proj also gives a gate of [N, H]; its sigmoid multiplies what the heads mixed (the same).
        mtp_layers: Decoder layers of the multi-token-prediction heads, 0 or 1.
        tie_word_embeddings: The output matrix is the embedding matrix.
        recurrent: The layers that are Gated DeltaNet instead of attention; None = none is.
        experts: The layers whose feed-forward part is a mixture; None = none is.

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
    recurrent: GatedDeltaConfig | None = None
    experts: ExpertsConfig | None = None

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
        for part in (self.recurrent, self.experts):
            if part is not None and len(part.layers) != self.num_layers:
                raise CheckpointError(f"{len(part.layers)} layer types are given for {self.num_layers} layers")
        if self.mtp_layers not in (0, 1):
            raise CheckpointError(f"multi-token prediction with {self.mtp_layers} layers is not supported; one is")
        inverse_frequencies(self.rope, self.head_dim)  # raises where the factors do not fit

    def is_recurrent(self, layer: int) -> bool:
        """Whether the layer is Gated DeltaNet; the others attend."""
        return self.recurrent is not None and self.recurrent.layers[layer]

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


def feed_forward(config: DecoderConfig, mixture: bool, dtype: jax.typing.DTypeLike) -> nnx.Module:
    """The feed-forward part of a layer."""
    if mixture and config.experts is not None:
        return MixtureOfExperts(config.experts, config.hidden_size, dtype)
    return FeedForward(config.hidden_size, config.intermediate_size, config.mlp_bias, dtype)


class DecoderLayer(nnx.Module):
    """A mixer and a feed-forward part, each behind its norm and beside its residual.

    Args:
        layer: Index in the model, or None for that of multi-token-prediction heads: it attends, and has
            a mixture where the model has any.
    """

    def __init__(self, config: DecoderConfig, layer: int | None, dtype: jax.typing.DTypeLike) -> None:
        width, eps, experts = config.hidden_size, config.rms_norm_eps, config.experts
        recurrent = config.recurrent if layer is not None and config.is_recurrent(layer) else None
        self.input_layernorm = norm_of(config, width, dtype)
        self.linear_attn = GatedDeltaNet(recurrent, width, eps, dtype) if recurrent is not None else None
        self.self_attn = Attention(config, dtype) if recurrent is None else None
        self.post_attention_layernorm = norm_of(config, width, dtype)
        mixture = experts is not None and (any(experts.layers) if layer is None else experts.layers[layer])
        self.mlp = feed_forward(config, mixture, dtype)

    def __call__(
        self,
        x: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        spec: AttentionSpec | RecurrentSpec,
        cache: LayerCache,
        attend: Attend,
        recur: Recur | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """x [T, D] -> ([T, D], cache)."""
        normed = self.input_layernorm(x)
        if self.self_attn is not None and isinstance(spec, AttentionSpec):
            mixed, cache = self.self_attn(normed, cos_sin, spec, cache, attend)
        else:
            assert self.linear_attn is not None
            assert isinstance(spec, RecurrentSpec)
            assert recur is not None
            mixed, cache = self.linear_attn(normed, spec, cache, recur)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List([DecoderLayer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = norm_of(config, config.hidden_size, dtype)


class CausalDecoder(nnx.Module):
    """A `Decoder` and its output matrix; the root of the parameter tree."""

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        self.model = Decoder(config, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, False, dtype)


class DecoderModel:
    """The `Model` of every decoder family: configuration and graph, never weights."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._graph = ModuleGraph(lambda: CausalDecoder(config, np.float32))
        self.family = config.family
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        windows = [(i, window) for i, window in enumerate(config.windows) if not config.is_recurrent(i)]
        self.attention_layers = tuple(attention_spec(config, i, window) for i, window in windows)
        layers = range(config.num_layers)
        recurrent = config.recurrent
        self.recurrent_layers = (
            () if recurrent is None else tuple(recurrent.spec(i) for i in layers if recurrent.layers[i])
        )

    def abstract_params(self, dtype: jax.typing.DTypeLike) -> Params:
        """The parameter tree as ShapeDtypeStructs of `dtype`; allocates nothing."""
        return self._graph.abstract_params(dtype)

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, caches: tuple[LayerCache, ...], attend: Attend,
        recur: Recur | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:  # fmt: skip
        """tokens, positions [T] int32 -> (final normed hidden [T, D], caches).

        Rows are independent except inside `attend` and `recur`, so lanes may be packed in any order.
        """
        module: Decoder = self._graph.merge(params).model
        cos_sin = rotation(positions, inverse_frequencies(self.config.rope, self.config.head_dim))
        x = module.embed_tokens(tokens)
        specs: list[AttentionSpec | RecurrentSpec] = [*self.attention_layers, *self.recurrent_layers]
        at = {spec.layer: (i, spec) for i, spec in enumerate(specs)}
        kept = list(caches)
        if len(kept) != len(specs):
            raise ValueError(f"{len(kept)} caches are given for {len(specs)} layers")
        for number, layer in enumerate(module.layers):
            i, spec = at[number]
            x, kept[i] = layer(x, cos_sin, spec, kept[i], attend, recur)
        return module.norm(x), tuple(kept)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 logits [R, V], accumulated in float32."""
        output = params["model"]["embed_tokens"] if self.config.tie_word_embeddings else params["lm_head"]
        return linear(hidden, output["weight"], np.float32)
