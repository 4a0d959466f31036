"""The detokenizer: characters in pieces, prompts, special tokens (T1 of the fault scenarios)."""

from __future__ import annotations

import pytest

from helios_jax.text.detokenizer import Detokenizer
from helios_jax.text.tokenizer import load_tokenizer
from tests.unit.text_toy import GOLDEN, ListTokenizer


def pieces(tokens: list[bytes], prompt: int = 0, special: tuple[int, ...] = ()) -> list[str]:
    """The first `prompt` tokens are the prompt."""
    detokenizer = Detokenizer(ListTokenizer(tokens, special), range(prompt), True)
    return [*(detokenizer.push(i) for i in range(prompt, len(tokens))), detokenizer.flush()]


@pytest.mark.parametrize(
    "text", ["🙂", "👩‍💻", "👨‍👩‍👧‍👦", "🇩🇪", "안녕", "\u1112\u1161\u11ab", "é", "e\u0301", "\U0010ffff"]
)
def test_byte_by_byte(text: str) -> None:
    found = pieces([bytes([b]) for b in text.encode()])
    assert "".join(found) == text
    assert [p for p in found if p] == list(text), "whole characters, as soon as they are whole"


@pytest.mark.parametrize("kind", ["byte_level", "headers", "byte_fallback", "unigram"])
def test_characters_that_the_vocabulary_has_only_as_bytes(kind: str) -> None:
    tokenizer = load_tokenizer(GOLDEN / f"text_{kind}")
    text = "x 🧑🏽‍🚀 𝕏 \ud55c 漢"
    ids = tokenizer.encode(text)
    assert any(tokenizer.decode_token(i) == "\ufffd" for i in ids)
    detokenizer = Detokenizer(tokenizer, [], True)
    assert "".join([detokenizer.push(i) for i in ids]) == text
    assert detokenizer.flush() == ""


def test_bad_bytes_show_once_and_spoil_nothing_else() -> None:
    assert pieces([b"\xf0\x9f", b"a", b"\xff", b"\xe2\x82", b"\xac", b"\x80"]) == [
        "",
        "\ufffda",
        "\ufffd",
        "",
        "€",
        "\ufffd",
        "",
    ]


def test_unfinished_tail_is_flushed() -> None:
    assert pieces([b"ok\xf0\x9f\x99"]) == ["ok", "\ufffd"]


def test_character_begun_by_the_prompt() -> None:
    assert pieces([b"ab\xf0\x9f", b"\x99", b"\x82!"], prompt=1) == ["", "🙂!", ""]


@pytest.mark.parametrize("after", [[b"plain"], [b""], []])
def test_what_the_prompt_left_unfinished_is_not_shown(after: list[bytes]) -> None:
    assert "".join(pieces([b"ab\xf0\x9f", *after], prompt=1)) == b"".join(after).decode()


def test_special_token_between_the_bytes_of_a_character() -> None:
    assert pieces([b"\xc3", b"<sep>", b"\xa9"], special=(1,)) == ["", "", "é", ""]


def test_space_at_the_start_of_a_text_only() -> None:
    tokenizer = load_tokenizer(GOLDEN / "text_byte_fallback")
    word = tokenizer.encode("in", add_special_tokens=False)
    assert tokenizer.decode_token(word[0]).startswith(" ")
    prompts = {(): "in", (1,): "in", tuple(word): " in"}  # nothing, BOS (skipped), a word
    for prompt, expected in prompts.items():
        detokenizer = Detokenizer(tokenizer, prompt, True)
        assert "".join(detokenizer.push(i) for i in word) == expected


def test_special_tokens_on_request() -> None:
    tokenizer = load_tokenizer(GOLDEN / "text_headers")
    ids = tokenizer.encode("a<|eot|>b")
    for skip, expected in ((True, "ab"), (False, "<|begin|>a<|eot|>b")):
        detokenizer = Detokenizer(tokenizer, [], skip)
        assert "".join(detokenizer.push(i) for i in ids) == expected
