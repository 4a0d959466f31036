"""Grammars in the real engine over the fake device: every mode of decoding, mixed company, preemption, failures."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from helios_jax.engine.outputs import CompletionOutput, RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.engine.structured import StructuredOutputsParams
from helios_jax.errors import RequestError
from helios_jax.scheduler.types import Constraint
from helios_jax.testing import EngineRig, scripted
from helios_jax.text.grammar import Matcher

OBJECT = {
    "type": "object",
    "properties": {
        "n": {"type": "string", "maxLength": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["n", "size"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": OBJECT, "disable_any_whitespace": True},
    {"regex": "[a-f]{3}-[0-9]{2}"},
    {"choice": ["yes", "no", "maybe later"]},
    {"grammar": 'start: "(" start ")" | "x"{1,3}'},
]
MODES = [
    pytest.param({"spec_method": "copy", "mixed_prefill": True}, id="copies and mixed frames"),
    *(
        pytest.param(mode, marks=pytest.mark.slow, id=str(mode))
        for mode in ({}, {"spec_method": "copy"}, {"spec_method": "draft"}, {"spec_method": "mtp", "frames": 1})
    ),
]
Asks = list[tuple[str, dict[str, Any] | None]]


def form(**asked: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**asked)


def check(text: str, asked: dict[str, Any]) -> None:
    """A complete output has the form that was asked for; judged without llguidance."""
    if "json" in asked:
        jsonschema.validate(json.loads(text), asked["json"])
    elif "regex" in asked:
        assert re.fullmatch(asked["regex"], text)
    elif "choice" in asked:
        assert text in asked["choice"]
    else:
        inner = text.strip("()")
        assert inner in ("x", "xx", "xxx")
        assert text.count("(") == text.count(")")


def run(rig: EngineRig, asks: Asks, **params: Any) -> list[RequestOutput]:
    names = [
        rig.submit(
            prompt,
            kind=OutputKind.FINAL_ONLY,
            **({"max_tokens": 12 if asked is None else 60} | params),
            structured_outputs=None if asked is None else form(**asked),
        )
        for prompt, asked in asks
    ]
    outputs = rig.finish(*names)
    assert all(isinstance(output, RequestOutput) for output in outputs), outputs
    rig.settle()
    assert rig.ledger_problems() == []
    return outputs  # type: ignore[return-value]


@functools.cache
def company() -> tuple[Asks, list[CompletionOutput]]:
    """100 requests, every other one with a grammar, and the output of each when it is alone."""
    asks: Asks = [(f"prompt {i % 5}" * (1 + i % 3), None if i % 2 else FORMS[i // 2 % len(FORMS)]) for i in range(100)]
    with EngineRig(max_slots=1) as rig:
        alone = {key: run(rig, [ask])[0].outputs[0] for key, ask in {repr(ask): ask for ask in asks}.items()}
    return asks, [alone[repr(ask)] for ask in asks]


@pytest.mark.parametrize("mode", MODES)
def test_mixed_company_is_what_everybody_would_be_alone_g6(mode: dict[str, Any]) -> None:
    """100 requests with grammars and without: valid ones, and nobody's output depends on the others."""
    asks, alone = company()
    with EngineRig(max_slots=6, num_pages=90, **mode) as rig:
        outputs = run(rig, asks)
    for (_, asked), output, expected in zip(asks, outputs, alone, strict=True):
        mine = output.outputs[0]
        assert (mine.token_ids, mine.text, mine.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )
        if asked is not None:
            assert mine.finish_reason == "stop"
            check(mine.text, asked)


@pytest.mark.parametrize("mode", [{}, {"spec_method": "copy"}, {"spec_method": "copy", "mixed_prefill": True}], ids=str)
def test_the_end_of_a_grammar_lies_inside_a_drafted_block_g1(mode: dict[str, Any], monkeypatch: Any) -> None:
    """The model would go on with the copied text; the output ends with the grammar, as without speculation."""
    behind: list[bool] = []
    advance = Matcher.advance

    def spy(self: Matcher, token: int) -> None:
        behind.append(self.is_over)
        advance(self, token)

    monkeypatch.setattr(Matcher, "advance", spy)
    text = '{"n":"abcd","size":7}'
    with EngineRig(next_token=scripted(text * 3), **mode) as rig:
        asked = FORMS[0]
        for stop in (None, "zzz"):  # with host stops too
            (output,) = run(rig, [(text * 2, asked)], stop=stop)
            assert output.outputs[0].text == text
            assert output.outputs[0].finish_reason == "stop"
            assert len(output.outputs[0].token_ids) == len(text)
        rounds = rig.engine.stats().rounds
    assert behind
    assert not any(behind)
    assert bool(rounds) == bool(mode)
    if mode:
        assert max(width for _, width in rounds) > 2
        assert sum(counts.accepted for counts in rounds.values()) > len(text) // 2


def test_copies_are_cut_where_the_grammar_does_not_go_on() -> None:
    """What the copy index finds but the grammar refuses is never sent to the device as a proposal."""
    prompt = "no no no no no "
    with EngineRig(next_token=scripted("no no no no no "), spec_method="copy") as rig:
        (output,) = run(rig, [(prompt, {"regex": "(no )*na"})], max_tokens=30)
        frames = [frame for frame in rig.core.runner.frames if "proposal" in frame.parts]
    assert set(output.outputs[0].text) <= set("no a")
    supplied = [bytes(row[row >= 0].astype(np.uint8)) for frame in frames for row in frame.parts["proposal"][:1]]
    assert any(len(piece) > 1 for piece in supplied), supplied
    assert all(re.fullmatch(b"[no ]*", piece) and b"nn" not in piece for piece in supplied)


