"""run_server: bind the port at once, prepare the engine behind it, serve, drain, stop.

1. Bind; a port in use is one clear line before anything expensive happens.
2. Serve with the engine absent (`/health` 200, `/ready` 503 with the progress) while a thread makes it.
3. Attach the engine: ready.
4. SIGTERM or SIGINT: drain. New work gets 503 over the open port, running work goes on up to the
   drain timeout, then streams end with an error event. A second signal skips the wait.
5. Close the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from helios_jax.errors import ConfigError, UnavailableError
from helios_jax.server.app import create_app
from helios_jax.server.context import Phase, ServerContext, ServerLimits

log = logging.getLogger("helios_jax.server")

Report = Callable[[str], None]
EngineFactory = Callable[[Report], Any]
BACKLOG = 2048
MAX_PORT = 65535
SHOW_CURSOR = "\x1b[?25h"
KEEP_ALIVE_S = 30  # longer than clients keep idle connections (5 s in httpx), so that they never meet a closing one
# After a drain nothing is running, so only idle keep-alive connections are left to close.
CONNECTION_CLOSE_S = 5


def bind(host: str, port: int) -> socket.socket:
    """A listening address of ours, taken before the model is touched.

    Raises:
        ConfigError: The address is in use or is not ours.
    """
    if not 0 <= port <= MAX_PORT:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"cannot listen on {host}:{port}: --port must be in [0, {MAX_PORT}]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.set_inheritable(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
    return sock


class HeliosServer(uvicorn.Server):
    """uvicorn with a drain between the signal and the end.

    Args:
        app: From `create_app`.
        sock: From `bind`.
        factory: Makes the engine; called in a thread with a function that takes progress lines. `None`
            if the application has its engine already.
    """

    def __init__(self, app: Starlette, sock: socket.socket, factory: EngineFactory | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,  # the gate writes our own
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CONNECTION_CLOSE_S,
                server_header=False,
                ws="none",
            )
        )
        self.context: ServerContext = app.state.context
        self.failure: BaseException | None = None
        self.listening = threading.Event()  # the port answers
        self.ready = threading.Event()  # the engine is attached
        self.abandoned = False  # stopped while the engine was still being made
        self._sock = sock
        self._factory = factory
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background: set[asyncio.Task[None]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end what runs. uvicorn would close the port at once."""
        self.request_stop()

    def request_stop(self) -> None:
        """Begin the drain, or cut it short if it has begun; safe from any thread and from a signal handler."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self.context.phase is Phase.DRAINING:
            log.info("second signal: ending %d running requests", self.context.in_flight)
            self.context.stopping.set()
        elif self.context.phase is not Phase.STOPPED:
            log.info("draining: %d requests running", self.context.in_flight)
            self.context.begin_drain()
            self._spawn(self._drain())

    async def _drain(self) -> None:
        timeout_s = self.context.limits.drain_timeout_s
        drained = await self.context.drain(timeout_s)
        if not drained:
            log.warning("drain_timeout_s = %s is over: running requests end with an error", timeout_s)
            await self.context.settle()
        self.should_exit = True

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._background.discard)

    def run_until_stopped(self) -> None:
        """Serve until a signal or `request_stop`.

        Raises:
            Whatever the engine factory raised.
        """
        asyncio.run(self._serve_all())
        if self.failure is not None:
            raise self.failure

    async def _serve_all(self) -> None:
        self._loop = asyncio.get_running_loop()
        preparing = self._loop.create_task(self._prepare()) if self._factory is not None else None
        try:
            await self.serve(sockets=[self._sock])
        finally:
            if preparing is not None:
                self.abandoned = not preparing.done()
                preparing.cancel()
                await asyncio.gather(preparing, return_exceptions=True)
            await self._close_engine()
            self.context.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def _prepare(self) -> None:
        assert self._factory is not None
        try:
            engine = await in_daemon_thread(self._factory, self._report)
            if hasattr(engine, "__aenter__"):
                engine = await engine.__aenter__()  # an engine that cannot start has freed what it took
            self.context.attach(engine)
            self.ready.set()
            log.info("ready: serving %s", ", ".join(self.context.model_names))
        except Exception as error:
            self.failure = error
            self.context.begin_drain()
            self.should_exit = True

    def _report(self, line: str) -> None:
        self.context.progress = line  # one assignment, read by /ready

    async def _close_engine(self) -> None:
        engine: Any = self.context.engine_or_none
        if engine is None:
            return
        closed = engine.close()
        if inspect.isawaitable(closed):
            await closed


async def in_daemon_thread(call: Callable[..., Any], *args: Any) -> Any:
    """Result of a long call; the process may exit before it returns (an executor would wait for it)."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)

    def work() -> None:
        value, error = None, None
        try:
            value = call(*args)
        except BaseException as raised:
            error = raised if isinstance(raised, Exception) else UnavailableError(f"preparation ended: {raised!r}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="helios-prepare", daemon=True).start()
    return await result


def run_server(
    engine_factory: EngineFactory,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    api_key: str | None = None,
    served_model_names: tuple[str, ...] = (),
    limits: ServerLimits | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Args:
        engine_factory: Makes the engine. Called in a thread with a function that takes progress lines;
            the result is entered with `async with` if it can be, and closed at the end.
        host, port: Where to listen; port 0 takes a free one.
        api_key: Bearer token for /v1, /tokenize and /detokenize.
        served_model_names: Names that requests may use; the engine's own if empty.
        limits: Named bounds.
        announce: Told the URL once the port is bound.

    Raises:
        ConfigError: The address cannot be bound.
        HeliosError: The engine could not be made.
    """
    sock = bind(host, port)
    try:
        app = create_app(None, api_key=api_key, served_model_names=served_model_names, limits=limits)
        server = HeliosServer(app, sock, engine_factory)
        bound = sock.getsockname()[1]
        url = f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
        log.info("listening on %s", url)
        if announce is not None:
            announce(url)
        server.run_until_stopped()
    finally:
        sock.close()
    if server.abandoned:
        leave_preparation()


def leave_preparation() -> None:
    """End the process although a thread still compiles, which nothing can interrupt.

    An ordinary exit would unload libraries under that thread, and it would crash instead of ending.
    """
    log.info("stopped while preparing")
    logging.shutdown()
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)  # a progress display may have hidden it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
