"""What hybrid and mixture-of-experts checkpoints say beyond a dense decoder's, and how they name tensors.

Files of models with vision keep the text model's configuration under `text_config` and its tensors
under `model.language_model.`; the tower (`model.visual.`) is not read here. Experts lie packed in one tensor
(`experts.gate_up_proj`, `experts.down_proj`) or one by one (`experts.7.gate_proj.weight`, ...).
"""

from __future__ import annotations

import re
from typing import Any

from helios_jax.errors import CheckpointError
from helios_jax.models.checkpoint_files import StoredTensor, Tensors, join
from helios_jax.models.decoder import DecoderConfig, DecoderModel
from helios_jax.models.dense_config import FULL, dense_config, dense_from_hf, rope_from_hf
from helios_jax.models.experts import ExpertsConfig
from helios_jax.models.fields import Fields
from helios_jax.models.gated_delta import GatedDeltaConfig
from helios_jax.models.mtp import decoder_of

LINEAR = "linear_attention"
DEFAULT_INTERVAL = 4  # every fourth layer has full attention
DEFAULT_HEAD_DIM = 256  # of families with recurrent layers
DEFAULT_ROTATED_SHARE = 0.25
_PREFIX, _TOWER = "model.language_model.", "model.visual."
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def text_fields(config: Fields) -> Fields:
    """The text model's part of a config.json: `text_config` where there is one."""
    inner = config.section("text_config")
    if inner is None:
        return config
    tied = config.boolean("tie_word_embeddings", False)
    return Fields({"tie_word_embeddings": tied, **inner.values}, inner.where)


def recurrent_from_hf(config: Fields, packed: bool) -> GatedDeltaConfig | None:
    """The Gated DeltaNet layers of a config.json by `layer_types`, or else by `full_attention_interval`.

    Args:
        packed: See `GatedDeltaConfig.packed_projections`.
    """
    layers = config.integer("num_hidden_layers")
    interval = config.integer("full_attention_interval", DEFAULT_INTERVAL)
    types = config.get("layer_types", [FULL if (i + 1) % max(1, interval) == 0 else LINEAR for i in range(layers)])
    if not isinstance(types, list) or len(types) != layers or set(types) - {FULL, LINEAR}:
        raise CheckpointError(f"{config.where}: layer_types must be {layers} entries of {FULL} and {LINEAR}")
    if LINEAR not in types:
        return None
    return GatedDeltaConfig(
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim", 4),
        packed_projections=packed,
        gate=config.text("output_gate_type", "silu"),
        layers=tuple(kind == LINEAR for kind in types),
    )


def experts_from_hf(config: Fields, **differences: Any) -> ExpertsConfig:
    """The mixtures of a config.json: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if step < 1 or not isinstance(dense, list):
        raise CheckpointError(f"{config.where}: decoder_sparse_step must be positive and mlp_only_layers a list")
    fields = {
        "num_experts": config.integer("num_experts"),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "intermediate_size": config.integer("moe_intermediate_size"),
        "layers": tuple((i + 1) % step == 0 and i not in dense for i in range(config.integer("num_hidden_layers"))),
    }
    return ExpertsConfig(**{**fields, **differences})


def refuse_dedicated_embeddings(config: Fields) -> None:
    """Heads with an embedding of their own are not supported.

    Raises:
        CheckpointError: The configuration asks for them.
    """
    if config.boolean("mtp_use_dedicated_embeddings", False):
        raise CheckpointError(f"{config.where}: mtp_use_dedicated_embeddings is not supported")


def hybrid_from_hf(config: Fields, family: str, packed: bool, **differences: Any) -> DecoderConfig:
    """What Qwen3-Next and the Qwen3.5 families share, with the `differences` of one.

    Args:
        packed: See `GatedDeltaConfig.packed_projections`.
    """
    refuse_dedicated_embeddings(config)
    bias = config.boolean("attention_bias", False)
    shared = {
        "head_dim": config.integer("head_dim", DEFAULT_HEAD_DIM),
        "rope": rope_from_hf(config, DEFAULT_ROTATED_SHARE),
        "qk_norm": True,
        "zero_centred_norms": True,
        "output_gate": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "recurrent": recurrent_from_hf(config, packed),
    }
    return dense_from_hf(config, family, **{**shared, **differences})


def hybrid_from_config(config: dict[str, Any]) -> DecoderModel:
    """The inverse of `dense_to_config`."""
    return decoder_of(dense_config(config))


def hybrid_tensors(model: DecoderModel, tensors: Tensors, where: str) -> Tensors:
    """The text model's tensors by the names of its parameters, single experts joined; see the module's text."""
    named: dict[str, StoredTensor] = {}
    single: dict[str, dict[tuple[int, str], StoredTensor]] = {}
    count = 0 if model.config.experts is None else model.config.experts.num_experts
    for stored, tensor in tensors.items():
        if stored.startswith(_TOWER):
            continue
        name = "model." + stored.removeprefix(_PREFIX) if stored.startswith(_PREFIX) else stored
        match = _EXPERT.fullmatch(name)
        if match is not None and int(match[2]) < count:
            single.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            named[name] = tensor  # an expert too many stays, and is refused as a tensor without a place
    for prefix, parts in single.items():
        for name, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            named[f"{prefix}.{name}"] = _join_experts(f"{where} lacks tensor {prefix}", parts, count, kinds)
    return named


def _join_experts(
    missing: str, parts: dict[tuple[int, str], StoredTensor], count: int, kinds: tuple[str, ...]
) -> StoredTensor:
    """[experts, rows of all kinds, columns] of matrices [rows, columns] that must be alike."""
    pieces = []
    for expert in range(count):
        for kind in kinds:
            if (piece := parts.get((expert, kind))) is None:
                raise CheckpointError(f"{missing}.{expert}.{kind}_proj.weight")
            if piece.shape != parts[0, kinds[0]].shape or len(piece.shape) != 2:
                raise CheckpointError(
                    f"{piece.path}: {kind}_proj of expert {expert} has shape {list(piece.shape)}, unlike the first one"
                )
            pieces.append(piece)
    rows, columns = pieces[0].shape
    return join(tuple(pieces), (count, rows * len(kinds), columns))
