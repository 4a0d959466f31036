"""Multi-token-prediction heads of Qwen3-Next and Qwen3.5: one attending layer on the target's hidden rows.

    x_i = fc [norm_e(embed[t_{i+1}]) ; norm_h(h_i)]      h_i: the target's hidden after its final norm
    out_i = norm(layer(x)_i)                             causal over rows, rotated by the row's position i
    logits of t_{i+2} = lm_head(out_i)                   embedding and lm_head are the target's

For the token after that, out_i is the hidden of row i + 1. Tensors are named as in the published
checkpoints, `mtp.*` (transformers ignores them; the semantics are vLLM's and SGLang's).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from helios_jax.models.decoder import DecoderConfig, DecoderLayer, DecoderModel, attention_spec, norm_of
from helios_jax.models.graph import ModuleGraph
from helios_jax.models.interface import Attend, LayerCache, Params
from helios_jax.models.layers import Linear
from helios_jax.models.rope import inverse_frequencies, rotation


class Predictor(nnx.Module):
    """What checkpoints call `mtp`."""

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        width = config.hidden_size
        self.fc = Linear(2 * width, width, False, dtype)
        self.pre_fc_norm_embedding = norm_of(config, width, dtype)
        self.pre_fc_norm_hidden = norm_of(config, width, dtype)
        self.layers = nnx.List([DecoderLayer(config, None, dtype)])
        self.norm = norm_of(config, width, dtype)


class _Root(nnx.Module):
    """The root of the heads' parameter tree."""

    def __init__(self, config: DecoderConfig, dtype: jax.typing.DTypeLike) -> None:
        self.mtp = Predictor(config, dtype)


class DecoderHeads:
    """The `MtpHeads` of a decoder: configuration and graph, never weights."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._graph = ModuleGraph(lambda: _Root(config, np.float32))
        self.family = config.family
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.hidden_size = config.hidden_size
        self.attention_layers = (attention_spec(config, 0),)

    def abstract_params(self, dtype: jax.typing.DTypeLike) -> Params:
        """The tree {"mtp": ...} as ShapeDtypeStructs of `dtype`; allocates nothing."""
        return self._graph.abstract_params(dtype)

    def predict(
        self, params: Params, target: Params, tokens: jax.Array, positions: jax.Array, hidden: jax.Array,
        caches: tuple[LayerCache, ...], attend: Attend,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:  # fmt: skip
        """See `MtpHeads.predict`."""
        module: Predictor = self._graph.merge(params).mtp
        embedded = target["model"]["embed_tokens"]["weight"].at[tokens].get(mode="clip")
        parts = [module.pre_fc_norm_embedding(embedded), module.pre_fc_norm_hidden(hidden)]
        x = module.fc(jnp.concatenate(parts, axis=-1))
        cos_sin = rotation(positions, inverse_frequencies(self.config.rope, self.config.head_dim))
        (cache,) = caches
        x, cache = module.layers[0](x, cos_sin, self.attention_layers[0], cache, attend)
        return module.norm(x), (cache,)


class DecoderWithHeads(DecoderModel):
    """A decoder whose checkpoint has multi-token-prediction heads."""

    @functools.cached_property
    def mtp(self) -> DecoderHeads:
        """The heads; see `interface.heads_of`."""
        return DecoderHeads(self.config)


def decoder_of(config: DecoderConfig) -> DecoderModel:
    """The model of a configuration, with heads where it has them."""
    return DecoderWithHeads(config) if config.mtp_layers else DecoderModel(config)