def test_grammars_need_feedback_and_no_learned_proposals() -> None:
    with EngineRig(spec_method="draft") as rig:
        run(rig, [("abc", FORMS[0]), ("xyz", FORMS[1])])
        frames = rig.core.runner.frames
        masked = [frame for frame in frames if frame.bits is not None]
        assert masked
        assert all(frame.shape.proposal_depth == 0 for frame in masked)
        request = rig.assembly.intake.request(
            "a",
            rig_params(structured_outputs=form(choice=["a"])),
            request_id="x",
            sink=rig,
            arrival_ns=0,
        )
        flags = request.sequences[0].spec.constraints
    assert flags & Constraint.GRAMMAR
    assert flags & Constraint.NO_LEARNED


def rig_params(**params: Any) -> Any:
    from helios_jax.engine.params import SamplingParams

    return SamplingParams(temperature=0.0, **params)


@pytest.mark.parametrize("mode", [{}, {"spec_method": "copy"}], ids=str)
def test_a_preempted_request_continues_its_json_g2(mode: dict[str, Any]) -> None:
    """Pages for three of four growing outputs: somebody gives way in the middle of its text, and ends as if not."""
    items = {"type": "array", "items": {"enum": [True, None, 17]}, "minItems": 25, "maxItems": 25}
    asked = {"json": items, "disable_any_whitespace": True}
    asks: Asks = [(f"prompt {i}", asked) for i in range(4)]
    options: dict[str, Any] = {"max_tokens": 240, "temperature": 0.0}
    with EngineRig(max_slots=1) as rig:
        alone = [run(rig, [ask], **options)[0].outputs[0].text for ask in asks]
    with EngineRig(max_slots=4, num_pages=20, **mode) as rig:
        outputs = run(rig, asks, **options)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output, expected in zip(outputs, alone, strict=True):
        assert output.outputs[0].text == expected
        assert output.outputs[0].finish_reason == "stop"
        check(output.outputs[0].text, asked)


def test_several_outputs_of_one_request_each_have_their_matcher() -> None:
    with EngineRig() as rig:
        (output,) = run(rig, [("abc", FORMS[1])], n=4, temperature=1.0, seed=3)
    assert len({part.text for part in output.outputs}) > 1
    for part in output.outputs:
        check(part.text, FORMS[1])


def test_ignoring_ends_does_not_go_on_behind_a_grammar() -> None:
    with EngineRig() as rig:
        (output,) = run(rig, [("abc", {"choice": ["yes"]})], ignore_eos=True)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")


@pytest.mark.parametrize("mode", [{}, {"spec_method": "copy"}], ids=str)
def test_stop_tokens_end_an_output_before_its_grammar(mode: dict[str, Any]) -> None:
    with EngineRig(**mode) as rig:
        (output,) = run(rig, [("abc-de-abc-de-", FORMS[1])], stop_token_ids=[ord("-")])
    part = output.outputs[0]
    assert (part.finish_reason, part.stop_reason) == ("stop", ord("-"))
    assert re.fullmatch("[a-f]{3}", part.text)
    assert part.token_ids[-1] == ord("-")


@pytest.mark.parametrize("length", [3, 4])
def test_output_that_ends_for_length_at_the_end_of_the_grammar_has_stopped(length: int) -> None:
    with EngineRig() as rig:
        (output,) = run(rig, [("abc", {"choice": ["four"]})], max_tokens=length)
    assert output.outputs[0].finish_reason == ("stop" if length == 4 else "length")


@pytest.mark.parametrize("where", ["mask", "advance"])
@pytest.mark.parametrize("mode", [{}, {"spec_method": "copy"}, {"mixed_prefill": True}], ids=str)
def test_a_matcher_that_fails_costs_its_request_only(mode: dict[str, Any], where: str, monkeypatch: Any) -> None:
    """A limit of the library is met in the middle of an output."""
    fails, calls = "fill" if where == "mask" else "advance", 0
    original = getattr(Matcher, fails)

    def broken(self: Matcher, argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 5 and getattr(self, "doomed", False):
            self.error = "too many items"
        original(self, argument)

    monkeypatch.setattr(Matcher, fails, broken)
    with EngineRig(start=False, **mode) as rig:
        doomed = rig.submit("abc", structured_outputs=form(**FORMS[0]), max_tokens=90, n=2)
        for request in rig.engine.board.open_requests():
            request.sequences[0].matcher.doomed = True  # type: ignore[union-attr]
        others = [rig.submit("abc", structured_outputs=form(**FORMS[0]), max_tokens=90), rig.submit("z", max_tokens=30)]
        rig.engine.start()
        lost, valid, plain = rig.finish(doomed, *others)
        rig.settle()
        assert rig.ledger_problems() == []
        assert rig.engine.health().ready
        assert isinstance(lost, RequestError)
        assert "too many items" in str(lost)
        assert isinstance(valid, RequestOutput)
        assert isinstance(plain, RequestOutput)
        check(rig.text(others[0]), FORMS[0])
        assert rig.reason(others[1]) == "length"
