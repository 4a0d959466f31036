"""Prefixes of a trace's prompts: which tokens two of them share, and what a plain cache would have found.

A prompt is known by its blocks: equal leading ids mean equal leading tokens, to the end of the last
equal block, and nothing is known below a block. `BlockLru` is the yardstick of prefix caches; it
shares no code with the scheduler's checkpoints, which `prefix_replay` runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from helios_jax.errors import ConfigError
from helios_jax.simulation.traces import BLOCK_TOKENS, Blocks, Trace


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request as a prefix cache sees it: tokens of its prompt and of its answer, ids of the prompt's blocks."""

    length: int
    output_len: int
    blocks: Blocks


def reusable_tokens(prompt: Prompt, shared_blocks: int, page_size: int) -> int:
    """Tokens of `shared_blocks` leading blocks that a prefill may leave out.

    The last token of a prompt is always computed, for its logits, so a repeated prompt saves the
    whole pages before it.
    """
    return min(shared_blocks * BLOCK_TOKENS, (prompt.length - 1) // page_size * page_size)


class BlockLru:
    """A plain least-recently-used cache of blocks.

    Args:
        capacity: Blocks that it holds; None holds all.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def ask(self, blocks: Blocks) -> int:
        """How many leading blocks are held; afterwards all of them are the most recent, in their order."""
        shared = next((i for i, block in enumerate(blocks) if block not in self._held), len(blocks))
        for block in blocks:
            self._held[block] = None
            self._held.move_to_end(block)
            if self._capacity is not None and len(self._held) > self._capacity:
                self._held.popitem(last=False)
        return shared


class Found(NamedTuple):
    """What a cache had of one prompt: its leading blocks, and the tokens of them that are not computed again."""

    blocks: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Hits:
    """What a cache found in a replay: blocks and tokens, of those that were asked for."""

    blocks: int
    tokens: int
    asked_blocks: int
    asked_tokens: int

    @property
    def block_ratio(self) -> float:
        return self.blocks / self.asked_blocks if self.asked_blocks else 0.0

    @property
    def token_ratio(self) -> float:
        return self.tokens / self.asked_tokens if self.asked_tokens else 0.0


def count_hits(prompts: Sequence[Prompt], found: Iterable[Found]) -> Hits:
    """Sum up what a cache found of every prompt."""
    blocks, tokens = (sum(column) for column in zip(*found, strict=True)) if prompts else (0, 0)
    return Hits(blocks, tokens, sum(len(p.blocks) for p in prompts), sum(p.length for p in prompts))


def replay_lru(prompts: Sequence[Prompt], capacity: int | None, page_size: int = 1) -> Hits:
    """Every prompt in order of arrival through a fresh `BlockLru`; pages matter to repeated prompts only."""
    cache = BlockLru(capacity)
    shared = [cache.ask(prompt.blocks) for prompt in prompts]
    tokens = [reusable_tokens(*pair, page_size) for pair in zip(prompts, shared, strict=True)]
    return count_hits(prompts, map(Found, shared, tokens))


def prompts_of(trace: Trace) -> list[Prompt]:
    """The requests of a trace, in order of arrival.

    Raises:
        ConfigError: The trace says nothing of what its prompts share.
    """
    if not trace.blocks:
        raise ConfigError(f"{trace.name} has no hash_ids; what its prompts share is not known")
    columns = (trace.prompt_len.tolist(), trace.output_len.tolist(), trace.blocks)
    return [Prompt(*row) for row in zip(*columns, strict=True)]


def message_ends(prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """The ends of messages that a frontend would have known of every prompt, as far as the ids can tell.

    - the system prompt: the leading blocks that most prompts have in common;
    - a turn before: the longest earlier prompt (the latest of equal ones) whose whole blocks all
      lead this one and are more than the system prompt's, and whose answer fits before its end.
      Its own ends, its prompt's end and its answer's end are ends here too;
    - the end of the prompt: its last message.

    All are rounded down to whole blocks, below which no id says what is shared; ascending, above 0.
    """
    common = _common_prefix(prompts)
    latest: dict[Blocks, int] = {}  # whole blocks of a prompt -> the last one that has them
    found: list[tuple[int, ...]] = []
    for number, prompt in enumerate(prompts):
        ends = {prompt.length}
        if prompt.blocks[: len(common)] == common:
            ends.add(len(common) * BLOCK_TOKENS)
        before = _turn_before(prompts, latest, prompt, len(common))
        if before is not None:
            ends |= {*found[before], prompts[before].length, prompts[before].length + prompts[before].output_len}
        whole = {end // BLOCK_TOKENS * BLOCK_TOKENS for end in ends if end <= prompt.length}
        found.append(tuple(sorted(whole - {0})))
        latest[prompt.blocks[: prompt.length // BLOCK_TOKENS]] = number
    return found


def _common_prefix(prompts: Sequence[Prompt]) -> Blocks:
    """Leading blocks that more than half of the prompts have in common."""
    common: Blocks = ()
    while prompts:
        depth = len(common) + 1
        heads = Counter(prompt.blocks[:depth] for prompt in prompts if len(prompt.blocks) >= depth)
        head, count = heads.most_common(1)[0] if heads else ((), 0)
        if 2 * count <= len(prompts):
            break
        common = head
    return common


def _turn_before(prompts: Sequence[Prompt], latest: dict[Blocks, int], prompt: Prompt, common: int) -> int | None:
    for depth in range(prompt.length // BLOCK_TOKENS, common, -1):
        number = latest.get(prompt.blocks[:depth])
        if number is not None and prompts[number].length + prompts[number].output_len <= prompt.length:
            return number
    return None
