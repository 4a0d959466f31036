"""`response_format`, `structured_outputs` and vLLM's `guided_*` as one `StructuredOutputsParams`.

A schema stays the text that came: nothing of it is decoded before its size has been looked at.
"""

from __future__ import annotations

from typing import Any

import msgspec

from helios_jax.engine.structured import StructuredOutputsParams
from helios_jax.errors import RequestError
from helios_jax.server.protocol import NOTHING, ResponseFormat, SamplingFields, StructuredOutputs

REFUSED = ("disable_additional_properties", "whitespace_pattern", "structural_tag")
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def structured_outputs(request: SamplingFields) -> StructuredOutputsParams | None:
    """What form the outputs of a request have, None if any.

    Raises:
        RequestError: Several of the fields ask for one, or one of them asks for what is not there.
    """
    found = [asked for asked in (_response_format(request.response_format), _structured(request)) if asked]
    for name, kind in GUIDED.items():
        value = schema_text(request.guided_json) if name == "guided_json" else getattr(request, name)
        if value is not None:
            found.append(_params(name, {kind: value}))
    if len(found) > 1:
        names = " and ".join(asked.field for asked in found)
        raise RequestError(
            f"{names} each ask for a form of the output: give one of them",
            param=found[1].field,
            code="conflicting_options",
        )
    return found[0] if found else None


def schema_text(raw: msgspec.Raw) -> str | None:
    """The text of a schema that came as JSON, or as JSON text in a string; None if nothing came.

    Raises:
        RequestError: Not UTF-8.
    """
    data = bytes(raw)
    if data == bytes(NOTHING):
        return None
    try:
        return msgspec.json.decode(data, type=str) if data[:1] == b'"' else data.decode()
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise RequestError(f"the schema is no text: {error}", code="invalid_json") from error


def _params(field: str, given: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given, field=field)


def _response_format(asked: ResponseFormat | None) -> StructuredOutputsParams | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _params("response_format", {"json_object": True})
    if asked.type != "json_schema":
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {asked.type[:40]!r}",
            param="response_format",
            code="unsupported" if asked.type == "structural_tag" else "invalid_value",
        )
    text = schema_text(asked.json_schema.schema) if asked.json_schema is not None else None
    if text is None:
        raise RequestError(
            "response_format of type json_schema needs json_schema.schema",
            param="response_format",
            code="invalid_value",
        )
    return _params("response_format", {"json": text})


def _structured(request: SamplingFields) -> StructuredOutputsParams | None:
    asked: StructuredOutputs | None = request.structured_outputs
    if asked is None:
        return None
    for name in REFUSED:
        if getattr(asked, name) not in (None, False):
            raise RequestError(
                f"structured_outputs.{name} is not supported in this version",
                param="structured_outputs",
                code="unsupported",
            )
    fields: dict[str, Any] = {
        "json": schema_text(asked.json),
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": asked.json_object,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        return None  # as vLLM: an empty object asks for nothing
    if asked.disable_any_whitespace:
        given["disable_any_whitespace"] = True
    return _params("structured_outputs", given)
