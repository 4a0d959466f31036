"""Configurations of decoders, out of config.json or GGUF metadata and back to JSON.

Both spellings of the rotary settings are read: the one dict `rope_parameters` of new
checkpoints, and `rope_theta` beside `rope_scaling` (whose kind is `rope_type` or, older, `type`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from helios_jax.errors import CheckpointError
from helios_jax.models.checkpoint_files import StoredTensor, Tensors, read_tensor
from helios_jax.models.decoder import DecoderConfig, DecoderModel
from helios_jax.models.experts import ExpertsConfig
from helios_jax.models.fields import Fields
from helios_jax.models.gated_delta import GatedDeltaConfig
from helios_jax.models.rope import RopeConfig

ROPE_FACTORS = "rope_freqs.weight"  # llama.cpp's form of the llama3 scaling
SLIDING, FULL = "sliding_attention", "full_attention"


def dense_from_hf(config: Fields, family: str, **differences: Any) -> DecoderConfig:
    """The fields that all decoder families share, with the family's `differences` on top.

    Raises:
        CheckpointError: A field is missing, of a wrong type, or asks for what we do not have.
    """
    if (method := config.section("quantization_config")) is not None:
        name = method.get("quant_method", "unknown")
        raise CheckpointError(
            f"{config.where}: weights quantised with {name} are not supported; use an unquantised copy"
        )
    if (act := config.text("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{config.where}: hidden_act {act!r} is not supported; decoders here use silu")
    heads, layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    hidden = config.integer("hidden_size")
    shared = {
        "family": family,
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": differences.pop("intermediate_size", None) or config.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", hidden // max(1, heads)),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "rope": differences.pop("rope", None) or rope_from_hf(config),
        "windows": (None,) * layers,
        "tie_word_embeddings": config.boolean("tie_word_embeddings", False),
    }
    return DecoderConfig(**{**shared, **differences})


def rope_from_hf(config: Fields, rotated_share: float | None = None) -> RopeConfig:
    """The rotary settings of a config.json in either spelling.

    Args:
        rotated_share: Of families that rotate a part of the head dimension, where the file does not say it.
    """
    rope = config.section("rope_parameters") or config.section("rope_scaling") or Fields({}, config.where)
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    whole = 1.0 if rotated_share is None else rotated_share
    part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", whole))
    if rotated_share is None and part != 1.0:
        raise CheckpointError(f"{config.where}: partial_rotary_factor {part} is not supported here")
    scaling = rope.text("rope_type", rope.text("type", "default"))
    if scaling == "llama3":
        original = rope.integer("original_max_position_embeddings", None)
        return RopeConfig(
            scaling=scaling,
            theta=theta,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=config.integer("max_position_embeddings") if original is None else original,
            rotated_share=part,
        )
    factor = rope.number("factor") if scaling == "linear" else 1.0
    return RopeConfig(scaling=scaling, theta=theta, factor=factor, rotated_share=part)


def windows_from_hf(config: Fields) -> tuple[int | None, ...]:
    """One window a layer, by `layer_types` or else `max_window_layers`, where `use_sliding_window` is true."""
    layers = config.integer("num_hidden_layers")
    if not config.boolean("use_sliding_window", False):
        return (None,) * layers
    window = config.integer("sliding_window", 4096)
    first = config.integer("max_window_layers", 28)
    types = config.get("layer_types", [SLIDING if i >= first else FULL for i in range(layers)])
    if not isinstance(types, list) or set(types) - {SLIDING, FULL}:
        raise CheckpointError(f"{config.where}: layer_types may hold {SLIDING} and {FULL} only")
    return tuple(window if kind == SLIDING else None for kind in types)


def dense_from_gguf(fields: Fields, tensors: Tensors, family: str, **differences: Any) -> DecoderConfig:
    """The shared fields of a GGUF file, with the family's `differences` on top.

    Tied embeddings and biases are not written in the metadata: the tensors that are there tell.

    Raises:
        CheckpointError: A field or the embedding is missing, or the file needs what we do not have.
    """
    if fields.integer("expert_count", 0):
        raise CheckpointError(f"{fields.where}: mixtures of experts are not supported by family {family}")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{fields.where} lacks tensor token_embd.weight")
    heads, layers = fields.integer("attention.head_count"), fields.integer("block_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // max(1, heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            raise CheckpointError(
                f"{fields.where}: {name} {fields.get(name)} differs from the head dimension {head_dim}"
            )
    shared = {
        "family": family,
        "vocab_size": tensors["token_embd.weight"].num_rows,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "rope": rope_from_gguf(fields, tensors.get(ROPE_FACTORS)),
        "windows": (None,) * layers,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    return DecoderConfig(**{**shared, **differences})


def rope_from_gguf(fields: Fields, factors: StoredTensor | None) -> RopeConfig:
    """The rotary settings of a GGUF file; llama3 scaling lies in a tensor of divisors."""
    scaling = fields.text("rope.scaling.type", "none")
    divisors = () if factors is None else tuple(read_tensor(factors, np.dtype(np.float32)).ravel().tolist())
    if any(not value > 0 for value in divisors):
        raise CheckpointError(f"{fields.where}: tensor {ROPE_FACTORS} holds a divisor that is not positive")
    return RopeConfig(
        scaling="default" if scaling == "none" else scaling,
        theta=fields.number("rope.freq_base", 10000.0),
        factor=fields.number("rope.scaling.factor") if scaling == "linear" else 1.0,
        freq_factors=divisors,
    )


def dense_to_config(model: DecoderModel) -> dict[str, Any]:
    """Plain JSON values of a decoder's configuration."""
    return dataclasses.asdict(model.config)


def dense_from_config(config: dict[str, Any]) -> DecoderModel:
    """The model of `dense_to_config`'s values."""
    return DecoderModel(dense_config(config))


def dense_config(config: dict[str, Any]) -> DecoderConfig:
    """The configuration of `dense_to_config`'s values (JSON makes lists of tuples)."""
    rope = dict(config["rope"])
    rope["freq_factors"] = tuple(rope["freq_factors"])
    fields = {**config, "rope": RopeConfig(**rope), "windows": tuple(config["windows"])}
    for name, kind in (("recurrent", GatedDeltaConfig), ("experts", ExpertsConfig)):
        if (part := config[name]) is not None:
            fields[name] = kind(**{**part, "layers": tuple(part["layers"])})
    return DecoderConfig(**fields)
