"""The tiny checkpoints as GGUF files, written the way llama.cpp's converter writes them.

The row order of q and k (architecture `llama`), the tensor of rope divisors and the names are
restated here from the converter's side, independently of the reader's code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.golden.tiny import HEADS, KV_HEADS, LAYERS, config_of, tiny_tensors

ARCHITECTURES = {"llama3": "llama", "llama_linear": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to neighbouring pairs."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(family: str) -> dict[str, np.ndarray]:
    """The float32 tensors of a tiny model with llama.cpp's names and row order."""
    tensors = tiny_tensors(family)
    out = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        out["output.weight"] = tensors["lm_head.weight"]
    for layer in range(LAYERS):
        for part, short in _PARTS.items():
            for leaf in ("weight", "bias"):
                tensor = tensors.get(f"model.layers.{layer}.{part}.{leaf}")
                if tensor is None:
                    continue
                if ARCHITECTURES[family] == "llama" and short in ("attn_q", "attn_k"):
                    tensor = interleave_rows(tensor, HEADS if short == "attn_q" else KV_HEADS)
                out[f"blk.{layer}.{short}.{leaf}"] = tensor
    if family == "llama3":
        out["rope_freqs.weight"] = rope_divisors(config_of(family)["rope_parameters"], 16)
    return out


def rope_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """llama3 scaling as one divisor a frequency, case by case."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def write_gguf(
    family: str, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **changes: Any
) -> Path:
    """Writes a tiny model as GGUF; matrices in `kind`, vectors in F32.

    Args:
        changes: Metadata that replaces or joins the usual (`expert_count=4`); names without the architecture.
    """
    tensors = gguf_tensors(family)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    for name, value in {**_metadata(family), **changes}.items():
        key = name if name.startswith(("tokenizer.", "general.")) else f"{ARCHITECTURES[family]}.{name}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(family: str) -> dict[str, Any]:
    config = config_of(family)
    head_dim = config.get("head_dim", config["hidden_size"] // HEADS)
    rope = config.get("rope_parameters", config)
    eos = config["eos_token_id"]
    values = {
        "block_count": LAYERS,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": eos[0] if isinstance(eos, list) else eos,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(config["vocab_size"])],
    }
    if family == "llama_linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": config["rope_scaling"]["factor"]}
    if family == "mistral":
        values["attention.sliding_window"] = config["sliding_window"]
    return values
