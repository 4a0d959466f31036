"""Server-sent events: `data: {json}` and a blank line each, `data: [DONE]` at the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
from starlette.types import Send

from helios_jax.engine.outputs import RequestOutput
from helios_jax.server.errors import describe_error
from helios_jax.server.job import Job, Tally
from helios_jax.server.metrics import ServerMetrics
from helios_jax.server.record import NS_PER_S

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the tokens
]


def event(body: bytes) -> bytes:
    """One event; JSON holds no raw line break, so one data line is enough."""
    return b"data: " + body + b"\n\n"


class EventStream:
    """One streamed answer. Headers go out with the first event, so that earlier errors keep their status."""

    def __init__(self, send: Send, metrics: ServerMetrics) -> None:
        self._send = send
        self._metrics = metrics
        self._started = False
        self._encoder = msgspec.json.Encoder()
        self._delivered_ns: dict[tuple[int, int], int] = {}

    async def run(self, job: Job, outputs: AsyncIterator[tuple[int, RequestOutput]], tally: Tally) -> None:
        """Send every delta, then the usage if it was asked for, then the end mark."""
        async for prompt_index, output in outputs:
            tally.add(prompt_index, output)
            chunks = [event(self._encoder.encode(chunk)) for chunk in job.writer.deltas(prompt_index, output)]
            if chunks:
                await self._write(b"".join(chunks))
            self._note_gaps(prompt_index, output)
        usage = tally.finish()
        tail = event(self._encoder.encode(job.writer.usage_chunk(usage))) if job.include_usage else b""
        await self._write(tail + DONE, more=False)

    async def fail(self, error: Exception, request_id: str) -> None:
        """End a started stream with an error event: a status can no longer tell."""
        await self._write(event(describe_error(error, request_id).body) + DONE, more=False)

    def _note_gaps(self, prompt_index: int, output: RequestOutput) -> None:
        now = time.monotonic_ns()
        for choice in output.outputs:
            if not choice.token_ids:
                continue
            key = (prompt_index, choice.index)
            before = self._delivered_ns.get(key)
            if before is not None:
                self._metrics.delivered((now - before) / NS_PER_S)
            self._delivered_ns[key] = now

    async def _write(self, body: bytes, more: bool = True) -> None:
        if not self._started:
            await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            self._started = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
