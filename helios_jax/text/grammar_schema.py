"""What is refused of a JSON schema before the library compiles it.

The library says itself what it does not implement. Checked here are its limits that it does not keep,
and two things that it compiles into grammars which also write instances that are not valid:

- `minProperties`: it counts a name that is written twice as two, a reader as one.
- control characters: without `\\u` escapes it leaves them out of constants and names.
"""

from __future__ import annotations

import json
from typing import Any

from helios_jax.errors import RequestError

MAX_DEPTH = 100  # of lists and objects; the library's own parser stops at 128
WRITABLE = frozenset("\b\f\n\r\t")  # control characters with an escape of their own
ESCAPES = 'bfnrt"\\'  # no \u: further names of an object could spell one of its properties with it
MAX_INDENT = 16
WHITESPACE = rf"\n?\x20{{0,{MAX_INDENT}}}"


class GrammarError(RequestError):
    """A grammar cannot be read, is not supported, or is larger or slower than the limits."""

    def __init__(self, message: str, code: str = "invalid_grammar") -> None:
        super().__init__(message, code=code)


def json_options(whitespace: bool, pattern: str = WHITESPACE) -> dict[str, Any]:
    """The library's options: how JSON is written, with whitespace of a `pattern` or none between its parts."""
    spaces = {"whitespace_pattern": pattern} if whitespace else {"whitespace_flexible": False}
    return spaces | {"json_allowed_escapes": ESCAPES}


def check_schema(text: str) -> None:
    """Raise `GrammarError` for a schema that is no JSON, too deep, or compiled into the wrong grammar."""
    check_depth(text)
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"a schema is a JSON object, got {type(schema).__name__}")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise GrammarError("x-guidance, options of the library, cannot be set by a request")
    _check(schema)


def check_depth(text: str) -> None:
    """Refuse JSON text whose lists and objects lie more than `MAX_DEPTH` deep; brackets in strings count not."""
    depth, inside, escaped = 0, False, False
    for char in text:
        if inside:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                inside = False
        elif char == '"':
            inside = True
        elif char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise GrammarError(f"the schema is more than {MAX_DEPTH} levels deep", "grammar_too_large")
        elif char in "]}":
            depth -= 1


def _check(part: Any) -> None:
    if isinstance(part, str):
        found = next((char for char in part if char < " " and char not in WRITABLE), None)
        if found is not None:
            raise GrammarError(f"the schema has the control character {found!r}, which is not supported")
    elif isinstance(part, list):
        for item in part:
            _check(item)
    elif isinstance(part, dict):
        least, required = part.get("minProperties"), part.get("required")
        named = len(required) if isinstance(required, list) else 0
        if isinstance(least, (int, float)) and least > max(1, named):
            raise GrammarError(
                f"minProperties {least} is supported up to 1, or up to the number of required properties ({named})"
            )
        for key, value in part.items():
            _check(key)
            _check(value)
