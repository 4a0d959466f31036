"""Two thousand requests on a real server with the real model, a third of whose clients leave: nothing stays behind.

1. Every kind of request is answered once, alone: the reference.
2. All of them again in random order, twelve clients on eight slots. Some leave: they close the socket
   after a random time (queued, prefilling, decoding, finishing), or stop reading a stream in the middle.
3. Whoever stayed got what the solitary request got. Slots, pages, queue, counts, tasks, threads and
   descriptors are what they were before.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helios_jax.config import EngineConfig
from helios_jax.engine.async_llm import AsyncLLM
from helios_jax.server.background import ServerThread

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_KINDS, CLIENTS, LEAVING_SHARE, SEED = 2000, 48, 12, 0.3, 20261130
PATIENCE_S = 600.0
TOPICS = ("the sea", "a lighthouse", "bread", "winter", "the market", "two friends", "a letter", "the road home")
GUIDED: tuple[dict[str, Any], ...] = (
    {"guided_choice": ["yes", "no", "maybe later"]},
    {"guided_regex": "[a-f]{3}-[0-9]{2}"},
    {"guided_json": {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}},
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A request: its body, and whether the answer is read as a stream."""

    body: str
    stream: bool


def jobs(model: str) -> list[Job]:
    """Kinds of requests: greedy and seeded, plain and guided, short and long, streamed and whole."""
    rng = random.Random(SEED)
    made = []
    for number in range(NUM_KINDS):
        stream = number % 2 == 0
        words = rng.choice((3, 8, 20, 60, 110))
        body: dict[str, Any] = {
            "model": model,
            "prompt": " ".join([f"Write about {rng.choice(TOPICS)}."] * (words // 4 + 1)) + f" Part {number}:",
            "max_tokens": rng.choice((1, 2, 4, 6, 9)),
            "ignore_eos": True,
            "stream": stream,
        }
        body |= {"temperature": 0} if number % 3 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
        if number % 5 == 0:
            body |= GUIDED[number // 5 % len(GUIDED)] | {"max_tokens": 12, "ignore_eos": False}
        made.append(Job(json.dumps(body), stream))
    return made


@pytest.fixture(scope="module")
def server(smollm2_core_dir: Path) -> Iterator[ServerThread]:
    llm = AsyncLLM(core=smollm2_core_dir, config=EngineConfig(max_queue=64))
    with ServerThread(llm) as running:
        yield running


async def read(client: httpx.AsyncClient, job: Job, events: int | None = None) -> str:
    """The answer's text and reason; with `events`, the reader leaves after so many."""
    if not job.stream:
        reply = await client.post("/v1/completions", content=job.body)
        assert reply.status_code == httpx.codes.OK, reply.text
        (choice,) = reply.json()["choices"]
        return f"{choice['text']}|{choice['finish_reason']}"
    text, reason = "", None
    async with client.stream("POST", "/v1/completions", content=job.body) as reply:
        assert reply.status_code == httpx.codes.OK, (await reply.aread()).decode()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"] or reason
            if events is not None and (events := events - 1) <= 0:
                return ""
    return f"{text}|{reason}"


async def vanish(url: str, job: Job, after_s: float) -> None:
    """Send the request over a bare socket and close it, without a word, whatever has happened by then."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(job.body.encode())}\r\n\r\n"
    writer.write((head + job.body).encode())
    await asyncio.sleep(after_s)
    writer.transport.abort()


async def churn(url: str, known: list[Job], expected: list[str]) -> collections.Counter[str]:
    """All requests; how they went."""
    rng, gate, seen = random.Random(SEED), asyncio.Semaphore(CLIENTS), collections.Counter[str]()

    async def one(client: httpx.AsyncClient, number: int, how: float, delay_s: float, events: int) -> None:
        async with gate:
            job = known[number]
            if how < LEAVING_SHARE / 2:
                await vanish(url, job, delay_s)
                seen["vanished"] += 1
            elif how < LEAVING_SHARE and job.stream:
                await read(client, job, events)
                seen["stopped reading"] += 1
            elif how < LEAVING_SHARE:
                with pytest.raises(httpx.TimeoutException):
                    await client.post("/v1/completions", content=job.body, timeout=delay_s / 100)
                seen["gave up"] += 1
            else:
                assert await read(client, job) == expected[number], job
                seen["answered"] += 1

    limits = httpx.Limits(max_connections=2 * CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        chances = [
            (rng.randrange(NUM_KINDS), rng.random(), rng.random(), rng.randrange(1, 4)) for _ in range(NUM_REQUESTS)
        ]
        await asyncio.gather(*(one(client, *chance) for chance in chances))
    return seen


def held(server: ServerThread) -> dict[str, Any]:
    """What the process and the engine hold now."""
    stats = server.context.engine.stats()
    scheduler = stats.scheduler
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "active": stats.requests.active,
        "in flight": server.context.in_flight,
        "pages used": stats.pages_used,
        "pages free": stats.pages_free,
        "slots used": scheduler["slots_used"],
        "frames": scheduler["frames_in_flight"],
        "reserved": scheduler.get("pages_reserved"),
        "threads": sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": num_tasks(server),
        "compiles": stats.compiles_after_ready,
    }


def num_tasks(server: ServerThread) -> int:
    """Tasks of the server's event loop, the counting one included."""

    async def count() -> int:
        return len(asyncio.all_tasks())

    loop = server.server._loop
    assert loop is not None
    return asyncio.run_coroutine_threadsafe(count(), loop).result(PATIENCE_S)


def test_two_thousand_requests_leave_nothing_behind(server: ServerThread) -> None:
    known = jobs(server.context.model_names[0])

    async def alone() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            return [await read(client, job) for job in known]

    expected = asyncio.run(alone())
    before = settled(server, None)
    counts = asyncio.run(churn(server.url, known, expected))
    assert counts.total() == NUM_REQUESTS
    assert counts["answered"] > 0.6 * NUM_REQUESTS
    assert min(counts["vanished"], counts["stopped reading"], counts["gave up"]) > 50, counts
    assert settled(server, before) == before
    assert server.context.engine.stats().requests.reconciles()


def settled(server: ServerThread, goal: dict[str, Any] | None) -> dict[str, Any]:
    """What is held once it is `goal`, or has not changed for a while."""
    last, end, same = held(server), time.monotonic() + 30.0, 0
    while last != goal and time.monotonic() < end and (goal is not None or same < 10):
        time.sleep(0.1)
        now = held(server)
        last, same = now, same + 1 if now == last else 0
    return last
