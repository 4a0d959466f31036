"""SmolLM2 with and without mixed programs: the same greedy answers, from prompts that arrive beside running ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios_jax import LLM, RequestOutput, SamplingParams
from helios_jax.aot import CoreOptions, inspect_core, prepare
from helios_jax.aot.manifest import read_manifest
from helios_jax.aot.memory import headroom_bytes
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import Catalog

pytestmark = pytest.mark.long  # eight programs of the real model

PROMPTS = [
    "Once upon a time there was a lighthouse keeper who",
    "The three most common elements in the Earth's crust are",
    "def fibonacci(n):\n    ",
    "A recipe for pancakes. Take two eggs, a cup of milk and a cup of flour. " * 6 + "Then",
    "Dear colleagues,",
    "Water boils at 100 degrees, and",
]


@pytest.fixture(scope="module")
def core_dir(cache_dir: Path) -> Path:
    out = cache_dir / "smollm2-mixed-2x256"
    options = CoreOptions(max_slots=2, max_context=256, prefill_chunk=64, mixed_prefill=True, state_rows=0)
    prepare(open_source("smollm2"), options, out).close()
    return out


def answers(core_dir: Path, mixed: bool) -> tuple[list[RequestOutput], int]:
    """Greedy answers of different lengths, and how many mixed programs ran."""
    with LLM(core=core_dir, mixed_prefill=mixed, progress=False) as llm:
        params = [SamplingParams(temperature=0, max_tokens=12 + 9 * (i % 4), ignore_eos=True) for i in range(12)]
        outputs = llm.generate(PROMPTS * 2, params)
        stats = llm.stats()
        assert (stats.pages_used, stats.running, stats.compiles_after_ready) == (0, 0, 0)
        return outputs, stats.scheduler["programs_by_kind"].get("mixed", 0)


def test_answers_do_not_depend_on_mixed_programs(core_dir: Path) -> None:
    (joint, ran), (apart, never) = answers(core_dir, True), answers(core_dir, False)
    assert never == 0
    assert ran > 0
    assert [o.outputs[0].token_ids for o in joint] == [o.outputs[0].token_ids for o in apart]
    assert [o.outputs[0].text for o in joint] == [o.outputs[0].text for o in apart]


def test_the_headroom_holds_the_temporaries_that_xla_reports(core_dir: Path) -> None:
    catalog = Catalog(read_manifest(core_dir).catalog)
    largest = max(row.temp_bytes for row in inspect_core(core_dir))
    assert largest <= headroom_bytes(catalog, open_source("smollm2").model) < 64 * 2**20 + 4 * largest
