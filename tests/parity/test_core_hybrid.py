"""A hybrid model from a checkpoint to the engine's output: heads, mixed programs, slots that are used again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from helios_jax import LLM, SamplingParams
from helios_jax.aot.core import CoreOptions, prepare
from helios_jax.aot.device_state import abstract_state
from helios_jax.aot.memory import make_dims, measure
from helios_jax.config import EngineConfig
from helios_jax.errors import ConfigError
from helios_jax.models.source import open_source
from tests.golden.tiny import golden, tiny_checkpoint

FAMILY = "qwen3_5_hybrid"


@pytest.mark.long
@pytest.mark.parametrize("spec_width", ["fixed"])
def test_greedy_output_is_transformers_in_every_turn_of_a_slot(tmp_path: Path, spec_width: str) -> None:
    """More requests than slots, so each slot is taken over with another's state in it; prompts of several chunks."""
    stored = golden(FAMILY)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    options = CoreOptions(
        max_slots=2, max_context=96, prefill_chunk=16, spec_method="mtp", num_draft_tokens=1, mixed_prefill=True
    )
    prepare(tiny_checkpoint(FAMILY), options, tmp_path / "core").close()
    prompts = [prompt + greedy[:known] for known in (0, 9, 3, 17, 1)]
    params = [SamplingParams(temperature=0, max_tokens=60 - known, ignore_eos=True) for known in (0, 9, 3, 17, 1)]
    with LLM(core=tmp_path / "core", config=EngineConfig(spec_width=spec_width)) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [prompts[i][24:] + out.outputs[0].token_ids for i, out in enumerate(outputs)] == [greedy[:60]] * 5
        stats = llm.stats()
        assert stats.compiles_after_ready == 0
        assert sum(count.offered for count in stats.rounds.values()) > 0


def test_recurrent_rows_are_counted_and_do_not_grow_with_pages() -> None:
    model = open_source(tiny_checkpoint(FAMILY)).model
    options = CoreOptions(max_slots=3, max_context=96).resolve(model)
    dims = make_dims(model, options, 18)
    _, state, page = measure(model, dims, "bfloat16", abstract_state)
    plain = open_source(tiny_checkpoint("qwen3_5")).model
    _, without, _ = measure(plain, dims, "bfloat16", abstract_state)
    each = [4 * 8 * 12 * 4 + 3 * spec.channels * 2 for spec in model.recurrent_layers]
    attending = len(model.attention_layers)
    assert page == attending * 2 * 16 * 2 * 32 * 2
    assert state - without == 4 * sum(each) + (attending - len(plain.attention_layers)) * dims.num_pages * page
    assert math.prod(abstract_state(model, dims, "float32").recurrent[0][1].shape) == 4 * 4 * 8 * 12


def test_a_hybrid_draft_model_is_refused() -> None:
    hybrid = open_source(tiny_checkpoint(FAMILY)).model
    options = CoreOptions(max_slots=1, max_context=96, spec_method="draft", draft_model="small")
    with pytest.raises(ConfigError, match="recurrent layers, whose state a round could not take back"):
        options.resolve(hybrid, hybrid)
