"""Tiny checkpoints of every family, made from a hash: no download, no torch, the same everywhere.

`tiny_checkpoint(family)` gives a complete Hugging Face directory (configuration, weights,
tokenizer, chat template) of a 2-layer model with 128 tokens. `make_models.py` runs the same
directories through transformers and stores what they must compute in `models/<family>.npz`.

Weights come from SplitMix64 on the tensor's name and index, not from numpy's generators,
whose streams may change between versions.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.golden.tiny_hybrid import (
    HYBRID_CONFIGS,
    LONG_CONFIGS,
    ZERO_CENTRED,
    has_mixture,
    is_recurrent,
    mixture_part,
    packed_experts,
    recurrent_part,
    with_vision,
)

GOLDEN_DIR = Path(__file__).parent / "models"
VOCAB, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 128, 2, 4, 2, 96
PROMPT_LEN, GREEDY_LEN = 24, 64
WINDOW = 8  # shorter than the prompt, so that the mask matters

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# Both spellings of the rotary settings, tied and untied embeddings, biases and windows all occur.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3_ROPE},
        "eos_token_id": [2, 5],
    },
    "llama_linear": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_theta": 10000.0,
        "sliding_window": WINDOW,
        "head_dim": 16,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "sliding_window": WINDOW,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
    },
    "qwen3_window": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "head_dim": 32,
        "layer_types": ["full_attention"] * LAYERS,
        "mtp_num_hidden_layers": 1,
    },
}
FAMILIES = tuple(CONFIGS)  # dense ones; `tiny_hybrid.HYBRIDS` are the others
VARIANTS = ("float32", "bfloat16", "float16", "sharded", "packed", "vision")


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a tiny model."""
    return {**_BASE, **(CONFIGS | HYBRID_CONFIGS | LONG_CONFIGS)[family]}


def tiny_prompt(family: str) -> list[int]:
    """PROMPT_LEN ordinary token ids."""
    return (3 + _bits(f"{family}.prompt", PROMPT_LEN) % np.uint64(VOCAB - 3)).astype(int).tolist()


def tiny_tensors(family: str) -> dict[str, np.ndarray]:
    """Every float32 tensor of a tiny model, by its Hugging Face name; see `tiny_mtp_tensors` for its heads.

    Gains are chosen so that the model's choices differ from step to step: norms and biases are
    away from 1 and 0, because a neutral tensor would hide that it is not applied.
    """
    config = config_of(family)
    d = config["hidden_size"]
    output_gain = 2.0 / math.sqrt(d)
    tensors: dict[str, np.ndarray] = {}
    if config.get("tie_word_embeddings", False):
        tensors["model.embed_tokens.weight"] = _weights(family, "embed", (VOCAB, d), output_gain)
    else:
        tensors["model.embed_tokens.weight"] = _weights(family, "embed", (VOCAB, d), 1.0)
        tensors["lm_head.weight"] = _weights(family, "head", (VOCAB, d), output_gain)
    tensors["model.norm.weight"] = _norm(family, "norm", d)
    for layer in range(config["num_hidden_layers"]):
        tensors |= _layer(family, f"model.layers.{layer}.", layer)
    return tensors


def tiny_mtp_tensors(family: str) -> dict[str, np.ndarray]:
    """Every float32 tensor of a tiny model's multi-token-prediction heads; none where it has none."""
    config = config_of(family)
    if not config.get("mtp_num_hidden_layers"):
        return {}
    d = config["hidden_size"]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    tensors = {f"mtp.{name}.weight": _norm(family, f"mtp.{name}", d) for name in norms}
    tensors["mtp.fc.weight"] = _weights(family, "mtp.fc", (d, 2 * d), 1 / math.sqrt(2 * d))
    return tensors | _layer(family, "mtp.layers.0.", None)


def _norm(family: str, name: str, width: int) -> np.ndarray:
    """Weights of a norm around its neutral value: 0 in families that multiply by 1 + w."""
    return np.float32(0 if family in ZERO_CENTRED else 1) + _weights(family, name, (width,), 0.2)


