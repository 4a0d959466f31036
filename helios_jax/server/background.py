"""ServerThread: a whole server on a free port inside this process, for tests and notebooks."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from helios_jax.errors import UnavailableError
from helios_jax.server.app import create_app
from helios_jax.server.context import ServerContext, ServerLimits
from helios_jax.server.run import EngineFactory, HeliosServer, bind

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


class ServerThread:
    """Serve in a thread with an event loop of its own; `with` waits until ready, and drains at the end.

    Args:
        engine: An engine that has not been started (it is entered on the server's loop), or a factory.
        limits, options: As of `create_app`.
        wait_ready: Return from `with` only once work is accepted.

    Example:
        with ServerThread(AsyncLLM(model="smollm2")) as server:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    """

    def __init__(
        self, engine: Any, *, limits: ServerLimits | None = None, wait_ready: bool = True, **options: Any
    ) -> None:
        factory: EngineFactory = engine if callable(engine) else lambda report: engine
        self._sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        app = create_app(None, limits=limits, **options)
        self.context: ServerContext = app.state.context
        self.server = HeliosServer(app, self._sock, factory)
        self.failure: BaseException | None = None
        self._wait_ready = wait_ready
        self._thread = threading.Thread(target=self._run, name="helios-server", daemon=True)

    def _run(self) -> None:
        try:
            self.server.run_until_stopped()
        except BaseException as error:
            self.failure = error
            self.server.listening.set()
            self.server.ready.set()

    def __enter__(self) -> ServerThread:
        self._thread.start()
        awaited = self.server.ready if self._wait_ready else self.server.listening
        if not awaited.wait(START_TIMEOUT_S) or self.failure is not None:
            self.stop()
            raise self.failure or UnavailableError(f"the server did not start within {START_TIMEOUT_S} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain and wait for the end of the thread; safe to call again."""
        if self._thread.is_alive():
            self.server.request_stop()
            self._thread.join(STOP_TIMEOUT_S)
        self._sock.close()
