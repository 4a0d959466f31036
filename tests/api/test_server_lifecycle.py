"""The life of a server: the port before the engine, probes, drain on a signal, and what ends streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from helios_jax.engine.heartbeat import EngineHealth
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.errors import CheckpointError, ConfigError
from helios_jax.server.background import ServerThread
from helios_jax.server.context import ServerLimits
from helios_jax.server.run import bind, run_server
from helios_jax.testing import Gate, fake_async_llm
from tests.api.server_kit import ScriptedEngine, async_test, client_for, error_of, events, fake_client, one_output

TEXT = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 200}


async def nothing(name: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
    yield one_output(name, finish="stop")


@pytest.mark.parametrize(
    ("health", "live", "ready"),
    [
        (EngineHealth(True, True), 200, 200),
        (EngineHealth(True, False, "no step for 61 s"), 200, 503),
        (EngineHealth(False, False, "the engine thread is not running"), 503, 503),
    ],
)
@async_test
async def test_liveness_is_apart_from_readiness(health: EngineHealth, live: int, ready: int) -> None:
    """H1: a stuck engine is not ready but alive; a dead one is neither."""
    engine = ScriptedEngine(nothing)
    engine.health_now = health
    async with client_for(engine) as client:
        assert (await client.get("/health")).status_code == live
        answer = await client.get("/ready")
        work = await client.post(TEXT, json=BODY)
    assert answer.status_code == ready
    if ready == 503:
        assert answer.json()["reason"] == health.reason
        assert health.reason in error_of(work, 503)["message"]
        assert "retry-after" in work.headers


@async_test
async def test_a_stuck_device_call_makes_the_server_unready_in_time_and_idling_does_not() -> None:
    """H1 with the real engine thread held inside a device call."""
    gate = Gate()
    async with fake_client(gate=gate, ready_timeout_s=0.05) as client:
        await asyncio.sleep(0.15)
        assert (await client.get("/ready")).status_code == 200  # idle for three times the limit
        gate.close()
        task = asyncio.create_task(client.post(TEXT, json={"prompt": "a", "max_tokens": 2}))
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200
        gate.open()
        assert (await task).status_code == 200
        assert (await client.get("/ready")).status_code == 200


@async_test
async def test_before_there_is_an_engine() -> None:
    async with client_for(None) as client:
        client.app.state.context.progress = "compile 3/9"  # type: ignore[attr-defined]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json() == {"status": "not ready", "reason": "compile 3/9"}
        assert (await client.get("/metrics")).status_code == 200
        assert set((await client.get("/version")).json()) == {"version"}
        for path in ("/v1/models", "/v1/models/fake"):
            error_of(await client.get(path), 503)
        for path in (TEXT, "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert "compile 3/9" in error_of(await client.post(path, json=BODY), 503)["message"]


def test_the_port_answers_while_the_engine_is_made() -> None:
    may_finish = threading.Event()
    reported = threading.Event()

    def factory(report: Any) -> Any:
        report("compile 1/2")
        reported.set()
        may_finish.wait(30)
        return fake_async_llm()

    with ServerThread(factory, wait_ready=False) as server:
        assert reported.wait(30)
        assert httpx.get(server.url + "/ready").json()["reason"] == "compile 1/2"
        assert httpx.get(server.url + "/health").status_code == 200
        may_finish.set()
        assert server.server.ready.wait(30)
        assert httpx.get(server.url + "/ready").status_code == 200
        assert httpx.post(server.url + TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_what_the_factory_raises_ends_the_server() -> None:
    def factory(report: Any) -> Any:
        raise CheckpointError("no such model")

    with pytest.raises(CheckpointError, match="no such model"):
        run_server(factory, port=0)


def test_a_port_in_use_is_one_clear_error_before_the_model_is_touched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            run_server(lambda report: pytest.fail("the model was touched"), port=port)
    for host, wrong in (("127.0.0.1", 70000), ("no.such.host.invalid", 80)):
        with pytest.raises(ConfigError, match="cannot listen"):
            bind(host, wrong)


def first_event(stream: httpx.Response, lines: Any) -> str:
    return next(line for line in lines if line.startswith("data: "))


def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    gate = Gate()
    with ServerThread(fake_async_llm(gate=gate)) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        gate.close()
        gate.step(4)
        with client.stream("POST", TEXT, json={**BODY, "stream": True, "max_tokens": 20}) as response:
            lines = response.iter_lines()
            first_event(response, lines)
            server.server.request_stop()
            while client.get("/ready").status_code == 200:
                pass
            assert client.get("/ready").json()["reason"] == "draining"
            assert "draining" in error_of(client.post(TEXT, json=BODY), 503)["message"]
            gate.open()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        server.stop()
        assert server.failure is None


@pytest.mark.parametrize("stream", [True, False])
def test_after_the_drain_timeout_what_runs_ends_with_an_error(stream: bool) -> None:
    gate = Gate()
    limits = ServerLimits(drain_timeout_s=0.1)
    with ServerThread(fake_async_llm(gate=gate), limits=limits) as server:
        gate.close()
        if stream:
            gate.step(4)
        results: list[httpx.Response] = []
        body = {**BODY, "stream": stream}
        client = threading.Thread(
            target=lambda: results.append(httpx.post(server.url + TEXT, json=body, timeout=30)), daemon=True
        )
        client.start()
        assert gate.wait_for_frame()
        server.server.request_stop()
        client.join(30)
        gate.open()
    (response,) = results
    if stream:
        assert response.status_code == 200
        last = events(response.text)[-1]
    else:
        last = response.json()
        assert response.status_code == 503
    assert "server stopped" in last["error"]["message"]
    outcome = server.context.metrics.registry.get_sample_value("helios_requests_total", {"outcome": "failed"})
    assert outcome == 1


PROGRAM = """
from helios_jax.server.run import run_server
from helios_jax.testing import fake_async_llm
run_server(lambda report: fake_async_llm(), port=0, announce=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_in_order(sent: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(transport=httpx.HTTPTransport(retries=50), base_url=url) as client:
            while client.get("/ready").status_code != 200:
                pass
            assert client.post(TEXT, json=BODY).status_code == 200
        process.send_signal(sent)
        assert process.stdout.read() == "ended\n"
        assert process.wait(30) == 0


STUCK = """
import threading
from helios_jax.server.run import run_server
run_server(lambda report: threading.Event().wait(), port=0, announce=lambda url: print(url, flush=True))
"""


def test_a_signal_while_preparing_ends_the_process_at_once() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(transport=httpx.HTTPTransport(retries=50), base_url=url) as client:
            assert client.get("/ready").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
