"""A conversation as ids, and where in them its complete messages end.

The ends are where the scheduler may keep state for the next turn, so an end that is not one costs a copy
that nobody can use. An end is given only if all of this holds; whatever is in doubt is left out:

1. The messages up to there, rendered without the generation prompt, are the beginning of the whole text.
   (Templates that drop earlier reasoning, or treat the last message differently, rewrite history.)
2. Their text shows the last of them. (Some templates hold the system message back, for the first question.)
3. A token ends there, and the tokens before it are those of that text by itself.

Every part of the text is encoded three times, and at most `MAX_ENDS` beginnings are rendered.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from helios_jax.errors import RequestError
from helios_jax.text.template import Message, encode_rendered, render_chat

MAX_ENDS = 16  # of one conversation: the first message (the system's) and the last ones
TAIL = 32  # characters at the end of a message that tell whether it is shown
CONTEXT = 16  # tokens that are encoded once more ahead of a part


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation through a model's template.

    Attributes:
        text: What the template made of it.
        token_ids: Ids of the text, with exactly one BOS where the tokenizer begins texts with it.
        message_ends: Numbers of tokens after which complete messages end, rising.
    """

    text: str
    token_ids: list[int]
    message_ends: tuple[int, ...]


def encode_conversation(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Conversation:
    """Render and encode a conversation, and find where its messages end.

    The options are `render_chat`'s.

    Raises:
        RequestError: As `render_chat`.
    """
    text = render_chat(tokenizer, messages, **options)
    ids = encode_rendered(tokenizer, text)
    chars = list(_ends_in_text(tokenizer, messages, text, options))
    return Conversation(text, ids, tuple(_Aligner(tokenizer, text, ids).ends(chars)))


def _ends_in_text(tokenizer: Any, messages: Sequence[Message], whole: str, options: Mapping[str, Any]) -> Iterator[int]:
    """Numbers of characters after which messages end in `whole`."""
    done = 0
    count = len(messages)
    for number in sorted({1, *range(max(count - MAX_ENDS + 2, 1), count + 1)}):
        text = _beginning(tokenizer, messages[:number], options)
        if text is None or len(text) <= done or not whole.startswith(text):
            continue
        if _shows(text[done:], messages[number - 1].get("content")):
            done = len(text)
            yield done


def _beginning(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str | None:
    """The text of the first messages, None where the template refuses them by themselves."""
    try:
        return render_chat(tokenizer, messages, **{**options, "add_generation_prompt": False})
    except RequestError:
        return None


def _shows(text: str, content: Any) -> bool:
    """Whether the content's end is in the text. Its beginning need not be: reasoning is often dropped."""
    if isinstance(content, str):
        return content.strip()[-TAIL:] in text
    parts = content if isinstance(content, Sequence) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return all(_shows(text, part) for part in texts if isinstance(part, str))


class _Aligner:
    """Finds the tokens after which a text is cut.

    Args:
        tokenizer: With `spans`, every cut is checked together with the tokens before it; one without is taken
            to encode a part of a text as it does in the whole.
        text: A rendered conversation.
        ids: Its tokens.
    """

    def __init__(self, tokenizer: Any, text: str, ids: list[int]) -> None:
        self._tokenizer, self._text, self._ids = tokenizer, text, ids
        self._has_spans = hasattr(tokenizer, "spans")

    def ends(self, cuts: Iterable[int]) -> Iterator[int]:
        """Numbers of tokens at the rising `cuts` (characters), those left out where no token ends for certain."""
        done = start = 0
        for cut in cuts:
            end = self._end(done, start, cut)
            if end is not None:
                done, start = cut, end
                yield end

    def _end(self, done: int, start: int, cut: int) -> int | None:
        """The token count at `cut`; `start` is the one at `done`, an end that was found before (or 0)."""
        if not done or not self._has_spans:
            text = self._text[done:cut]
            part = self._encode(text) if done else encode_rendered(self._tokenizer, text)
            return start + len(part) if part and self._ids[start : start + len(part)] == part else None
        possible = self._boundaries(cut)
        if not possible:
            return None
        # The head of this may differ from the whole's, as at any beginning of a text. From `start` on, and one
        # token before, it must not.
        again = self._encode(self._text[self._starts[max(start - CONTEXT, 0)] : cut])
        for end in possible:
            count = end - start + 1
            if end > start and again[-count:] == self._ids[end - count : end]:
                return end
        return None

    def _boundaries(self, cut: int) -> range:
        """Numbers of tokens that may lie before `cut`; none if a token reaches over it."""
        count = bisect.bisect_left(self._starts, cut)
        if not count or self._stops[count - 1] > cut:
            return range(0)
        # Where spans leave out spaces, those of a token of spaces are empty and lie behind it.
        return range(count, bisect.bisect_right(self._stops, cut) + 1)

    @functools.cached_property
    def _spans(self) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = self._tokenizer.spans(self._text)
        extra = len(spans) - len(self._ids)  # BOS: one that the text does not say, or several that it does
        return spans[extra:] if extra >= 0 else [(0, 0)] * -extra + spans

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self._spans]

    @functools.cached_property
    def _stops(self) -> list[int]:
        return [stop for _, stop in self._spans]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
