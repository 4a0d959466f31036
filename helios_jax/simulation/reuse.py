"""The simulator's host of prefixes: prompts of a trace by their blocks, checkpoints of the scheduler by the same.

1. `matched` before an admission: the checkpoint that shares most with the prompt.
2. `published` when a capture is complete: the scheduler learns the key, the index the blocks.

What the scheduler has evicted since is taken out of the index before the next match. Tokens of an answer are
in no trace, so a checkpoint behind the prompt's end is known by the prompt, and no other prompt reaches its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.types import CheckpointPublished, RequestSpec
from helios_jax.simulation.driver import Served
from helios_jax.simulation.prefix_index import PrefixIndex, covering
from helios_jax.simulation.prefixes import Prompt
from helios_jax.simulation.traces import BLOCK_TOKENS, Blocks


class TraceReuse:
    """Matches for one run.

    Args:
        scheduler: Keeps the checkpoints. Parts of them are used where its limits allow it.
        prompts: Of the requests, by number.
    """

    def __init__(self, scheduler: Scheduler, prompts: Sequence[Prompt]) -> None:
        self._scheduler, self._prompts = scheduler, prompts
        self._index = PrefixIndex()
        self._blocks: dict[int, Blocks] = {}  # of the checkpoints in the index
        self._seen: object = None

    def matched(self, number: int, spec: RequestSpec) -> RequestSpec:
        """The spec with the checkpoint, or the part of one, that its prompt begins with."""
        self._forget()
        state, prompt = self._scheduler.state, self._prompts[number]
        limits, known = state.limits, state.retention.checkpoints
        if limits.shares_parts:
            match = self._index.longest_part(prompt.blocks)
        else:
            match = self._index.longest_whole(prompt.blocks, prompt.length)
        if not match.checkpoint:
            return spec
        endpoint = int(known.endpoints[library.index_of(known, match.checkpoint)])
        tokens = endpoint
        if limits.shares_parts:
            shared = min(match.blocks * BLOCK_TOKENS, prompt.length, endpoint, len(spec.prompt) - 1)
            tokens = shared // limits.page_size * limits.page_size
        return dataclasses.replace(spec, restored_len=tokens, restore_from=match.checkpoint if tokens else 0)

    def published(self, number: int, event: CheckpointPublished) -> None:
        """Name a fresh checkpoint by the blocks that it covers."""
        prompt = self._prompts[number]
        blocks = covering(prompt.blocks, min(event.endpoint, prompt.length))
        answer = number if event.endpoint > prompt.length else None
        self._scheduler.identify_checkpoint(event.checkpoint, (event.endpoint, blocks, answer))
        self._forget()
        known = self._scheduler.state.retention.checkpoints
        if library.is_published(known, event.checkpoint):  # it may be another's alias now
            self._blocks[event.checkpoint] = blocks
            self._index.add(event.checkpoint, blocks, event.endpoint)

    def _forget(self) -> None:
        known = self._scheduler.state.retention.checkpoints
        if known.keys is self._seen:
            return
        self._seen = known.keys
        for checkpoint in self._blocks.keys() - set(known.ids.tolist()):
            self._index.remove(checkpoint, self._blocks.pop(checkpoint))


def prefix_report(prompts: Sequence[Prompt], requests: Sequence[Served], scheduler: Scheduler) -> dict[str, Any]:
    """What the requests of a run reused, those that were refused left out."""
    served = [pair for pair in zip(prompts, requests, strict=True) if pair[1].reason != "refused"]
    asked, reused = sum(prompt.length for prompt, _ in served), sum(request.reused for _, request in served)
    counts = scheduler.state.retention.counts
    return {
        "prompt_tokens": asked,
        "reused_tokens": reused,
        "hit_ratio": round(reused / asked, 4) if asked else 0.0,
        "captured": sum(counts.captured),
        "evicted": counts.evicted,
    }
