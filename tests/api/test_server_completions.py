"""Completions over HTTP: kinds of prompt, echo, log-probabilities, several outputs; tokenize and models."""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.testing import scripted
from tests.api.server_kit import async_test, error_of, events, fake_client

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "count"), [("abc", 1), (["abc", "xyz"], 2), ([97, 98, 99], 1), ([[97, 98, 99], [120]], 2)]
)
@async_test
async def test_every_kind_of_prompt(prompt: Any, count: int) -> None:
    async with fake_client() as client:
        answer = (await client.post(PATH, json={"prompt": prompt, "max_tokens": 4, "temperature": 0})).json()
        alone = (await client.post(PATH, json={"prompt": "abc", "max_tokens": 4, "temperature": 0})).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 4 * count


@async_test
async def test_default_is_sixteen_tokens() -> None:
    async with fake_client() as client:
        answer = (await client.post(PATH, json={"prompt": "abc"})).json()
    assert answer["usage"]["completion_tokens"] == 16


@async_test
async def test_stream_of_several_prompts_and_outputs_equals_the_plain_answer() -> None:
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 7, "seed": 3, "echo": True, "logprobs": 2}
    async with fake_client(max_slots=3) as client:
        plain = (await client.post(PATH, json=body)).json()
        text = await client.post(PATH, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events(text.text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    for choice in plain["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [v for c in mine for v in (c["logprobs"] or {name: []})[name]] == choice["logprobs"][name]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("length", [15, 16, 17, 32])
@async_test
async def test_echo_scores_the_prompt(max_tokens: int, length: int) -> None:
    """U3 at the form of the answer: prompts around page borders, sent twice."""
    prompt = "abcdefgh" * 4
    body = {"prompt": prompt[:length], "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
    async with fake_client(page_size=16) as client:
        answers = [(await client.post(PATH, json=body)).json() for _ in range(2)]
    choices = [answer["choices"][0] for answer in answers]
    assert choices[0] == choices[1]
    assert choices[0]["text"][:length] == prompt[:length]
    logprobs = choices[0]["logprobs"]
    assert len(logprobs["tokens"]) == length + max_tokens
    assert "".join(logprobs["tokens"]) == choices[0]["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == list(range(length + max_tokens))
    assert answers[0]["usage"]["completion_tokens"] == max_tokens
    assert choices[0]["finish_reason"] == "length"


@async_test
async def test_prompt_logprobs_have_vllms_form() -> None:
    async with fake_client() as client:
        answer = (await client.post(PATH, json={"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 1})).json()
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [entry[str(ord(c))]["decoded_token"] for entry, c in zip(rest, "bc", strict=True)] == ["b", "c"]


@async_test
async def test_echo_of_ids_without_logprobs() -> None:
    async with fake_client(next_token=scripted("!")) as client:
        answer = (await client.post(PATH, json={"prompt": [104, 105], "echo": True})).json()
    assert answer["choices"][0]["text"] == "hi!"


@async_test
async def test_seed_is_honoured() -> None:
    body = {"prompt": "abc", "seed": 42, "max_tokens": 12}
    async with fake_client() as client:
        first, second = [(await client.post(PATH, json=body)).json()["choices"][0]["text"] for _ in range(2)]
        other = (await client.post(PATH, json={**body, "seed": 43})).json()["choices"][0]["text"]
    assert first == second != other


@async_test
async def test_logit_bias_with_string_keys_and_ignore_eos() -> None:
    async with fake_client(next_token=scripted("ab")) as client:
        body = {"prompt": "q", "max_tokens": 5}
        biased = (await client.post(PATH, json={**body, "logit_bias": {"120": 100}})).json()
        ignoring = (await client.post(PATH, json={**body, "ignore_eos": True})).json()
        stopped = (await client.post(PATH, json={**body, "stop_token_ids": [98]})).json()
    assert biased["choices"][0]["text"] == "xxxxx"
    assert ignoring["usage"]["completion_tokens"] == 5
    assert stopped["choices"][0]["stop_reason"] == 98


@async_test
async def test_tokenize_and_detokenize_round_trip() -> None:
    async with fake_client() as client:
        ids = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        text = (await client.post("/detokenize", json={"tokens": ids["tokens"]})).json()
        for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 1}, {"messages": []}):
            error_of(await client.post("/tokenize", json=body), 400)
        for tokens in ([260], [-1], [2**63], "x", [1.5]):
            error_of(await client.post("/detokenize", json={"tokens": tokens}), 400)
    assert ids["tokens"] == [104, 195, 169]
    assert ids["count"] == 3
    assert len(ids["token_strs"]) == 3
    assert text == {"prompt": "hé"}


@async_test
async def test_models() -> None:
    names = {"served_model_names": ("org/name", "alias")}
    async with fake_client(names, max_context=64) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/org/name")).json()
        missing = await client.get("/v1/models/fake")
        unknown = await client.post(PATH, json={"prompt": "a", "model": "fake"})
        known = await client.post(PATH, json={"prompt": "a", "model": "alias"})
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/name", "alias"]
    assert one["max_model_len"] == 64
    assert one["object"] == "model"
    for response in (missing, unknown):
        assert error_of(response, 404)["code"] == "model_not_found"
    assert known.json()["model"] == "alias"
