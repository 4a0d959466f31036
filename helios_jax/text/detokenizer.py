"""Token ids to text, one at a time, never half a character.

The life of a `Detokenizer`: 1. it is told the prompt, of which it keeps the last bytes only;
2. `push` gives the text that each token completes, so the pieces put together are the decoding of
all tokens; 3. `flush` gives what an unfinished character at the end leaves, U+FFFD.
Text is a sequence of Unicode characters here: the parts of a ZWJ emoji come one after the other.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from helios_jax.text.token_bytes import ByteRule, strip_start

MAX_PARTIAL_BYTES = 3  # of an unfinished UTF-8 character
_new_decoder = codecs.getincrementaldecoder("utf-8")
_PLAIN = ByteRule()


class Detokenizer:
    """Incremental decoding of one output.

    Args:
        tokenizer: Gives `token_bytes`; `special_ids` and `byte_rule` where it has them.
        prompt_ids: What the output continues. A text's first space is stripped only when nothing
            visible is before it, and a character that the prompt began may be finished by the output.
        skip_special_tokens: Special tokens give no text.

    Cost: O(bytes of the token) a push; O(1) memory.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._rule: ByteRule = getattr(tokenizer, "byte_rule", _PLAIN)
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _new_decoder("replace")
        tail = self._prompt_tail(prompt_ids)
        self._left_to_strip = 0 if tail else self._rule.max_strip
        self._begun = partial_character(tail)

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's last bytes to see whether a character is unfinished."""
        tail = b""
        for token in reversed(prompt_ids):
            if token not in self._skipped:
                tail = self._bytes_of(int(token)) + tail
            if len(tail) > MAX_PARTIAL_BYTES:
                break
        return tail

    def push(self, token_id: int) -> str:
        """Text that this token completes; often the token's own, "" while a character is unfinished."""
        if token_id in self._skipped:
            return ""
        data = self._bytes_of(token_id)
        if self._left_to_strip and data:
            data, self._left_to_strip = strip_start(data, self._rule, self._left_to_strip)
        if self._begun and data:
            # Bytes that the prompt left unfinished and the output does not continue are not the output's fault.
            if partial_or_whole(self._begun + data[:1]):
                data = self._begun + data
            self._begun = b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end of the output: U+FFFD if it stopped within a character."""
        self._begun = b""
        return self._decoder.decode(b"", final=True)


def partial_character(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and do not finish it."""
    decoder = _new_decoder("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def partial_or_whole(data: bytes) -> bool:
    """Whether `data` is one or more characters, the last perhaps unfinished."""
    try:
        _new_decoder("strict").decode(data)
    except UnicodeDecodeError:
        return False
    return True


def text_offsets(
    tokenizer: Any, ids: Sequence[int], prompt_ids: Sequence[int] = (), *, start: int = 0, skip_special: bool = True
) -> list[int]:
    """Where the text of each token begins, in characters, as completions report it.

    A token that continues a character begins where that character begins.
    """
    detokenizer, offsets, at = Detokenizer(tokenizer, prompt_ids, skip_special), [], start
    for token in ids:
        offsets.append(at)
        at += len(detokenizer.push(token))
    return offsets
