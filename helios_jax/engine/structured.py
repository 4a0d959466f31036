"""What a request may ask its outputs to be, named as vLLM names it, and the grammar that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from helios_jax.errors import RequestError
from helios_jax.text.grammar import JSON_OBJECT, GrammarSpec

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A form that every output of a request has; exactly one of the first five.

    Attributes:
        json: A JSON schema, as text or as a mapping.
        regex: A regular expression that matches the whole output.
        choice: The texts of which the output is one.
        grammar: A grammar in llguidance's Lark form, or in GBNF.
        json_object: Any JSON object.
        disable_any_whitespace: JSON without whitespace between its parts.
        field: The field of the request that errors name.

    Raises:
        RequestError: None of them, or several, or a value of the wrong type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json is False:
            given.append("json")  # the schema that nothing satisfies
        if len(given) != 1:
            allowed, found = ", ".join(KINDS), " and ".join(given) or "none"
            raise self._error(f"{self.field} needs exactly one of {allowed}, found {found}")
        kinds: dict[str, tuple[type, ...]] = {
            "json": (str, Mapping, bool),
            "regex": (str,),
            "choice": (list, tuple),
            "grammar": (str,),
            "json_object": (bool,),
        }
        (name,) = given
        if not isinstance(getattr(self, name), kinds[name]):
            raise self._error(f"{self.field}: {name} has the type {type(getattr(self, name)).__name__}")

    def spec(self) -> GrammarSpec:
        """The grammar as text.

        Raises:
            RequestError: Too large, too deep, or no JSON.
        """
        try:
            if self.choice is not None:
                return GrammarSpec.choice(self.choice)
            if self.regex is not None:
                return GrammarSpec("regex", self.regex)
            if self.grammar is not None:
                return GrammarSpec("lark", self.grammar)
            schema = JSON_OBJECT if self.json_object else self.json
            return GrammarSpec.json_schema(schema, whitespace=not self.disable_any_whitespace)
        except RequestError as error:
            raise self.named(error) from error

    def named(self, error: RequestError) -> RequestError:
        """The error with the request's field in front."""
        return RequestError(f"{self.field}: {error}", param=self.field, code=error.code)

    def _error(self, message: str) -> RequestError:
        return RequestError(message, param=self.field, code="invalid_value")
