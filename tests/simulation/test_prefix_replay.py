"""Replays of prompts through the checkpoint policy: against a naive model, and beside plain LRU of the same size."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from helios_jax.simulation.prefix_index import NO_MATCH, Match, PrefixIndex
from helios_jax.simulation.prefix_replay import CacheSize, CheckpointCache, replay_checkpoints, size_of
from helios_jax.simulation.prefixes import Prompt, prompts_of, replay_lru
from helios_jax.simulation.traces import BLOCK_TOKENS, load_trace
from tests.unit.simulation_toy import prefix_prompts, shared_data


@dataclasses.dataclass
class Kept:
    """A prompt in the naive cache: its whole blocks are held as pages, which prompts share."""

    prompt: Prompt
    pages: list[int]
    demand: int
    born: int


def common_blocks(one: Prompt, other: Prompt) -> int:
    pairs = zip(one.blocks, other.blocks, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.blocks), len(other.blocks)))


def naive_replay(prompts: list[Prompt], capacity: int) -> list[int]:
    """Reused tokens of each prompt: a list of prompts, the least recent given up when pages of a block are short.

    Rows are plenty. While a prompt is served it also has a page for its last, partial block.
    """
    cached: list[Kept] = []
    reused, numbers = [], itertools.count()
    for now, prompt in enumerate(prompts):
        best = max(cached, key=lambda kept: (common_blocks(kept.prompt, prompt), kept.born), default=None)
        shared = min(common_blocks(best.prompt, prompt), (prompt.length - 1) // BLOCK_TOKENS) if best else 0
        mine = best.pages[:shared] if best else []
        new = [next(numbers) for _ in prompt.blocks[shared:]]

        def fits(kept: list[Kept], mine: list[int] = mine, new: list[int] = new) -> bool:
            return len({page for one in kept for page in one.pages} | {*mine, *new}) <= capacity

        cached.sort(key=lambda kept: (kept.demand, kept.prompt.length))
        gone: list[Kept] = []
        while not fits(cached):
            gone.append(cached.pop(0))
        for kept in reversed(gone):  # those that did not matter stay
            cached += [kept] if fits([*cached, kept]) else []
        same = [kept for kept in cached if kept.prompt == prompt]
        if same:
            same[0].demand = now
        else:
            cached.append(Kept(prompt, [*mine, *new][: prompt.length // BLOCK_TOKENS], now, now))
        reused.append(shared * BLOCK_TOKENS)
    return reused


@pytest.mark.parametrize("capacity", [30, 60, 150, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_the_replay_is_the_naive_one(seed: int, capacity: int) -> None:
    prompts = [p for p in prefix_prompts(random.Random(seed), 80) if len(p.blocks) <= 30]
    rows = 100
    size = CacheSize(tokens=(capacity + rows) * BLOCK_TOKENS, page_size=BLOCK_TOKENS, rows=rows)
    cache = CheckpointCache(size, partial=True)
    assert [cache.ask(prompt).tokens for prompt in prompts] == naive_replay(prompts, capacity)


@pytest.mark.parametrize("blocks", [50, 100, 300, 1000])
def test_checkpoints_of_the_same_size_are_not_below_lru(blocks: int) -> None:
    prompts = prefix_prompts(random.Random(7), 150)
    size = size_of(blocks, 16, blocks_a_row=2)  # three new blocks a prompt
    ours, lru = replay_checkpoints(prompts, size, partial=True), replay_lru(prompts, blocks, 16)
    assert ours.tokens >= lru.tokens > 0
    assert (ours.asked_tokens, ours.asked_blocks) == (lru.asked_tokens, lru.asked_blocks)


def test_a_recurrent_state_is_reused_whole() -> None:
    first = Prompt(1300, 100, (1, 2, 3))
    fork = Prompt(1500, 1, (1, 9, 10))  # shares one block, where nothing was captured
    further = Prompt(1600, 1, (1, 2, 4, 5))
    cache = CheckpointCache(size_of(64, 64), partial=False)
    found = [cache.ask(first, (1024,)), cache.ask(fork, (1024,)), cache.ask(further, (1024, 1536))]
    assert [f.tokens for f in found] == [0, 0, 1024]
    parts = CheckpointCache(size_of(64, 64), partial=True)
    assert [parts.ask(prompt).tokens for prompt in (first, fork, further)] == [0, 512, 1024]


def test_a_prompt_that_never_fits_leaves_the_others_alone() -> None:
    cache = CheckpointCache(size_of(4, 64), partial=True)
    small, large = Prompt(1000, 1, (1, 2)), Prompt(3000, 1, (1, 2, 3, 4, 5, 6))
    assert [cache.ask(prompt).tokens for prompt in (small, large, small)] == [0, 0, 960]


def test_the_index_compares_every_id() -> None:
    index = PrefixIndex()
    index.add(1, (1, 2, 3), 1536)
    index.add(2, (1, 2, 4), 1400)
    index.add(3, (1, 2), 1024)
    assert index.longest_part((1, 2, 3, 9)) == Match(1, 3)
    assert index.longest_part((1, 2, 9)) == Match(3, 2)  # the youngest of three
    assert index.longest_part((2, 3)) == NO_MATCH  # known blocks, another prefix
    assert index.longest_whole((1, 2, 3, 9), 2000) == Match(1, 3)
    assert index.longest_whole((1, 2, 4), 1400) == Match(3, 2)  # something must be left to compute
    assert index.longest_whole((1, 9), 1000) == NO_MATCH
    index.remove(3, (1, 2))
    index.remove(1, (1, 2, 3))
    assert index.longest_part((1, 2, 3, 9)) == Match(2, 2)
    assert index.longest_whole((1, 2, 9), 1500) == NO_MATCH
    index.remove(2, (1, 2, 4))
    assert index.longest_part((1, 2, 4)) == NO_MATCH


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [500, 2000, 10_000, 50_000])
def test_the_shared_trace_is_reused_as_lru_would_or_better(blocks: int) -> None:
    path = shared_data("traces/mooncake_conversation.jsonl")
    prompts = prompts_of(load_trace(str(path), seconds=1e6))[:1200]
    ours, lru = replay_checkpoints(prompts, size_of(blocks, 64), partial=True), replay_lru(prompts, blocks, 64)
    assert ours.tokens >= lru.tokens > 0
