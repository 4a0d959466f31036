"""What the server's tests share: a client over ASGI, an engine that says what a test tells it, SSE reading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx

from helios_jax.engine.heartbeat import EngineHealth
from helios_jax.engine.outputs import CompletionOutput, RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.engine.stats import CheckpointStats, EngineStats, HostTierStats, Totals
from helios_jax.server.app import create_app
from helios_jax.testing import ByteTokenizer, fake_async_llm

Outputs = Callable[[str, SamplingParams], AsyncIterator[RequestOutput]]


def async_test(call: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test on a loop of its own."""

    @functools.wraps(call)
    def test(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(call(*args, **kwargs), 60))  # type: ignore[arg-type]

    return test


@contextlib.asynccontextmanager
async def client_for(engine: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application around the engine, without a socket."""
    app = create_app(engine, **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        client.app = app  # type: ignore[attr-defined]
        yield client


@contextlib.asynccontextmanager
async def fake_client(options: dict[str, Any] | None = None, **engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client in front of the real engine on a fake device."""
    async with fake_async_llm(**engine) as llm, client_for(llm, **(options or {})) as client:
        client.llm = llm  # type: ignore[attr-defined]
        yield client


def events(text: str) -> list[Any]:
    """JSON of each event; asserts the framing and the end mark."""
    assert text.endswith("data: [DONE]\n\n")
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks]


def chat_body(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response; asserts its status and OpenAI's four fields."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def one_output(request_id: str, text: str = "", *, finish: str | None = None, **fields: Any) -> RequestOutput:
    """An output of one choice, one token a character."""
    choice = CompletionOutput(0, text, [ord(c) % 256 for c in text], finish_reason=finish, **fields)
    return RequestOutput(request_id, None, [1], [choice], finished=finish is not None)


class ScriptedEngine:
    """An engine whose outputs, health and faults a test writes down."""

    def __init__(self, outputs: Outputs) -> None:
        self.tokenizer = ByteTokenizer()
        self.model_name, self.max_context, self.vocab_size = "fake", 128, 260
        self.health_now = EngineHealth(True, True, "")
        self.closed = 0
        self.checkpoints = CheckpointStats()
        self.host_tier = HostTierStats()
        self.asked: list[tuple[list[int], tuple[int, ...]]] = []  # prompts, and where messages end in them
        self._outputs = outputs

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        arrival_ns: int | None = None,
        *,
        message_ends: Sequence[int] = (),
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append((list(prompt), tuple(message_ends)))  # type: ignore[arg-type]
        try:
            async for output in self._outputs(request_id or "", params):
                yield output
        finally:
            self.closed += 1

    def health(self) -> EngineHealth:
        return self.health_now

    def stats(self) -> EngineStats:
        return EngineStats(
            running=0,
            waiting=0,
            slots_total=1,
            pages_total=8,
            pages_used=0,
            pages_free=8,
            requests=Totals(),
            scheduler={},
            compiles_after_ready=0,
            checkpoints=self.checkpoints,
            host_tier=self.host_tier,
        )
