"""Llama 2, 3 and what shares their equations (SmolLM, TinyLlama, ...): the plain decoder.

Optional biases by `attention_bias` (all four projections) and `mlp_bias`; rope scaling linear or
llama3. GGUF files of architecture `llama` also hold Mistral models.
"""

from __future__ import annotations

from helios_jax.models.checkpoint_files import Tensors
from helios_jax.models.decoder import DecoderModel
from helios_jax.models.dense_config import dense_from_config, dense_from_gguf, dense_from_hf, dense_to_config
from helios_jax.models.dense_gguf import dense_gguf_name, llama_row_order
from helios_jax.models.fields import Fields
from helios_jax.models.registry import Family, register

NAME = "llama"


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json."""
    bias = config.boolean("attention_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)
    return DecoderModel(dense_from_hf(config, NAME, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias))


def from_gguf(fields: Fields, tensors: Tensors) -> DecoderModel:
    """The model of a GGUF file. Other architectures write a window that their models do not use."""
    windows = (fields.integer("attention.sliding_window", None),) * fields.integer("block_count")
    return DecoderModel(dense_from_gguf(fields, tensors, NAME, windows=windows))


register(
    Family(
        name=NAME,
        hf_architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        to_config=dense_to_config,
        from_config=dense_from_config,
        gguf_name=dense_gguf_name,
        gguf_row_order=llama_row_order,
    )
)
