"""What tests of grammars share: a compiler over single bytes, walks along texts, and random outputs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from helios_jax.testing import ByteTokenizer
from helios_jax.text.grammar import Grammar, GrammarCompiler, GrammarSpec, Matcher

VOCAB, EOS = 300, 257  # ids from 260 up stand for nothing
WORDS = -(-VOCAB // 32)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), VOCAB, (EOS,))


def schema(value: Any, **options: Any) -> Grammar:
    return compiler().compile(GrammarSpec.json_schema(value, **options))


def ids_of(words: np.ndarray) -> list[int]:
    """The ids whose bits are set."""
    return [32 * word + bit for word, value in enumerate(words.tolist()) for bit in range(32) if value >> bit & 1]


def allowed(matcher: Matcher) -> list[int]:
    words = np.zeros(WORDS, np.uint32)
    matcher.fill(words)
    return ids_of(words)


def accepts(grammar: Grammar, text: str | bytes) -> bool:
    """Whether the masks let through every byte of a text, and its end."""
    matcher = grammar.matcher()
    for byte in text.encode() if isinstance(text, str) else text:
        if byte not in allowed(matcher):
            return False
        matcher.advance(byte)
    return EOS in allowed(matcher)


def random_output(grammar: Grammar, rng: np.random.Generator, limit: int = 400) -> str | None:
    """A text drawn through the masks, brackets and quotes likelier as it grows; None if it does not end."""
    matcher, out = grammar.matcher(), bytearray()
    while len(out) < limit:
        ids = allowed(matcher)
        assert ids, f"nothing may follow {bytes(out)!r}"
        if EOS in ids and (ids == [EOS] or rng.random() < 0.3):
            return out.decode()
        ids = [i for i in ids if i != EOS]
        weights = np.array([1 + (i in b'"]}') * len(ids) * 0.3 * min(1, len(out) / 40) for i in ids])
        token = int(rng.choice(ids, p=weights / weights.sum()))
        matcher.advance(token)
        assert matcher.error is None
        out.append(token)
    return None
