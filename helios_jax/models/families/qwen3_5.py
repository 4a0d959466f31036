"""Qwen3.5 text models of full-attention layers, with their multi-token-prediction heads.

Against Qwen3: norms multiply by 1 + w; q_proj also gives a gate a head, whose sigmoid multiplies the
mixed values; a quarter of the head dimension is rotated. Text positions are the same in all three
sections of the interleaved rotation, so it is the plain one here. Most published models alternate
these layers with Gated DeltaNet ("linear_attention"), which this version does not have.
"""

from __future__ import annotations

from typing import Any

from helios_jax.errors import CheckpointError
from helios_jax.models.decoder import DecoderConfig, DecoderModel
from helios_jax.models.dense_config import FULL, dense_config, dense_from_hf, dense_to_config, rope_from_hf
from helios_jax.models.fields import Fields
from helios_jax.models.mtp import DecoderWithHeads
from helios_jax.models.registry import Family, register

NAME = "qwen3_5"
DEFAULT_HEAD_DIM = 256
DEFAULT_ROTATED_SHARE = 0.25
DEFAULT_INTERVAL = 4  # every fourth layer has full attention


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json."""
    layers = config.integer("num_hidden_layers")
    interval = config.integer("full_attention_interval", DEFAULT_INTERVAL)
    types = config.get("layer_types", [FULL if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)])
    if not isinstance(types, list) or len(types) != layers or set(types) - {FULL}:
        raise CheckpointError(
            f"{config.where}: layer_types must be {layers} times {FULL}; Gated DeltaNet layers (linear_attention) are"
            " not supported by this version"
        )
    if config.boolean("mtp_use_dedicated_embeddings", False):
        raise CheckpointError(f"{config.where}: mtp_use_dedicated_embeddings is not supported")
    bias = config.boolean("attention_bias", False)
    return model_of(
        dense_from_hf(
            config,
            NAME,
            head_dim=config.integer("head_dim", DEFAULT_HEAD_DIM),
            rope=rope_from_hf(config, DEFAULT_ROTATED_SHARE),
            qk_norm=True,
            zero_centred_norms=True,
            output_gate=True,
            qkv_bias=bias,
            output_bias=bias,
            mtp_layers=config.integer("mtp_num_hidden_layers", 0),
        )
    )


def model_of(config: DecoderConfig) -> DecoderModel:
    """The model of a configuration, with heads where it has them."""
    return DecoderWithHeads(config) if config.mtp_layers else DecoderModel(config)


def from_config(config: dict[str, Any]) -> DecoderModel:
    """The inverse of `dense_to_config`."""
    return model_of(dense_config(config))


register(
    Family(
        name=NAME,
        hf_architectures=("Qwen3_5ForCausalLM",),
        from_hf=from_hf,
        to_config=dense_to_config,
        from_config=from_config,
    )
)
