"""`text_offset` of completions: where each token begins in the text of the answer, in characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helios_jax.text.detokenizer import text_offsets


def echo_offsets(tokenizer: Any, ids: Sequence[int], text: str, given_as_text: bool) -> list[int]:
    """Where the tokens of an echoed prompt begin.

    Args:
        tokenizer: Made the ids, or decoded them to the text.
        ids: Of the prompt, special tokens included.
        text: What is echoed.
        given_as_text: The client gave the text: special tokens that the tokenizer put around it are not in it.
    """
    first, last = 0, len(ids)
    if given_as_text:
        special = tokenizer.special_ids
        while first < last and ids[first] in special and not text.startswith(tokenizer.decode_token(ids[first])):
            first += 1
        while first < last and ids[last - 1] in special and not text.endswith(tokenizer.decode_token(ids[last - 1])):
            last -= 1
    inner = text_offsets(tokenizer, ids[first:last], skip_special=False)
    # A tokenizer that normalises may have made more characters than the client gave.
    return [min(at, len(text)) for at in [0] * first + inner + [len(text)] * (len(ids) - last)]
