"""Structured outputs and tools over HTTP, in front of the real engine on a fake device."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.errors import RequestError
from helios_jax.server.background import ServerThread
from helios_jax.testing import fake_async_llm, scripted
from tests.api.server_kit import async_test, chat_body, error_of, events, fake_client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
LONG: dict[str, Any] = {"max_context": 2048, "prefill_chunk": 512}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": schema_format(OBJECT, strict=True)}, OBJECT),
        ({"response_format": schema_format(OBJECT)}, OBJECT),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"guided_json": OBJECT}, OBJECT),
        ({"guided_json": json.dumps(OBJECT)}, OBJECT),
        ({"guided_regex": "[12]"}, {"enum": [1, 2]}),
        ({"guided_choice": ["true", "false"]}, {"type": "boolean"}),
        ({"guided_grammar": 'start: "[" "1"{2} "]"'}, {"const": [11]}),
        ({"structured_outputs": {"json": OBJECT}}, OBJECT),
        ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, OBJECT),
        ({"structured_outputs": {"choice": ["null"]}}, {"const": None}),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ],
)
@async_test
async def test_the_forms_of_an_output(fields: dict[str, Any], schema: Any) -> None:
    async with fake_client() as client:
        chat = (await client.post(CHAT, json=chat_body(max_tokens=150, seed=3, **fields))).json()["choices"][0]
        plain = await client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 150, "seed": 3, **fields})
    for text, choice in ((chat["message"]["content"], chat), (plain.json()["choices"][0]["text"], None)):
        jsonschema.validate(json.loads(text), schema)
        assert choice is None or choice["finish_reason"] == "stop"


@async_test
async def test_text_asks_for_nothing() -> None:
    async with fake_client() as client:
        nothing: list[dict[str, Any]] = [{}, {"response_format": {"type": "text"}}, {"guided_json": None}]
        bodies = [chat_body(max_tokens=9, temperature=0, **more) for more in [*nothing, {"structured_outputs": {}}]]
        texts = {(await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"] for body in bodies}
    assert len(texts) == 1


@async_test
async def test_a_stream_says_what_the_plain_answer_says() -> None:
    body = chat_body(max_tokens=150, n=2, temperature=1.0, seed=1, response_format=schema_format(OBJECT))
    async with fake_client() as client:
        plain = (await client.post(CHAT, json=body)).json()
        chunks = events((await client.post(CHAT, json={**body, "stream": True})).text)
    for choice in plain["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        jsonschema.validate(json.loads(choice["message"]["content"]), OBJECT)


def big() -> dict[str, Any]:
    return {"properties": {f"property_{i}": {"type": "string", "description": "x" * 40} for i in range(10_000)}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "unsupported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"response_format": {}}, "response_format.type", None),
        ({"response_format": schema_format({"type": "no such type"})}, "response_format", "invalid_grammar"),
        ({"response_format": schema_format({"not": {}})}, "response_format", "invalid_grammar"),
        ({"response_format": schema_format([])}, "response_format", "invalid_grammar"),
        ({"response_format": schema_format(big())}, "response_format", "grammar_too_large"),
        ({"guided_json": "{"}, "guided_json", "invalid_grammar"),
        ({"guided_regex": "(a"}, "guided_regex", "invalid_grammar"),
        ({"guided_choice": []}, "guided_choice", "invalid_grammar"),
        ({"guided_choice": "yes"}, "guided_choice", "invalid_type"),
        ({"guided_grammar": "start: b"}, "guided_grammar", "invalid_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "unsupported"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "unsupported"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "conflicting_options"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "conflicting_options",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "invalid_value"),
        ({"tools": [NOW, NOW]}, "tools", "invalid_value"),
        ({"tools": [{**NOW, "type": "retrieval"}]}, "tools", "unsupported"),
        ({"tools": [NOW] * 129}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "unsupported"),
        (
            {"tools": [NOW], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
            "conflicting_options",
        ),
        ({"tools": [NOW], "guided_regex": "a"}, "guided_regex", "conflicting_options"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools",
            "invalid_grammar",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "invalid_grammar",
        ),
    ],
)
@async_test
async def test_what_cannot_be_served_is_refused(fields: dict[str, Any], param: str, code: str | None) -> None:
    async with fake_client() as client:
        error = error_of(await client.post(CHAT, json=chat_body(max_tokens=5, **fields)), 400)
        served = await client.post(CHAT, json=chat_body(max_tokens=5))
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert served.status_code == 200


@async_test
async def test_completions_have_no_tools() -> None:
    async with fake_client() as client:
        error = error_of(await client.post(COMPLETIONS, json={"prompt": "a", "tools": [NOW]}), 400)
    assert (error["param"], error["code"]) == ("tools", "unsupported")


@async_test
async def test_streams_keep_their_pace_while_a_grammar_is_compiled_g3() -> None:
    """The slow grammar is refused after its second; a stream goes on through all of it, and others are answered."""
    slow = {"type": "object", "patternProperties": {f"^a{i}x+": {"type": "string"} for i in range(500)}}
    counted: list[RequestOutput] = []
    async with fake_client(grammar_timeout_s=1.0, max_context=8192, num_pages=1024) as client:

        async def stream() -> None:
            params = SamplingParams(max_tokens=8000, ignore_eos=True)
            async for output in client.llm.generate("go", params):  # type: ignore[attr-defined]
                counted.append(output)

        running = asyncio.create_task(stream())
        await client.post(CHAT, json=chat_body(max_tokens=5, guided_choice=["yes"]))  # the worker is there
        before = len(counted)
        refused = await client.post(CHAT, json=chat_body(guided_json=slow))
        between = len(counted) - before
        kept = await client.post(CHAT, json=chat_body(max_tokens=5, guided_choice=["yes"]))
        assert not running.done()
        running.cancel()
    assert error_of(refused, 400)["code"] == "grammar_too_slow"
    assert kept.json()["choices"][0]["message"]["content"] == "yes"
    assert between > 50


# ---- tools


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["required", "named"]
)
@async_test
async def test_a_required_call_is_made(choice: Any) -> None:
    tools = [ADD] if choice == "required" else [NOW, ADD]
    body = chat_body(max_tokens=400, seed=7, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    async with fake_client(**LONG) as client:
        plain = (await client.post(CHAT, json=body)).json()["choices"][0]
        chunks = events((await client.post(CHAT, json={**body, "stream": True})).text)
    (call,) = plain["message"]["tool_calls"]
    assert plain["message"]["content"] is None
    assert plain["finish_reason"] == "tool_calls"
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "add"
    jsonschema.validate(json.loads(call["function"]["arguments"]), ADD["function"]["parameters"])  # type: ignore[index]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [part for c in choices for part in c["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "add"
    assert deltas[0]["id"].startswith("call_")
    assert all(set(part) == {"index", "function"} for part in deltas[1:])
    assert "".join(part["function"]["arguments"] for part in deltas) == call["function"]["arguments"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any(c["delta"].get("content") for c in choices)


@pytest.mark.parametrize("stream", [False, True])
@async_test
async def test_calls_of_the_model_s_own_will(stream: bool) -> None:
    said = f"I will add.\n{CALL}\n{CALL}"
    async with fake_client(**LONG, next_token=scripted(said)) as client:
        bodies = [chat_body(max_tokens=300, seed=3, stream=stream, **more) for more in ({"tools": [ADD]}, {})]
        bodies.append(chat_body(max_tokens=300, seed=3, stream=stream, tools=[ADD], tool_choice="none"))
        answers = [await client.post(CHAT, json=body) for body in bodies]
    for answer, has_tools in zip(answers, (True, False, False), strict=True):
        if stream:
            choices = [chunk["choices"][0] for chunk in events(answer.text)]
            content = "".join(c["delta"].get("content", "") for c in choices)
            calls = {part["index"] for c in choices for part in c["delta"].get("tool_calls", [])}
            reason = choices[-1]["finish_reason"]
        else:
            choice = answer.json()["choices"][0]
            content, reason = choice["message"]["content"], choice["finish_reason"]
            calls = set(range(len(choice["message"].get("tool_calls", []))))
        assert (content, calls, reason) == (
            ("I will add.", {0, 1}, "tool_calls") if has_tools else (said, set(), "stop")
        )


@async_test
async def test_an_answer_in_a_form_or_a_call() -> None:
    """`auto` with a response_format: the model may call, or answer in the form."""
    fields = {"tools": [ADD], "response_format": schema_format(OBJECT), "max_tokens": 300}
    answer = '{"ok": true, "n": 2}'
    found = {}
    for said in (CALL, answer, "Sure: " + answer):
        async with fake_client(**LONG, next_token=scripted(said)) as client:
            found[said] = (await client.post(CHAT, json=chat_body(**fields))).json()["choices"][0]
    assert found[CALL]["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert found[answer]["message"] == {"role": "assistant", "content": answer}
    jsonschema.validate(json.loads(found["Sure: " + answer]["message"]["content"] or "{}"), {"type": "object"})


@async_test
async def test_results_of_calls_go_back_to_the_model() -> None:
    history = [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    async with fake_client(**LONG) as client:
        answer = await client.post(CHAT, json={"messages": history, "tools": [ADD], "max_tokens": 4})
        rows = [frame.parts["tokens"] for frame in client.llm.core.runner.frames if "tokens" in frame.parts]  # type: ignore[attr-defined]
        prompt = b"".join(bytes(row[row < 256].astype("u1")) for row in rows)
        wrong = {**history[1], "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{"}}]}
        error = error_of(await client.post(CHAT, json={"messages": [history[0], wrong]}), 400)
    assert answer.status_code == 200
    assert b"<tool_response>\n2\n</tool_response>" in prompt
    assert b'{"name": "add", "arguments": {"a": 1}}' in prompt
    assert error["param"] == "messages[1].tool_calls"


def test_the_openai_client_parses_forms_and_calls() -> None:
    with ServerThread(fake_async_llm(max_slots=2, **LONG)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)
        common: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
        formed = client.chat.completions.create(**common, response_format=schema_format(OBJECT, strict=True))
        jsonschema.validate(json.loads(formed.choices[0].message.content or ""), OBJECT)
        called = client.chat.completions.create(**common, tools=[ADD], tool_choice="required")
        calls = called.choices[0].message.tool_calls or []
        assert calls[0].function.name == "add"  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="invalid or not supported"):
            client.chat.completions.create(**common, response_format=schema_format({"type": "strin"}))


# ---- the Python interface


def test_params_of_python_have_vllm_s_names() -> None:
    from helios_jax import StructuredOutputsParams

    for wrong in ({}, {"json": "{}", "regex": "a"}, {"choice": "yes"}, {"json": 5}, {"regex": ["a"]}):
        with pytest.raises(RequestError) as caught:
            StructuredOutputsParams(**wrong)  # type: ignore[arg-type]
        assert caught.value.param == "structured_outputs"
    with pytest.raises(RequestError):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@async_test
async def test_generate_takes_structured_outputs() -> None:
    from helios_jax import StructuredOutputsParams

    async with fake_async_llm() as llm:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"), max_tokens=20)
        outputs: list[RequestOutput] = [output async for output in llm.generate("hi", params)]
        assert outputs[-1].outputs[0].text.isdigit()
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        with pytest.raises(RequestError, match="structured_outputs: the grammar is invalid"):
            _ = [output async for output in llm.generate("hi", bad)]
