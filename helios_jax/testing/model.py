"""Models of one line: the next token, and a draft of it, as pure functions of the tokens before.

A test that knows the function knows the right answer. `expected_tokens` is the slow reference:
one token at a time, without pages, slots, rounds or frames.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from helios_jax.aot.abi import TOP_LOGPROBS

# (all tokens [n], prompt length, seed or None when greedy) -> next token id
NextToken = Callable[[np.ndarray, int, int | None], int]
PRINTABLE = b"abcdefghijklmnopqrstuvwxyz     "


def hashed_text(tokens: np.ndarray, prompt_len: int, seed: int | None) -> int:
    """The default model: a printable byte drawn by a hash of the whole history (and the seed)."""
    key = np.asarray(tokens, np.int32).tobytes() + str(seed).encode()
    return PRINTABLE[zlib.crc32(key) % len(PRINTABLE)]


def scripted(text: str | bytes, then: int = 257) -> NextToken:
    """A model that says `text` byte by byte, then token `then` (ByteTokenizer's EOS) for ever."""
    script = text.encode() if isinstance(text, str) else text

    def next_token(tokens: np.ndarray, prompt_len: int, seed: int | None) -> int:
        index = len(tokens) - prompt_len
        return script[index] if index < len(script) else then

    return next_token


class Guess(NamedTuple):
    """A proposed token, and how sure the draft is of it, within (0, 1)."""

    token: int
    confidence: float


class FakeDraft:
    """A draft model that is right as often as it is told to be, and a little surer where it is right.

    Args:
        agreement: Share of its proposals that are the target's token, by a hash of the history.
    """

    def __init__(self, agreement: float = 0.7) -> None:
        self.agreement = agreement

    def guess(self, next_token: NextToken, tokens: np.ndarray, prompt_len: int, seed: int | None) -> Guess:
        """The proposal behind `tokens` [n]."""
        number = zlib.crc32(b"draft" + np.asarray(tokens, np.int32).tobytes())
        right, unsure = (number % 1000) / 1000 < self.agreement, (number // 1000 % 1000) / 1000
        token = next_token(tokens, prompt_len, seed)
        return Guess(token, 0.5 + 0.45 * unsure) if right else Guess((token + 1) % 256, 0.05 + 0.6 * unsure)


def expected_tokens(next_token: NextToken, prompt: list[int], count: int, seed: int | None = None) -> list[int]:
    """What a model says after a prompt, one token at a time and without pages: the slow reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(np.asarray(tokens, np.int32), len(prompt), seed))
    return tokens[len(prompt) :]


def nearest_allowed(token: int, bits: np.ndarray, vocab_size: int) -> int:
    """`token` if a mask allows it, else the next id, cyclically, that it allows; -1 where it allows none.

    Args:
        bits: uint32 [ceil(V / 32)], bit t % 32 of word t // 32 is 1 where token t is allowed.
    """
    allowed = np.unpackbits(bits.astype("<u4").view(np.uint8), bitorder="little")[:vocab_size]
    ids = np.flatnonzero(allowed)
    if not len(ids):
        return -1
    return int(ids[np.argmin((ids - token) % vocab_size)])


def fake_logprobs(token: int, ids: np.ndarray, values: np.ndarray, vocab_size: int) -> None:
    """Fill one row: the token has half the mass, its successors by id a half of what is left, each."""
    ids[:] = (token + np.arange(TOP_LOGPROBS)) % vocab_size
    values[:] = -np.log(2.0) * np.arange(1, TOP_LOGPROBS + 1)
