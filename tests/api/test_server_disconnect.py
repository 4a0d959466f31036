"""C1: a client that goes away, in every phase, streamed or not, over real sockets."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.server.background import ServerThread
from helios_jax.server.context import ServerContext
from helios_jax.testing import Gate, fake_async_llm

PATIENCE_S = 10.0
PREFILL = (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL)


def eventually(condition: Callable[[], Any]) -> None:
    """Wait for another thread to make the condition true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "did not happen"
        threading.Event().wait(0.002)


class Rig:
    """A server on a fake device whose frames a test lets through one by one."""

    def __init__(self, **engine: Any) -> None:
        self.gate = Gate()
        self.llm = fake_async_llm(gate=self.gate, **engine)
        self.server = ServerThread(self.llm)

    def post(self, **body: Any) -> socket.socket:
        """A connection that has sent a whole completion request."""
        host, port = self.server.url.removeprefix("http://").split(":")
        content = json.dumps({"prompt": "abc", "max_tokens": 200, "ignore_eos": True, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}"
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        return connection

    def is_empty(self) -> bool:
        stats = self.llm.stats()
        return stats.running == 0 and stats.waiting == 0 and stats.pages_used == 0 and stats.requests.active == 0

    @property
    def context(self) -> ServerContext:
        return self.server.context

    def left(self) -> None:
        """Wait until the server has noticed one departure, then let the frames in flight end."""
        eventually(lambda: self.metric("helios_requests_total", {"outcome": "cancelled"}) == 1)
        self.gate.step(self.llm.core.limits.frames)  # slot and pages return with the last of them

    def metric(self, name: str, labels: dict[str, str] | None = None) -> float:
        return self.context.metrics.registry.get_sample_value(name, labels or {}) or 0.0

    def prefilled(self) -> int:
        runner: Any = self.llm.core.runner
        return sum(int(f.parts["query_len"].sum()) for f in runner.frames if f.shape.kind in PREFILL)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(max_slots=1, max_context=512, prefill_chunk=16, page_size=16)
    with made.server:
        yield made
        made.gate.open()


@pytest.mark.parametrize("stream", [False, True])
def test_right_after_the_post(rig: Rig, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig.gate.close()
    with caplog.at_level(logging.INFO, logger="helios_jax.access"):
        connection = rig.post(stream=stream)
        assert rig.gate.wait_for_frame()
        connection.close()
        rig.left()  # the frame in flight owns slot and pages until it is complete, no longer
        eventually(rig.is_empty)
    lines = [record.getMessage() for record in caplog.records]
    assert any("status=499" in line and "outcome=cancelled" in line for line in lines)
    assert rig.llm.stats().requests.cancelled == 1
    assert rig.context.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_while_queued(rig: Rig, stream: bool) -> None:
    rig.gate.close()
    first = rig.post(stream=stream)
    assert rig.gate.wait_for_frame()
    second = rig.post(stream=stream)
    eventually(lambda: rig.llm.stats().requests.arrived == 2)
    second.close()
    rig.left()
    eventually(lambda: rig.llm.stats().requests.cancelled == 1)
    assert rig.llm.stats().requests.active == 1
    rig.gate.open()
    assert first.recv(20).startswith(b"HTTP/1.1 200")
    first.close()
    eventually(rig.is_empty)


@pytest.mark.parametrize("stream", [False, True])
def test_during_a_long_prompt_the_rest_is_never_run(rig: Rig, stream: bool) -> None:
    rig.gate.close()
    connection = rig.post(prompt="x" * 400, stream=stream)
    for _ in range(3):
        assert rig.gate.wait_for_frame()
        rig.gate.step()
    eventually(lambda: rig.prefilled() >= 32)
    assert rig.gate.wait_for_frame()
    connection.close()
    submitted = rig.prefilled()
    assert submitted < 400
    rig.left()
    eventually(rig.is_empty)
    assert rig.prefilled() == submitted


def test_while_decoding_a_stream(rig: Rig) -> None:
    rig.gate.close()
    rig.gate.step(6)
    connection = rig.post(stream=True)
    received = b""
    while b"data: " not in received:  # headers may come in a packet of their own
        part = connection.recv(4000)
        assert part, received
        received += part
    connection.close()
    rig.left()
    eventually(rig.is_empty)
    assert rig.llm.stats().requests.generation_tokens < 20


def test_one_of_several_prompts_takes_all_with_it(rig: Rig) -> None:
    rig.gate.close()
    connection = rig.post(prompt=["a", "b", "c"], stream=True)
    assert rig.gate.wait_for_frame()
    eventually(lambda: rig.llm.stats().requests.arrived == 3)
    connection.close()
    rig.left()
    eventually(rig.is_empty)
    assert rig.llm.stats().requests.cancelled == 3


def test_in_the_middle_of_the_body(rig: Rig) -> None:
    host, port = rig.server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"prompt"')
    eventually(lambda: rig.context.in_flight == 1)
    connection.close()
    eventually(lambda: rig.metric("helios_requests_total", {"outcome": "cancelled"}) == 1)
    assert rig.llm.stats().requests.arrived == 0


def test_the_server_goes_on_serving_afterwards(rig: Rig) -> None:
    for stream in (False, True) * 4:
        rig.post(stream=stream).close()
    eventually(lambda: rig.metric("helios_requests_arrived_total") == 8 and rig.context.in_flight == 0)
    eventually(rig.is_empty)
    response = httpx.post(rig.server.url + "/v1/completions", json={"prompt": "abc", "max_tokens": 3})
    assert response.json()["usage"]["completion_tokens"] == 3
