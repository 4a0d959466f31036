"""Deltas that a slow reader has not taken are merged, in order, without loss."""

from __future__ import annotations

import asyncio

import pytest

from helios_jax.engine.mailbox import Mailbox, merged
from helios_jax.engine.outputs import CompletionOutput, Logprob, RequestOutput
from helios_jax.engine.params import OutputKind


def delta(*parts: CompletionOutput, finished: bool = False, scored: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], list(parts), finished, prompt_logprobs=[None] if scored else None)


def part(index: int, text: str, reason: str | None = None) -> CompletionOutput:
    ids = list(text.encode())
    return CompletionOutput(index, text, ids, [{i: Logprob(-1.0, 1, chr(i))} for i in ids], reason)


def test_merged_deltas_equal_the_sequence_of_deltas() -> None:
    both = merged(
        merged(delta(part(1, "ab"), scored=True), delta(part(0, "x"), part(1, "c"))),
        delta(part(1, "d", "stop"), finished=True),
    )
    assert [(p.index, p.text, p.finish_reason) for p in both.outputs] == [(0, "x", None), (1, "abcd", "stop")]
    assert both.outputs[1].token_ids == list(b"abcd")
    assert len(both.outputs[1].logprobs or []) == 4
    assert both.finished
    assert both.prompt_logprobs == [None]


def test_reader_takes_what_came_then_the_error() -> None:
    async def run() -> None:
        box = Mailbox(OutputKind.DELTA)
        box.put(delta(part(0, "a")))
        box.put(delta(part(0, "b")))
        box.put(ValueError("died"))
        assert (await box.get()).outputs[0].text == "ab"
        with pytest.raises(ValueError, match="died"):
            await box.get()

    asyncio.run(run())


def test_cumulative_output_replaces_the_one_before() -> None:
    async def run() -> None:
        box = Mailbox(OutputKind.CUMULATIVE)
        box.put(delta(part(0, "a")))
        box.put(delta(part(0, "ab")))
        assert (await box.get()).outputs[0].text == "ab"
        waiter = asyncio.ensure_future(box.get())
        await asyncio.sleep(0)
        assert not waiter.done()
        box.put(delta(part(0, "abc")))
        assert (await waiter).outputs[0].text == "abc"

    asyncio.run(run())
