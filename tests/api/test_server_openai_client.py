"""The real openai client against a real server on a fake device."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from helios_jax.server.background import ServerThread
from helios_jax.testing import fake_async_llm

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with ServerThread(fake_async_llm(max_slots=4), api_key="key") as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0, timeout=30)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "helios-jax"


def test_chat_plain_and_streamed(client: openai.OpenAI) -> None:
    options = {"model": "fake", "messages": MESSAGES, "max_tokens": 8, "seed": 1, "n": 2}
    plain = client.chat.completions.create(**options)  # type: ignore[call-overload]
    texts = ["", ""]
    reasons: dict[int, str] = {}
    usage = None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in plain.choices]
    assert reasons == {0: "length", 1: "length"}
    assert usage == plain.usage


def test_chat_logprobs_and_extensions(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content or []] == [2] * 4


def test_completion_with_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    assert answer.choices[0].text.startswith("abc")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == 5


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
