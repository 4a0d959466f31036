"""Speculation in the real engine: copies of a tiny model, output equal to plain decode's.

One core serves all tests: with speculation on it plays rounds, loaded with `spec_width="off"`
it decodes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helios_jax import LLM, AsyncLLM, OutputKind, SamplingParams
from helios_jax.config import EngineConfig

PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9]
PROMPTS = [PROMPT, [7, 8] * 12, list(range(3, 60)), [11], [40, 41, 42, 40, 41, 42, 40]]


@pytest.fixture(scope="module")
def plain(tiny_copy_core_dir: Path) -> Iterator[LLM]:
    with LLM(core=tiny_copy_core_dir, config=EngineConfig(spec_width="off")) as llm:
        yield llm


@pytest.fixture(scope="module", params=["adaptive", "fixed"])
def copying(request: pytest.FixtureRequest, tiny_copy_core_dir: Path) -> Iterator[LLM]:
    with LLM(core=tiny_copy_core_dir, config=EngineConfig(spec_width=request.param)) as llm:
        yield llm


def rounds(llm: LLM) -> int:
    return sum(counts.rounds for counts in llm.stats().rounds.values())


def test_greedy_output_equals_plain_decode_and_rounds_were_played(plain: LLM, copying: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    wanted = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    for _ in range(3):
        assert [output.outputs[0].token_ids for output in copying.generate(PROMPTS, params)] == wanted
    stats = copying.stats()
    counts = list(stats.rounds.values())
    assert sum(c.accepted for c in counts) > 0
    assert all(c.accepted <= c.offered <= c.proposed for c in counts)
    assert all(c.emitted == c.accepted + c.lanes for c in counts)
    assert rounds(plain) == 0
    assert stats.compiles_after_ready == 0
    assert stats.pages_used == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4},
        {"logit_bias": {5: 8.0, 9: -20.0}},
        {"min_p": 0.2},
        {"logprobs": 5},
        {"stop_token_ids": [17, 33, 60]},
    ],
)
def test_settings_mean_what_they_mean_in_plain_decode(plain: LLM, copying: LLM, settings: dict) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **settings)
    for want, got in zip(plain.generate(PROMPTS, params), copying.generate(PROMPTS, params), strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].finish_reason == want.outputs[0].finish_reason
        assert got.outputs[0].stop_reason == want.outputs[0].stop_reason
        for ours, theirs in zip(got.outputs[0].logprobs or [], want.outputs[0].logprobs or [], strict=True):
            assert list(ours) == list(theirs)
            for token, value in ours.items():
                assert value.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)
                assert value.rank == theirs[token].rank


def test_every_output_length_and_the_last_position_of_the_context(plain: LLM, copying: LLM) -> None:
    """max_tokens and the context end inside a block as they do in plain decode."""
    for max_tokens in (1, 2, 3, 4, 5, 7):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        want, got = (llm.generate([PROMPT], params)[0].outputs[0] for llm in (plain, copying))
        assert (got.token_ids, got.finish_reason) == (want.token_ids, "length")
        assert len(got.token_ids) == max_tokens
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    want, got = (llm.generate([PROMPT * 10], params)[0].outputs[0] for llm in (plain, copying))
    assert got.token_ids == want.token_ids
    assert len(got.token_ids) == 128 - 100


def test_a_stop_string_inside_a_block_hides_what_follows(plain: LLM, copying: LLM) -> None:
    text = plain.generate([PROMPT], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0].outputs[0].text
    for start in range(0, min(len(text), 40), 7):
        stop = text[start : start + 3]
        if not stop.strip():
            continue
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop=[stop])
        want, got = (llm.generate([PROMPT], params)[0].outputs[0] for llm in (plain, copying))
        assert (got.text, got.finish_reason, got.stop_reason) == (want.text, want.finish_reason, want.stop_reason)
        assert got.token_ids == want.token_ids


def test_sampled_output_is_reproducible_beside_others(copying: LLM) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=24, seed=seed, ignore_eos=True) for seed in range(4)]
    together = [o.outputs[0].token_ids for o in copying.generate([PROMPT] * 4, params)]
    assert all(len(tokens) == 24 for tokens in together)
    assert len({tuple(tokens) for tokens in together}) == 4


def test_cancellation_in_every_phase_returns_everything(tiny_copy_core_dir: Path, plain: LLM) -> None:
    async def one(llm: AsyncLLM, rng: random.Random, greedy: list) -> None:
        prompt = rng.choice(PROMPTS)
        params = SamplingParams(temperature=rng.choice([0.0, 0.0, 1.0]), max_tokens=rng.randrange(1, 40),
                                ignore_eos=True, output_kind=OutputKind.DELTA)  # fmt: skip
        leave = rng.choice([None, None, 1, 2, 5])
        tokens: list[int] = []
        stream = llm.generate(prompt, params)
        async for number, output in _numbered(stream):
            tokens += output.outputs[0].token_ids
            if leave is not None and number >= leave:
                break
        await stream.aclose()
        if leave is None and params.temperature == 0:
            greedy.append((prompt, params.max_tokens, tokens))

    async def _numbered(stream):
        number = 0
        async for output in stream:
            number += 1
            yield number, output

    async def run() -> list:
        rng, greedy = random.Random(5), []
        async with AsyncLLM(core=tiny_copy_core_dir, config=EngineConfig(max_queue=64)) as llm:
            await asyncio.gather(*(one(llm, rng, greedy) for _ in range(60)))
            assert await llm.drain(60.0)
            stats = llm.stats()
            assert (stats.pages_used, stats.pages_free) == (0, stats.pages_total)
            assert stats.compiles_after_ready == 0
            assert stats.rounds
        return greedy

    for prompt, max_tokens, tokens in asyncio.run(run()):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        assert tokens == plain.generate([prompt], params)[0].outputs[0].token_ids


def test_the_trace_tells_the_capacities_of_each_round(tiny_copy_core_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with LLM(core=tiny_copy_core_dir, config=EngineConfig(trace=trace)) as llm:
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        shapes = {shape.name: shape for shape in llm.engine.core.catalog} if hasattr(llm, "engine") else {}
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    played = [line for line in lines if line["kind"] == "speculative"]
    assert played
    for line in played:
        assert line["b"] >= line["lanes"]
        assert line["d"] <= 3
        assert line["p"] <= line["b"] * line["w"]
        assert {"estimated_ns", "observation_age_ns", "reason", "exploration_credit_ns"} <= set(line)
        if shapes:
            shape = shapes[line["shape"]]
            capacities = (shape.batch_capacity, shape.proposal_depth, shape.token_capacity, shape.packed_capacity)
            assert (line["b"], line["d"], line["w"], line["p"]) == capacities
    assert np.all([line["tokens"] <= line["lanes"] * line["w"] for line in played])
