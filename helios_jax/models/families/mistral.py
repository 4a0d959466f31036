"""Mistral: the plain decoder whose layers all see a sliding window, where the config has one.

A null `sliding_window` means full attention, as in every release since 0.2. GGUF
files of Mistral models carry architecture `llama` and are read by that family.
"""

from __future__ import annotations

from helios_jax.models.decoder import DecoderModel
from helios_jax.models.dense_config import dense_from_config, dense_from_hf, dense_to_config
from helios_jax.models.fields import Fields
from helios_jax.models.registry import Family, register

NAME = "mistral"
DEFAULT_WINDOW = 4096  # of a config.json without the field: files of the first release


def from_hf(config: Fields) -> DecoderModel:
    """The model of a config.json."""
    window = config.integer("sliding_window", None) if "sliding_window" in config.values else DEFAULT_WINDOW
    return DecoderModel(dense_from_hf(config, NAME, windows=(window,) * config.integer("num_hidden_layers")))


register(
    Family(
        name=NAME,
        hf_architectures=("MistralForCausalLM",),
        from_hf=from_hf,
        to_config=dense_to_config,
        from_config=dense_from_config,
    )
)
