"""The ASGI application: routes, and what each answers.

| path | guarded | answers |
|---|---|---|
| POST /v1/chat/completions, /v1/completions | by the key | generation, plain or streamed |
| GET /v1/models, /v1/models/{id} | by the key | what is served |
| POST /tokenize, /detokenize | by the key | ids and text |
| GET /health | no | 200 while the process can serve or may come to; 503 once the engine is dead |
| GET /ready | no | 200 if work is accepted, else 503 and why |
| GET /metrics, /version | no | Prometheus text; the version |
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helios_jax.errors import UnknownModelError
from helios_jax.server.body import read_body
from helios_jax.server.chat import parse_chat
from helios_jax.server.completions import parse_completion
from helios_jax.server.context import Phase, ServerContext, ServerLimits
from helios_jax.server.errors import HttpError
from helios_jax.server.gate import Gate
from helios_jax.server.generation import GenerationResponse
from helios_jax.server.interface import EngineLike
from helios_jax.server.protocol import ModelCard, ModelList
from helios_jax.server.tokenization import detokenize, tokenize

DISTRIBUTION = "helios-jax"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Endpoint = Callable[[Request], Awaitable[Response]]
BodyCall = Callable[[bytes, ServerContext], Awaitable[msgspec.Struct]]


class _Status(msgspec.Struct):
    status: str
    reason: str = ""


class _Version(msgspec.Struct):
    version: str


def _json(answer: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def version() -> str:
    """The installed version, or `unknown` from a tree that is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _probes(context: ServerContext) -> dict[str, Endpoint]:
    async def health(request: Request) -> Response:
        engine = context.engine_or_none
        state = engine.health() if engine is not None else None
        if state is not None and not state.alive and context.phase is not Phase.STOPPED:
            return _json(_Status("dead", state.reason), 503)
        return _json(_Status("alive"))

    async def ready(request: Request) -> Response:
        reason = context.unready_reason()
        return _json(_Status("not ready", reason), 503) if reason else _json(_Status("ready"))

    async def metrics(request: Request) -> Response:
        return Response(context.metrics.render(), media_type=METRICS_TYPE)

    async def version_of(request: Request) -> Response:
        return _json(_Version(version()))

    return {"/health": health, "/ready": ready, "/metrics": metrics, "/version": version_of}


def _models(context: ServerContext) -> dict[str, Endpoint]:
    def card(name: str) -> ModelCard:
        return ModelCard(name, context.created, context.engine.max_context)

    async def models(request: Request) -> Response:
        _ = context.engine  # 503 rather than an empty list while there is no model
        return _json(ModelList([card(name) for name in context.model_names]))

    async def model(request: Request) -> Response:
        _ = context.engine
        name = request.path_params["name"]
        if not name:
            raise UnknownModelError("the model's name is missing from the path", param="model")
        return _json(card(context.check_model(name)))

    return {"/v1/models": models, "/v1/models/{name:path}": model}


def _generation(context: ServerContext) -> dict[str, Endpoint]:
    async def chat(request: Request) -> Response:
        return GenerationResponse(request, context, parse_chat, "chatcmpl")

    async def completion(request: Request) -> Response:
        return GenerationResponse(request, context, parse_completion, "cmpl")

    return {"/v1/chat/completions": chat, "/v1/completions": completion}


def _text(context: ServerContext) -> dict[str, Endpoint]:
    def endpoint(call: BodyCall) -> Endpoint:
        async def answer(request: Request) -> Response:
            _ = context.engine
            return _json(await call(await read_body(request, context), context))

        return answer

    return {"/tokenize": endpoint(tokenize), "/detokenize": endpoint(detokenize)}


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals in OpenAI's form, by way of the gate."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        raise HttpError(404, f"there is nothing at {request.url.path}", code="not_found")
    if error.status_code == 405:
        allowed = headers.get("Allow", "")
        message = f"{request.method} is not allowed at {request.url.path}; allowed: {allowed}"
        raise HttpError(405, message, code="method_not_allowed", headers={"allow": allowed})
    raise HttpError(error.status_code, str(error.detail), code="http_error", headers=headers)


def create_app(
    engine: EngineLike | None,
    *,
    api_key: str | None = None,
    served_model_names: tuple[str, ...] = (),
    limits: ServerLimits | None = None,
) -> Starlette:
    """The application of one server; its `ServerContext` is at `app.state.context`.

    Args:
        engine: A started engine, or `None` to attach one later with `context.attach`.
        api_key: Bearer token for the guarded paths; `None` leaves them open.
        served_model_names: Names that requests may use; the engine's own if empty.
        limits: Named bounds.
    """
    context = ServerContext(engine, api_key=api_key, served_model_names=served_model_names, limits=limits)
    gets = _probes(context) | _models(context)
    posts = _generation(context) | _text(context)
    routes = [Route(path, call, methods=["GET"]) for path, call in gets.items()]
    routes += [Route(path, call, methods=["POST"]) for path, call in posts.items()]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, context=context)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a redirect would lose the body of a POST
    app.state.context = context
    return app
