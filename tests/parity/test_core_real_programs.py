"""A core of the real programs and a real (tiny, random) family: made, loaded, and run at prime sizes.

The core that was loaded in place of its model must compute bit for bit what the one that was
compiled did, update its state in place, and compile nothing after ready.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helios_jax.aot.abi import completion_layout, control_layout
from helios_jax.aot.core import CoreOptions, PreparedCore, load_core, prepare
from helios_jax.aot.report import ProgramStatus
from helios_jax.models.fields import Fields
from helios_jax.models.params import leaves, num_params, tree_of
from helios_jax.models.registry import hf_family, model_config
from helios_jax.models.source import TextSource
from helios_jax.scheduler.catalog import ProgramKind

CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
OPTIONS = CoreOptions(
    max_slots=1, max_context=37, prefill_chunk=31, num_pages=3, state_rows=0
)  # primes; 3 pages hold 48 tokens


@dataclasses.dataclass(frozen=True)
class RandomSource:
    """A llama of CONFIG with random weights."""

    directory: Path
    name: str = "tiny"
    eos_token_ids: tuple[int, ...] = (2,)
    bos_token_id: int | None = 1

    @property
    def model(self) -> Any:
        return hf_family(("LlamaForCausalLM",), self.name).from_hf(Fields(CONFIG, self.name))

    @property
    def num_params(self) -> int:
        return num_params(self.model.abstract_params("float32"))

    def model_config(self) -> dict[str, Any]:
        return model_config(self.model)

    def config_digest(self) -> str:
        return hashlib.sha256(json.dumps(self.model_config(), sort_keys=True).encode()).hexdigest()

    def weights_digest(self) -> str:
        return "seed 7"

    def load_params(self, dtype: str, put: Any = jax.device_put, progress: Any = None) -> Any:
        rng = np.random.default_rng(7)
        named = leaves(self.model.abstract_params(dtype))
        return tree_of(
            (name, put(rng.normal(float(leaf.ndim == 1), 0.3, leaf.shape).astype(leaf.dtype))) for name, leaf in named
        )

    def text_files(self) -> TextSource:
        return TextSource("hf", self.directory)


def run(core: PreparedCore, prompt: list[int], steps: int) -> list[tuple[int, float]]:
    """Greedy tokens after `prompt`, each with its log-probability, through initialise, prefill, decode."""
    table = np.arange(1, core.dims.pages_per_slot + 1, dtype=np.int32)
    results = []

    def submit(kind: ProgramKind, **values: Any) -> None:
        shape = core.catalog.of_kind(kind)[0]
        ints, floats, fields = control_layout(shape, core.dims).new()
        for name, value in values.items():
            fields[name][:] = value
        done = completion_layout(shape, core.dims).split(*core.execute(shape, ints, floats).wait()[:2])
        assert done["slot"].tolist() == [0]
        if kind is not ProgramKind.INITIALIZE:
            assert done["status"].tolist() == [0]
            results.append((int(done["token"][0]), float(done["logprob"][0])))

    submit(
        ProgramKind.INITIALIZE, prompt_len=len(prompt), bias_ids=-1, top_p=1.0, repetition_penalty=1.0, seed=[[3, 4]]
    )
    bucket = core.catalog.of_kind(ProgramKind.PREFILL)[0].token_capacity
    tokens = np.pad(np.asarray(prompt, np.int32), (0, bucket - len(prompt)))
    submit(ProgramKind.PREFILL, query_len=len(prompt), sample=1, want_logprobs=1, page_table=table, tokens=tokens)
    for _ in range(steps - 1):
        submit(ProgramKind.DECODE, want_logprobs=1, page_table=table)
    return results


@pytest.mark.slow
def test_a_core_of_real_programs_is_the_same_made_loaded_and_reset(tmp_path: Path) -> None:
    source = RandomSource(tmp_path / "model")
    source.directory.mkdir()
    (source.directory / "tokenizer.json").write_text("{}")
    prompt = [1, *range(5, 32)]  # 28 tokens; with 9 more the context of 37 is full
    with prepare(source, OPTIONS, tmp_path / "core") as made:
        assert all(line.status is ProgramStatus.COMPILED for line in made.report)
        assert all(line.alias_bytes == line.donated_bytes == made.memory.state_bytes for line in made.report)
        assert made.dims.pages_per_slot * made.dims.page_size >= 37
        first = run(made, prompt, steps=9)
        made.reset()
        assert run(made, prompt, steps=9) == first
        assert made.compiles_after_ready() == 0
    with load_core(tmp_path / "core") as loaded:  # the model comes from the manifest alone
        assert all(line.status is ProgramStatus.LOADED for line in loaded.report)
        assert run(loaded, prompt, steps=9) == first
        assert loaded.compiles_after_ready() == 0
    assert len({token for token, _ in first}) > 1
    assert all(logprob <= 0 for _, logprob in first)
