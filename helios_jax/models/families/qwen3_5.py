"""Qwen3.5 (also 3.6, 3.8) text models with a dense feed-forward part, and their multi-token-prediction heads.

Against Qwen3: most layers are Gated DeltaNet; norms multiply by 1 + w; q_proj also gives a gate a
head, whose sigmoid multiplies the mixed values; a quarter of the head dimension is rotated. Text
positions are the same in all three sections of the interleaved rotation, so it is the plain one here.
Of files with a vision tower the text model is read.
"""

from __future__ import annotations

from helios_jax.models.decoder import DecoderModel
from helios_jax.models.dense_config import dense_to_config
from helios_jax.models.fields import Fields
from helios_jax.models.hybrid_config import hybrid_from_config, hybrid_from_hf, hybrid_tensors, text_fields
from helios_jax.models.mtp import decoder_of
from helios_jax.models.registry import Family, register

NAME = "qwen3_5"


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json."""
    text = text_fields(config)
    return decoder_of(hybrid_from_hf(text, NAME, False, mtp_layers=text.integer("mtp_num_hidden_layers", 0)))


register(
    Family(
        name=NAME,
        hf_architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        from_hf=from_hf,
        to_config=dense_to_config,
        from_config=hybrid_from_config,
        hf_tensors=hybrid_tensors,
    )
)
