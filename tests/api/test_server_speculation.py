"""What HTTP clients see does not depend on speculation: text, reasons, log-probabilities, usage (faults P2 to P5)."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helios_jax.testing import FakeDraft, scripted
from tests.api.server_kit import async_test, events, fake_client

TEXT = "the cat sat on the mat and the cat sat on the hat and the cat"
METHODS = {
    "copies": {"spec_method": "copy", "num_draft_tokens": 7},
    "a draft": {"spec_method": "draft", "num_draft_tokens": 3, "draft": FakeDraft(0.8)},
    "heads": {"spec_method": "mtp", "num_draft_tokens": 2, "draft": FakeDraft(0.8)},
}
BODIES: dict[str, dict[str, Any]] = {
    "the model's end": {"max_tokens": 100},
    "max_tokens": {"max_tokens": 23},
    "one token": {"max_tokens": 1},
    "a stop string": {"max_tokens": 100, "stop": ["sat on the h", "never"]},
    "a stop string that stays": {"max_tokens": 100, "stop": "mat", "include_stop_str_in_output": True},
    "a stop token": {"max_tokens": 100, "stop_token_ids": [ord("h")]},
    "log-probabilities": {"max_tokens": 30, "logprobs": 3},
    "several": {"max_tokens": 12, "n": 2, "echo": True},
}


def seen(answer: dict[str, Any]) -> Any:
    return answer["choices"], answer["usage"]


async def answers(**engine: Any) -> tuple[dict[str, Any], float]:
    """What each body is answered, whole and streamed alike, and the accepted proposals."""
    found = {}
    async with fake_client(next_token=scripted(TEXT), max_slots=2, max_context=256, **engine) as client:
        for name, fields in BODIES.items():
            body = {"prompt": "the cat sat on the", "temperature": 0, **fields}
            found[name] = (await client.post("/v1/completions", json=body)).json()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = events((await client.post("/v1/completions", json=body | options)).text)
            assert chunks[-1]["usage"] == found[name]["usage"], name
            for choice in found[name]["choices"]:
                mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
                assert "".join(c["text"] for c in mine) == choice["text"], name
                assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]], name
        stats = client.llm.stats()
        assert stats.pages_used == 0
        return found, sum(counts.accepted for counts in stats.rounds.values())


@pytest.mark.parametrize("width", ["fixed", "adaptive"])
@pytest.mark.parametrize("method", METHODS)
@async_test
async def test_answers_and_usage_are_plain_decodes(method: str, width: str) -> None:
    plain, without = await answers()
    fast, accepted = await answers(**METHODS[method], spec_width=width)
    assert without == 0
    assert accepted > 20
    for name, answer in plain.items():
        assert seen(fast[name]) == seen(answer), name
    reasons = {choice["finish_reason"] for answer in plain.values() for choice in answer["choices"]}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("method", METHODS)
@async_test
async def test_metrics_count_what_the_rounds_of_the_trace_did(method: str, tmp_path: Path) -> None:
    """`flare_speculative_*` by source and lane width, against the frame trace and the answer."""
    trace = tmp_path / "trace.jsonl"
    body = {"prompt": "the cat sat on the", "temperature": 0, "max_tokens": 50}
    engine = {"max_slots": 2, "max_context": 256, "trace": trace, **METHODS[method]}
    # One frame at a time: none is outstanding when the answer is there, and all of them are in both books.
    async with fake_client(next_token=scripted(TEXT * 3), async_scheduling=False, **engine) as client:
        tokens = (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"]
        page = (await client.get("/metrics")).text
    counts: dict[str, collections.Counter[tuple[str, str]]] = collections.defaultdict(collections.Counter)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if family.name.startswith("flare_speculative_") and sample.name.endswith("_total"):
                counts[family.name][sample.labels["source"], sample.labels["width"]] += int(sample.value)
    frames = [json.loads(line) for line in trace.read_text().splitlines()]
    rounds = [frame for frame in frames if frame["kind"] == "speculative"]
    plain = [frame for frame in frames if frame["kind"] == "decode"]
    source = "copy" if method == "copies" else "learned"
    assert counts["flare_speculative_rounds"] == collections.Counter((source, str(f["tokens"])) for f in rounds)
    assert counts["flare_speculative_lanes"] == counts["flare_speculative_rounds"]  # one request, one lane
    total = {name.removeprefix("flare_speculative_"): sum(by.values()) for name, by in counts.items()}
    assert total["emitted"] == total["accepted"] + total["lanes"]
    assert total["emitted"] + len(plain) + 1 == tokens  # the prompt's last chunk makes the first token
    assert 0 < total["accepted"] <= total["offered"] <= total["proposed"]
