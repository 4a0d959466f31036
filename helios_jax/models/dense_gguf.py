"""How llama.cpp names and orders the tensors of dense decoders.

llama.cpp rotates neighbouring pairs (2i, 2i + 1) in files of architecture `llama`, so its
converter reorders the rows of the q and k projections there; `llama_row_order` undoes it. Files
of `qwen2` and `qwen3` keep the Hugging Face order, because llama.cpp rotates halves for them.
"""

from __future__ import annotations

import re

import numpy as np

from helios_jax.models.decoder import DecoderModel

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
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
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def dense_gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    if match := _LAYER.fullmatch(name):
        layer, part, leaf = match.groups()
        return f"blk.{layer}.{_IN_LAYER[part]}.{leaf}"
    part, _, leaf = name.rpartition(".")
    return f"{_TOP[part]}.{leaf}"


def llama_row_order(model: DecoderModel, name: str) -> np.ndarray | None:
    """Where each stored row of a q or k projection (weight or bias) belongs; None for other tensors.

    Within a head of H rows, stored row 2i is row i, and stored row 2i + 1 is row i + H/2.
    """
    match = _LAYER.fullmatch(name)
    heads = {"self_attn.q_proj": model.config.num_heads, "self_attn.k_proj": model.config.num_kv_heads}
    if match is None or match[2] not in heads:
        return None
    head_dim = model.config.head_dim
    stored = np.arange(heads[match[2]] * head_dim)
    head, row = divmod(stored, head_dim)
    return head * head_dim + row // 2 + (row % 2) * (head_dim // 2)
