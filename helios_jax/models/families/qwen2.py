"""Qwen2 and Qwen2.5: biases on q, k and v; optionally a window on the layers above some depth."""

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

NAME = "qwen2"


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json."""
    return DecoderModel(dense_from_hf(config, NAME, qkv_bias=True, windows=windows_from_hf(config)))


def from_gguf(fields: Fields, tensors: Tensors) -> DecoderModel:
    """The model of a GGUF file."""
    return DecoderModel(dense_from_gguf(fields, tensors, NAME, qkv_bias=True))


register(
    Family(
        name=NAME,
        hf_architectures=("Qwen2ForCausalLM",),
        gguf_architectures=("qwen2",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        to_config=dense_to_config,
        from_config=dense_from_config,
        gguf_name=dense_gguf_name,
    )
)
