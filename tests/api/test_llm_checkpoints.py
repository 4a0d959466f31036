"""Reuse on compiled models: whatever is restored, the tokens are those of a prompt that is computed whole.

A hybrid and a plain attention model; float32, greedy. Cases K1 to K6 of the fault list.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax import LLM, EngineConfig, SamplingParams
from helios_jax.aot.core import CoreOptions, prepare
from tests.golden.tiny import tiny_checkpoint, write_checkpoint

PAGE, VOCAB = 16, 128
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
READY = EngineConfig(checkpoint_extra_work_fraction=5.0)
LONGEST = 12_000  # tokens of case K5's longest first turn


@pytest.fixture(scope="module")
def heads_core_dir(cache_dir: Path) -> Path:
    """A tiny Qwen3.5 whose prediction heads propose a token a round: one slot, context 256, chunk 64, 3 state rows."""
    out = cache_dir / "tiny-qwen3_5_hybrid-heads-rows"
    options = CoreOptions(
        max_slots=1, max_context=256, prefill_chunk=64, state_rows=3, spec_method="mtp", num_draft_tokens=1
    )
    prepare(tiny_checkpoint("qwen3_5_hybrid"), options, out).close()
    return out


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("tiny_hybrid_core_dir", marks=pytest.mark.slow),
        pytest.param("heads_core_dir", marks=pytest.mark.slow),
    ],
    ids=["hybrid", "heads"],
)
def core_dir(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def warm(core_dir: Path) -> Iterator[LLM]:
    with LLM(core=core_dir, config=READY, progress=False) as llm:
        llm.generate([prompt(99, 70), prompt(98, 30)], GREEDY)  # durations are known
        yield llm


@pytest.fixture(scope="module")
def cold(core_dir: Path) -> Iterator[LLM]:
    with LLM(core=core_dir, config=READY, enable_prefix_caching=False, progress=False) as llm:
        yield llm


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def asked(ids: list[int], ends: tuple[int, ...]) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "message_ends": ends}


def same(warm: LLM, cold: LLM, ids: list[int], ends: tuple[int, ...], count: int = 8) -> tuple[list[int], int]:
    """The answer, which is the same both ways, and what was reused for it."""
    params = dataclasses.replace(GREEDY, max_tokens=count)
    (mine,), (theirs,) = (llm.generate(asked(ids, ends), params) for llm in (warm, cold))
    assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert mine.num_cached_tokens is not None
    assert theirs.num_cached_tokens is None
    return mine.outputs[0].token_ids, mine.num_cached_tokens


def test_a_chat_of_ten_turns(warm: LLM, cold: LLM) -> None:
    """Case K5."""
    history, ends = list[int](), tuple[int, ...]()
    for turn in range(10):
        before = len(history)
        history += prompt(turn, 6 + turn)
        ends = (*ends, len(history))
        said, cached = same(warm, cold, history, ends)
        assert cached >= (before - len(said) if turn else 0)
        history += said
        ends = (*ends, len(history))
    assert warm.stats().compiles_after_ready == 0


def test_an_abort_at_nine_tenths_an_edit_and_a_shared_system_prompt(warm: LLM, cold: LLM) -> None:
    first = prompt(20, 40)
    heard = []
    for output in warm.stream(asked(first, (40,)), dataclasses.replace(GREEDY, max_tokens=20)):
        heard += output.outputs[0].token_ids
        if len(heard) >= 18:
            break
    history = [*first, *heard, *prompt(21, 5)]
    assert same(warm, cold, history, (40, 40 + len(heard), len(history)))[1] >= 40
    edited = [*first[:25], *prompt(22, 20)]
    said, _ = same(warm, cold, edited, (25, 45))
    assert same(warm, cold, [*edited, *said, 5], (25, 45, 53, 54))[1] >= 45
    system = prompt(23, 33)
    hits = [same(warm, cold, [*system, *prompt(24 + i, 20)], (33, 53))[1] for i in range(3)]
    assert hits[1:] == [33, 33]


def test_codewords_of_concurrent_chats_stay_apart(warm: LLM, cold: LLM) -> None:
    """Cases K4 and K6: more conversations than slots and rows."""
    chats = [[*prompt(30, 10), *prompt(31 + k, 12)] for k in range(4)]
    for _ in range(3):
        prompts = [asked(chat, (10, len(chat))) for chat in chats]
        answers = [[out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)] for llm in (warm, cold)]
        assert answers[0] == answers[1]
        chats = [[*chat, *answer, 7] for chat, answer in zip(chats, answers[0], strict=True)]


def test_checkpoints_at_every_offset_of_a_page(warm: LLM, cold: LLM) -> None:
    """Bounds of pages and of the prefill chunk among them; two different continuations of each."""
    for length in (*range(1, PAGE + 3), 31, 32, 33, 63, 64, 65):
        start = prompt(100 + length, length)
        assert same(warm, cold, [*start, 9], (length, length + 1), 2)[1] == 0
        for seed in (1, 2):
            assert same(warm, cold, [*start, *prompt(seed, 5)], (length, length + 5), 4)[1] >= length


def test_sampled_outputs_and_penalties_do_not_notice(warm: LLM, cold: LLM) -> None:
    """One frame width at a time: a seed gives the same tokens whether its prompt was restored or computed."""
    start = prompt(40, 37)
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **settings)
    for llm in (warm, cold):
        llm.generate(asked([*start, 9], (37, 38)), params)
    answers = [llm.generate(asked([*start, *prompt(41, 6)], (37, 43)), params)[0] for llm in (warm, cold)]
    assert answers[0].num_cached_tokens == 37
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids


@pytest.mark.slow
def test_an_attention_model_reuses_pages_of_every_prompt(tiny_core_dir: Path) -> None:
    """Case K1 and K2: with pages alone, all of what is shared but a part of a page, wherever prompts part."""
    with LLM(core=tiny_core_dir, config=READY, progress=False) as warm:
        cold = LLM(core=tiny_core_dir, enable_prefix_caching=False, progress=False)
        whole = prompt(50, 80)
        assert warm.generate(whole, GREEDY)[0].num_cached_tokens == 0
        assert same(warm, cold, whole, ())[1] == 64
        for shared in (5, 20, 47, 79):
            warm.generate(whole, GREEDY)  # there are few rows: its state is the last to go now
            _, cached = same(warm, cold, [*whole[:shared], 1, *prompt(51 + shared, 9)], ())
            assert shared - PAGE < cached <= shared
        stats = warm.stats()
        assert (stats.compiles_after_ready, stats.pages_used) == (0, 0)
        cold.close()


@pytest.mark.long
def test_turn_two_behind_twelve_thousand_tokens(tmp_path: Path) -> None:
    """Case K5, its longest: the second turn computes its own tokens and the pending one."""
    options = CoreOptions(max_slots=1, max_context=12_288, prefill_chunk=1024, state_rows=2)
    model, out = write_checkpoint("qwen3_next", tmp_path / "model"), tmp_path / "core"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12_288}))
    prepare(model, options, out).close()
    first, second = prompt(60, LONGEST), prompt(61, 20)
    answers = []
    for enabled in (True, False):
        with LLM(core=out, config=READY, enable_prefix_caching=enabled, progress=False) as llm:
            (before,) = llm.generate(asked(first, (LONGEST,)), GREEDY)
            history = [*first, *before.outputs[0].token_ids]
            (after,) = llm.generate(asked([*history, *second], (LONGEST, len(history))), GREEDY)
            answers.append([before.outputs[0].token_ids, after.outputs[0].token_ids])
            assert after.num_cached_tokens == (len(history) - 1 if enabled else None)
            assert llm.stats().compiles_after_ready == 0
    assert answers[0] == answers[1]
