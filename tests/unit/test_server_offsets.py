"""`text_offset` against real tokenizers: each offset is where the text of its token stands in the answer."""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from helios_jax.server.completions import CompletionWriter
from helios_jax.server.offsets import echo_offsets
from helios_jax.server.replies import usage_of
from helios_jax.text.tokenizer import load_tokenizer
from tests.unit.text_toy import GOLDEN

TEXT = "Hello 🧑🏽 漢 x"


def scored(tokenizer: Any, ids: list[int]) -> list[TokenLogprobs]:
    return [{i: Logprob(-1.0, 1, tokenizer.decode_token(i))} for i in ids]


def begins(tokenizer: Any, ids: list[int], skip: bool = True) -> list[int]:
    """Characters that the tokens before each one complete, by decoding every beginning from scratch."""
    return [len(tokenizer.decode(ids[:count], skip_special_tokens=skip).rstrip("\ufffd")) for count in range(len(ids))]


@pytest.mark.parametrize("kind", ["byte_level", "headers", "byte_fallback", "unigram"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_offsets_of_an_output(kind: str, pieces: int) -> None:
    """Plain, or as deltas of which some bring no text: characters split over tokens share their beginning."""
    tokenizer = load_tokenizer(GOLDEN / f"text_{kind}")
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    writer = CompletionWriter(("id", 0, "m"), tokenizer, 1)
    writer.wants_logprobs = True
    step = -(-len(ids) // pieces)
    found: list[int] = []
    for start in range(0, len(ids), step):
        part, last = ids[start : start + step], start + step >= len(ids)
        choice = CompletionOutput(
            0, "x", part, finish_reason="stop" if last else None, logprobs=scored(tokenizer, part)
        )
        for chunk in writer.deltas(0, RequestOutput("r", None, [], [choice], finished=last)):
            assert chunk.choices[0].logprobs is not None
            found += chunk.choices[0].logprobs.text_offset
    assert found == begins(tokenizer, ids)


@pytest.mark.parametrize("kind", ["byte_level", "headers", "byte_fallback", "unigram"])
@pytest.mark.parametrize("as_text", [True, False])
def test_offsets_under_echo(kind: str, as_text: bool) -> None:
    """Special tokens around a text are not in it; those of given ids are."""
    tokenizer = load_tokenizer(GOLDEN / f"text_{kind}")
    ids = tokenizer.encode(TEXT)
    echoed = TEXT if as_text else tokenizer.decode(ids, skip_special_tokens=False)
    offsets = echo_offsets(tokenizer, ids, echoed, as_text)
    assert offsets == begins(tokenizer, ids, skip=as_text)
    writer = CompletionWriter(("id", 0, "m"), tokenizer, 1)
    writer.wants_logprobs, writer.given_as_text, writer.echoed = True, as_text, [echoed]
    tail = tokenizer.encode("y", add_special_tokens=False)[:1]
    choice = CompletionOutput(0, "y", tail, finish_reason="length", logprobs=scored(tokenizer, tail))
    scores: list[TokenLogprobs | None] = [None, *scored(tokenizer, ids)[1:]]
    output = RequestOutput("r", None, ids, [choice], prompt_logprobs=scores, finished=True)
    logprobs = writer.plain([output], usage_of(1, 1, 0)).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [*offsets, len(echoed)]


def test_skipped_specials_of_an_output_take_no_room() -> None:
    tokenizer = load_tokenizer(GOLDEN / "text_byte_level")
    special = min(tokenizer.special_ids)
    a, b = tokenizer.encode("a", add_special_tokens=False)[0], tokenizer.encode("b", add_special_tokens=False)[0]
    for skip, expected in ((True, [0, 1, 1]), (False, [0, 1, 1 + len(tokenizer.decode_token(special))])):
        writer = CompletionWriter(("id", 0, "m"), tokenizer, 1)
        writer.wants_logprobs, writer.skip_special_tokens = True, skip
        ids = [a, special, b]
        choice = CompletionOutput(0, "ab", ids, finish_reason="stop", logprobs=scored(tokenizer, ids))
        made = writer.plain([RequestOutput("r", None, [a], [choice], finished=True)], usage_of(1, 3, 0))
        assert made.choices[0].logprobs is not None
        assert made.choices[0].logprobs.text_offset == expected
