"""Gate: the ASGI layer that every request passes; nothing leaves without an answer, a count and a log line.

1. Record the arrival and name the request (`x-request-id`).
2. Refuse what HTTP alone can refuse: a missing key, too many requests at once.
3. Hand on; an error that comes back becomes OpenAI's error body.
4. Classify the outcome, count it, write the access log line.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helios_jax.errors import CapacityError
from helios_jax.server.context import ServerContext
from helios_jax.server.errors import CLIENT_CLOSED_REQUEST, ClientGone, ErrorReply, HttpError, describe_error
from helios_jax.server.record import Outcome, RequestRecord, request_id_from

RECORD_KEY = "helios.record"
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
GUARDED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")  # probes and metrics stay open, as in vLLM

access_log = logging.getLogger("helios_jax.access")
error_log = logging.getLogger("helios_jax.server")


async def send_error(send: Send, reply: ErrorReply) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(reply.body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


class Gate:
    """ASGI middleware around the routes of one server."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        is_generation = path in GENERATION_PATHS
        record = RequestRecord(request_id_from(headers.get("x-request-id", "")), scope["method"], path, is_generation)
        scope[RECORD_KEY] = record

        async def noting_send(message: Message) -> None:
            starts = message["type"] == "http.response.start"
            if starts:
                MutableHeaders(raw=message.setdefault("headers", [])).append("x-request-id", record.request_id)
            await send(message)  # noted afterwards: a send that was cancelled has sent nothing
            if starts:
                record.status = message["status"]
                record.response_started = True
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                record.response_complete = True

        if is_generation:
            self._context.entered()
            self._context.metrics.arrived()
        try:
            self._check(headers, path, is_generation)
            await self._app(scope, receive, noting_send)
        except Exception as error:
            await self._answer(error, record, noting_send)
        finally:
            self._close(record)

    def _check(self, headers: Headers, path: str, is_generation: bool) -> None:
        if path.startswith(GUARDED_PREFIXES) and not self._context.check_key(headers.get("authorization", "")):
            raise HttpError(
                401,
                "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        limit = self._context.limits.max_in_flight
        if is_generation and self._context.in_flight > limit:
            raise CapacityError(f"max_in_flight: {limit} requests are already being served; try again later")

    async def _answer(self, error: Exception, record: RequestRecord, send: Send) -> None:
        if isinstance(error, ClientGone):
            record.status = CLIENT_CLOSED_REQUEST
            record.outcome = Outcome.CANCELLED
            return
        reply = describe_error(error, record.request_id)
        if reply.status == 500:
            error_log.error("request %s failed", record.request_id, exc_info=error)
        if record.response_started:  # too late for a status; the stream has told the client what it could
            record.outcome = Outcome.FAILED
            return
        await send_error(send, reply)

    def _close(self, record: RequestRecord) -> None:
        if record.is_generation:
            if record.outcome is None:
                record.outcome = outcome_of(record)
            self._context.metrics.closed(record)
            self._context.left()
        self._context.metrics.answered(record)
        access_log.info("%s", record.log_line())


def outcome_of(record: RequestRecord) -> Outcome:
    """The outcome that a status implies, where nothing said otherwise."""
    if not record.response_complete:  # the task was cancelled from outside, or the answer broke off
        return Outcome.FAILED
    if record.status < 400:
        return Outcome.FINISHED
    unanswered = record.status == 500 or (record.status == 503 and record.accepted)
    return Outcome.FAILED if unanswered else Outcome.REFUSED
