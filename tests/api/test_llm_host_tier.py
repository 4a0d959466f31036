"""Checkpoints on the host with a real core: what comes back is what went, and nothing compiles after ready."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from helios_jax import LLM, EngineConfig, SamplingParams
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.stats import EngineStats

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TALKS = 24  # of 5 pages each, for a pool of 64


def turns(core: Path, config: EngineConfig) -> tuple[list[RequestOutput], list[RequestOutput], EngineStats]:
    """First and second turns of many conversations, one after the other."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 128) for _ in range(rng.randint(60, 80))] for _ in range(TALKS)]
    more = [[rng.randrange(3, 128) for _ in range(rng.randint(1, 20))] for _ in range(TALKS)]
    with LLM(core=core, config=config, progress=False) as llm:
        first = [llm.generate({"prompt_token_ids": p, "message_ends": (len(p),)}, GREEDY)[0] for p in prompts]
        for output, new, place in zip(first, more, range(TALKS), strict=True):
            prompts[place] = [*prompts[place], *output.outputs[0].token_ids, *new]
        if llm._assembly.engine.host is not None:
            llm._assembly.engine.host.settle()
        second = [llm.generate(p, GREEDY)[0] for p in prompts]
        stats = llm.stats()
        assert stats.compiles_after_ready == 0
    return first, second, stats


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["tiny_core_dir", "tiny_hybrid_core_dir"])
def test_turns_that_come_back_from_the_host_are_answered_as_computed_ones(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    core: Path = request.getfixturevalue(fixture)
    cold_first, cold, _ = turns(core, EngineConfig(enable_prefix_caching=False))
    without_first, without, small = turns(core, EngineConfig())
    first, second, stats = turns(core, EngineConfig(host_checkpoint_bytes=1 << 26))
    assert answers(first) == answers(without_first) == answers(cold_first)
    assert answers(second) == answers(without) == answers(cold)
    host = stats.host_tier
    assert host.lost == 0
    assert host.restored >= TALKS // 2
    assert host.bytes_used > 0
    reused, had = (sum(output.num_cached_tokens or 0 for output in outputs) for outputs in (second, without))
    assert reused >= 60 * TALKS
    assert reused >= had + host.restored_tokens // 2
    assert small.host_tier.saved == 0
