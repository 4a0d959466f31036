"""Checkpoints in host memory: what the device had no room for, by the tokens that it covers.

A checkpoint is the content of whole pages of a prefix, and of the state row behind them. Pages lie in a
tree, an edge the tokens of one page, so that conversations with one beginning keep it once; a checkpoint hangs at
the node of its last page by the tokens behind it. Keys are the tokens themselves: nothing is found by a hash alone.

The least recently used checkpoints go when the bytes do not suffice, with the pages that no other one needs. This
module knows neither devices nor requests. It is not safe for threads by itself; `host_copying` holds a lock.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

Content = tuple[np.ndarray, ...]  # as `aot.host_copies.Content`
TOKEN_BYTES = 4


@dataclasses.dataclass(eq=False)
class _Node:
    """A page of a prefix; the root is the empty prefix.

    Attributes:
        parent, edge: Where it hangs, by which tokens.
        content: None of the root only.
        children: By the tokens of their page.
        checkpoints: Those that end behind this page, by the tokens between.
    """

    parent: _Node | None = None
    edge: bytes = b""
    content: Content | None = None
    children: dict[bytes, _Node] = dataclasses.field(default_factory=dict)
    checkpoints: dict[bytes, HostCheckpoint] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class HostCheckpoint:
    """One checkpoint.

    Attributes:
        endpoint: Tokens that it covers.
        row: Content of its state row.
        tail: Its tokens behind the last whole page.
    """

    endpoint: int
    row: Content
    tail: bytes
    node: _Node


class HostTier:
    """Checkpoints within a budget of bytes.

    Args:
        budget_bytes: Of contents and keys together.
        page_size: Tokens of a page.

    Attributes:
        used_bytes: What is kept now.
        evicted: Checkpoints that gave way so far.
    """

    def __init__(self, budget_bytes: int, page_size: int) -> None:
        self.budget_bytes, self.page_size = budget_bytes, page_size
        self.used_bytes = 0
        self.evicted = 0
        self._root = _Node()
        self._by_use: collections.OrderedDict[HostCheckpoint, None] = collections.OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._by_use)

    def lacking(self, tokens: np.ndarray, num_pages: int) -> list[int] | None:
        """Which of the first pages of a prefix are not here; None if its checkpoint is, which counts as a use.

        Args:
            tokens: int32 [endpoint], the prefix.
            num_pages: Whole pages that a checkpoint of it shares.
        """
        path = list(self._path(tokens, num_pages))
        if len(path) == num_pages + 1:
            found = path[-1].checkpoints.get(tokens[num_pages * self.page_size :].tobytes())
            if found is not None:
                self._by_use.move_to_end(found)
                return None
        return list(range(len(path) - 1, num_pages))

    def put(self, tokens: np.ndarray, num_pages: int, pages: Mapping[int, Content], row: Content) -> bool:
        """Keep a checkpoint; False if it does not fit, or a page of it is neither given nor here.

        Args:
            tokens: int32 [endpoint].
            num_pages: Its whole pages.
            pages: Contents of pages by their place in the prefix, those that were lacking.
        """
        tail = np.ascontiguousarray(tokens[num_pages * self.page_size :]).tobytes()
        path = list(self._path(tokens, num_pages))
        missing = range(len(path) - 1, num_pages)
        if not all(index in pages for index in missing):
            return False
        if len(path) == num_pages + 1 and tail in path[-1].checkpoints:
            self._by_use.move_to_end(path[-1].checkpoints[tail])
            return True
        whole = _size(row) + len(tail) + sum(self._page_bytes(pages[index]) for index in missing)
        whole += sum(self._page_bytes(node.content) for node in path[1:] if node.content is not None)
        if whole > self.budget_bytes:
            return False
        node = path[-1]
        for index in missing:
            edge = self._edge(tokens, index)
            child = _Node(node, edge, pages[index])
            node.children[edge] = child
            self.used_bytes += self._page_bytes(pages[index])
            node = child
        checkpoint = HostCheckpoint(len(tokens), row, tail, node)
        node.checkpoints[tail] = checkpoint
        self._by_use[checkpoint] = None
        self.used_bytes += _size(row) + len(tail)
        while self.used_bytes > self.budget_bytes:  # the new one is the last to go, and fits alone
            self._drop(next(iter(self._by_use)))
            self.evicted += 1
        return True

    def find(self, prompt: np.ndarray, beyond: int = 0) -> HostCheckpoint | None:
        """The longest checkpoint of more than `beyond` tokens that a prompt begins with and goes on behind.

        Args:
            prompt: int32 [n]; at least its last token is always computed.
        """
        best = None
        for depth, node in enumerate(self._path(prompt, len(prompt) // self.page_size)):
            start = depth * self.page_size
            for tail, checkpoint in node.checkpoints.items():
                end = checkpoint.endpoint
                longer = beyond < end < len(prompt) and (best is None or end > best.endpoint)
                if longer and prompt[start:end].tobytes() == tail:
                    best = checkpoint
        return best

    def contents(self, checkpoint: HostCheckpoint) -> list[Content]:
        """Contents of its pages, the first of the prefix first; this counts as a use."""
        self._by_use.move_to_end(checkpoint)
        pages, node = [], checkpoint.node
        while node.content is not None:
            pages.append(node.content)
            assert node.parent is not None
            node = node.parent
        return pages[::-1]

    def clear(self) -> None:
        """Forget everything."""
        while self._by_use:
            self._drop(next(iter(self._by_use)))

    def _path(self, tokens: np.ndarray, num_pages: int) -> Iterator[_Node]:
        """The root, and the nodes of the first pages as far as they are here."""
        node: _Node | None = self._root
        for index in range(num_pages + 1):
            assert node is not None
            yield node
            node = node.children.get(self._edge(tokens, index)) if index < num_pages else None
            if node is None:
                return

    def _edge(self, tokens: np.ndarray, index: int) -> bytes:
        return tokens[index * self.page_size : (index + 1) * self.page_size].tobytes()

    def _page_bytes(self, content: Content) -> int:
        return _size(content) + self.page_size * TOKEN_BYTES

    def _drop(self, checkpoint: HostCheckpoint) -> None:
        del self._by_use[checkpoint]
        node = checkpoint.node
        del node.checkpoints[checkpoint.tail]
        self.used_bytes -= _size(checkpoint.row) + len(checkpoint.tail)
        while node.parent is not None and not node.children and not node.checkpoints:
            assert node.content is not None
            del node.parent.children[node.edge]
            self.used_bytes -= self._page_bytes(node.content)
            node = node.parent


def _size(content: Sequence[np.ndarray]) -> int:
    return sum(array.nbytes for array in content)
