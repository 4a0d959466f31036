"""EngineRig: a whole engine over the fake device, for tests that look inside.

The engine thread is the real one; what comes out is collected by request, and the page
ledger can be recounted from the tables at any quiet moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from helios_jax.config import EngineConfig
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind, SamplingParams
from helios_jax.engine.request import Request
from helios_jax.engine.setup import assemble
from helios_jax.scheduler.state_rows import RowUse
from helios_jax.testing.core import ENGINE_OPTIONS, fake_core
from helios_jax.testing.tokenizer import ByteTokenizer

PATIENCE_S = 30.0  # a test that waits longer has failed


class EngineRig:
    """An engine that a test starts, feeds and inspects.

    Args:
        start: Start the engine thread at once.
        options: Of `fake_core`, and of `EngineConfig`; a `clock` goes to both.
    """

    def __init__(self, *, start: bool = True, **options: Any) -> None:
        config = EngineConfig(**{key: options.pop(key) for key in ENGINE_OPTIONS if key in options})
        clock = options.get("clock") or time.monotonic_ns
        self.tokenizer = options.pop("tokenizer", None) or ByteTokenizer(vocab_size=options.get("vocab_size", 260))
        self.core = fake_core(**options)
        self.assembly = assemble(self.core, config, self.tokenizer, clock)
        self.engine = self.assembly.engine
        self.received: dict[str, list[RequestOutput | Exception]] = {}
        self._changed = threading.Condition()
        self._count = 0
        if start:
            self.engine.start()

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        """The engine's sink."""
        with self._changed:
            for request, item in batch:
                self.received.setdefault(request.request_id, []).append(item)
            self._changed.notify_all()

    def submit(
        self,
        prompt: str | list[int],
        request_id: str | None = None,
        *,
        kind: OutputKind = OutputKind.DELTA,
        message_ends: tuple[int, ...] = (),
        **params: Any,
    ) -> str:
        """Build and submit a request; `params` of `SamplingParams`, greedy unless told otherwise."""
        self._count += 1
        settings = SamplingParams(**({"temperature": 0.0} | params), output_kind=kind)
        name = request_id or f"r{self._count}"
        request = self.assembly.intake.request(
            prompt,
            settings,
            request_id=name,
            sink=self,
            arrival_ns=self.engine.clock(),
            message_ends=message_ends,
        )
        self.engine.board.submit(request)
        return name

    def abort(self, request_id: str) -> None:
        self.engine.board.abort(request_id)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is looked at after every delivery."""
        with self._changed:
            if not self._changed.wait_for(condition, PATIENCE_S):
                raise TimeoutError(f"nothing came in {PATIENCE_S} s; received {list(self.received)}")

    def settle(self) -> None:
        """Return once the engine thread has nothing left to do: frames of requests that ended are complete too."""
        if not self.engine.board.wait_until_empty(PATIENCE_S):
            raise TimeoutError(f"the engine is not idle after {PATIENCE_S} s: {self.engine.health()}")

    def has_ended(self, request_id: str) -> bool:
        items = self.received.get(request_id, [])
        return bool(items) and (isinstance(items[-1], Exception) or items[-1].finished)

    def finish(self, *request_ids: str) -> list[RequestOutput | Exception]:
        """Wait until the requests have ended; the last thing that each of them was told."""
        self.wait_for(lambda: all(self.has_ended(name) for name in request_ids))
        return [self.received[name][-1] for name in request_ids]

    def text(self, request_id: str, index: int = 0) -> str:
        """All deltas of one output, joined."""
        outputs = [item for item in self.received.get(request_id, []) if isinstance(item, RequestOutput)]
        return "".join(part.text for output in outputs for part in output.outputs if part.index == index)

    def reason(self, request_id: str, index: int = 0) -> str | None:
        """The finish reason that the reader was told, None before the end."""
        for item in reversed(self.received.get(request_id, [])):
            if isinstance(item, RequestOutput):
                for part in item.outputs:
                    if part.index == index:
                        return part.finish_reason
        return None

    def ledger_problems(self) -> list[str]:
        """What is wrong with pages, slots and state rows, recounted from the tables, once the last frame is complete.

        Checkpoints may keep pages and rows; nobody else may.
        """
        if self.engine._thread.is_alive():
            self.settle()
        state = self.engine.scheduler.state
        known = state.retention.checkpoints
        kept = {page for pages in known.pages for page in pages}
        owned = [*np.concatenate([*state.pool.tables, state.pool.free[: state.pool.num_free]]).tolist(), *kept]
        problems = []
        if sorted(owned) != list(range(1, state.limits.pages + 1)):
            problems.append(f"pages are lost or owned twice: {sorted(owned)}")
        uses = state.retention.rows.use.tolist()
        if [use != RowUse.FREE for use in uses] != [row + 1 in known.rows for row in range(len(uses))]:
            problems.append(f"rows are used as {uses}, checkpoints name {sorted(set(known.rows.tolist()))}")
        if known.pins.any():
            problems.append(f"checkpoints are pinned: {known.pins.tolist()}")
        if int(state.requests.reserved_pages.sum()) != 0 or bool((state.requests.phase != 0).any()):
            problems.append(f"slots are not free: {state.requests.phase.tolist()}")
        if state.pool.num_free + len(kept) != state.limits.pages:
            problems.append(f"{state.limits.pages - state.pool.num_free - len(kept)} pages are still used")
        return problems

    def close(self) -> None:
        self.core.runner.gate.open()
        self.engine.close()

    def __enter__(self) -> EngineRig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
