"""Grammars over a byte vocabulary: what compiles, what is refused and why, and where a matcher stands."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.testing import ByteTokenizer
from helios_jax.text import grammar as grammar_room
from helios_jax.text.grammar import GrammarCompiler, GrammarSpec
from helios_jax.text.grammar_process import PROCESS
from helios_jax.text.grammar_schema import MAX_INDENT, GrammarError
from tests.unit.grammar_kit import EOS, VOCAB, WORDS, accepts, allowed, compiler, ids_of, schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_allows_its_instances_only() -> None:
    person = schema(PERSON)
    assert accepts(person, '{"name": "Ada", "age": 36}')
    assert accepts(person, '{\n  "name": "Ada",\n  "age": 36\n}')
    for text in ('{"name": "Ada"}', '{"name": 1, "age": 36}', '{"name": "Ada", "age": 36, "x": 1}', "[]", "", '"a"'):
        assert not accepts(person, text)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("regex", "[a-f]{2}-[0-9]+"), ["ab-1", "ff-007"], ["ab", "ag-1", "ab-1x"]),
        (GrammarSpec.choice(["yes", "no", 'it "depends"\n']), ["yes", "no", 'it "depends"\n'], ["y", "maybe"]),
        (GrammarSpec("lark", 'start: "a" b+\nb: "(" b ")" | "b"'), ["ab", "a(b)b"], ["a", "a(b"]),
        (GrammarSpec("lark", 'root ::= "x" digit*\ndigit ::= [0-9]'), ["x", "x12"], ["1", "xx"]),
        (GrammarSpec.json_schema({"type": "object"}), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
        (GrammarSpec.json_schema({"enum": [1, "b"]}, whitespace=False), ["1", '"b"'], ["2", "b"]),
        (GrammarSpec.json_schema({"type": "array"}, whitespace=False), ["[1,2]", "[]"], ["[1, 2]", "[ ]"]),
    ],
)
def test_kinds_of_grammars(spec: GrammarSpec, good: list[str], bad: list[str]) -> None:
    grammar = compiler().compile(spec)
    assert all(accepts(grammar, text) for text in good)
    assert not any(accepts(grammar, text) for text in bad)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4, unique=True))
def test_any_text_may_be_a_choice(choices: list[str]) -> None:
    grammar = compiler().compile(GrammarSpec.choice(choices))
    assert all(accepts(grammar, choice) for choice in choices)
    assert not accepts(grammar, "".join(choices) + "!")


def test_whitespace_between_parts_ends_g4() -> None:
    """A model that says nothing but whitespace where it may comes to the end of a valid object."""
    matcher, text = schema({**PERSON, "properties": {"name": {"const": "x"}, "age": {"const": 1}}}).matcher(), b""
    while EOS not in (ids := allowed(matcher)):
        token = next((space for space in b"\n\t\r " if space in ids), ids[0])
        matcher.advance(token)
        text += bytes([token])
    assert json.loads(text) == {"name": "x", "age": 1}
    assert text.count(b"\n") >= 7  # it did like them
    assert max(len(part) for part in text.split(b"\n")) <= MAX_INDENT + len('"name"')


def test_every_end_of_sequence_ends_a_grammar_g5() -> None:
    """A model with three EOS ids: all of them, and only together with the end of the grammar."""
    three = GrammarCompiler(ByteTokenizer(), VOCAB, (257, 259, 258))
    matcher = three.compile(GrammarSpec("regex", "ab?")).matcher()
    assert allowed(matcher) == [ord("a")]
    matcher.advance(ord("a"))
    assert allowed(matcher) == [ord("b"), 257, 258, 259]
    assert matcher.is_complete
    matcher.advance(ord("b"))
    assert matcher.is_over
    assert allowed(matcher) == [257, 258, 259]


def test_ids_without_text_and_special_tokens_are_never_allowed() -> None:
    text = compiler().compile(GrammarSpec("regex", "(.|\n)+")).matcher()
    ids = allowed(text)
    assert set(range(32, 127)) <= set(ids)
    assert not set(ids) & set(range(256, VOCAB))


def test_a_matcher_is_not_used_behind_its_end_g1() -> None:
    matcher = compiler().compile(GrammarSpec.choice(["a"])).matcher()
    assert matcher.allowed([ord("a"), EOS, ord("a")]) == 1
    matcher.advance(ord("a"))
    assert matcher.is_over
    assert matcher.allowed([EOS]) == 0
    assert matcher.error is None
    matcher.advance(ord("a"))
    assert matcher.error is not None
    assert not matcher.is_over
    assert allowed(matcher) == []


def test_a_token_that_the_grammar_refuses_is_its_error() -> None:
    one, other = (schema(PERSON).matcher() for _ in range(2))
    one.advance(ord("x"))
    assert one.error is not None
    assert allowed(one) == []
    one.advance(ord("{"))
    assert other.error is None
    assert allowed(other) == [ord("{")]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_along_proposals_are_those_of_plain_steps(data: st.DataObject) -> None:
    """Proposals of any kind, wrong ones included, leave the matcher where it was."""
    text = b'{"name": "Ada", "age": 36}'
    done = data.draw(st.integers(0, len(text)))
    wrong = data.draw(st.lists(st.sampled_from([*b'{}":, a1', EOS, 270]), max_size=5))
    proposals = [*text[done : done + data.draw(st.integers(0, 6))], *wrong]
    matcher, plain = schema(PERSON).matcher(), schema(PERSON).matcher()
    for token in text[:done]:
        matcher.advance(token)
        plain.advance(token)
    before = allowed(matcher)
    rows = np.zeros((len(proposals) + 1, WORDS), np.uint32)
    matcher.fill_along(rows, proposals)
    count = matcher.allowed(proposals)
    assert matcher.error is None
    assert allowed(matcher) == before
    for depth, token in enumerate([*proposals, None]):
        expected = allowed(plain)
        assert ids_of(rows[depth]) == expected
        if token not in expected or token == EOS:
            break
        assert token is not None
        plain.advance(token)
        count -= 1
    assert count == 0
    assert not rows[depth + 1 :].any()


def nested(levels: int, word: str) -> Any:
    made: Any = {"type": "string"}
    for level in range(levels):
        one = {"type": "object", "properties": {f"a{level}": made}, "required": [f"a{level}"]}
        made = {word: [one, {"type": "object", "properties": {f"b{level}": {"type": "integer"}}}]}
    return made


def chain(length: int) -> Any:
    steps = {
        str(i): {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}, "additionalProperties": False}
        for i in range(length)
    }
    return {"$ref": "#/$defs/0", "$defs": steps | {str(length): True}}


REFUSED: dict[str, tuple[Any, str]] = {
    "20-deep oneOf": (lambda: GrammarSpec.json_schema(nested(20, "oneOf")), "invalid_grammar"),
    "1 MB of properties": (
        lambda: GrammarSpec.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(35000)}}),
        "grammar_too_large",
    ),
    "200 levels": (lambda: GrammarSpec.json_schema('{"items":' * 200 + "true" + "}" * 200), "grammar_too_large"),
    "a chain of references that overflows a stack": (
        lambda: GrammarSpec.json_schema(chain(900)),
        "grammar_too_large",
    ),
    "no JSON": (lambda: GrammarSpec.json_schema('{"type":'), "invalid_grammar"),
    "no schema": (lambda: GrammarSpec.json_schema("[1]"), "invalid_grammar"),
    "an unknown type": (lambda: GrammarSpec.json_schema({"type": "strin"}), "invalid_grammar"),
    "a keyword that is not there": (lambda: GrammarSpec.json_schema({"not": {}}), "invalid_grammar"),
    "nothing is valid": (lambda: GrammarSpec.json_schema(False), "invalid_grammar"),
    "a reference out of the schema": (
        lambda: GrammarSpec.json_schema({"$ref": "http://localhost/x"}),
        "invalid_grammar",
    ),
    "a broken regex": (lambda: GrammarSpec("regex", "(a"), "invalid_grammar"),
    "an unknown rule": (lambda: GrammarSpec("lark", "start: b"), "invalid_grammar"),
    "100,000 parentheses": (lambda: GrammarSpec("regex", "(" * 50000 + ")" * 50000), "invalid_grammar"),
    "a lone surrogate": (lambda: GrammarSpec("regex", "\ud800"), "invalid_grammar"),
    "no choice": (lambda: GrammarSpec.choice([]), "invalid_grammar"),
    "an empty choice": (lambda: GrammarSpec.choice(["a", ""]), "invalid_grammar"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_g3(name: str) -> None:
    make, code = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        compiler().compile(make())
    assert caught.value.code == code
    assert 10 < len(str(caught.value)) < 500


def test_hard_grammars_that_fit_the_limits_work_g3() -> None:
    assert accepts(compiler().compile(GrammarSpec("regex", "(a+)+b")), "a" * 500 + "b")
    tree = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}}
    assert accepts(schema(tree), '{"c": ' * 40 + "{}" + "}" * 40)
    assert not accepts(schema(tree), '{"c": ' * 40 + "1" + "}" * 40)
    deep = schema(nested(20, "anyOf"))
    assert accepts(deep, "".join(f'{{"a{level}": ' for level in reversed(range(20))) + '"x"' + "}" * 20)


def test_a_slow_compilation_is_killed_and_the_next_one_works_g3() -> None:
    """Hundreds of patterns are compared pair by pair: minutes, in a library that cannot be interrupted."""
    slow = {"type": "object", "patternProperties": {f"^a{i}x+": {"type": "string"} for i in range(500)}}
    hasty = GrammarCompiler(ByteTokenizer(), VOCAB, (EOS,), timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        hasty.compile(GrammarSpec.json_schema(slow))
    assert caught.value.code == "grammar_too_slow"
    assert time.monotonic() - started < 30  # it takes a minute and more where it is not stopped
    assert PROCESS._worker is None
    assert accepts(hasty.compile(GrammarSpec.choice(["on we go"])), "on we go")


WRONG_WITH_THE_LIBRARY_ALONE = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1,"\\u0061":"x"}'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1,"a":"x"}'),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061b":"x"}'),
    ({"type": "object", "properties": {"é": {"type": "integer"}}}, '{"\\u00e9":"x"}'),
    ({"type": "string", "pattern": "^a$"}, '"a\\n"'),
    ({"type": "string", "maxLength": 1}, '"\\ud83d\\ude00"'),
]


@pytest.mark.parametrize(("value", "text"), WRONG_WITH_THE_LIBRARY_ALONE)
def test_other_spellings_do_not_get_round_a_schema(value: Any, text: str) -> None:
    assert not accepts(schema(value), text)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "object", "minProperties": 2},
        {"properties": {"minProperties": {"minProperties": 3, "required": ["a"]}}},
        {"const": "a\u0000b"},
        {"oneOf": [{"type": "object"}, {"type": "object"}], "x-guidance": {"coerce_one_of": True}},
        {"properties": {"a\u0001": True}},
    ],
)
def test_schemas_that_compile_into_too_much_are_refused(value: Any) -> None:
    with pytest.raises(GrammarError):
        compiler().compile(GrammarSpec.json_schema(value))
    assert schema({"type": "object", "minProperties": 1})
    assert schema({"type": "object", "required": ["a", "b"], "minProperties": 2})


def test_grammars_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = PROCESS.ask
    monkeypatch.setattr(PROCESS, "ask", lambda question, limit: asked.append(question["text"]) or ask(question, limit))
    monkeypatch.setattr(grammar_room, "MAX_CACHED", 2)
    fresh = GrammarCompiler(ByteTokenizer(), VOCAB, (EOS,))
    specs = [GrammarSpec("regex", letter) for letter in "abc"]
    first = fresh.compile(specs[0])
    assert fresh.compile(specs[0]) is first is fresh.kept(specs[0])
    fresh.compile(specs[1])
    fresh.compile(specs[0])
    fresh.compile(specs[2])  # the second was used the longest ago
    assert [fresh.kept(spec) is not None for spec in specs] == [True, False, True]
    assert asked == ["a", "b", "c"]


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="no end-of-sequence"):
        GrammarCompiler(ByteTokenizer(), VOCAB, ()).compile(GrammarSpec("regex", "a"))
