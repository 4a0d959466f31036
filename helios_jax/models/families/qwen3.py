"""Qwen3 dense: RMSNorm over the head dimension of q and k before the rotation, no qkv biases by default.

The head dimension is independent of hidden size / heads (128 where the config lacks it).
"""

from __future__ import annotations

from helios_jax.models.checkpoint_files import Tensors
from helios_jax.models.decoder import DecoderModel
from helios_jax.models.dense_config import (
    dense_from_config,
    dense_from_gguf,
    dense_from_hf,
    dense_to_config,
    windows_from_hf,
)
from helios_jax.models.dense_gguf import dense_gguf_name
from helios_jax.models.fields import Fields
from helios_jax.models.registry import Family, register

NAME = "qwen3"
DEFAULT_HEAD_DIM = 128


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json."""
    bias = config.boolean("attention_bias", False)
    return DecoderModel(
        dense_from_hf(
            config,
            NAME,
            head_dim=config.integer("head_dim", DEFAULT_HEAD_DIM),
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=windows_from_hf(config),
        )
    )


def from_gguf(fields: Fields, tensors: Tensors) -> DecoderModel:
    """The model of a GGUF file."""
    return DecoderModel(dense_from_gguf(fields, tensors, NAME, qk_norm=True))


register(
    Family(
        name=NAME,
        hf_architectures=("Qwen3ForCausalLM",),
        gguf_architectures=("qwen3",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        to_config=dense_to_config,
        from_config=dense_from_config,
        gguf_name=dense_gguf_name,
    )
)
