"""Qwen3.5 (also 3.6) text models whose feed-forward parts are mixtures with a gated shared expert."""

from __future__ import annotations

from helios_jax.models.decoder import DecoderModel
from helios_jax.models.dense_config import dense_to_config
from helios_jax.models.fields import Fields
from helios_jax.models.hybrid_config import (
    experts_from_hf,
    hybrid_from_config,
    hybrid_from_hf,
    hybrid_tensors,
    text_fields,
)
from helios_jax.models.mtp import decoder_of
from helios_jax.models.registry import Family, register

NAME = "qwen3_5_moe"


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json. Every layer has a mixture, so a dense width may be missing."""
    text = text_fields(config)
    layers = (True,) * text.integer("num_hidden_layers")
    shared = text.integer("shared_expert_intermediate_size")
    experts = experts_from_hf(text, shared_intermediate_size=shared, layers=layers)
    return decoder_of(
        hybrid_from_hf(
            text,
            NAME,
            False,
            experts=experts,
            intermediate_size=experts.intermediate_size,
            mtp_layers=text.integer("mtp_num_hidden_layers", 0),
        )
    )


register(
    Family(
        name=NAME,
        hf_architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        from_hf=from_hf,
        to_config=dense_to_config,
        from_config=hybrid_from_config,
        hf_tensors=hybrid_tensors,
    )
)
