"""Tools in prompts and calls in outputs: what models are told, and what is read from any cut of their text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.testing import ByteTokenizer
from helios_jax.text.grammar import GrammarSpec
from helios_jax.text.grammar_schema import GrammarError
from helios_jax.text.template import render_chat
from helios_jax.text.tokenizer import load_tokenizer
from helios_jax.text.tool_parser import CallParser, Piece
from helios_jax.text.tools import MAX_CALLS, adapt, call_grammar, takes_tools
from tests.unit.grammar_kit import accepts, compiler

GOLDEN = Path(__file__).parents[1] / "golden"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HISTORY = [
    {"role": "user", "content": "one plus?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_template_without_tools_tells_them_in_the_system_part() -> None:
    tokenizer = ByteTokenizer()
    assert not takes_tools(tokenizer)
    messages, tools = adapt(tokenizer, [{"role": "system", "content": "Be kind."}, *HISTORY], [ADD, NOW])
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be kind.\n\n")
    assert json.dumps(ADD["function"]) in messages[0]["content"]
    assert messages[2]["content"] == CALL
    assert messages[3]["content"] == "<tool_response>\n2\n</tool_response>"
    alone, _ = adapt(tokenizer, HISTORY[:1], [NOW])
    assert [message["role"] for message in alone] == ["system", "user"]
    assert "now" in render_chat(tokenizer, alone)


def test_a_template_with_tools_gets_them_as_they_are() -> None:
    tokenizer = load_tokenizer(GOLDEN / "text_headers")
    assert takes_tools(tokenizer)
    messages, tools = adapt(tokenizer, HISTORY, [ADD])
    assert (messages, tools) == (HISTORY, [ADD])
    assert adapt(tokenizer, HISTORY, [])[1] is None


def test_the_grammar_of_calls() -> None:
    one = compiler().compile(call_grammar([ADD, NOW], parallel=False))
    several = compiler().compile(call_grammar([ADD, NOW], parallel=True))
    for grammar in (one, several):
        assert accepts(grammar, CALL)
        assert accepts(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
        for wrong in ("", "Sure!", CALL.replace("add", "sub"), CALL.replace("1", '"1"'), CALL + "\n"):
            assert not accepts(grammar, wrong)
    assert not accepts(one, f"{CALL}\n{CALL}")
    assert accepts(several, "\n".join([CALL] * MAX_CALLS))
    assert not accepts(several, "\n".join([CALL] * (MAX_CALLS + 1)))
    either = compiler().compile(
        call_grammar([ADD], parallel=False, answer=GrammarSpec.json_schema({"type": "boolean"}))
    )
    assert accepts(either, "true")
    assert accepts(either, CALL)
    assert not accepts(either, "1")


def test_references_in_parameters_are_within_their_tool() -> None:
    parameters = {"properties": {"x": {"$ref": "#/$defs/d"}}, "required": ["x"], "$defs": {"d": {"enum": [7]}}}
    tool = {"function": {"name": 'f"g', "parameters": parameters}}
    grammar = compiler().compile(call_grammar([ADD, tool], parallel=False))
    assert accepts(grammar, '<tool_call>\n{"name": "f\\"g", "arguments": {"x": 7}}\n</tool_call>')
    assert not accepts(grammar, '<tool_call>\n{"name": "f\\"g", "arguments": {"x": 8}}\n</tool_call>')


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": ["object", "null"]}])
def test_parameters_are_an_object(parameters: Any) -> None:
    with pytest.raises(GrammarError, match="must be an object"):
        call_grammar([{"function": {"name": "f", "parameters": parameters}}], parallel=True)


Found = tuple[str, list[tuple[str, Any]]]  # text, and calls with decoded arguments


def gather(pieces: list[Piece]) -> Found:
    text, calls = "", []
    for piece in pieces:
        text += piece.content
        if piece.name is not None:
            assert piece.call == len(calls)
            calls.append((piece.name, ""))
        elif piece.call is not None:
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


CASES: dict[str, Found] = {
    "Hello <b>world</b>, 1 < 2 \n": ("Hello <b>world</b>, 1 < 2 \n", []),
    CALL: ("", [("add", {"a": 1})]),
    f"Let me see.\n\n{CALL}\n": ("Let me see.", [("add", {"a": 1})]),
    f"{CALL}\n{CALL.replace('1', '2')} done": (" done", [("add", {"a": 1}), ("add", {"a": 2})]),
    '<tool_call>{"name":"f","parameters":{"s":"}\\"</tool_call>{","t":[{}]}}</tool_call>': (
        "",
        [("f", {"s": '}"</tool_call>{', "t": [{}]})],
    ),
    '<tool_call>[{"name": "f", "arguments": {}}, {"arguments": {"x": null}, "name": "g"}]</tool_call>': (
        "",
        [("f", {}), ("g", {"x": None})],
    ),
    '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>': ("", [("f", {"x": 1})]),
    "<tool_call>no JSON</tool_call>!": ("<tool_call>no JSON</tool_call>!", []),
    '<tool_call>{"name": "f"}</tool_call>': ('<tool_call>{"name": "f"}</tool_call>', []),
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>': (
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        [],
    ),
    "a <tool_call> that does not end": ("a <tool_call> that does not end", []),
    "almost <tool_cal": ("almost <tool_cal", []),
    ' {"name": "add", "parameters": {"a": 3}}': ("", [("add", {"a": 3})]),
    '[{"name": "add", "arguments": {"a": 3}}, {"name": "now", "arguments": {}}]': (
        "",
        [("add", {"a": 3}), ("now", {})],
    ),
    '{"name": "Ada", "arguments": {"a": 3}}': ('{"name": "Ada", "arguments": {"a": 3}}', []),
    '{"a": 1}': ('{"a": 1}', []),
    "[1, 2": ("[1, 2", []),
    "": ("", []),
    " \n": (" \n", []),
}


@pytest.mark.parametrize("text", CASES)
def test_calls_are_read_from_an_output(text: str) -> None:
    parser = CallParser({"add", "now"})
    assert gather(parser.feed(text) + parser.finish()) == CASES[text]
    assert parser.calls == len(CASES[text][1])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_what_is_read_does_not_depend_on_the_cuts(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser, pieces = CallParser({"add", "now"}), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.feed(text[start:end])
    assert gather(pieces + parser.finish()) == CASES[text]


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='<tool_call>/{}[]":,\\ naemrgus1', max_size=80), st.data())
def test_no_text_is_lost_or_made_up(text: str, data: st.DataObject) -> None:
    """Whatever the output: text without calls comes out as it is."""
    cut = data.draw(st.integers(0, len(text)))
    parser = CallParser({"add"}, bare=False)
    pieces = parser.feed(text[:cut]) + parser.feed(text[cut:]) + parser.finish()
    if not parser.calls:
        assert "".join(piece.content for piece in pieces) == text


def test_arguments_are_passed_on_while_they_come() -> None:
    parser = CallParser({"add"})
    seen = [parser.feed(char) for char in CALL]
    begun = next(i for i, pieces in enumerate(seen) if pieces)
    assert CALL[: begun + 1].endswith('"arguments": {')
    assert sum(bool(pieces) for pieces in seen) == len('{"a": 1}')


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    parser = CallParser({"add"})
    pieces = parser.feed(CALL[:-20]) + parser.finish()
    assert [piece.name for piece in pieces if piece.name] == ["add"]
    assert '{"a": 1}'.startswith("".join(piece.arguments for piece in pieces))
