"""What a fake device remembers: pages of token ids, the slot table, recurrent state, and state rows.

Token ids lie where a model has keys and values. What comes next is a function of the tokens *read
back through the page table*, so a wrong page, slot, length or order changes the output. Recurrent state
is a checksum of the tokens that a slot has consumed; where it is not that of the tokens behind the page
table, as after a restore of a wrong row or page, every token that follows is another one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from helios_jax.aot.abi import Dims
from helios_jax.testing.model import NextToken, fake_logprobs, nearest_allowed

FORCING_BIAS = 50.0  # a logit bias from here up forces its token, as it would in a model
Parts = dict[str, np.ndarray]  # named fields of a control or completion vector
Mask = Callable[[int], np.ndarray | None]  # row of `bits` -> what may be sampled there, None = everything


def unmasked(row: int) -> None:
    """The mask of a frame without one."""


class Consumed(NamedTuple):
    """What recurrent layers keep of a prefix."""

    length: int = 0
    checksum: int = 0


class SavedState(NamedTuple):
    """A state row: what is behind the last whole page, and the recurrent state."""

    page: np.ndarray
    committed: int
    recurrent: Consumed


class FakeState:
    """Pages [P, page_size]; of each slot [S + 1] its committed length, pending token, settings and recurrent state."""

    def __init__(self, dims: Dims, next_token: NextToken, *, recurrent: bool = True) -> None:
        self.dims, self.next_token, self.is_recurrent = dims, next_token, recurrent
        self.pages = np.full((dims.num_pages, dims.page_size), -1, np.int32)
        self.committed = np.zeros(dims.slots + 1, np.int32)
        self.pending = np.full(dims.slots + 1, -1, np.int32)
        self.settings: list[dict[str, Any]] = [{} for _ in range(dims.slots + 1)]
        self.recurrent = [Consumed()] * (dims.slots + 1)
        self.saved = [SavedState(self.pages[0].copy(), -1, Consumed())] * (dims.state_rows + 1)

    def write(self, table: np.ndarray, start: int, tokens: np.ndarray) -> None:
        """Put `tokens` at positions `start` on, through a page table [pages_per_slot]."""
        page, place = self._address(table, np.arange(start, start + len(tokens)))
        self.pages[page, place] = tokens

    def consume(self, slot: int, start: int, tokens: np.ndarray) -> None:
        """Recurrent layers go on with `tokens`; a prompt from its beginning finds an empty state."""
        length, checksum = self.recurrent[slot] if start else Consumed()
        self.recurrent[slot] = Consumed(length + len(tokens), zlib.crc32(tokens.astype(np.int32).tobytes(), checksum))

    def history(self, table: np.ndarray, length: int) -> np.ndarray:
        """int32 [length], the first tokens behind a page table."""
        return self.pages[self._address(table, np.arange(length))]

    def _address(self, table: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pages = table[positions // self.dims.page_size]
        if not (pages > 0).all():
            missing = int(positions[np.argmin(pages > 0)])
            raise ValueError(f"position {missing} has no page in the table {table.tolist()}: the host's mistake")
        return pages, positions % self.dims.page_size

    def room(self, table: np.ndarray, start: int, most: int) -> int:
        """Positions from `start` on, at most `most`, that the table has pages for."""
        positions = np.arange(start, start + most)
        index = positions // self.dims.page_size
        there = (index < len(table)) & (table[np.minimum(index, len(table) - 1)] > 0)
        return int(np.cumprod(there).sum()) if most else 0

    def initialize(self, parts: Parts) -> None:
        """Settings of fresh slots; nothing is committed or pending."""
        for row, slot in enumerate(parts["slot"]):
            self.settings[slot] = {name: parts[name][row].copy() for name in parts if name != "slot"}
            self.committed[slot], self.pending[slot] = 0, -1

    def snapshot(self, parts: Parts, out: Parts) -> None:
        """Complete states of slots into state rows."""
        for lane, (slot, row, page) in self._copies(parts):
            self.saved[row] = SavedState(self.pages[page].copy(), int(self.committed[slot]), self.recurrent[slot])
            out["row"][lane], out["committed_len"][lane] = row, self.committed[slot]

    def restore(self, parts: Parts, out: Parts) -> None:
        """State rows into slots that new requests take over."""
        self.initialize({name: part for name, part in parts.items() if name not in ("row", "page")})
        for lane, (slot, row, page) in self._copies(parts):
            saved = self.saved[row]
            if page:
                self.pages[page] = saved.page
            self.committed[slot], self.recurrent[slot] = saved.committed, saved.recurrent
            out["row"][lane], out["committed_len"][lane] = row, saved.committed

    def _copies(self, parts: Parts) -> list[tuple[int, tuple[int, int, int]]]:
        """(lane, (slot, row, page)) of the lanes that copy anything."""
        lanes = enumerate(zip(*(parts[name].tolist() for name in ("slot", "row", "page")), strict=True))
        return [(lane, each) for lane, each in lanes if each[0] < self.dims.slots and 0 < each[1] < len(self.saved)]

    def seed(self, slot: int) -> int | None:
        """The slot's seed, None where it is greedy."""
        settings = self.settings[slot]
        words = settings["seed"].view(np.uint32)
        return int(words[0]) << 32 | int(words[1]) if settings["temperature"] > 0 else None

    def prompt_len(self, slot: int) -> int:
        return int(self.settings[slot]["prompt_len"])

    def choose(self, slot: int, history: np.ndarray, mask: np.ndarray | None) -> int:
        """The target's token behind `history` [n]; -1 where a mask allows none."""
        token, settings = self.next_token(history, self.prompt_len(slot), self.seed(slot)), self.settings[slot]
        length, checksum = self.recurrent[slot]
        foreign = length > len(history) or zlib.crc32(history[:length].tobytes()) != checksum
        if foreign and self.is_recurrent:
            token = (token + 1) % 256  # recurrent state and keys are not of one prefix
        best = int(np.argmax(settings["bias_values"]))
        if settings["bias_ids"][best] >= 0 and settings["bias_values"][best] >= FORCING_BIAS:
            token = int(settings["bias_ids"][best])
        return token if mask is None else nearest_allowed(token, mask, self.dims.vocab_size)

    def describe(self, token: int, out: Parts, index: tuple[int, ...]) -> None:
        """Log-probabilities of a sampled token."""
        fake_logprobs(token, out["top_ids"][index], out["top_logprobs"][index], self.dims.vocab_size)
        out["logprob"][index], out["rank"][index] = out["top_logprobs"][index][0], 1
