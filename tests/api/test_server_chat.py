"""Chat over HTTP: answers, streams, usage and log-probabilities."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator

import pytest

from helios_jax.engine.outputs import Logprob, RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.server.replies import MIN_LOGPROB
from helios_jax.testing import ByteTokenizer, scripted
from tests.api.server_kit import (
    ScriptedEngine,
    async_test,
    chat_body,
    client_for,
    error_of,
    events,
    fake_client,
    one_output,
)

CHAT = "/v1/chat/completions"
PROMPT_TOKENS = len("user\nhello" + "\n" + "assistant\n") + 4  # bytes of the template, <bos>, two starts, one end


@async_test
async def test_plain_answer_has_the_form_of_openai() -> None:
    async with fake_client(next_token=scripted("hi there")) as client:
        response = await client.post(CHAT, json=chat_body(max_tokens=50), headers={"x-request-id": "abc"})
    answer = response.json()
    assert response.headers["x-request-id"] == "abc"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi there"}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["prompt_tokens"] == PROMPT_TOKENS
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("n", [1, 2, 3])
@async_test
async def test_stream_says_what_the_plain_answer_says(n: int) -> None:
    """U1, U2: text, reasons and usage by index, usage once at the end with empty choices."""
    body = chat_body(n=n, max_tokens=12, seed=5, temperature=1.0, stop=["a"])
    async with fake_client() as client:
        plain = (await client.post(CHAT, json=body)).json()
        streamed = await client.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = events(streamed.text)
    *deltas, last = chunks
    assert last["choices"] == []
    assert last["usage"] == plain["usage"]
    assert all(chunk["usage"] is None for chunk in deltas)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in plain["choices"]:
        mine = [c for chunk in deltas for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["delta"] == {}
        contents = [c["delta"]["content"] for c in mine[1:-1]]
        assert all(contents)
        assert "".join(contents) == choice["message"]["content"]
    assert len(plain["choices"]) == n


@async_test
async def test_usage_is_absent_from_a_stream_that_did_not_ask() -> None:
    async with fake_client() as client:
        chunks = events((await client.post(CHAT, json=chat_body(stream=True, max_tokens=3))).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@async_test
async def test_logprobs_plain_and_streamed_are_the_same() -> None:
    body = chat_body(max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    async with fake_client() as client:
        plain = (await client.post(CHAT, json=body)).json()["choices"][0]
        chunks = events((await client.post(CHAT, json={**body, "stream": True})).text)
    content = plain["logprobs"]["content"]
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == content
    assert "".join(entry["token"] for entry in content) == plain["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [round(top["logprob"] / -math.log(2)) for top in entry["top_logprobs"]] == [1, 2, 3]  # the fake's law
        assert entry["top_logprobs"][0]["token"] == entry["token"]


@async_test
async def test_logprobs_that_json_cannot_say_are_written_as_the_documented_value() -> None:
    """U4."""

    async def outputs(name: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        entry = {97: Logprob(0.0, 1, "a"), 98: Logprob(-math.inf, 2, "b"), 99: Logprob(math.nan, 3, "c")}
        yield one_output(name, "a", finish="stop", logprobs=[entry])

    async with client_for(ScriptedEngine(outputs)) as client:
        chat = (await client.post(CHAT, json=chat_body(logprobs=True, top_logprobs=3))).json()
        text = (await client.post("/v1/completions", json={"prompt": "x", "logprobs": 3})).json()
    tops = [top["logprob"] for top in chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    assert tops == [0.0, MIN_LOGPROB, MIN_LOGPROB]
    assert text["choices"][0]["logprobs"]["top_logprobs"] == [{"a": 0.0, "b": MIN_LOGPROB, "c": MIN_LOGPROB}]


@async_test
async def test_log_probabilities_of_tokens_without_text_yet_go_out_with_the_next_text() -> None:
    entry = {97: Logprob(-1.0, 1, "a")}

    async def outputs(name: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        yield one_output(name, "", logprobs=[entry])  # half a character
        yield one_output(name, "é", logprobs=[entry])
        yield one_output(name, "", logprobs=[entry], finish="length")

    async with client_for(ScriptedEngine(outputs)) as client:
        chunks = events((await client.post(CHAT, json=chat_body(logprobs=True, stream=True))).text)
    choices = [c for chunk in chunks for c in chunk["choices"]]
    assert [c["delta"].get("content") for c in choices] == ["", "é", "", None]
    assert [len(c["logprobs"]["content"]) if c["logprobs"] else 0 for c in choices] == [0, 2, 1, 0]


@async_test
async def test_content_parts_and_developer_role() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one\ntwo"}]
    async with fake_client() as client:
        first = (await client.post("/tokenize", json={"messages": messages})).json()
        second = (await client.post("/tokenize", json={"messages": plain})).json()
        without = (await client.post("/tokenize", json={"messages": plain, "add_generation_prompt": False})).json()
    assert first == second
    assert first["count"] == len(first["tokens"]) == without["count"] + len("assistant\n") + 1


@async_test
async def test_template_arguments_may_have_any_name() -> None:
    template = "{{ size }}{{ call }}{{ messages[0]['content'] }}"
    async with fake_client() as client:
        client.llm.tokenizer.chat_template = template  # type: ignore[attr-defined]
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"size": "a", "call": "b"}}
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == list(b"abx")


@async_test
async def test_long_inputs_are_encoded_off_the_event_loop() -> None:
    threads = set()

    class Watched(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            threads.add((len(text) > 20_000, threading.current_thread() is threading.main_thread()))
            return super().encode(text, add_special_tokens)

    async with fake_client(tokenizer=Watched()) as client:
        for size in (10, 30_000):
            await client.post("/tokenize", json={"prompt": "x" * size})
            await client.post(CHAT, json=chat_body("x" * size, max_tokens=1))
    assert threads == {(False, True), (True, False)}


@async_test
async def test_a_stop_string_never_leaks_and_stop_reason_names_it() -> None:
    async with fake_client(next_token=scripted("ABCDEFGHIJK")) as client:
        body = chat_body(max_tokens=20, stop="DEFG")
        plain = (await client.post(CHAT, json=body)).json()["choices"][0]
        chunks = events((await client.post(CHAT, json={**body, "stream": True})).text)
        kept = (await client.post(CHAT, json={**body, "include_stop_str_in_output": True})).json()["choices"][0]
    assert (plain["message"]["content"], plain["stop_reason"]) == ("ABC", "DEFG")
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == "ABC"
    assert chunks[-1]["choices"][0]["stop_reason"] == "DEFG"
    assert kept["message"]["content"] == "ABCDEFG"


@async_test
async def test_max_completion_tokens_wins_and_null_means_the_default() -> None:
    async with fake_client(max_context=64) as client:
        both = (await client.post(CHAT, json=chat_body(max_tokens=9, max_completion_tokens=2))).json()
        none = (await client.post(CHAT, json=chat_body(max_tokens=None, temperature=None, n=None, stop=None))).json()
    assert both["usage"]["completion_tokens"] == 2
    assert none["usage"]["total_tokens"] == 64
    assert none["choices"][0]["finish_reason"] == "length"


@async_test
async def test_a_failure_in_the_middle_of_a_stream_is_an_error_event() -> None:
    async def outputs(name: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        yield one_output(name, "a")
        raise RuntimeError("planted: secret detail")

    engine = ScriptedEngine(outputs)
    async with client_for(engine) as client:
        streamed = await client.post(CHAT, json=chat_body(stream=True))
        plain = await client.post(CHAT, json=chat_body())
    *_, last = events(streamed.text)
    assert last["error"]["type"] == "internal_error"
    assert error_of(plain, 500)["code"] == "internal_error"
    assert "secret" not in streamed.text + plain.text
    assert engine.closed == 2


@async_test
async def test_an_output_aborted_by_the_engine_is_no_success() -> None:
    async def outputs(name: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        yield one_output(name, "a")
        yield one_output(name, "", finish="abort")

    async with client_for(ScriptedEngine(outputs)) as client:
        error_of(await client.post(CHAT, json=chat_body()), 503)
        *_, last = events((await client.post(CHAT, json=chat_body(stream=True))).text)
    assert last["error"]["code"] == "unavailable"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@async_test
async def test_usage_says_what_was_reused(path: str, stream: bool) -> None:
    """Of several prompts the sum; of outputs in several deltas what the last one says; None counts as nothing."""
    reused = {"0": [None, 3], "1": [4, 4], "": [5, 6], "2": [None, None]}

    async def outputs(request_id: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        _, _, index = request_id.partition("-")[2].partition("-")
        for number, cached in enumerate(reused[index]):
            output = one_output(request_id, "ab"[number], finish=[None, "stop"][number])
            output.num_cached_tokens = cached
            if stream or output.finished:
                yield output

    body = chat_body() if path == CHAT else {"prompt": ["abc", "de", "f"]}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client_for(ScriptedEngine(outputs)) as client:
        answer = await client.post(path, json=body)
    usage = (events(answer.text)[-1] if stream else answer.json())["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6 if path == CHAT else 7}


@pytest.mark.parametrize("stream", [False, True])
@async_test
async def test_the_engine_is_told_where_messages_end(stream: bool) -> None:
    async def outputs(request_id: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        yield one_output(request_id, "yes", finish="stop")

    engine = ScriptedEngine(outputs)
    messages = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "who?"))]
    async with client_for(engine) as client:
        chat = {"messages": messages, "stream": stream}
        tools = [{"type": "function", "function": {"name": "add"}}]
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat | {"tools": tools})).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "abc", "stream": stream})).status_code == 200
    texts = [ByteTokenizer().decode(ids, skip_special_tokens=False) for ids, _ in engine.asked]
    cuts = [
        ByteTokenizer().decode(ids[a:b], skip_special_tokens=False)
        for ids, ends in engine.asked
        for a, b in zip((0, *ends), ends, strict=False)
    ]
    plain, told, completion = texts
    assert plain == f"{cuts[0]}{cuts[1]}<|im_start|>assistant\n"
    assert cuts[:2] == ["<bos><|im_start|>system\ns<|im_end|>\n", "<|im_start|>user\nwho?<|im_end|>\n"]
    assert told == f"{cuts[2]}{cuts[3]}<|im_start|>assistant\n"
    assert "add" in cuts[2]  # the tools are told in the system message
    assert cuts[3] == cuts[1]
    assert (completion, cuts[4:]) == ("abc", [])
