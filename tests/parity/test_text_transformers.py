"""Ids and text equal to transformers', for tiny tokenizers of each kind (tests/golden/make_text.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helios_jax.text.template import encode_chat, render_chat
from helios_jax.text.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = json.loads((GOLDEN / "text_expected.json").read_text())
KINDS = sorted(EXPECTED)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(kind: str) -> Tokenizer:
    return load_tokenizer(GOLDEN / f"text_{kind}")


def test_ids_of_texts(kind: str, tokenizer: Tokenizer) -> None:
    for case in EXPECTED[kind]["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["bare_ids"]


def test_text_of_ids(kind: str, tokenizer: Tokenizer) -> None:
    for case in EXPECTED[kind]["texts"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"]


def chat_arguments(chat: dict[str, Any]) -> dict[str, Any]:
    return dict(chat["options"])


def test_text_of_conversations(kind: str, tokenizer: Tokenizer) -> None:
    for chat in EXPECTED[kind]["chats"].values():
        assert render_chat(tokenizer, **chat_arguments(chat)) == chat["text"]


def test_ids_of_conversations(kind: str, tokenizer: Tokenizer) -> None:
    """Transformers' ids; where the template leaves out the BOS that texts begin with, it is added."""
    for chat in EXPECTED[kind]["chats"].values():
        ids = encode_chat(tokenizer, **chat_arguments(chat))
        assert ids == ([tokenizer.bos_token_id] if kind == "unigram" else []) + chat["ids"]
        if tokenizer.adds_bos:
            assert ids[0] == tokenizer.bos_token_id
            assert ids.count(tokenizer.bos_token_id) == 1


def test_the_kinds_differ_in_who_writes_bos() -> None:
    """The test above would be empty if no tokenizer added BOS, or none left it out."""
    loaded = {kind: load_tokenizer(GOLDEN / f"text_{kind}") for kind in KINDS}
    assert {kind for kind, t in loaded.items() if t.adds_bos} == {"headers", "byte_fallback", "unigram"}
    assert {kind for kind, t in loaded.items() if t.chat_template and "bos_token" in t.chat_template} == {
        "headers",
        "byte_fallback",
    }


def test_saved_files_load_equal(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    for name in ("special_tokens", "chat_templates", "eos_token_ids", "bos_token_id", "adds_bos", "special_ids"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert (again.vocab_size, again.byte_rule) == (tokenizer.vocab_size, tokenizer.byte_rule)
    for case in EXPECTED[kind]["texts"]:
        assert again.encode(case["text"]) == case["ids"]
    for token_id in range(tokenizer.vocab_size + 2):
        assert again.token_bytes(token_id) == tokenizer.token_bytes(token_id)
