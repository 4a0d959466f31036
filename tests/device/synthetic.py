"""A model of a real size with random weights: what a device test can make without a download."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from helios_jax.models.fields import Fields
from helios_jax.models.interface import Model, Params
from helios_jax.models.params import leaves, num_params, tree_of
from helios_jax.models.registry import build_model, hf_family, model_config
from helios_jax.models.source import TextSource

SIZES = {  # (hidden, layers, heads, kv heads, head dim, ffn, vocabulary): a 1.7B model, and one for a CPU
    "full": (2048, 28, 16, 8, 128, 6144, 151936),
    "small": (128, 2, 4, 2, 32, 256, 512),
}


def synthetic_config(size: str) -> dict[str, Any]:
    """A qwen3 config.json of the given size."""
    hidden, layers, heads, kv_heads, head_dim, ffn, vocab = SIZES[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


@dataclasses.dataclass(frozen=True)
class SyntheticSource:
    """Random weights made on the device; otherwise what `open_source` gives."""

    size: str
    text: TextSource
    eos_token_ids: tuple[int, ...] = (2,)
    bos_token_id: int | None = 1

    @property
    def name(self) -> str:
        return f"synthetic-{self.size}"

    @property
    def model(self) -> Model:
        return hf_family(("Qwen3ForCausalLM",), self.name).from_hf(Fields(synthetic_config(self.size), self.name))

    @property
    def num_params(self) -> int:
        return num_params(self.model.abstract_params("float32"))

    def model_config(self) -> dict[str, Any]:
        return model_config(self.model)

    def config_digest(self) -> str:
        return hashlib.sha256(json.dumps(self.model_config(), sort_keys=True).encode()).hexdigest()

    def weights_digest(self) -> str:
        return self.size

    def load_params(
        self, dtype: str, put: Callable[[Any], Any] = jax.device_put, progress: Callable[[int, int], None] | None = None
    ) -> Params:
        wanted = leaves(build_model(self.model_config()).abstract_params(dtype))
        placed = []
        for number, (name, leaf) in enumerate(wanted):
            noise = 0.02 * jax.random.normal(jax.random.key(number), leaf.shape, jnp.float32)
            placed.append((name, put((noise + (1.0 if leaf.ndim == 1 else 0.0)).astype(leaf.dtype))))
        return tree_of(placed)

    def text_files(self) -> TextSource:
        return self.text


def synthetic_source(size: str, text: Path) -> SyntheticSource:
    """`text`: a directory with any tokenizer; prompts are ids."""
    return SyntheticSource(size, TextSource("hf", text))
