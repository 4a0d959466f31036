"""The offline API over the fake device: forms of prompts, order, early exits, streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import helios_jax
from helios_jax import LLM, EngineConfig, SamplingParams
from helios_jax.errors import ConfigError, CoreError, RequestError, UnavailableError
from helios_jax.testing import ByteTokenizer, expected_tokens, fake_core, hashed_text

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def said(prompt: str, count: int = 4) -> str:
    return bytes(expected_tokens(hashed_text, list(prompt.encode()), count)).decode()


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.from_core(fake_core(), tokenizer=ByteTokenizer(), config=EngineConfig(max_queue=2)) as llm:
        yield llm


@pytest.mark.parametrize(
    "prompts",
    [
        "ab",
        [97, 98],
        np.array([97, 98]),
        ["ab"],
        [[97, 98]],
        {"prompt": "ab"},
        [{"prompt_token_ids": [97, 98]}],
        [{"prompt_token_ids": (97, 98), "prompt": "shown"}],
    ],
)
def test_every_form_of_a_prompt(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt_token_ids == [97, 98]
    assert output.outputs[0].text == said("ab")
    assert output.finished


@pytest.mark.parametrize("prompts", [[1.5], [["a"]], [{"text": "a"}], [None], 5.0])
def test_other_forms_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)


def test_more_prompts_than_slots_and_queue_hold_come_back_in_order(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 5) for i in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [said(p, 1 + i % 5) for i, p in enumerate(prompts)]
    assert llm.generate([], GREEDY) == []


def test_one_wrong_prompt_runs_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(["fine", ""], GREEDY)
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    assert llm.stats().requests_total["arrived"] == 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation, GREEDY)
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert len(llm.chat([conversation, conversation], GREEDY)) == 2


def test_the_scheduler_is_told_where_messages_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    board, told = llm._assembly.engine.board, []
    submit = board.submit

    def spy(request: Any) -> None:
        told.append([sequence.spec.message_ends for sequence in request.sequences])
        submit(request)

    monkeypatch.setattr(board, "submit", spy)
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    llm.chat(conversation, SamplingParams(temperature=0, max_tokens=2, n=2))
    list(llm.stream(llm.chat_prompt(conversation[:1]), GREEDY))
    llm.generate("hi", GREEDY)
    user = 3 + len("user\nhi\n")  # <bos>, and the two tokens around a message
    both = user + 2 + len("assistant\nyo\n")
    assert told == [[(user, both)] * 2, [(user,)], [()]]


def test_stream_gives_deltas_and_leaving_it_cancels(llm: LLM) -> None:
    pieces = [output.outputs[0].text for output in llm.stream("ab", GREEDY)]
    assert len(pieces) == 4
    assert "".join(pieces) == said("ab")
    for output in llm.stream("ab", SamplingParams(temperature=0, max_tokens=200)):
        assert not output.finished
        break
    assert llm.generate("ab", GREEDY)[0].outputs[0].text == said("ab")
    assert llm.stats().requests_total["cancelled"] == 1


def test_after_the_with_block_the_engine_is_closed() -> None:
    with LLM.from_core(fake_core(), tokenizer=ByteTokenizer()) as llm:
        pass
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("a", GREEDY)
    llm.close()


def test_public_names_and_unknown_options() -> None:
    for name in helios_jax.__all__:
        assert getattr(helios_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        helios_jax.nonsense  # noqa: B018
    with pytest.raises(ConfigError, match="unknown options max_slot"):
        LLM(max_slot=4)
    with pytest.raises(CoreError, match="holds no prepared core"):
        LLM(core="/nonexistent")
    with pytest.raises(ConfigError, match="unknown scheduler policy 'fastest'"):
        LLM.from_core(fake_core(), tokenizer=ByteTokenizer(), config=EngineConfig(policy="fastest"))
