"""Random bodies: whatever comes in, no answer is a 5xx and every one is JSON or a whole stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helios_jax.server.app import create_app
from helios_jax.server.context import ServerLimits
from helios_jax.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from helios_jax.testing import fake_async_llm
from tests.api.server_kit import events

LIMITS = ServerLimits(max_choices=4)
PATHS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
numbers = st.one_of(
    st.integers(-2, 300), st.sampled_from([2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 1e-9, 1e308]), st.floats(-3, 3)
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8))
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"])},
        optional={
            "content": st.one_of(
                st.text(max_size=12),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=2),
            ),
            "name": scalars,
        },
    ),
    max_size=3,
)
prompts = st.one_of(
    st.text(max_size=20),
    st.lists(st.text(max_size=5), max_size=3),
    st.lists(st.integers(-1, 262), max_size=5),
    st.lists(st.lists(st.integers(0, 259), max_size=4), max_size=2),
)
# Each in its range, so that a good share of the bodies runs; the rest of the fields is anything.
sane = {
    "prompt": prompts,
    "messages": messages,
    "tokens": st.lists(st.integers(-1, 262), max_size=5),
    "max_tokens": st.integers(0, 6),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(min_size=1, max_size=3), max_size=3)),
    "logit_bias": st.dictionaries(st.integers(0, 259).map(str), st.floats(-100, 100), max_size=3),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 5)),
    "top_logprobs": st.integers(0, 5),
    "stop_token_ids": st.lists(st.integers(0, 259), max_size=3),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    names = list(PATHS[path].__struct_fields__)
    required = [name for name in ("prompt", "messages", "tokens") if name in names]
    chosen = draw(st.lists(st.sampled_from([n for n in names if n in sane] + names), max_size=6, unique=True))
    wild = draw(st.integers(0, 3)) == 0
    body = {name: draw(sane[name] if name in sane and not wild else anything) for name in [*required, *chosen]}
    body.update({"max_tokens": 3} if "max_tokens" not in body and "max_tokens" in names else {})
    return body


class Service:
    """One application and loop for all examples."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.llm = fake_async_llm(max_context=64, page_size=16)
        self.runner.run(self.llm.start())
        app = create_app(self.llm, limits=LIMITS)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    def post(self, path: str, content: bytes) -> httpx.Response:
        return self.runner.run(asyncio.wait_for(self.client.post(path, content=content), 30))

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.run(self.llm.close())
        self.runner.close()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service()
    yield made
    assert made.runner.run(made.llm.drain(30))  # what ended last may still be on the device
    stats = made.llm.stats()
    assert stats.pages_used == stats.running == stats.waiting == 0
    made.close()


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert all("error" not in chunk for chunk in events(response.text))
        return

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    answer = json.loads(response.content, parse_constant=refuse)
    if response.status_code != 200:
        assert answer["error"]["message"]


@pytest.mark.parametrize("path", list(PATHS))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_fields(service: Service, path: str, data: st.DataObject) -> None:
    check(service.post(path, json.dumps(data.draw(bodies(path))).encode()))


@pytest.mark.parametrize("path", list(PATHS))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.one_of(st.binary(max_size=40), anything.map(lambda value: json.dumps(value).encode())))
def test_random_bytes(service: Service, path: str, content: bytes) -> None:
    check(service.post(path, content))
