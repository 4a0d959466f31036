"""Where messages end in conversations, byte by byte: what templates do with histories."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helios_jax.errors import RequestError
from helios_jax.testing import ByteTokenizer
from helios_jax.text.conversation import encode_conversation


def cuts(template: str, *contents: Any, **options: Any) -> list[str]:
    """The text up to each end that is given, without what was up to the one before."""
    messages = [{"role": "user", "content": content} for content in contents]
    conversation = encode_conversation(ByteTokenizer(), messages, template=template, **options)
    assert ByteTokenizer().decode(conversation.token_ids, skip_special_tokens=False) == conversation.text
    places = [0, *conversation.message_ends]
    return [conversation.text[a:b] for a, b in itertools.pairwise(places)]


def test_every_message_ends_before_the_generation_prompt() -> None:
    template = "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
    assert cuts(template, "ab", "c", "def") == ["ab;", "c;", "def;"]
    assert cuts(template, "ab", "c", add_generation_prompt=False) == ["ab;", "c;"]


def test_beginnings_that_the_template_refuses() -> None:
    template = (
        "{% if messages | length < 2 %}{{ raise_exception('too few') }}{% endif %}"
        "{% for m in messages %}{{ m.content }};{% endfor %}"
    )
    assert cuts(template, "ab", "c", "d") == ["ab;c;", "d;"]
    with pytest.raises(RequestError, match="too few"):
        cuts(template, "ab")


def test_history_that_is_rewritten_has_no_ends() -> None:
    assert cuts("{% for m in messages %}{{ m.content if loop.last else '-' }};{% endfor %}", "ab", "cd") == ["-;cd;"]
    assert cuts("{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}", "a", "b") == ["2a;b;"]
    assert cuts("{% for m in messages[-2:] %}{{ m.content }};{% endfor %}", "a", "b", "c") == ["b;c;"]


def test_a_message_that_is_held_back_has_no_end() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if not loop.first %}"
        "[{% if loop.index0 == 1 %}{{ messages[0].content }}|{% endif %}{{ m.content }}]{% endif %}{% endfor %}"
    )
    ids = encode_conversation(ByteTokenizer(), [{"content": c} for c in ("sys", "a", "b")], template=template)
    assert ids.message_ends == (len("_[sys|a]"), len("_[sys|a][b]"))


def test_a_message_without_text_and_one_in_parts() -> None:
    template = (
        "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}>{% endfor %}"
    )
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert cuts(template, "", parts, "d") == ["<>", "<bc>", "<d>"]


def test_the_one_bos_is_counted() -> None:
    for adds_bos in (True, False):
        for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
            tokenizer = ByteTokenizer(adds_bos=adds_bos)
            found = encode_conversation(tokenizer, [{"content": "abc"}], template=template)
            assert found.message_ends == (len(found.token_ids),)
            assert len(found.token_ids) == 3 + (adds_bos or "bos" in template)


def test_reasoning_that_is_dropped_later() -> None:
    """As Qwen3's template: reasoning stays only behind the last question."""
    template = (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}({% if loop.index0 > ns.last or m.role == 'user' %}{{ m.content }}"
        "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}){% endfor %}"
    )
    roles = ("user", "assistant", "user", "assistant")
    texts = ("q", "<think>x</think>a", "r", "<think>y</think>b")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    found = encode_conversation(ByteTokenizer(), messages, template=template)
    ends = [len("(q)"), len("(q)(a)(r)"), len(found.text)]
    assert list(found.message_ends) == ends
