"""Prefixes through the whole simulator: the scheduler's own reuse is that of the replay without a clock."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from helios_jax.errors import ConfigError
from helios_jax.simulation.acceptance import load_acceptance
from helios_jax.simulation.experiment import PAGE_SIZE, Experiment, Outcome, run_experiment
from helios_jax.simulation.prefix_replay import CacheSize, CheckpointCache, size_of
from helios_jax.simulation.prefixes import Prompt, prompts_of, replay_lru
from helios_jax.simulation.profiles import CostProfile, load_profile
from helios_jax.simulation.traces import Trace, load_trace
from tests.unit.simulation_toy import acceptance_file, prefix_prompts, profile_file, shared_data

GIB = 2**30


def trace_of(prompts: list[Prompt], *, apart_s: float, outputs: bool = False) -> Trace:
    columns = zip(*((p.length, p.output_len if outputs else 1, p.blocks) for p in prompts), strict=True)
    lengths, answers, blocks = columns
    return Trace(
        name="toy", kind="mooncake", at_s=np.arange(len(prompts)) * apart_s, prompt_len=np.array(lengths),
        output_len=np.array(answers), client=np.zeros(len(prompts), np.int64), blocks=tuple(blocks),
    )  # fmt: skip


@pytest.fixture
def profile(tmp_path) -> CostProfile:
    return load_profile(profile_file(tmp_path), "toy.gpu")


def simulated(profile: CostProfile, trace: Trace, size: CacheSize, **more: object) -> Outcome:
    experiment = Experiment(
        profile=profile, slots=4, seconds=float(trace.at_s[-1]) + 1, max_context=131_072, warm=True,
        kv_gib=(size.pages * PAGE_SIZE * profile.kv_bytes_per_token + 1) / GIB, state_rows=size.rows, **more,
    )  # fmt: skip
    return run_experiment(experiment, trace)


def replayed(prompts: list[Prompt], size: CacheSize) -> list[int]:
    cache = CheckpointCache(size, partial=True)
    return [cache.ask(prompt).tokens for prompt in prompts]


@pytest.mark.parametrize("blocks", [40, 1000])
def test_one_after_the_other_reuses_what_the_replay_does(profile: CostProfile, blocks: int) -> None:
    prompts = [p for p in prefix_prompts(random.Random(5), 20) if len(p.blocks) < 30]
    size = size_of(blocks, PAGE_SIZE, blocks_a_row=2)
    outcome = simulated(profile, trace_of(prompts, apart_s=1000.0), size, check=blocks == 40)
    assert [request.reused for request in outcome.requests] == replayed(prompts, size)
    found = outcome.report["prefixes"]
    assert found["reused_tokens"] == sum(request.reused for request in outcome.requests) > 0
    assert found["prompt_tokens"] == sum(prompt.length for prompt in prompts)
    assert (found["evicted"] > 0) == (blocks == 40)


def test_side_by_side_with_answers_reuses_too(profile: CostProfile) -> None:
    """Prompts that wait for a slot are matched when they get it; whoever shares pages with one that runs keeps them."""
    prompts = [dataclasses.replace(p, output_len=1 + p.output_len % 9) for p in prefix_prompts(random.Random(6), 12)]
    trace = trace_of(prompts, apart_s=0.05, outputs=True)
    size = size_of(50, PAGE_SIZE, blocks_a_row=4)
    outcome = simulated(profile, trace, size, check=True)
    again = simulated(profile, trace, size)
    assert outcome.report["requests"] == {"arrived": 12, "completed": 12, "refused": 0}
    assert outcome.report == again.report
    unlimited = replay_lru(prompts, None, PAGE_SIZE).tokens
    assert 0 < outcome.report["prefixes"]["reused_tokens"] <= unlimited
    plain = run_experiment(dataclasses.replace(_experiment(profile, trace), state_rows=0), trace)
    assert "prefixes" not in plain.report
    assert plain.report["ttft_ms"]["p50"] > outcome.report["ttft_ms"]["p50"]


def _experiment(profile: CostProfile, trace: Trace) -> Experiment:
    return Experiment(profile=profile, slots=4, seconds=float(trace.at_s[-1]) + 1, max_context=131_072, warm=True)


def test_with_drafts_whole_checkpoints_are_restored(profile: CostProfile, tmp_path) -> None:
    first = Prompt(1300, 3, (1, 2, 3))
    prompts = [first, Prompt(1500, 3, (1, 9, 10)), Prompt(2200, 3, (1, 2, 4, 5, 6)), first]
    table = load_acceptance(f"{acceptance_file(tmp_path)}:mtp")
    outcome = simulated(profile, trace_of(prompts, apart_s=100.0), size_of(64, PAGE_SIZE), acceptance=table, check=True)
    assert [request.reused for request in outcome.requests] == [0, 0, 1024, 1024]
    assert outcome.report["programs"]["restore"] == 2


def test_checkpoints_need_a_trace_that_says_what_is_shared(profile: CostProfile) -> None:
    trace = load_trace("poisson:5", seconds=5)
    with pytest.raises(ConfigError, match="hash_ids"):
        simulated(profile, trace, size_of(64, PAGE_SIZE))
    with pytest.raises(ConfigError, match="vtc keeps no checkpoints"):
        simulated(profile, trace, size_of(64, PAGE_SIZE), policy="vtc")


@pytest.mark.slow
def test_a_slice_of_the_shared_trace_through_the_scheduler(profile: CostProfile) -> None:
    path = shared_data("traces/mooncake_conversation.jsonl")
    prompts = prompts_of(load_trace(str(path), seconds=1e6))[:300]
    size = size_of(1500, PAGE_SIZE)
    outcome = simulated(profile, trace_of(prompts, apart_s=1000.0), size)
    assert outcome.report["prefixes"]["reused_tokens"] >= replay_lru(prompts, 1500, PAGE_SIZE).tokens > 0
    assert [request.reused for request in outcome.requests] == replayed(prompts, size)
