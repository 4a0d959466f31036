"""The model of the simulated world.

`talk` repeats itself often enough for copies to be right, ends now and then, and says characters of
several bytes. Every token depends on all tokens before it, so nothing can go wrong unseen.
"""

from __future__ import annotations

import zlib

import numpy as np

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
