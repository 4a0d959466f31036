"""A trace's prompts through the checkpoint policy, one after the other, with service in no time.

What the scheduler does at the same places, with its own functions:

1. A prompt arrives; the index says which checkpoint shares most with it. Attention models reuse the
   pages of any part of one, recurrent models a whole one.
2. Pages for the rest: free ones, then those of checkpoints that give way.
3. The cuts of `plan_cuts`, a row for each, and its publication.

There is no clock and no device, so a trace of thousands of requests takes seconds. The capacity counts
everything that checkpoints hold: pages, and the page that every row has beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler import state_rows
from helios_jax.scheduler.checkpoints import Claim
from helios_jax.scheduler.cuts import Cut, CutCosts, plan_cuts
from helios_jax.scheduler.page_pressure import follow, make_room
from helios_jax.scheduler.preferences import PolicyConfig
from helios_jax.scheduler.resources import give_back, new_pool, pages_for, share, take
from helios_jax.scheduler.retention import new_retention
from helios_jax.scheduler.row_allocator import obtain
from helios_jax.scheduler.types import RequestHandle
from helios_jax.simulation.prefix_index import Match, PrefixIndex, covering
from helios_jax.simulation.prefixes import Found, Hits, Prompt, count_hits, message_ends, reusable_tokens
from helios_jax.simulation.traces import BLOCK_TOKENS, Blocks

# Extras are planned by measured costs: about an 8B model on an H100, 20 prompt tokens a ms, 0.05 ms a copy.
COSTS = CutCosts(np.array([512, 2048], np.int64), np.array([26_000_000, 100_000_000], np.int64), 50_000)
BLOCKS_A_ROW = 16  # the prompts of the conversation trace bring 18 new blocks each


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Capacity of a checkpoint cache.

    Attributes:
        tokens: Of KV cache, in pages and rows together.
        page_size: Tokens a page.
        rows: State rows; one takes as much as a page.
    """

    tokens: int
    page_size: int
    rows: int

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size - self.rows


