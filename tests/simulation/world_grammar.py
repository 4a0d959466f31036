"""Grammars of the simulated world, each twice: as the engine is asked for it, and as a few lines that know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from helios_jax.engine.structured import StructuredOutputsParams
from helios_jax.testing import ByteTokenizer
from helios_jax.text.grammar import GrammarCompiler
from tests.simulation.world_model import EOS

CHOICES = ("yes indeed", "no", "no way", "nothing at all")
Allowed = tuple[frozenset[int], bool]  # the next bytes, and whether the text may end here


def _choice(said: bytes) -> Allowed:
    rest = [choice.encode()[len(said) :] for choice in CHOICES if choice.encode().startswith(said)]
    return frozenset(text[0] for text in rest if text), b"" in rest


def _words(said: bytes) -> Allowed:
    """One to three words of two to four letters from e to n."""
    words = said.split(b" ")
    last = len(words[-1])
    letters = frozenset(b"efghijklmn") if last < 4 else frozenset()
    space = frozenset(b" ") if last >= 2 and len(words) < 3 else frozenset()
    return letters | space, last >= 2


@dataclasses.dataclass(frozen=True)
class Form:
    """A grammar as it is asked for, and what it allows behind some text."""

    asked: StructuredOutputsParams
    allowed: Callable[[bytes], Allowed]

    def nearest(self, token: int, said: bytes, vocab_size: int) -> int:
        """What a device samples that wants `token`: the next id, cyclically, that is allowed."""
        letters, may_end = self.allowed(said)
        ids = letters | ({EOS} if may_end else set())
        return min(ids, key=lambda i: (i - token) % vocab_size)

    def is_over(self, said: bytes) -> bool:
        """Whether nothing can follow."""
        letters, _ = self.allowed(said)
        return not letters


FORMS = (
    Form(StructuredOutputsParams(choice=list(CHOICES)), _choice),
    Form(StructuredOutputsParams(regex="[e-n]{2,4}( [e-n]{2,4}){0,2}"), _words),
)
COMPILER = GrammarCompiler(ByteTokenizer(), 260, (EOS,), timeout_s=60.0)  # of all worlds: each grammar is compiled once


def form_of(asked: StructuredOutputsParams | None) -> Form | None:
    """The form that a request asks for."""
    return next((form for form in FORMS if form.asked is asked), None)
