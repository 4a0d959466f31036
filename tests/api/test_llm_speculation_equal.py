"""What a user sees of a request with speculation is what plain decode gives (faults P2 to P6, P11).

Copies and a draft model, each by the same core with its rounds unused. With one or two slots and as
many proposals or more, every test is one of few slots (P11) as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from helios_jax import LLM, SamplingParams
from helios_jax.config import EngineConfig
from helios_jax.engine.outputs import CompletionOutput

PROMPTS = [[5, 9, 17, 33, 5, 9, 17, 33, 5, 9], [40, 41, 42, 40, 41, 42, 40]]
CONTEXT = 128


@dataclasses.dataclass
class Pair:
    """Two engines of one core: without and with speculation."""

    plain: LLM
    fast: LLM

    def same(self, prompt: list[int], **settings: Any) -> tuple[CompletionOutput, CompletionOutput]:
        """Both outputs; tokens, text and the way they ended are equal."""
        params = SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | settings))
        (want,), (got,) = (llm.generate([prompt], params) for llm in (self.plain, self.fast))
        assert got.prompt_token_ids == want.prompt_token_ids == prompt
        mine, theirs = got.outputs[0], want.outputs[0]
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason, mine.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        return theirs, mine


@pytest.fixture(
    scope="module",
    params=[
        ("copy", "adaptive"),
        ("copy", "fixed"),
        pytest.param(("draft", "fixed"), marks=pytest.mark.long),
        pytest.param(("draft", "adaptive"), marks=pytest.mark.long),
    ],
    ids=lambda param: "-".join(param),
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    source, width = request.param
    core = request.getfixturevalue(f"tiny_{source}_core_dir")
    with (
        LLM(core=core, config=EngineConfig(spec_width="off")) as plain,
        LLM(core=core, config=EngineConfig(spec_width=width)) as fast,
    ):
        pair = Pair(plain, fast)
        yield pair
        stats = fast.stats()
        if (source, width) == ("copy", "fixed"):  # what adaptive offers is a matter of times, a draft's luck is its own
            assert sum(counts.accepted for counts in stats.rounds.values()) > 0
        assert sum(counts.offered for counts in stats.rounds.values()) > 0
        assert (stats.compiles_after_ready, stats.pages_used) == (0, 0)
        assert sum(counts.offered for counts in plain.stats().rounds.values()) == 0


def test_a_stop_token_at_each_place_of_a_block(pair: Pair) -> None:
    """P2, P3: wherever in an accepted run it stands, the output ends there, at or before max_tokens."""
    for prompt in PROMPTS:
        truth = pair.plain.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        tokens = truth[0].outputs[0].token_ids
        for place in range(1, 10):
            first = tokens.index(tokens[place])
            _, got = pair.same(prompt, stop_token_ids=[tokens[place]])
            assert (got.finish_reason, got.stop_reason) == ("stop", tokens[place])
            assert len(got.token_ids) <= first + 1
            if first:  # the last token of max_tokens is it, or the one before it
                _, got = pair.same(prompt, stop_token_ids=[tokens[place]], max_tokens=first + place % 2)
                assert got.finish_reason == ("stop" if place % 2 else "length")


def test_the_model_s_own_end(pair: Pair) -> None:
    """P3: the checkpoint's end-of-sequence ids, forced at some step by their bias."""
    ended = 0
    for bias in (0.5, 1.0, 2.0, 4.0):
        for prompt in PROMPTS:
            want, _ = pair.same(prompt, ignore_eos=False, logit_bias={2: bias, 5: bias}, max_tokens=60)
            ended += want.finish_reason == "stop"
    assert ended > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4, "logit_bias": {5: 8.0, 9: -20.0}},
        {"min_p": 0.2, "max_tokens": 1},
    ],
)
def test_penalties_and_bias(pair: Pair, settings: dict[str, Any]) -> None:
    """P4."""
    for prompt in PROMPTS:
        pair.same(prompt, **settings)


def test_log_probabilities_to_the_last_position_of_the_context(pair: Pair) -> None:
    """P5, P11: there D is larger than what is left."""
    prompt = (PROMPTS[0] * 12)[: CONTEXT - 24]
    want, got = pair.same(prompt, logprobs=5, max_tokens=None)
    assert len(got.token_ids) == CONTEXT - len(prompt)
    assert got.finish_reason == "length"
    assert want.logprobs is not None
    assert got.logprobs is not None
    assert len(got.logprobs) == len(want.logprobs) == len(got.token_ids)
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert list(mine) == list(theirs)
        for token, value in mine.items():
            assert value.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)
            assert (value.rank, value.decoded_token) == (theirs[token].rank, theirs[token].decoded_token)


def test_stop_strings(pair: Pair) -> None:
    text = (
        pair.plain.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
        .outputs[0]
        .text
    )
    found = 0
    for start in range(1, 30, 6):
        stop = text[start : start + 3]
        if stop.strip():
            want, _ = pair.same(PROMPTS[1], stop=[stop])
            found += want.finish_reason == "stop"
            pair.same(PROMPTS[1], stop=[stop], include_stop_str_in_output=True)
    assert found > 2


def test_sampled_outputs(pair: Pair, request: pytest.FixtureRequest) -> None:
    """P6: copies are judged with the noise of plain decode and give its output; a draft's own only fill it up."""
    settings = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3, "max_tokens": 40, "ignore_eos": True}
    copies = "copy" in request.node.callspec.id
    for seed in range(3):
        params = SamplingParams(seed=seed, **settings)
        first, second = (pair.fast.generate([PROMPTS[0]], params)[0].outputs[0].token_ids for _ in range(2))
        assert len(first) == 40
        if copies:
            assert first == second == pair.plain.generate([PROMPTS[0]], params)[0].outputs[0].token_ids
