"""Reading a request body: bounded in size and time, then decoded into a struct."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from helios_jax.server.context import ServerContext
from helios_jax.server.errors import ClientGone, HttpError, from_decode_error

T = TypeVar("T")
JSON_TYPES = ("application/json", "")  # no media type at all is taken for JSON
MAX_LENGTH_DIGITS = 18  # a longer content-length is no size; int() of unbounded digits is quadratic


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than max_body_bytes = {limit}", code="body_too_large")


async def _collect(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


async def read_body(request: Request, context: ServerContext) -> bytes:
    """The whole body.

    Raises:
        HttpError: 415 for a media type other than JSON, 413 too large, 408 too slow.
        ClientGone: The client left before it had sent everything.
    """
    limits = context.limits
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in JSON_TYPES and not media_type.endswith("+json"):
        raise HttpError(
            415, f"content-type must be application/json, got {media_type!r}", code="unsupported_media_type"
        )
    length = request.headers.get("content-length", "")
    digits = length.isascii() and length.isdigit()
    if digits and (len(length) > MAX_LENGTH_DIGITS or int(length) > limits.max_body_bytes):
        raise _too_large(limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _collect(request, limits.max_body_bytes)
    except TimeoutError:
        raise HttpError(
            408, f"the body did not arrive within body_timeout_s = {limits.body_timeout_s}", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise ClientGone("the client left while it sent the body") from None


async def decode_body(body: bytes, kind: type[T], context: ServerContext) -> T:
    """The body as a struct.

    Raises:
        RequestError: Not JSON, or a field is missing or of a wrong type; names the field.
    """
    try:
        return await context.offload(len(body), msgspec.json.decode, body, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        wrapped = error if isinstance(error, msgspec.DecodeError) else msgspec.DecodeError(str(error))
        raise from_decode_error(wrapped) from None
