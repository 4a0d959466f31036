"""Chats of ten turns on the real default model: what was kept answers as what is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios_jax import LLM, EngineConfig, SamplingParams

pytestmark = pytest.mark.slow
SYSTEM = "You are a helpful assistant. Answer in one short sentence."
QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of them is older?",
    "Name a river there.",
    "How long is it?",
    "What do people eat there?",
    "Is it warm in winter?",
    "How do I get there?",
    "What should I bring?",
    "Thank you. Say it again.",
)
SHORT = SamplingParams(temperature=0, max_tokens=10)


def chat(llm: LLM) -> tuple[list[list[int]], list[int], list[int]]:
    """(answers, prompt tokens, of these reused) by turn; the conversation goes on with what was answered."""
    messages, answers, prompts, cached = [{"role": "system", "content": SYSTEM}], [], [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (output,) = llm.generate(llm.chat_prompt(messages), SHORT)
        answers.append(output.outputs[0].token_ids)
        prompts.append(len(output.prompt_token_ids))
        cached.append(output.num_cached_tokens or 0)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return answers, prompts, cached


def test_a_chat_of_ten_turns(smollm2_core_dir: Path) -> None:
    """Case K5 on a real model and its template: token for token, in float32."""
    ready = EngineConfig(checkpoint_extra_work_fraction=5.0)
    with LLM(core=smollm2_core_dir, config=ready, enable_prefix_caching=False, progress=False) as llm:
        cold, _, nothing = chat(llm)
    assert nothing == [0] * len(QUESTIONS)
    with LLM(core=smollm2_core_dir, config=ready, progress=False) as llm:
        warm, prompts, cached = chat(llm)
        assert llm.stats().compiles_after_ready == 0
    assert warm == cold
    for before, reused in zip(prompts, cached[1:], strict=False):
        assert reused >= before  # all of the last prompt at least
