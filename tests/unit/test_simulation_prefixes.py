"""Prefixes of traces: the plain LRU cache against a naive one, and the ends that a frontend would have known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helios_jax.errors import ConfigError
from helios_jax.simulation.prefixes import (
    Prompt,
    message_ends,
    prompts_of,
    replay_lru,
    reusable_tokens,
)
from helios_jax.simulation.traces import load_trace
from tests.unit.simulation_toy import prefix_prompts, shared_data


def naive_hits(prompts: list[Prompt], capacity: int | None) -> int:
    """Times of last use in a plain list, the oldest one dropped whenever there are too many."""
    held: list[tuple[int, int]] = []  # (when, block)
    hits = now = 0
    for prompt in prompts:
        present = [block in [b for _, b in held] for block in prompt.blocks]
        hits += [*present, False].index(False)
        for block in prompt.blocks:
            now += 1
            held = [(when, b) for when, b in held if b != block] + [(now, block)]
            if capacity is not None and len(held) > capacity:
                held.remove(min(held))
    return hits


@pytest.mark.parametrize("capacity", [1, 3, 7, 20, 60, None])
@pytest.mark.parametrize("seed", range(4))
def test_the_lru_is_the_naive_one(capacity: int | None, seed: int) -> None:
    prompts = prefix_prompts(random.Random(seed), 60)
    found = replay_lru(prompts, capacity)
    assert found.blocks == naive_hits(prompts, capacity)
    assert found.asked_blocks == sum(len(prompt.blocks) for prompt in prompts)
    assert found.asked_tokens == sum(prompt.length for prompt in prompts)


def test_a_repeated_prompt_computes_its_last_page() -> None:
    prompt = Prompt(1100, 1, (1, 2, 3))
    assert replay_lru([prompt, prompt], None).tokens == 1099
    assert [reusable_tokens(prompt, n, 64) for n in range(4)] == [0, 512, 1024, 1088]
    assert reusable_tokens(Prompt(1024, 1, (1, 2)), 2, 64) == 960  # the last page is full, and still computed
    assert reusable_tokens(Prompt(512, 1, (1,)), 1, 512) == 0


def test_the_shared_trace_is_the_beginning_of_the_published_one() -> None:
    """Published, of all 12,031 requests: 0.042, 0.054, 0.212, 0.355, 0.366. The file has the first 3,000.

    In a longer trace a request finds more earlier ones, so the beginning has a little less at every capacity.
    """
    path = shared_data("traces/mooncake_conversation.jsonl")
    prompts = prompts_of(load_trace(str(path), seconds=3600))
    published = {500: 0.042, 2000: 0.054, 10_000: 0.212, 50_000: 0.355, None: 0.366}
    ratios = [replay_lru(prompts, capacity).block_ratio for capacity in published]
    assert len(prompts) == 3000
    assert ratios == sorted(ratios)
    for ratio, whole in zip(ratios, published.values(), strict=True):
        assert 0.85 * whole < ratio < whole


def test_known_ends_are_those_of_the_system_prompt_and_of_earlier_turns() -> None:
    first = Prompt(1100, 300, (1, 2, 3))
    others = [Prompt(700, 50, (1, block)) for block in (90, 91, 92)]
    second = Prompt(2000, 100, (1, 2, 4, 5))  # the first, its answer (to 1400) and a message
    third = Prompt(4200, 10, (1, 2, 6, 7, 8, 9, 10, 11, 12))  # goes on from the first otherwise
    assert message_ends([first, *others, second, third]) == [
        (512, 1024),
        (512,),
        (512,),
        (512,),
        (512, 1024, 1536),
        (512, 1024, 4096),
    ]


def test_an_answer_that_does_not_fit_is_no_turn_before() -> None:
    first, longer, other = Prompt(1100, 500, (1, 2, 3)), Prompt(1599, 1, (1, 2, 4, 5)), Prompt(100, 1, (6,))
    assert message_ends([first, longer, other, other, other]) == [(1024,), (1536,), (), (), ()]
    fits = Prompt(3000, 1, (1, 2, 4, 5, 7, 8))
    assert message_ends([first, fits, other, other, other])[1] == (1024, 1536, 2560)


def test_a_trace_without_ids_has_no_prefixes() -> None:
    with pytest.raises(ConfigError, match="hash_ids"):
        prompts_of(load_trace("poisson:5", seconds=5))


def test_blocks_follow_the_order_of_arrival() -> None:
    path = shared_data("traces/mooncake_conversation.jsonl")
    trace = load_trace(str(path), seconds=60, seed=3)
    assert [len(blocks) for blocks in trace.blocks] == (-(-trace.prompt_len // 512)).tolist()
    assert (np.diff(trace.at_s) >= 0).all()
