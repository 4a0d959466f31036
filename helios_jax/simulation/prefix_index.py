"""Which checkpoint holds most of a prompt: a tree of block ids over the published checkpoints.

A path from the root is a prefix, so a match compares every id of it. Attention's cache is valid up to
any page: a prompt may use part of a checkpoint (`longest_part`). A recurrent state exists only where
it was captured: all of it or nothing (`longest_whole`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from helios_jax.simulation.traces import BLOCK_TOKENS, Blocks


class Match(NamedTuple):
    """A checkpoint (0: none) and how many leading blocks of the prompt it shares."""

    checkpoint: int
    blocks: int


NO_MATCH = Match(0, 0)


@dataclasses.dataclass(slots=True)
class _Node:
    children: dict[int, _Node] = dataclasses.field(default_factory=dict)
    through: dict[int, None] = dataclasses.field(default_factory=dict)  # checkpoints of this prefix and longer ones
    ends: dict[int, int] = dataclasses.field(default_factory=dict)  # checkpoint that ends here -> its endpoint


class PrefixIndex:
    """Checkpoints by the blocks that they cover; the last block may be covered in part."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, checkpoint: int, blocks: Blocks, endpoint: int) -> None:
        """The blocks of its prefix, of `endpoint` tokens; inside a block only whole prompts can end."""
        node = self._root
        for block in blocks:
            node = node.children.setdefault(block, _Node())
            node.through[checkpoint] = None
        node.ends[checkpoint] = endpoint

    def remove(self, checkpoint: int, blocks: Blocks) -> None:
        """The checkpoint is gone; prefixes that nobody holds any more are forgotten."""
        node, path = self._root, []
        for block in blocks:
            path.append((node, block))
            node = node.children[block]
            del node.through[checkpoint]
        del node.ends[checkpoint]
        for parent, block in reversed(path):
            if parent.children[block].through:
                break
            del parent.children[block]

    def longest_part(self, blocks: Blocks) -> Match:
        """The youngest of the checkpoints that share most leading blocks with a prompt."""
        node, depth, best = self._root, 0, NO_MATCH
        for block in blocks:
            following = node.children.get(block)
            if following is None:
                break
            node, depth = following, depth + 1
            best = Match(next(reversed(node.through)), depth)
        return best

    def longest_whole(self, blocks: Blocks, prompt_len: int) -> Match:
        """The youngest of the longest checkpoints that lie whole within a prompt, and end before it does."""
        node, best = self._root, NO_MATCH
        for depth, block in enumerate(blocks, 1):
            following = node.children.get(block)
            if following is None:
                break
            node = following
            whole = [checkpoint for checkpoint, endpoint in node.ends.items() if endpoint < prompt_len]
            best = Match(whole[-1], depth) if whole else best
        return best


def covering(blocks: Blocks, endpoint: int) -> Blocks:
    """The blocks that the first `endpoint` tokens reach into."""
    return blocks[: -(-endpoint // BLOCK_TOKENS)]
