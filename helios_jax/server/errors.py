"""Errors on the wire: every failure becomes OpenAI's body {"error": {message, type, param, code}}."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from helios_jax.errors import (
    CapacityError,
    DeviceError,
    HeliosError,
    RequestCancelled,
    RequestError,
    UnavailableError,
    UnknownModelError,
)

RETRY_AFTER_S = 1  # a queue place frees within a request's length; clients back off further by themselves
CLIENT_CLOSED_REQUEST = 499  # nginx's number; logged and counted, never sent: nobody listens any more
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r"- at (key in )?`\$\.?([^`]*)`$")


class ClientGone(RequestCancelled):
    """The client closed the connection before its answer was complete."""


class HttpError(HeliosError):
    """A refusal that only HTTP knows: path, method, key, media type, size of the body."""

    def __init__(self, status: int, message: str, *, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ErrorReply(NamedTuple):
    """An error ready to be sent."""

    status: int
    body: bytes
    headers: dict[str, str]


def _reply(
    status: int,
    message: str,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> ErrorReply:
    return ErrorReply(status, msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, code))), headers or {})


def describe_error(error: BaseException, request_id: str = "") -> ErrorReply:
    """Status, body and headers for an error.

    Args:
        error: Anything raised while a request was handled.
        request_id: Named in the text of an internal error, whose cause only the log tells.
    """
    retry = {"retry-after": str(RETRY_AFTER_S)}
    match error:
        case UnknownModelError():
            return _reply(404, str(error), "invalid_request_error", error.param or "model", "model_not_found")
        case RequestError():
            return _reply(400, str(error), "invalid_request_error", error.param, error.code)
        case HttpError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            return _reply(error.status, str(error), kind, None, error.code, error.headers)
        case CapacityError():
            return _reply(429, str(error), "rate_limit_error", None, "queue_full", retry)
        case UnavailableError():
            return _reply(503, str(error), "service_unavailable_error", None, "unavailable", retry)
        case DeviceError():
            text = f"the device failed and the request's state is lost; the server's log has it under {request_id!r}"
            return _reply(500, text, "server_error", None, "device_error")
        case RequestCancelled():
            return _reply(
                503, "the request was cancelled by the server", "service_unavailable_error", None, "cancelled"
            )
    message = f"internal error; the server's log has it under request id {request_id!r}"
    return _reply(500, message, "internal_error", None, "internal_error")


def from_decode_error(error: msgspec.DecodeError) -> RequestError:
    """A request error that names the field, from msgspec's message."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(
            f"the body is not valid JSON: {text} (NaN and Infinity are not JSON)", param=None, code="invalid_json"
        )
    found = _PATH.search(text)
    missing = _MISSING.search(text)
    path = ".".join(match.group(match.lastindex or 0) for match in (found, missing) if match)
    where = f"{path}: " if path else ""
    return RequestError(where + _PATH.sub("", text).strip(), param=path or None, code="invalid_type")
