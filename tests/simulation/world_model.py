"""The model of the simulated world, and what a request must answer: the slow reference.

`talk` repeats itself often enough for copies to be right, ends now and then, and says characters of
several bytes. Every token depends on all tokens before it, so nothing can go wrong unseen.
"""

from __future__ import annotations

import codecs
import dataclasses
import zlib

import numpy as np

from helios_jax.engine.params import SamplingParams
from helios_jax.testing import ByteTokenizer

EOS = 257
LETTERS = b"etaoin shrdlu "
SMILEY = (0xF0, 0x9F, 0x98)  # a fourth byte follows
MEMORY = 64  # tokens that a repetition looks back


def talk(tokens: np.ndarray, prompt_len: int, seed: int | None) -> int:
    """The next token: an end, a part of a smiley, a repetition, or a letter."""
    number = zlib.crc32(tokens.tobytes() + str(seed).encode())
    die, last = number % 128, tokens[-3:].tolist()
    begun = next((n for n in (3, 2, 1) if tuple(last[-n:]) == SMILEY[:n]), 0)
    if begun:
        return SMILEY[begun] if begun < 3 else 0x80 + number // 128 % 64
    if die < 2 and len(tokens) > prompt_len:
        return EOS
    if die < 6:
        return SMILEY[0]
    if die < 90 and len(tokens) > 2:
        recent = tokens[-MEMORY:]
        before = np.flatnonzero((recent[1:-1] == recent[-1]) & (recent[:-2] == recent[-2]))
        if len(before):
            return int(recent[before[-1] + 2])
    return LETTERS[number // 128 % len(LETTERS)]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one output must be if nothing disturbs it."""

    tokens: list[int]
    text: str
    reason: str


def shown(tokens: list[int], tokenizer: ByteTokenizer) -> str:
    """Text of an output that no stop cut short."""
    return b"".join(tokenizer.token_bytes(t) for t in tokens if t not in tokenizer.special_ids).decode(errors="replace")


def reference(prompt: list[int], params: SamplingParams, index: int, room: int, tokenizer: ByteTokenizer) -> Answer:
    """One token at a time, the whole text searched for stop strings each time.

    Args:
        index: Which of the n outputs.
        room: Most tokens that the context leaves.
    """
    seed = (params.seed or 0) + index if params.temperature else None
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    stop_ids = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    said: list[int] = []
    visible = b""
    while len(said) < most:
        token = talk(np.array(prompt + said, np.int32), len(prompt), seed)
        said.append(token)
        ends = token in stop_ids
        if token not in tokenizer.special_ids and (not ends or params.include_stop_str_in_output):
            visible += tokenizer.token_bytes(token)
        text = visible.decode(errors="replace") if ends or len(said) == most else _whole(visible)
        cut = _cut(text, params)
        if cut is not None:
            return Answer(said, text[:cut], "stop")
        if ends:
            return Answer(said, text, "stop")
    return Answer(said, visible.decode(errors="replace"), "length")


def _whole(data: bytes) -> str:
    """The characters of `data` that are complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _cut(text: str, params: SamplingParams) -> int | None:
    """Where a stop string ends the text: the one complete first, of those the longest."""
    found = [(text.index(stop) + len(stop), -len(stop)) for stop in params.stop or () if stop in text]
    if not found:
        return None
    end, negative = min(found)
    return end if params.include_stop_str_in_output else end + negative
