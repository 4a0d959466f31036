"""JSON Schema's own test suite (2020-12): every schema yields only valid instances, or is refused with a reason.

The judge is `jsonschema`. Some valid instances are refused because an output has one spelling (properties
in the schema's order, no `1.0` for the integer 1), or because formats are enforced; each such is named here.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from helios_jax.text.grammar import Grammar, GrammarSpec
from helios_jax.text.grammar_schema import GrammarError
from tests.unit.grammar_kit import accepts, compiler, random_output
from tests.unit.simulation_toy import shared_data

SAMPLES = 4  # outputs of each schema
OTHER_ORDER = {'{"foo": "baz", "bar": 2}', '{"foo": "quux", "bar": 2, "baz": null}', '{"baz": "bax", "foo": "bar"}'}
OTHER_NUMBER = {"0.0", "1.0", "-2.0", "[0.0]", "[1.0]", "9007199254740992.0"}
PYTHON_CANNOT_READ = r"\p{"  # a class of characters that the judge's regular expressions do not have


@functools.cache
def cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in shared_data("json_schema/test_suite_2020-12.jsonl").read_text().splitlines()]


@functools.cache
def compiled() -> dict[int, Grammar | GrammarError]:
    def one(value: Any) -> Grammar | GrammarError:
        try:
            return compiler().compile(GrammarSpec.json_schema(value))
        except GrammarError as error:
            return error

    return {number: one(case["schema"]) for number, case in enumerate(cases())}


def readable() -> list[tuple[dict[str, Any], Grammar]]:
    """Cases whose schema compiled, with their grammars."""
    pairs = [(case, compiled()[number]) for number, case in enumerate(cases())]
    return [(case, grammar) for case, grammar in pairs if isinstance(grammar, Grammar)]


def test_every_schema_compiles_or_is_refused_with_a_reason() -> None:
    refusals = [found for found in compiled().values() if isinstance(found, GrammarError)]
    print(f"{len(readable())} schemas compile, {len(refusals)} are refused")
    assert len(readable()) + len(refusals) == len(cases())
    assert len(readable()) >= 160  # of 383; what is refused needs more than a grammar that forgets what it read
    for error in refusals:
        assert error.code in ("invalid_grammar", "grammar_too_large")
        assert len(str(error)) > 20


def test_outputs_are_valid_instances() -> None:
    rng, made = np.random.default_rng(2), 0
    for case, grammar in readable():
        judge = jsonschema.Draft202012Validator(case["schema"])
        for _ in range(SAMPLES):
            text = random_output(grammar, rng)
            if text is not None:
                value = json.loads(text)
                if PYTHON_CANNOT_READ not in json.dumps(case["schema"]):
                    assert judge.is_valid(value), (case["description"], text)
                made += 1
    assert made > 0.9 * SAMPLES * len(readable())


def test_the_suite_s_invalid_instances_are_refused() -> None:
    count = 0
    for case, grammar in readable():
        for test in case["tests"]:
            if not test["valid"]:
                count += 1
                assert not accepts(grammar, json.dumps(test["data"], ensure_ascii=False)), (case["description"], test)
    assert count > 200


def test_the_suite_s_valid_instances_are_accepted() -> None:
    accepted = 0
    for case, grammar in readable():
        for test in case["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            if not test["valid"] or text in OTHER_ORDER | OTHER_NUMBER or case["file"] == "format.json":
                continue
            accepted += 1
            assert accepts(grammar, text), (case["description"], text)
    assert accepted > 250


@pytest.mark.parametrize("text", ['{"a": 1.5, "b": [true, null, "\\n\\u00e9"]}', '{"a": -0.5e-7, "b": []}'])
def test_any_object_is_an_object(text: str) -> None:
    grammar = compiler().compile(GrammarSpec.json_schema({"type": "object"}))
    assert accepts(grammar, json.dumps(json.loads(text), ensure_ascii=False))
