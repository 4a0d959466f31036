"""The real engine and real programs of a tiny model, with clients that come and go."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

from helios_jax import AsyncLLM, OutputKind, SamplingParams
from helios_jax.config import EngineConfig
from tests.golden.tiny import golden

NUM_REQUESTS, CANCELLED_SHARE, SEED = 1000, 0.3, 20261130
KINDS = [  # what requests ask for; the first is greedy and compared with its solitary run
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 7, "presence_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2},
    {"max_tokens": 0, "prompt_logprobs": 1},
]


async def _collect(llm: AsyncLLM, prompt: list[int], params: SamplingParams, limit: int | None = None) -> list[int]:
    """The tokens of a request; with `limit`, the client leaves after so many outputs."""
    tokens: list[int] = []
    stream = llm.generate(prompt, dataclasses.replace(params, output_kind=OutputKind.DELTA))
    seen = 0
    try:
        async for output in stream:
            tokens += output.outputs[0].token_ids
            seen += 1
            if limit is not None and seen >= limit:
                break
    finally:
        await stream.aclose()
    return tokens


async def _churn(llm: AsyncLLM) -> tuple[int, list[tuple[tuple[int, ...], int, list[int]]]]:
    """Runs the requests, 32 clients at a time; the cancelled number and the finished greedy outputs."""
    rng = random.Random(SEED)
    clients = asyncio.Semaphore(32)
    greedy: list[tuple[tuple[int, ...], int, list[int]]] = []
    cancelled = 0

    async def one(number: int) -> None:
        nonlocal cancelled
        kind = rng.randrange(len(KINDS))
        prompt = [rng.randrange(3, 128) for _ in range(rng.choice([1, 2, 15, 16, 17, 31, 40, 64, 80]))]
        settings = {"max_tokens": rng.randrange(1, 24), "ignore_eos": True, "seed": number} | KINDS[kind]
        params = SamplingParams(**settings)
        leaves = rng.random() < CANCELLED_SHARE
        after, outputs = rng.random() * 0.05, rng.choice([None, 1, 3])
        async with clients:
            task = asyncio.create_task(_collect(llm, prompt, params, outputs if leaves else None))
            if leaves and outputs is None:
                await asyncio.sleep(after)  # queued, prefilling or decoding: wherever it is by then
                task.cancel()
            cancelled += leaves
            (tokens,) = await asyncio.gather(task, return_exceptions=True)
            if not leaves:
                assert not isinstance(tokens, BaseException), tokens
                if kind == 0:
                    greedy.append((tuple(prompt), params.max_tokens or 0, tokens))

    await asyncio.gather(*(one(i) for i in range(NUM_REQUESTS)))
    return cancelled, greedy


def test_a_thousand_requests_with_a_third_cancelled_leave_nothing_behind(tiny_core_dir: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(core=tiny_core_dir, config=EngineConfig(max_queue=64)) as llm:
            cancelled, greedy = await _churn(llm)
            assert cancelled > 0.25 * NUM_REQUESTS
            assert await llm.drain(30.0)
            stats = llm.stats()
            assert (stats.pages_used, stats.pages_free) == (0, stats.pages_total)
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.requests.arrived == NUM_REQUESTS
            assert stats.requests.reconciles()
            assert stats.compiles_after_ready == 0
            assert len(greedy) > 50
        async with AsyncLLM(core=tiny_core_dir) as alone:
            for prompt, max_tokens, tokens in greedy[::5]:
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                assert await _collect(alone, list(prompt), params) == tokens

    asyncio.run(run())


def test_greedy_tokens_equal_transformers_through_the_whole_engine(tiny_core_dir: Path) -> None:
    """Prompt, 64 tokens: the golden file's, whatever runs beside them."""
    expected = golden("llama3")
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    noise = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)

    async def run() -> list[list[int]]:
        async with AsyncLLM(core=tiny_core_dir) as llm:
            prompt = expected["prompt"].tolist()
            jobs = [_collect(llm, prompt, params)] + [_collect(llm, prompt[: 3 * i + 1], noise) for i in range(7)]
            return list(await asyncio.gather(*jobs))

    assert asyncio.run(run())[0] == expected["greedy"].tolist()
