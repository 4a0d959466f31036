"""Qwen3-Next: as Qwen3.5 with mixtures, but packed projections of the recurrent layers and a plain rotation.

Published configurations do not count the layers of the multi-token-prediction heads; files have one.
"""

from __future__ import annotations

from helios_jax.models.decoder import DecoderModel
from helios_jax.models.dense_config import dense_to_config
from helios_jax.models.fields import Fields
from helios_jax.models.hybrid_config import experts_from_hf, hybrid_from_config, hybrid_from_hf, hybrid_tensors
from helios_jax.models.mtp import decoder_of
from helios_jax.models.registry import Family, register

NAME = "qwen3_next"
DEFAULT_HEADS = 1  # layers of the multi-token-prediction heads


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json."""
    experts = experts_from_hf(
        config,
        normalise=config.boolean("norm_topk_prob", True),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size"),
    )
    heads = config.integer("mtp_num_hidden_layers", config.integer("num_nextn_predict_layers", DEFAULT_HEADS))
    return decoder_of(hybrid_from_hf(config, NAME, True, experts=experts, mtp_layers=heads))


register(
    Family(
        name=NAME,
        hf_architectures=("Qwen3NextForCausalLM",),
        from_hf=from_hf,
        to_config=dense_to_config,
        from_config=hybrid_from_config,
        hf_tensors=hybrid_tensors,
    )
)
