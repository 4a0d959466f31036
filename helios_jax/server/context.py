"""ServerContext: what all endpoints of one server share, and the phases of its life.

1. `preparing`: the port answers, the engine is being made; /health 200, /ready and work 503.
2. `ready`: work is accepted.
3. `draining`: new work is refused with 503, running work goes on up to a timeout.
4. `stopped`: what still runs ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import hmac
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from helios_jax.errors import ConfigError, UnavailableError, UnknownModelError
from helios_jax.server.interface import EngineLike
from helios_jax.server.metrics import ServerMetrics

T = TypeVar("T")

OFFLOAD_SIZE = 8192  # characters or bytes; up to here work takes well under a millisecond and stays on the event loop
SETTLE_S = 2.0  # for the error events of ended streams; a client that does not read them is not waited for
OFFLOAD_THREADS = 2  # templates and tokenising; more would only take cores from the engine


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Named bounds of one server; each has an error that names it."""

    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0  # from the first byte of the headers to the last of the body
    max_in_flight: int = 1024  # requests for generation, queued or running, whatever the engine's queue holds
    max_choices: int = 256  # prompts x n of one request
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "body_timeout_s", "max_in_flight", "max_choices"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.drain_timeout_s < 0:
            raise ConfigError(f"drain_timeout_s must be at least 0, got {self.drain_timeout_s}")


class Phase(enum.Enum):
    PREPARING = "preparing"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class ServerContext:
    """Shared state of one server; touched by its event loop only.

    Args:
        engine: The engine, or `None` while it is being prepared.
        api_key: Bearer token that /v1, /tokenize and /detokenize ask for; `None` asks for nothing.
        served_model_names: Names that requests may use; the engine's own if empty.
        limits: Named bounds.
    """

    def __init__(
        self,
        engine: EngineLike | None,
        *,
        api_key: str | None = None,
        served_model_names: tuple[str, ...] = (),
        limits: ServerLimits | None = None,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.metrics = ServerMetrics(self)
        self.phase = Phase.PREPARING
        self.progress = "preparing"
        self.created = self.created_now()
        self.in_flight = 0
        self.stopping = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self._api_key = api_key
        self._names = served_model_names
        self._engine: EngineLike | None = None
        self._threads = ThreadPoolExecutor(OFFLOAD_THREADS, thread_name_prefix="helios-text")
        if engine is not None:
            self.attach(engine)

    def attach(self, engine: EngineLike) -> None:
        """Preparation is over: serve with this engine."""
        self._engine = engine
        if self.phase is Phase.PREPARING:
            self.phase = Phase.READY

    @property
    def engine_or_none(self) -> EngineLike | None:
        return self._engine

    @property
    def engine(self) -> EngineLike:
        """The engine, for work that has been accepted or needs no acceptance.

        Raises:
            UnavailableError: There is none yet.
        """
        if self._engine is None:
            raise UnavailableError(f"the server is not ready: {self.unready_reason()}")
        return self._engine

    def check_accepting(self) -> None:
        """Raise `UnavailableError` unless new work is accepted now."""
        reason = self.unready_reason()
        if reason:
            raise UnavailableError(f"the server is not ready: {reason}")

    @property
    def model_names(self) -> tuple[str, ...]:
        if self._names:
            return self._names
        return (self._engine.model_name,) if self._engine is not None else ()

    def check_model(self, name: str | None) -> str:
        """The served name to answer with; an absent or empty name means the served model.

        Raises:
            UnknownModelError: Naming what is served.
        """
        names = self.model_names
        if not name:
            return names[0]
        if name not in names:
            served = ", ".join(repr(n) for n in names)
            raise UnknownModelError(f"model {name!r} is not served here; served: {served}", param="model")
        return name

    @staticmethod
    def created_now() -> int:
        """Unix seconds, for the `created` of an answer."""
        return int(time.time())

    def check_key(self, authorization: str) -> bool:
        """Whether an Authorization header opens the guarded paths; compared in constant time."""
        if self._api_key is None:
            return True
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._api_key.encode())

    def unready_reason(self) -> str:
        """Why work is not accepted now; empty if it is."""
        if self.phase is Phase.PREPARING or self._engine is None:
            return self.progress
        if self.phase is not Phase.READY:
            return self.phase.value
        health = self._engine.health()
        return "" if health.ready else health.reason or "the engine is not ready"

    def entered(self) -> None:
        self.in_flight += 1
        self.idle.clear()

    def left(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    async def offload(self, size: int, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Result of the call; large inputs are worked on in a thread, so that streams keep their pace.

        Keyword arguments may come from a request, so no name of ours may stand in their way.
        """
        work = functools.partial(call, *args, **kwargs)
        if size <= OFFLOAD_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def begin_drain(self) -> None:
        """Refuse new work from now on."""
        if self.phase in (Phase.PREPARING, Phase.READY):
            self.phase = Phase.DRAINING

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for running work, then end what is left with an error.

        Args:
            timeout_s: Seconds to wait; the server's `drain_timeout_s` if `None`.

        Returns:
            Whether everything finished by itself.
        """
        self.begin_drain()
        limit = self.limits.drain_timeout_s if timeout_s is None else timeout_s
        finished = True
        try:
            async with asyncio.timeout(limit):
                await self.idle.wait()
        except TimeoutError:
            finished = False
        self.phase = Phase.STOPPED
        self.stopping.set()
        return finished

    async def settle(self) -> None:
        """Let requests that were just ended send their error; they wait for nothing but the socket."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self.idle.wait()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
