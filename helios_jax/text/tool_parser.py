"""Calls of tools in an output, found while it is being written.

A `CallParser` takes the text in pieces of any size and gives `Piece`s: text for the reader, the beginning
of a call with its name, parts of its arguments. The pieces of an output, joined, do not depend on how it was cut.

Known forms: JSON in `<tool_call>` tags, one call or a list of calls; and an output that is nothing but
such JSON, without tags, and calls known tools. What looks like a call and is none is text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from helios_jax.text.tools import CLOSE, OPEN

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
MAX_HEAD = 4096  # characters in which a call's name must have come for its arguments to be passed on at once


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new.

    Attributes:
        content: Text that is no call.
        call: Number of the call, from 0, that the rest is about.
        name: Name of the function; the call begins here.
        arguments: Part of the arguments as JSON text.
    """

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class _Arguments:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._inside, self._escaped = 0, False, False

    def take(self, text: str) -> tuple[int, bool]:
        """How many characters belong to the object, and whether it ends with them."""
        for index, char in enumerate(text):
            if self._inside:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._inside = False
            elif char == '"':
                self._inside = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1, True
        return len(text), False


class CallParser:
    """Reads one output.

    Args:
        names: Of the tools that may be called without tags.
        bare: Whether calls without tags are looked for.
    """

    def __init__(self, names: Collection[str], bare: bool = True) -> None:
        self._names, self._bare = frozenset(names), bare
        self._text = ""  # not yet decided
        self._began = False  # something that is not whitespace was seen
        self._in_tag = False
        self._gap = ""  # whitespace before the tag, not passed on: text only if there is no call
        self._arguments: _Arguments | None = None
        self._passed_on = False  # the present call's arguments went out as they came
        self.calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Pieces that more text decides."""
        self._text += text
        return list(self._advance())

    def finish(self) -> list[Piece]:
        """Pieces that the end of the output decides."""
        pieces = list(self._advance())
        rest, self._text = self._text, ""
        if self._in_tag:
            if not self._passed_on:
                pieces += self._whole(rest, f"{self._gap}{OPEN}{rest}")
        elif self._holds_bare(rest):
            pieces += self._whole(rest, rest, known=True)
        elif rest and not (self.calls and rest.isspace()):
            pieces.append(Piece(content=rest))
        return pieces

    def _holds_bare(self, text: str) -> bool:
        return self._bare and not self._began and not self.calls and text.lstrip()[:1] in ("{", "[")

    def _advance(self) -> Iterator[Piece]:
        while True:
            before = (self._text, self._in_tag, self._passed_on)
            yield from self._inside() if self._in_tag else self._outside()
            if before == (self._text, self._in_tag, self._passed_on):
                return

    def _outside(self) -> Iterator[Piece]:
        """Text up to the next tag; what may be the beginning of one, and whitespace before it, is held back."""
        if self._holds_bare(self._text):
            return
        index = self._text.find(OPEN)
        if index >= 0:
            said, self._text = self._text[:index], self._text[index + len(OPEN) :]
            self._in_tag, self._passed_on, self._arguments = True, False, None
            kept = said.rstrip()
            self._gap = said[len(kept) :]
            if kept:
                yield self._say(kept)
            return
        held = next((n for n in range(len(OPEN) - 1, 0, -1) if self._text.endswith(OPEN[:n])), 0)
        said = self._text[: len(self._text) - held].rstrip()
        if said:
            self._text = self._text[len(said) :]
            yield self._say(said)

    def _say(self, text: str) -> Piece:
        self._began = True
        return Piece(content=text)

    def _inside(self) -> Iterator[Piece]:
        if self._arguments is not None:
            count, ended = self._arguments.take(self._text)
            part, self._text = self._text[:count], self._text[count:]
            if ended:
                self._arguments = None
            if part:
                yield Piece(call=self.calls - 1, arguments=part)
            return
        if not self._passed_on:
            head = HEAD.match(self._text[:MAX_HEAD])
            name = _string(head.group(1)) if head else None
            if head and name:
                self._text = self._text[head.end() :]
                self._passed_on, self._arguments = True, _Arguments()
                yield self._begin(name)
                return
        index = self._text.find(CLOSE)
        if index >= 0:
            body, self._text = self._text[:index], self._text[index + len(CLOSE) :]
            self._in_tag = False
            if not self._passed_on:
                yield from self._whole(body, f"{self._gap}{OPEN}{body}{CLOSE}")

    def _begin(self, name: str) -> Piece:
        self.calls += 1
        return Piece(call=self.calls - 1, name=name)

    def _whole(self, body: str, otherwise: str, known: bool = False) -> Iterator[Piece]:
        """The calls of complete JSON text; `otherwise` is text if it has none."""
        found = _calls(body)
        if not found or (known and any(name not in self._names for name, _ in found)):
            yield self._say(otherwise)
            return
        for name, arguments in found:
            yield self._begin(name)
            yield Piece(call=self.calls - 1, arguments=arguments)


def _string(text: str) -> str | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _calls(body: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls that JSON text stands for; none if it is something else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    items: list[Any] = value if isinstance(value, list) else [value]
    found = []
    for item in items:
        name = item.get("name") if isinstance(item, dict) else None
        arguments = item.get("arguments", item.get("parameters")) if isinstance(item, dict) else None
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return []
        found.append((name, json.dumps(arguments, ensure_ascii=False)))
    return found
