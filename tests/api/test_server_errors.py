"""Bad input over HTTP: each limit has an error that names it, in OpenAI's form, and neighbours go on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.errors import DeviceError, UnavailableError
from helios_jax.server import completions, tokenization
from helios_jax.server.context import OFFLOAD_SIZE, ServerLimits
from helios_jax.testing import Gate
from tests.api.server_kit import ScriptedEngine, async_test, chat_body, client_for, error_of, fake_client, one_output

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CONTEXT = 64


def text_body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 4, **fields}


@pytest.mark.parametrize("token", [260, 261, -1, 2**63, 2**64])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "prompt"])
@async_test
async def test_ids_out_of_the_vocabulary(token: int, name: str) -> None:
    """V1: refused, and a neighbour's output does not change."""
    values: dict[str, Any] = {"logit_bias": {str(token): 1}, "stop_token_ids": [token], "prompt": [97, token]}
    async with fake_client() as client:
        alone = (await client.post(TEXT, json=text_body(temperature=0))).json()["choices"]
        neighbour = asyncio.create_task(client.post(TEXT, json=text_body(temperature=0)))
        error = error_of(await client.post(TEXT, json=text_body(**{name: values[name]})), 400)
        assert (await neighbour).json()["choices"] == alone
    assert error["param"] == name


@pytest.mark.parametrize(
    ("length", "max_tokens", "status", "generated"),
    [
        (CONTEXT - 1, 1, 200, 1),
        (CONTEXT - 1, 10**9, 200, 1),
        (CONTEXT - 10, None, 200, 10),
        (CONTEXT, 1, 400, 0),
        (CONTEXT + 1, 1, 400, 0),
        (CONTEXT - 2, 2**31, 400, 0),
        (1, 0, 200, 0),
        (1, -1, 400, 0),
    ],
)
@async_test
async def test_lengths_around_the_context(length: int, max_tokens: int | None, status: int, generated: int) -> None:
    """V2: more output than the context leaves is capped; a prompt without room is refused."""
    async with fake_client(max_context=CONTEXT, page_size=16) as client:
        response = await client.post(TEXT, json=text_body(prompt=[97] * length, max_tokens=max_tokens))
    assert response.status_code == status
    if status == 200:
        assert response.json()["usage"]["completion_tokens"] == generated
    elif length >= CONTEXT:
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]


@async_test
async def test_every_limit_one() -> None:
    """V2: one slot, the smallest context, one request in flight, one choice."""
    limits = ServerLimits(max_in_flight=1, max_choices=1)
    async with fake_client({"limits": limits}, max_slots=1, max_context=2, page_size=2, max_queue=0) as client:
        answer = (await client.post(TEXT, json=text_body(prompt="a", max_tokens=9))).json()
        error = error_of(await client.post(TEXT, json=text_body(n=2)), 400)
    assert answer["usage"]["completion_tokens"] == 1
    assert "max_choices" in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("top_k", -2),
        ("top_k", 2**40),
        ("top_k", 1.5),
        ("n", 0),
        ("n", 10**6),
        ("n", True),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", 7),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"97": 101}),
        ("logit_bias", {str(i): 1 for i in range(260)} | {"0" * k + "1": 1 for k in range(1, 19)} | {"9" * 400: 1}),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("seed", "x"),
        ("seed", 2**64),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("suffix", "tail"),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "xml"}),
        ("guided_json", 5),
        ("min_tokens", 3),
        ("max_tokens", -1),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", ["a", 1]),
        ("prompt", [[]]),
        ("prompt", None),
        ("prompt", {"a": 1}),
        ("model", 5),
    ],
)
@async_test
async def test_a_wrong_field_is_named(name: str, value: Any) -> None:
    """V3 and its relatives."""
    async with fake_client() as client:
        error = error_of(await client.post(TEXT, json=text_body(**{name: value})), 400)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-9),
        ("top_k", 2**31 - 1),
        ("top_k", -1),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("user", "me"),
        ("surprise", {"a": [1]}),
        ("best_of", 1),
        ("stop", []),
        ("seed", -5),
        ("stream", None),
    ],
)
@async_test
async def test_odd_values_with_a_defined_meaning(name: str, value: Any) -> None:
    async with fake_client() as client:
        response = await client.post(TEXT, json=text_body(**{name: value}))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [{"role": "user", "content": 5}],
        "hello",
        None,
    ],
)
@async_test
async def test_wrong_messages(messages: Any) -> None:
    async with fake_client() as client:
        error = error_of(await client.post(CHAT, json={"messages": messages}), 400)
    assert "messages" in (error["param"] or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"max_completion_tokens": -1}, "max_tokens"),
    ],
)
@async_test
async def test_wrong_chat_fields(fields: dict[str, Any], param: str) -> None:
    async with fake_client() as client:
        assert error_of(await client.post(CHAT, json=chat_body(**fields)), 400)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "seed": 1e400}',
        b'{"prompt": "a", "x": ' + b"[" * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
)
@async_test
async def test_bodies_that_are_no_request(body: bytes) -> None:
    async with fake_client() as client:
        error_of(await client.post(TEXT, content=body, headers={"content-type": "application/json"}), 400)


