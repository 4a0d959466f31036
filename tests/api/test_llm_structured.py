"""Grammars in compiled programs: rounds emit what plain decode emits, draft contexts are kept, others are untouched.

The tiny model knows no JSON: whatever is valid here was forced by the masks on the device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from helios_jax import LLM, SamplingParams, StructuredOutputsParams
from helios_jax.config import EngineConfig

PROMPTS = [[5, 9, 17, 33, 5, 9, 17, 33, 5, 9], [7, 8] * 12, list(range(3, 60)), [11]]
SCHEMA = {"type": "array", "items": {"enum": [True, None, 10]}, "minItems": 4, "maxItems": 8}
FORMS = [
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(regex="(ab|ba){3,9}c"),
    StructuredOutputsParams(choice=["red and red and red", "red and blue and red"]),
    None,
]
SAMPLING = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "top_p": 0.8, "seed": 1}]


def check(text: str, form: StructuredOutputsParams) -> None:
    if form.json is not None:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif form.regex is not None:
        assert re.fullmatch(form.regex, text)
    else:
        assert text in (form.choice or ())


@pytest.fixture(scope="module")
def plain(tiny_copy_core_dir: Path) -> Iterator[LLM]:
    with LLM(core=tiny_copy_core_dir, config=EngineConfig(spec_width="off")) as llm:
        yield llm


def params_of(settings: dict[str, float]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=60, structured_outputs=form, logprobs=2, **settings) for form in FORMS]  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", SAMPLING, ids=str)
def test_masked_rounds_emit_what_masked_decode_emits(
    plain: LLM, tiny_copy_core_dir: Path, settings: dict[str, float]
) -> None:
    """P6, G1, G6: copies are judged by masked rows with plain decode's noise, so sampled outputs are equal too."""
    asks, params = [prompt for prompt in PROMPTS for _ in FORMS], params_of(settings) * len(PROMPTS)
    wanted = plain.generate(asks, params)
    with LLM(core=tiny_copy_core_dir, config=EngineConfig(spec_width="fixed")) as copying:
        found = copying.generate(asks, params)
        counts = list(copying.stats().rounds.values())
        assert copying.stats().compiles_after_ready == 0
        assert copying.stats().pages_used == 0
    for want, got, setting in zip(wanted, found, params, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].finish_reason == want.outputs[0].finish_reason
        if setting.structured_outputs is not None:
            assert got.outputs[0].finish_reason == "stop"
            check(got.outputs[0].text, setting.structured_outputs)
        for ours, theirs in zip(got.outputs[0].logprobs or [], want.outputs[0].logprobs or [], strict=True):
            token = next(iter(ours))
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-3)
    assert sum(count.accepted for count in counts) > 0


def test_log_probabilities_are_those_of_the_raw_logits(plain: LLM) -> None:
    """A forced token keeps the rank that it has without the mask."""
    free = plain.generate([PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0, logprobs=20))[0].outputs[0]
    asked = StructuredOutputsParams(choice=["red"])
    forced = plain.generate(
        [PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0, logprobs=20, structured_outputs=asked)
    )[0].outputs[0]
    assert free.token_ids != forced.token_ids
    (before,), (after,) = free.logprobs or [], forced.logprobs or []
    token = forced.token_ids[0]
    assert after[token].rank > 1
    assert {i: v for i, v in after.items() if v.rank <= 20} == pytest.approx(before) or token not in before
    for other in before:
        if other in after:
            assert after[other].logprob == pytest.approx(before[other].logprob, abs=1e-5)
            assert after[other].rank == before[other].rank


def test_beside_a_draft_model_grammars_decode_and_its_context_is_kept(tiny_draft_core_dir: Path, plain: LLM) -> None:
    """Plain requests after a masked one get learned proposals again, and the outputs that they have without drafts."""
    greedy = {"temperature": 0.0}
    with LLM(core=tiny_draft_core_dir) as drafting:
        for form in FORMS[:3]:
            params = SamplingParams(max_tokens=60, structured_outputs=form, **greedy)  # type: ignore[arg-type]
            (got,), (want,) = (llm.generate([PROMPTS[1]], params) for llm in (drafting, plain))
            assert got.outputs[0].token_ids == want.outputs[0].token_ids
        before = sum(count.proposed for count in drafting.stats().rounds.values())
        free = SamplingParams(max_tokens=40, ignore_eos=True, **greedy)  # type: ignore[arg-type]
        (got,), (want,) = (llm.generate([PROMPTS[1]], free) for llm in (drafting, plain))
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert sum(count.proposed for count in drafting.stats().rounds.values()) > before


def test_the_last_position_of_the_context_ends_a_grammar_too(plain: LLM) -> None:
    endless = StructuredOutputsParams(regex="(ab)+c")
    room = plain.max_context - len(PROMPTS[2])
    params = SamplingParams(max_tokens=None, temperature=0, structured_outputs=endless, logit_bias={})
    (output,) = plain.generate([PROMPTS[2]], params)
    assert len(output.outputs[0].token_ids) <= room
    assert output.outputs[0].finish_reason in ("stop", "length")
    assert re.match("(ab)*a?c?", output.outputs[0].text)
