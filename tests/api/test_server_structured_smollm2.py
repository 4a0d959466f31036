"""Structured outputs and tools with SmolLM2 through the server and the openai client: a small model's are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from helios_jax.engine.async_llm import AsyncLLM
from helios_jax.server.background import ServerThread
from helios_jax.text.grammar_schema import MAX_INDENT

pytestmark = pytest.mark.long

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "married"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(smollm2_core_dir: Path) -> Iterator[openai.OpenAI]:
    with ServerThread(AsyncLLM(core=smollm2_core_dir)) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=300)
        stats = server.context.engine.stats()
        assert stats.compiles_after_ready == 0
        assert (stats.running, stats.pages_used) == (0, 0)


def ask(text: str) -> dict[str, Any]:
    return {"model": "", "messages": [{"role": "user", "content": text}], "temperature": 0}


def test_a_schema_s_answer_is_valid(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(
        **ask("Invent a person who lives in Rome. Answer as JSON."), response_format=form, max_tokens=120
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PERSON)


@pytest.mark.parametrize(
    ("liked", "least"), [(("\n", "\n\n"), "\n"), ((" ",), " " * MAX_INDENT)], ids=["lines", "spaces"]
)
def test_a_prompt_that_likes_whitespace_gets_valid_json_g4(
    client: openai.OpenAI, liked: tuple[str, ...], least: str
) -> None:
    """Whitespace is bounded however much the model is asked for it: a line and an indentation between two parts."""
    text = "Write JSON with very many empty lines between all of its parts.\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n"
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    bias = {token: 20.0 for token in ids_of(client, liked)}
    answer = client.chat.completions.create(**ask(text), response_format=form, max_tokens=300, logit_bias=bias)
    content = answer.choices[0].message.content or ""
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(content), PERSON)
    between = re.sub(r'"[^"]*"', '""', content)  # a string may hold as many spaces as its schema allows
    assert "\n\n" not in between
    assert " " * (MAX_INDENT + 1) not in between
    assert between.count(least) >= 8, content


def ids_of(client: openai.OpenAI, texts: tuple[str, ...]) -> list[str]:
    """Ids of those texts that are one token."""
    base = str(client.base_url).removesuffix("/v1/")
    answers = [client._client.post(f"{base}/tokenize", json={"prompt": text}).json() for text in texts]
    return [str(answer["tokens"][0]) for answer in answers if answer["count"] == 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_valid(client: openai.OpenAI, stream: bool) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    question = ask("What is the weather in Paris, in celsius?")
    if stream:
        name, arguments, reason = "", "", None
        for chunk in client.chat.completions.create(**question, **fields, stream=True):
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or []:
                    name += (call.function.name if call.function else None) or ""
                    arguments += (call.function.arguments if call.function else None) or ""
    else:
        choice = client.chat.completions.create(**question, **fields).choices[0]
        (call,) = choice.message.tool_calls or []
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason  # type: ignore[union-attr]
    assert (name, reason) == ("get_weather", "tool_calls")
    jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])


def test_plain_requests_do_not_notice_the_grammars_beside_them_g6(client: openai.OpenAI) -> None:
    def plain(text: str) -> str | None:
        return client.chat.completions.create(**ask(text), max_tokens=16).choices[0].message.content

    def guided(text: str) -> str | None:
        extra = {"guided_choice": ["a red apple", "a green pear"]}
        return client.chat.completions.create(**ask(text), max_tokens=16, extra_body=extra).choices[0].message.content

    texts = ["Name a fruit.", "Name a colour.", "Count to five."]
    alone = [plain(text) for text in texts]
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(guided, text) for text in texts]
        beside = [pool.submit(plain, text) for text in texts]
        assert [future.result() for future in beside] == alone
        assert {future.result() for future in others} <= {"a red apple", "a green pear"}