def _layer(family: str, prefix: str, layer: int | None) -> dict[str, np.ndarray]:
    """The tensors of one decoder layer; None is that of multi-token-prediction heads."""
    config, make = config_of(family), functools.partial(_weights, family)
    d, f, heads, kv = config["hidden_size"], config["intermediate_size"], HEADS, KV_HEADS
    h = config.get("head_dim", d // heads)
    qwen2, qk_norm = config["model_type"] == "qwen2", config["model_type"].startswith("qwen3")
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    gated = 2 if family in ZERO_CENTRED else 1
    tensors: dict[str, np.ndarray] = {}
    parts = {
        "self_attn.q_proj": (gated * heads * h, d, qwen2 or attention_bias),
        "self_attn.k_proj": (kv * h, d, qwen2 or attention_bias),
        "self_attn.v_proj": (kv * h, d, qwen2 or attention_bias),
        "self_attn.o_proj": (d, heads * h, attention_bias),
        "mlp.gate_proj": (f, d, mlp_bias),
        "mlp.up_proj": (f, d, mlp_bias),
        "mlp.down_proj": (d, f, mlp_bias),
    }
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    norms |= {"self_attn.q_norm": h, "self_attn.k_norm": h} if qk_norm else {}
    if is_recurrent(config, layer):
        tensors |= recurrent_part(config, prefix, make)
    if has_mixture(config, layer):
        tensors |= mixture_part(config, prefix, make)
    left_out = ("self_attn",) * is_recurrent(config, layer) + ("mlp",) * has_mixture(config, layer)
    parts = {part: extent for part, extent in parts.items() if not part.startswith(left_out)}
    norms = {part: width for part, width in norms.items() if not part.startswith(left_out)}
    for part, (num_out, num_in, bias) in parts.items():
        name = f"{prefix}{part}"
        tensors[f"{name}.weight"] = _weights(family, name, (num_out, num_in), 1.5 / math.sqrt(num_in))
        if bias:
            tensors[f"{name}.bias"] = _weights(family, f"{name}.bias", (num_out,), 0.3)
    for part, width in norms.items():
        tensors[f"{prefix}{part}.weight"] = _norm(family, f"{prefix}{part}", width)
    return tensors


def write_checkpoint(family: str, directory: Path, variant: str = "float32") -> Path:
    """Writes a tiny model as a Hugging Face directory.

    `sharded` is float32 in three files and an index, `packed` has the experts of a mixture in two tensors,
    `vision` has them too, inside a model with a vision tower.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors, config = tiny_tensors(family) | tiny_mtp_tensors(family), config_of(family)
    if variant in ("packed", "vision"):
        tensors = packed_experts(tensors)
    if variant == "vision":
        config, tensors = with_vision(config, tensors)
    if variant == "sharded":
        _write_shards(directory, tensors)
    else:
        save_file({name: t.astype(_dtype(variant)) for name, t in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(directory)
    return directory


@functools.cache
def tiny_checkpoint(family: str, variant: str = "float32") -> Path:
    """A directory with a tiny model, made once a process and removed at its end."""
    return write_checkpoint(family, Path(_scratch().name) / f"{family}-{variant}", variant)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="helios-tiny-")


def golden(family: str) -> dict[str, np.ndarray]:
    """What transformers computes for a tiny model.

    `prompt` [24]; `greedy` [64] tokens after it; `logits` [88, 128] after every token of both;
    `logits_bfloat16`, `logits_float16` [24, 128] of the rounded weights, computed in float32.
    """
    with np.load(GOLDEN_DIR / f"{family}.npz") as stored:
        return dict(stored)


def _dtype(variant: str) -> np.dtype:
    if variant == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype("float16" if variant == "float16" else "float32")


def _bits(name: str, count: int) -> np.ndarray:
    """`count` well mixed uint64 of a name: SplitMix64 (Steele et al. 2014) from the name's CRC."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 20)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _weights(family: str, name: str, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    """Uniform float32 values of the given standard deviation."""
    unit = (_bits(f"{family}.{name}", math.prod(shape)) >> np.uint64(40)).astype(np.float64) / 2**24
    return ((unit - 0.5) * math.sqrt(12) * deviation).astype(np.float32).reshape(shape)


def _write_shards(directory: Path, tensors: dict[str, np.ndarray], count: int = 3) -> None:
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, directory / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


_MERGES = [
    *("Ġ t", "h e", "i n", "e r", "a n", "r e", "o n", "a t", "Ġ a", "Ġ s", "n d", "o r", "e s", "i s", "i t"),
    *("o u", "e d", "Ġ w", "l l", "Ġ c", "o m", "Ġ o", "Ġ b", "Ġ f", "a r", "Ġt he", "in g", "Ġ m", "Ġ p"),
]
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer of exactly VOCAB tokens: 3 special, ASCII, and 29 merges."""
    special = ["<pad>", "<s>", "</s>"]
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in _MERGES)]
    assert len(tokens) == VOCAB
    added = [
        {
            "id": i,
            "content": s,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, s in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
