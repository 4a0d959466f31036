"""The Python API over the real default model; one prepared core for all (`smollm2_core_dir`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helios_jax import LLM, AsyncLLM, OutputKind, SamplingParams

pytestmark = pytest.mark.slow  # the core takes a minute or more to prepare
PROMPT = "Once upon a time, in a small village by the sea,"
# transformers, float32, greedy, no template: issue 2
GREEDY_IDS = [665, 436, 253, 9357, 1573, 267, 19341, 3365, 17644, 793]
GREEDY_IDS += [30, 909, 4161, 281, 253, 11637, 10000, 411, 253, 3953]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=42, max_tokens=12)
MAX_SLOTS = 8
OPTIONS: list[dict] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": -1.0},
    {"logit_bias": {100: 5.0, 200: -100.0}},
    {"seed": 7},
    {"logprobs": 20},
    {"prompt_logprobs": 20, "max_tokens": 1},
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"stop": ["e"], "stop_token_ids": [30], "ignore_eos": True},
    {"n": 3, "temperature": 1.5},
]


@pytest.fixture(scope="module")
def llm(smollm2_core_dir: Path) -> Iterator[LLM]:
    with LLM(core=smollm2_core_dir, progress=False) as llm:
        yield llm


def test_a_prompt_of_one_token_is_served_as_the_very_first_request(llm: LLM) -> None:
    """Case H2; this test is the first of the module on purpose."""
    (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2
    assert output.prompt_token_ids == [1]


def test_greedy_ids_are_those_of_transformers(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.outputs[0].token_ids == GREEDY_IDS
    assert output.outputs[0].text == llm.tokenizer.decode(GREEDY_IDS)
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt == PROMPT


def test_every_batch_size_gives_the_same_greedy_ids(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=6)
    for size in range(1, MAX_SLOTS + 1):
        outputs = llm.generate([PROMPT] * size, short)
        assert [output.outputs[0].token_ids for output in outputs] == [GREEDY_IDS[:6]] * size
    assert llm.stats().compiles_after_ready == 0


@pytest.mark.parametrize("size", range(1, MAX_SLOTS + 1))
def test_every_sampling_option_compiles_nothing(llm: LLM, size: int) -> None:
    """Case S2: the options of neighbours differ, in every batch."""
    for first in range(0, len(OPTIONS), size):
        chosen = [OPTIONS[(first + i) % len(OPTIONS)] for i in range(size)]
        params = [SamplingParams(**({"max_tokens": 2} | options)) for options in chosen]
        outputs = llm.generate([f"{PROMPT} {i}" for i in range(size)], params)
        for output, options in zip(outputs, chosen, strict=True):
            assert len(output.outputs) == options.get("n", 1)
            assert all(part.finish_reason in ("stop", "length") for part in output.outputs)
    assert llm.stats().compiles_after_ready == 0


def test_seeded_output_is_the_same_alone_beside_neighbours_and_after_a_restart(
    llm: LLM, smollm2_core_dir: Path
) -> None:
    """Case R1: other slots, other programs, another process state."""
    alone = llm.generate(PROMPT, SEEDED)[0].outputs[0].token_ids
    noise = SamplingParams(temperature=1.3, max_tokens=12)
    beside = llm.generate([f"Neighbour {i}" for i in range(7)] + [PROMPT], [noise] * 7 + [SEEDED])
    assert beside[-1].outputs[0].token_ids == alone
    with LLM(core=smollm2_core_dir, progress=False) as restarted:
        assert restarted.generate(PROMPT, SEEDED)[0].outputs[0].token_ids == alone
    assert llm.generate(PROMPT, SamplingParams(seed=43, max_tokens=12))[0].outputs[0].token_ids != alone


def test_scored_prompt_agrees_with_the_logprobs_of_decoding(llm: LLM) -> None:
    """Two programs, one distribution: what decode said of its tokens, scored prefill says of them as a prompt."""
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    part = output.outputs[0]
    whole = output.prompt_token_ids + part.token_ids
    (scored,) = llm.generate([whole], SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    tail = scored.prompt_logprobs[len(output.prompt_token_ids) :]
    for told, decoded, token in zip(tail, part.logprobs or [], part.token_ids, strict=True):
        assert told is not None
        assert told[token].logprob == pytest.approx(decoded[token].logprob, abs=2e-3)
        assert told[token].rank == decoded[token].rank == 1
        assert list(told)[:3] == list(decoded)[:3]


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_prompts_around_page_boundaries_twice(llm: LLM, length: int) -> None:
    """Case U3."""
    prompt = [int(i) for i in np.random.default_rng(length).integers(1000, 40000, length)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.prompt_logprobs == second.prompt_logprobs
    assert len(first.prompt_logprobs or []) == length


def test_forced_token_and_top_k_one_have_finite_logprobs(llm: LLM) -> None:
    """Cases U4 and V3: raw log-probabilities, so nothing becomes -inf by bias or truncation."""
    forced = SamplingParams(logit_bias={1234: 100.0}, top_k=1, max_tokens=2, logprobs=1)
    part = llm.generate(PROMPT, forced)[0].outputs[0]
    assert part.token_ids == [1234, 1234]
    assert all(np.isfinite(entry[1234].logprob) for entry in part.logprobs or [])


def test_stop_string_in_real_text(llm: LLM) -> None:
    full = llm.tokenizer.decode(GREEDY_IDS)
    stop = full[20:24]
    part = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20, stop=stop))[0].outputs[0]
    assert (part.finish_reason, part.stop_reason) == ("stop", stop)
    assert part.text == full[: full.index(stop)]


def test_chat_answers_and_stops_by_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_async_stream_of_the_real_model(smollm2_core_dir: Path) -> None:
    async def run() -> str:
        async with AsyncLLM(core=smollm2_core_dir) as llm:
            params = SamplingParams(temperature=0, max_tokens=6, output_kind=OutputKind.DELTA)
            return "".join([output.outputs[0].text async for output in llm.generate(PROMPT, params)])

    assert asyncio.run(run())