@async_test
async def test_what_http_alone_refuses() -> None:
    limits = ServerLimits(max_body_bytes=1000, body_timeout_s=0.05)
    async with fake_client({"limits": limits}) as client:
        unknown = error_of(await client.get("/v1/nothing"), 404)
        wrong_method = await client.get(CHAT)
        media = error_of(await client.post(TEXT, content=b"a=1", headers={"content-type": "text/plain"}), 415)
        large = error_of(await client.post(TEXT, json=text_body(prompt="a" * 2000)), 413)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        chunked = await client.post(TEXT, content=pieces(), headers={"content-type": "application/json"})

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        late = error_of(await client.post(TEXT, content=slow(), headers={"content-type": "application/json"}), 408)
    assert "/v1/nothing" in unknown["message"]
    assert error_of(wrong_method, 405)["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "POST"
    assert "text/plain" in media["message"]
    assert "max_body_bytes = 1000" in large["message"]
    assert error_of(chunked, 413) == large
    assert "body_timeout_s" in late["message"]


@async_test
async def test_the_key_guards_work_but_not_probes() -> None:
    async with fake_client({"api_key": "s3cret"}) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "s3cret"},
            {"authorization": "Bearer é"},
        ):
            encoded = {name: value.encode() for name, value in headers.items()}
            response = await client.post(TEXT, json=text_body(), headers=encoded)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/tokenize", "/detokenize"):
            error_of(await client.post(path, json={}), 401)
        error_of(await client.get("/v1/models"), 401)
        right = {"authorization": "Bearer s3cret"}
        assert (await client.post(TEXT, json=text_body(), headers=right)).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200


@async_test
async def test_full_queue_is_429_with_retry_after() -> None:
    gate = Gate()
    gate.close()
    async with fake_client(gate=gate, max_slots=1, max_queue=1) as client:
        running = [asyncio.create_task(client.post(TEXT, json=text_body())) for _ in range(2)]
        while client.llm.stats().requests.active < 2:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        refused = await client.post(TEXT, json=text_body(stream=True))
        gate.open()
        assert [(await task).status_code for task in running] == [200, 200]
    assert error_of(refused, 429)["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1


@async_test
async def test_too_many_requests_in_flight_is_429_naming_the_limit() -> None:
    hold = asyncio.Event()

    async def outputs(name: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        await hold.wait()
        yield one_output(name, "a", finish="stop")

    async with client_for(ScriptedEngine(outputs), limits=ServerLimits(max_in_flight=1)) as client:
        first = asyncio.create_task(client.post(TEXT, json=text_body()))
        while not client.app.state.context.in_flight:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        assert "max_in_flight" in error_of(await client.post(TEXT, json=text_body()), 429)["message"]
        hold.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize("prompts", ["abc", ["abc", "de"]])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UnavailableError("the engine stopped"), 503, "service_unavailable_error"),
        (DeviceError("out of memory"), 500, "server_error"),
    ],
)
@async_test
async def test_what_the_engine_took_and_lost_has_failed(prompts: Any, error: Exception, status: int, kind: str) -> None:
    async def outputs(name: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        await asyncio.sleep(0)
        raise error
        yield  # a generator

    async with client_for(ScriptedEngine(outputs)) as client:
        for stream in (False, True):
            found = error_of(await client.post(TEXT, json=text_body(prompt=prompts, stream=stream)), status)
            assert found["type"] == kind
        metrics = (await client.get("/metrics")).text
    assert 'helios_requests_total{outcome="failed"} 2.0' in metrics
    assert 'helios_requests_total{outcome="refused"} 0.0' in metrics
    assert "helios_request_seconds_count 2.0" in metrics


@async_test
async def test_long_lists_of_ids_are_walked_in_a_thread_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[threading.Thread] = []

    def note(ids: Sequence[int], vocab_size: int, param: str) -> None:
        walked.append(threading.current_thread())

    monkeypatch.setattr(completions, "check_ids", note)
    monkeypatch.setattr(tokenization, "check_ids", note)
    ids = [97] * (OFFLOAD_SIZE + 1)
    async with fake_client(max_context=64) as client:
        for prompt in (ids, [[97], ids]):
            error = error_of(await client.post(TEXT, json=text_body(prompt=prompt)), 400)
            assert error["code"] == "context_length_exceeded"
            assert str(len(ids)) in error["message"]
        assert walked == []
        assert (await client.post("/detokenize", json={"tokens": ids})).status_code == 200
    assert walked != [threading.current_thread()]
    assert len(walked) == 1


@async_test
async def test_a_strange_request_id_is_replaced() -> None:
    async with fake_client() as client:
        for given in (b"x" * 500, b"a b", "é".encode()):
            response = await client.get("/health", headers={"x-request-id": given})
            assert response.headers["x-request-id"].startswith("req-")


@async_test
async def test_neutral_values_of_another_type_are_not_neutral() -> None:
    async with fake_client() as client:
        for body in ({"min_tokens": False}, {"use_beam_search": 0}, {"tools": {}}):
            error_of(await client.post(TEXT, content=json.dumps(text_body(**body)).encode()), 400)
