"""Tiny checkpoints of hybrid and mixture-of-experts families; see `tiny`.

Widths of key and value heads differ, experts are more than their choice, and one layer in two families
has no mixture, so that no extent can stand for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Make = Callable[[str, tuple[int, ...], float], np.ndarray]  # (name, shape, deviation) -> float32 values around 0

_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_TYPES = ["linear_attention", "full_attention", "linear_attention"]

HYBRID_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "head_dim": 32,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        **_EXPERTS,
    },
    "qwen3_moe_plain": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_theta": 10000.0,
        "num_hidden_layers": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        **_EXPERTS,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 24,
        "mtp_num_hidden_layers": 1,
        **_LINEAR,
        **_EXPERTS,
    },
    "qwen3_5_hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_parameters": _ROPE | _SECTIONS,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": _TYPES,
        "mtp_num_hidden_layers": 1,
        **_LINEAR,
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "rope_parameters": _ROPE | _SECTIONS,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": _TYPES,
        "shared_expert_intermediate_size": 24,
        "mtp_num_hidden_layers": 1,
        **_LINEAR,
        **_EXPERTS,
    },
}
HYBRIDS = tuple(HYBRID_CONFIGS)
# Not tiny, and without goldens: 40 million weights and the context of a chat, for benchmarks.checkpoints.
LONG_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_long": {
        **HYBRID_CONFIGS["qwen3_5_hybrid"],
        "hidden_size": 512,
        "intermediate_size": 1536,
        "head_dim": 64,
        "num_hidden_layers": 12,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
        "mtp_num_hidden_layers": 0,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 4096,
    },
}
ZERO_CENTRED = ("qwen3_5", "qwen3_next", "qwen3_5_hybrid", "qwen3_5_moe", "qwen3_5_long")


def is_recurrent(config: dict[str, Any], layer: int | None) -> bool:
    """Whether layer `layer` is Gated DeltaNet; None is that of multi-token-prediction heads."""
    if layer is None or "linear_num_key_heads" not in config:
        return False
    types = config.get("layer_types")
    return (layer + 1) % 4 != 0 if types is None else types[layer] == "linear_attention"


def recurrent_part(config: dict[str, Any], prefix: str, make: Make) -> dict[str, np.ndarray]:
    """The tensors of `linear_attn`."""
    d, (nk, nv, dk, dv, kernel) = config["hidden_size"], (config[name] for name in _LINEAR)
    channels, values = 2 * nk * dk + nv * dv, nv * dv
    projections = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": nv, "in_proj_a": nv}
    if config["model_type"] == "qwen3_next":
        projections = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * nv}
    name = f"{prefix}linear_attn."
    tensors = {
        f"{name}{part}.weight": make(f"{name}{part}", (rows, d), 1.5 / math.sqrt(d))
        for part, rows in projections.items()
    }
    # dt_bias sets how long a head remembers: here from a few tokens to the whole prompt
    return tensors | {
        f"{name}conv1d.weight": make(f"{name}conv1d", (channels, 1, kernel), 0.7),
        f"{name}A_log": make(f"{name}A_log", (nv,), 0.7),
        f"{name}dt_bias": make(f"{name}dt_bias", (nv,), 1.5) - np.float32(2),
        f"{name}norm.weight": make(f"{name}norm", (dv,), 0.2) + np.float32(1),
        f"{name}out_proj.weight": make(f"{name}out_proj", (d, values), 1.5 / math.sqrt(values)),
    }


def mixture_part(config: dict[str, Any], prefix: str, make: Make) -> dict[str, np.ndarray]:
    """The tensors of a mixture, expert by expert."""
    d, f, shared = config["hidden_size"], config["moe_intermediate_size"], config.get("shared_expert_intermediate_size")
    parts = {"gate": (config["num_experts"], d)}
    for expert in range(config["num_experts"]):
        parts |= _swiglu(f"experts.{expert}.", d, f)
    if shared:
        parts |= _swiglu("shared_expert.", d, shared) | {"shared_expert_gate": (1, d)}
    return {
        f"{prefix}mlp.{part}.weight": make(f"{prefix}mlp.{part}", shape, 1.5 / math.sqrt(shape[1]))
        for part, shape in parts.items()
    }


def _swiglu(prefix: str, d: int, f: int) -> dict[str, tuple[int, int]]:
    return {f"{prefix}gate_proj": (f, d), f"{prefix}up_proj": (f, d), f"{prefix}down_proj": (d, f)}


def has_mixture(config: dict[str, Any], layer: int | None) -> bool:
    """Whether the feed-forward part of layer `layer` is a mixture; the heads' is one where any is."""
    return "num_experts" in config and layer not in config.get("mlp_only_layers", [])


def packed_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors with the experts of each mixture in two, as published files keep them."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        count = len({name.split(".experts.")[1].split(".")[0] for name in tensors if name.startswith(f"{prefix}.exp")})

        def expert(e: int, part: str, prefix: str = prefix) -> np.ndarray:
            return tensors[f"{prefix}.experts.{e}.{part}_proj.weight"]

        both = [np.concatenate([expert(e, "gate"), expert(e, "up")]) for e in range(count)]
        out[f"{prefix}.experts.gate_up_proj"] = np.stack(both)
        out[f"{prefix}.experts.down_proj"] = np.stack([expert(e, "down") for e in range(count)])
    return out


def with_vision(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The same text model as a file with a vision tower has it."""
    architecture = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    outer = ("architectures", "torch_dtype")
    text = {name: value for name, value in config.items() if name not in outer}
    wrapped = {"architectures": [architecture], "torch_dtype": config["torch_dtype"], "text_config": text}
    wrapped |= {"model_type": config["model_type"].removesuffix("_text"), "vision_config": {"depth": 1}}
    moved = {
        ("model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name): tensor
        for name, tensor in tensors.items()
    }
    return wrapped, moved | {"model.visual.blocks.0.norm1.weight": np.ones(4, np.float32)}
