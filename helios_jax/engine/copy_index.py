"""Copy proposals: what followed the last time the present suffix of a request occurred.

A bounded index of the newest positions of prompt and output, by n-grams of 2 to 5 tokens. The
longest n-gram that occurred before wins, the newest of its occurrences; the match is then
extended backwards, because longer matches are right more often (`CopyHistory`). The same
idea is known as prompt lookup or n-gram speculation.

Knows tokens only: no scheduler, no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

SHORTEST, LONGEST = 2, 5  # tokens of an indexed n-gram
LONGEST_MATCH = 16  # matches are told apart up to this length
CAPACITY = 16_384  # newest positions that the index knows, a request


class Copy(NamedTuple):
    """Proposed tokens, possibly none, and how many tokens before them agree (0 without a match)."""

    tokens: tuple[int, ...]
    match_len: int


class CopyIndex:
    """The tokens of one request and where their n-grams ended last.

    Args:
        tokens: The prompt.
        capacity: Positions that stay indexed; older ones are forgotten.
    """

    def __init__(self, tokens: Iterable[int], capacity: int = CAPACITY) -> None:
        self._tokens: list[int] = []
        self._capacity = capacity
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_entries(self) -> int:
        """N-grams in the index: at most 4 a position that is still indexed."""
        return len(self._ends)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Cost: O(1) a token."""
        for token in tokens:
            # What ends before this token has a continuation only now; so a suffix never finds itself.
            self._put(len(self._tokens))
            self._tokens.append(int(token))
            self._forget(len(self._tokens) - 1 - self._capacity)

    def propose(self, limit: int) -> Copy:
        """At most `limit` tokens that followed the longest known suffix. Cost: O(limit)."""
        tokens = self._tokens
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-size:]))
            if end is not None:
                return Copy(tuple(tokens[end : end + max(0, limit)]), self._match_len(end, size))
        return Copy((), 0)

    def _match_len(self, end: int, known: int) -> int:
        tokens, length = self._tokens, known
        most = min(LONGEST_MATCH, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _put(self, end: int) -> None:
        for size in range(SHORTEST, min(LONGEST, end) + 1):
            self._ends[tuple(self._tokens[end - size : end])] = end

    def _forget(self, end: int) -> None:
        for size in range(SHORTEST, min(LONGEST, end) + 1):
            key = tuple(self._tokens[end - size : end])
            if self._ends.get(key) == end:
                del self._ends[key]


class CopyHistory:
    """How often a copied token was right, by match length and depth, over all requests.

    The estimate is that of a token whose predecessors in the copy were right, as the round
    multiplies them. It starts at 1/2 with the weight of two observations and forgets with a half-life
    of 512 observations a cell.

    Args:
        depth: D, proposals a round.
    """

    _DECAY = 0.5 ** (1 / 512)

    def __init__(self, depth: int) -> None:
        self._right = np.ones((LONGEST_MATCH + 1, depth))
        self._judged = np.full((LONGEST_MATCH + 1, depth), 2.0)

    def confidence(self, match_len: int) -> np.ndarray:
        """float64 [D]: the estimate for each depth, never 0 or 1."""
        return self._right[match_len] / self._judged[match_len]

    def observe(self, match_len: int, offered: int, accepted: int) -> None:
        """A round judged `offered` copied tokens and took the first `accepted`."""
        judged = min(offered, accepted + 1)  # behind the first rejection nothing was learnt
        right, total = self._right[match_len], self._judged[match_len]
        right[:judged] *= self._DECAY
        total[:judged] *= self._DECAY
        total[:judged] += 1.0
        right[:accepted] += 1.0
