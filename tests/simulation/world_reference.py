"""What a request of the simulated world must answer: the slow reference.

One token at a time: no pages, slots, frames, rounds, masks or matchers, and the whole text is made anew
behind every token.
"""

from __future__ import annotations

import codecs
import dataclasses

import numpy as np

from helios_jax.engine.params import SamplingParams
from helios_jax.testing import ByteTokenizer
from tests.simulation.world_grammar import form_of
from tests.simulation.world_model import EOS, talk


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
    """What one output must be.

    Args:
        index: Which of the n outputs.
        room: Most tokens that the context leaves.
    """
    seed = (params.seed or 0) + index if params.temperature else None
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    stop_ids = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    form, said, visible = form_of(params.structured_outputs), list[int](), b""
    while len(said) < most:
        token = talk(np.array(prompt + said, np.int32), len(prompt), seed)
        token = token if form is None else form.nearest(token, bytes(said), tokenizer.vocab_size)
        said.append(token)
        ends = token in stop_ids
        if token not in tokenizer.special_ids and (not ends or params.include_stop_str_in_output):
            visible += tokenizer.token_bytes(token)
        over = ends or (form is not None and form.is_over(bytes(said)))
        text = visible.decode(errors="replace") if over or len(said) == most else _whole(visible)
        cut = _cut(text, params)
        if cut is not None or over:
            return Answer(said, text[:cut], "stop")
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
