"""Chat templates: the names they may use, exactly one BOS, errors (T3)."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from helios_jax.errors import RequestError
from helios_jax.testing import ByteTokenizer
from helios_jax.text.template import encode_chat, render_chat
from helios_jax.text.tokenizer import load_tokenizer
from tests.unit.text_toy import GOLDEN

USER = {"role": "user", "content": "hi"}


def rendered(template: str, messages: list[Any] | None = None, **options: Any) -> str:
    return render_chat(ByteTokenizer(), messages or [USER], template=template, **options)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if true %}\n  x\n{% endif %}\n", "  x\n"),  # trim_blocks and lstrip_blocks
        ("{{ {'a': '<é&\\''} | tojson }}", '{"a": "<é&\'"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ bos_token }}{{ eos_token }}", "<bos><eos>"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ mode }}", "fast"),
    ],
)
def test_what_templates_may_use(template: str, expected: str) -> None:
    assert rendered(template, mode="fast") == expected


def test_today() -> None:
    before = datetime.date.today().isoformat()
    assert rendered("{{ strftime_now('%Y-%m-%d') }}") in (before, datetime.date.today().isoformat())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles\n must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[3].content + 'x' }}", "cannot render"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),  # the sandbox: data is not changed
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{% for i in range(1000000000) %}{% endfor %}", "cannot render"),
    ],
)
def test_failures_are_the_requests(template: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        rendered(template)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_a_template_given_by_the_caller_may_be_wrong() -> None:
    with pytest.raises(RequestError, match="not a valid template") as caught:
        rendered("{% for %}")
    assert caught.value.param == "chat_template"


def test_no_template() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(tokenizer, [USER])


def test_unpaired_surrogates_are_the_messages_fault() -> None:
    tokenizer = load_tokenizer(GOLDEN / "text_byte_level")
    with pytest.raises(RequestError, match="surrogate") as caught:
        encode_chat(tokenizer, [{"role": "user", "content": "\ud83d"}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode("\ud83d")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("template", ["{{ bos_token }}x", "x", "{{ bos_token }}{{ bos_token }}x"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_one_bos_where_texts_begin_with_it(template: str, adds_bos: bool) -> None:
    ids = encode_chat(ByteTokenizer(adds_bos=adds_bos), [USER], template=template)
    assert ids == [256] * (1 if adds_bos else template.count("bos_token")) + [ord("x")]


@pytest.mark.parametrize("kind", ["headers", "byte_fallback", "unigram"])
def test_raw_text_that_begins_with_bos_gets_no_second(kind: str) -> None:
    tokenizer = load_tokenizer(GOLDEN / f"text_{kind}")
    assert tokenizer.adds_bos
    for text in ("hi", tokenizer.bos_token + "hi"):
        assert tokenizer.encode(text).count(tokenizer.bos_token_id) == 1
        assert tokenizer.encode(text)[0] == tokenizer.bos_token_id
    assert tokenizer.encode("hi", add_special_tokens=False).count(tokenizer.bos_token_id) == 0


def test_template_by_name_and_for_tools() -> None:
    tokenizer = load_tokenizer(GOLDEN / "text_headers")
    tools = [{"name": "f"}]
    assert render_chat(tokenizer, [USER], tools) == render_chat(tokenizer, [USER], tools, template="tool_use")
    assert render_chat(tokenizer, [USER], tools) != render_chat(tokenizer, [USER], tools, template="default")
    assert render_chat(tokenizer, [USER]) == render_chat(tokenizer, [USER], template="default")
