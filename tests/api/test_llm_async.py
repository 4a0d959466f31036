"""AsyncLLM over the fake device: errors before the first output, life, health, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from helios_jax import AsyncLLM, EngineHealth, OutputKind, SamplingParams
from helios_jax.errors import CapacityError, ConfigError, RequestError, UnavailableError
from helios_jax.testing import ByteTokenizer, Gate, expected_tokens, fake_async_llm, hashed_text

LONG = SamplingParams(temperature=0, max_tokens=100, output_kind=OutputKind.DELTA)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def said(prompt: str, count: int) -> str:
    return bytes(expected_tokens(hashed_text, list(prompt.encode()), count)).decode()


async def read(llm: AsyncLLM, prompt: str, params: SamplingParams = LONG) -> str:
    return "".join([output.outputs[0].text async for output in llm.generate(prompt, params)])


def test_many_streams_at_once_are_all_right() -> None:
    async def work() -> None:
        async with fake_async_llm(max_slots=3) as llm:
            prompts = [f"prompt {i}" for i in range(12)]
            texts = await asyncio.gather(*(read(llm, prompt) for prompt in prompts))
            assert texts == [said(prompt, 100) for prompt in prompts]

    run(work())


def test_refusals_come_before_the_first_output_and_are_counted() -> None:
    async def work() -> None:
        gate = Gate()
        gate.close()
        async with fake_async_llm(max_slots=1, max_queue=0, gate=gate) as llm:
            with pytest.raises(RequestError, match="maximum context length"):
                await anext(llm.generate([97] * 256, LONG))
            running = asyncio.ensure_future(read(llm, "a"))
            assert await asyncio.to_thread(gate.wait_for_frame)
            with pytest.raises(CapacityError, match="the queue is full"):
                await anext(llm.generate("b", LONG))
            gate.open()
            await running
            totals = llm.stats().requests
            assert (totals.arrived, totals.refused, totals.finished["length"]) == (3, 2, 1)
            assert totals.reconciles()

    run(work())


def test_a_slow_reader_gets_everything_in_few_outputs() -> None:
    async def work() -> None:
        async with fake_async_llm() as llm:
            stream = llm.generate("abc", LONG)
            first = await anext(stream)
            assert await llm.drain(20)  # the reader sleeps while the engine works
            rest = [output async for output in stream]
            assert len(rest) <= 2
            text = first.outputs[0].text + "".join(output.outputs[0].text for output in rest)
            assert text == said("abc", 100)
            assert rest[-1].finished

    run(work())


def test_abort_by_id_ends_the_stream_with_its_reason() -> None:
    async def work() -> None:
        async with fake_async_llm() as llm:
            outputs = []
            async for output in llm.generate("abc", LONG, "mine"):
                outputs.append(output)
                llm.abort("mine")
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert outputs[-1].request_id == "mine"

    run(work())


def test_life_of_an_engine_in_health() -> None:
    async def work() -> None:
        gate = Gate()
        gate.close()
        gate.step(2)  # initialise and prefill: the first token
        llm = fake_async_llm(gate=gate)
        assert llm.health() == EngineHealth(True, False, "the engine has not been started")
        with pytest.raises(UnavailableError, match="not been started"):
            await anext(llm.generate("a"))
        await llm.start()
        await llm.start()
        assert llm.health() == EngineHealth(True, True)
        assert (llm.model_name, llm.max_context, llm.vocab_size) == ("fake", 256, 260)
        stream = llm.generate("abc", SamplingParams(max_tokens=200))
        await anext(stream)
        closing = asyncio.ensure_future(llm.close())
        while not llm.health().reason:  # until the engine refuses, and is about to be told to stop
            await asyncio.sleep(0)
        gate.step(100)
        with pytest.raises(UnavailableError, match="closed"):
            async for _ in stream:
                pass
        await closing
        assert not llm.health().ready
        await llm.close()
        with pytest.raises(UnavailableError, match="closed"):
            await llm.start()

    run(work())


def test_model_that_cannot_be_loaded_is_an_error_and_stays_one_in_health() -> None:
    async def work() -> None:
        llm = AsyncLLM(model="smollm2", max_slots=65)
        with pytest.raises(ConfigError, match="max_slots must be"):
            await llm.start()
        health = llm.health()
        assert (health.alive, health.ready) == (False, False)
        assert "max_slots must be" in health.reason
        await llm.close()

    run(work())


def test_arrival_time_of_the_server_is_kept() -> None:
    async def work() -> None:
        async with fake_async_llm() as llm:
            (output,) = [
                output
                async for output in llm.generate(
                    "abc", SamplingParams(max_tokens=3, output_kind=OutputKind.FINAL_ONLY), arrival_ns=17
                )
            ]
            metrics = output.metrics
            assert metrics.arrival_ns == 17 < metrics.first_scheduled_ns <= metrics.first_token_ns
            assert metrics.first_token_ns <= metrics.last_token_ns

    run(work())


def test_one_engine_serves_several_event_loops_in_turn() -> None:
    llm = fake_async_llm(tokenizer=ByteTokenizer())
    asyncio.run(llm.start())
    for _ in range(2):
        assert asyncio.run(read(llm, "abc")) == said("abc", 100)
    asyncio.run(llm.close())