def size_of(blocks: int, page_size: int, blocks_a_row: int = BLOCKS_A_ROW) -> CacheSize:
    """The cache that takes as much as `blocks` blocks, with a row for every `blocks_a_row` of them.

    Prompts that bring fewer new blocks than that run out of rows before they run out of pages.
    """
    return CacheSize(tokens=blocks * BLOCK_TOKENS, page_size=page_size, rows=max(2, blocks // blocks_a_row))


class CheckpointCache:
    """The checkpoints of one core that serves one prompt at a time.

    Args:
        size: Its capacity.
        partial: A prompt may use part of a checkpoint, to the page: models without recurrent state.
    """

    def __init__(self, size: CacheSize, *, partial: bool) -> None:
        self._size, self._partial = size, partial
        self._kept = new_retention(size.rows, 1)
        self._pool = new_pool(size.pages, 1, size.rows)
        self._index = PrefixIndex()
        self._blocks: dict[int, Blocks] = {}  # of the published checkpoints
        self._used: tuple[int, ...] = ()  # by the prompt that is served
        self._asked = 0  # prompts so far: the clock of demand

    def ask(self, prompt: Prompt, ends: tuple[int, ...] = ()) -> Found:
        """What a prompt reuses; afterwards it is among the checkpoints as far as it fits.

        Args:
            ends: Of its messages. None are needed where parts serve: a checkpoint of the whole prompt has them all.
        """
        self._asked += 1
        if pages_for(prompt.length, self._size.page_size) > self._size.pages:
            return Found(0, 0)  # it would be refused
        match = self._match(prompt)
        reused = self._admit(match, reusable_tokens(prompt, match.blocks, self._size.page_size))
        needed = pages_for(prompt.length, self._size.page_size) - int(self._pool.held[0])
        self._kept, self._pool = make_room(self._kept, self._pool, needed)
        if needed <= self._pool.num_free:
            self._pool = take(self._pool, [(0, needed)])
            for cut in self._cuts(prompt, ends, reused):
                self._capture(prompt, cut)
        self._pool = give_back(self._pool, [0])
        self._forget()
        return Found(match.blocks, reused)

    def _match(self, prompt: Prompt) -> Match:
        if self._partial:
            return self._index.longest_part(prompt.blocks)
        return self._index.longest_whole(prompt.blocks, prompt.length)

    def _admit(self, match: Match, tokens: int) -> int:
        """Share the pages of the match; returns its tokens.

        A state that is restored is in demand. Pages are not: they live on with the prompt's own checkpoint, and the
        rest of the one that they came from was not asked for.
        """
        self._used = ()
        if not match.checkpoint:
            return 0
        checkpoints = self._kept.checkpoints
        place = library.index_of(checkpoints, match.checkpoint)
        tokens = min(tokens, int(checkpoints.endpoints[place]))
        self._pool = share(self._pool, 0, checkpoints.pages[place][: tokens // self._size.page_size])
        if not self._partial:
            self._set(library.touch(checkpoints, match.checkpoint, self._asked))
            self._use(match.checkpoint)
        return tokens

    def _cuts(self, prompt: Prompt, ends: tuple[int, ...], reused: int) -> tuple[Cut, ...]:
        fraction = PolicyConfig().checkpoint_extra_work_fraction
        plan = plan_cuts(
            prompt_len=prompt.length, restored_len=reused, message_ends=ends, mandatory=(), costs=COSTS,
            fraction=fraction,
        )  # fmt: skip
        return plan.cuts

    def _capture(self, prompt: Prompt, cut: Cut) -> None:
        claim = Claim(self._asked, cut.role, cut.endpoint)
        granted = obtain(self._kept.rows, self._kept.checkpoints, claim, self._used)
        if granted is None:
            return
        rows, row, handle = granted.rows, granted.row, RequestHandle(0, self._asked)
        rows = state_rows.arm(rows, row, handle, cut.endpoint, cut.role)
        rows = state_rows.finish_copy(state_rows.begin_copy(rows, row, 1), row, 1, publish=True)
        blocks = covering(prompt.blocks, cut.endpoint)
        pages = tuple(self._pool.tables[0][: cut.endpoint // self._size.page_size].tolist())
        published = library.publish(
            granted.checkpoints, key=(cut.endpoint, blocks), endpoint=cut.endpoint, role=cut.role, row=row,
            demand_ns=self._asked, pages=pages,
        )  # fmt: skip
        if published.surplus_row:
            rows = state_rows.free_published(rows, published.surplus_row)
        self._kept = dataclasses.replace(self._kept, rows=rows)
        self._set(published.checkpoints)
        self._use(published.checkpoint)
        if published.checkpoint not in self._blocks:
            self._blocks[published.checkpoint] = blocks
            self._index.add(published.checkpoint, blocks, cut.endpoint)

    def _use(self, checkpoint: int) -> None:
        self._used = (*self._used, checkpoint)
        self._kept = dataclasses.replace(self._kept, used=(self._used,))

    def _set(self, checkpoints: library.Checkpoints) -> None:
        self._kept = dataclasses.replace(self._kept, checkpoints=checkpoints)
        self._pool = follow(self._pool, checkpoints)

    def _forget(self) -> None:
        self._kept = dataclasses.replace(self._kept, used=((),))
        for checkpoint in self._blocks.keys() - set(self._kept.checkpoints.ids.tolist()):
            self._index.remove(checkpoint, self._blocks.pop(checkpoint))


def replay_checkpoints(prompts: Sequence[Prompt], size: CacheSize, *, partial: bool) -> Hits:
    """Every prompt in order of arrival through a fresh `CheckpointCache`.

    Where parts of a checkpoint serve, one at the prompt's end holds all that earlier ends would. A
    recurrent state is captured at the ends that a frontend would have known.
    """
    cache = CheckpointCache(size, partial=partial)
    ends = [()] * len(prompts) if partial else message_ends(prompts)
    return count_hits(prompts, [cache.ask(*pair) for pair in zip(prompts, ends, strict=True)])
