"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B, Coder): Qwen3's attention, no shared expert."""

from __future__ import annotations

from helios_jax.models.decoder import DecoderModel
from helios_jax.models.dense_config import dense_from_config, dense_from_hf, dense_to_config
from helios_jax.models.fields import Fields
from helios_jax.models.hybrid_config import experts_from_hf, hybrid_tensors
from helios_jax.models.registry import Family, register

NAME = "qwen3_moe"


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json; a sliding window is one of all layers."""
    bias = config.boolean("attention_bias", False)
    window = config.integer("sliding_window", 4096) if config.boolean("use_sliding_window", False) else None
    return DecoderModel(
        dense_from_hf(
            config,
            NAME,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=(window,) * config.integer("num_hidden_layers"),
            experts=experts_from_hf(config, normalise=config.boolean("norm_topk_prob", False)),
        )
    )


register(
    Family(
        name=NAME,
        hf_architectures=("Qwen3MoeForCausalLM",),
        from_hf=from_hf,
        to_config=dense_to_config,
        from_config=dense_from_config,
        hf_tensors=hybrid_tensors,
    )
)
