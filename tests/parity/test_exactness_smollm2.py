"""Rounds of SmolLM2 say what plain decode says: a small case of `benchmarks.exactness`.

The whole model with copies in one slot. Compiling is what costs, so programs of several lanes and those
with a draft model have the first two of its layers: the same vocabulary, heads and real prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness import random_draft
from benchmarks.sweep import Played, Sweep, Task, plain_decode
from helios_jax.aot import CoreOptions, prepare
from helios_jax.aot.prepared import PreparedCore
from helios_jax.models.registry import build_model
from helios_jax.models.source import ModelSource, open_source
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.long
TEXTS = (
    "The quick brown fox jumps over the lazy dog. Repeat the sentence: The quick brown fox",
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return",
    "Translate to German: I like to read books about the sea, and about ships.",
    "Question: What is the capital of France? Answer:",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
    "Summary of the meeting: the budget was approved, the budget was approved, the",
)
LAYERS = 2


def cut(layers: int) -> ModelSource:
    """SmolLM2 without the layers behind the first few."""
    whole = open_source("smollm2")
    config = whole.model_config() | {"num_layers": layers, "windows": (None,) * layers}
    return dataclasses.replace(whole, name=f"smollm2-{layers}", model=build_model(config))


def played(core: PreparedCore, count: int, tokens: int) -> list[Played]:
    tokenizer = load_tokenizer(Path(core.source_info.text_path))
    tasks = [Task(str(number), tokenizer.encode(text)) for number, text in enumerate(TEXTS[:count])]
    plain_decode(core, tasks, tokens)
    found = list(Sweep(core, tasks, tokens, seed=3).play())
    assert core.compiles_after_ready() == 0
    assert sorted(one.name for one in found if not one.cancelled) == [task.name for task in tasks]
    assert all(one.tokens == tokens for one in found if not one.cancelled)
    return found


def check(core: PreparedCore, found: Sequence[Played]) -> float:
    """Every round was played, differences are near-ties; the mean tokens of a lane of rounds with proposals."""
    rounds = {shape.name: shape for shape in core.catalog.of_kind(ProgramKind.SPECULATIVE)}
    assert set(rounds) <= {name for one in found for name in one.shapes}
    assert [d for one in found for d in one.differences if not d.is_tie] == []
    offering = [counts for one in found for name, counts in one.shapes.items() if "-d" in name]
    return sum(tokens for _, tokens in offering) / sum(lanes for lanes, _ in offering)


def test_copies_of_the_whole_model(cache_dir: Path) -> None:
    options = CoreOptions(
        max_slots=1, max_context=192, prefill_chunk=64, dtype="float32", spec_method="copy", num_draft_tokens=3
    )
    with prepare("smollm2", options, cache_dir / "exact-smollm2-copy") as core:
        assert 1.5 < check(core, played(core, 2, 96)) < 4


@pytest.mark.parametrize("method", ["copy", "self", "random"])
def test_every_program_of_the_first_layers(cache_dir: Path, method: str) -> None:
    """Rectangles, both ways to allocate, and width one; acceptance high, whole, and none."""
    source = cut(LAYERS)
    extra: dict[str, Any] = {"spec_method": "copy" if method == "copy" else "draft"}
    draft = source if method == "self" else None
    if method == "random":
        directory = random_draft(cache_dir / "random-draft", source.model.vocab_size, 256)
        draft = open_source(directory)
    if draft is not None:
        extra["draft_model"] = draft.name
    extra |= {"max_slots": 1 if method == "self" else 2, "num_draft_tokens": 1 if method == "random" else 3}
    options = CoreOptions(max_context=192, prefill_chunk=64, dtype="float32", **extra)
    with prepare(source, options, cache_dir / f"exact-layers-{method}", draft=draft) as core:
        found = played(core, 6, 112)
        assert any(one.cancelled for one in found)
        low, high = {"copy": (1.5, 4.0), "self": (2.0, 4.0), "random": (0.99, 1.1)}[method]
        assert low < check(core, found) < high
