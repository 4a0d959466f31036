"""AsyncLLM: the engine for asyncio programs, and what the HTTP server talks to.

Life: 1. made: nothing is loaded; 2. `start` loads the core in a thread of its own and starts
the engine thread; 3. `generate` streams outputs; 4. `drain` and `close`, or `async with`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from helios_jax.config import EngineConfig
from helios_jax.engine.heartbeat import EngineHealth
from helios_jax.engine.mailbox import LoopSink
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.engine.request import Request
from helios_jax.engine.setup import Assembly, Progress, Target, assemble, configured
from helios_jax.engine.stats import EngineStats
from helios_jax.errors import UnavailableError


class AsyncLLM:
    """A model that answers many requests at once, for asyncio.

    Args:
        model: Name, directory, GGUF file, hub id, or directory of a core. Default: smollm2.
        max_slots: Requests that run at the same time.
        max_context: Tokens of one request, prompt and output.
        dtype: float32, bfloat16 or float16.
        core: Directory of a prepared core (see `engine.setup.Target`).
        policy: Scheduler preset, "balanced" or "throughput"; None is the config's.
        spec_method: Speculative decoding: "none", "copy", "draft" or "mtp"; with a core, "none" leaves its
            rounds out and everything else is the core's. Likewise
            `draft_model`, `num_draft_tokens` and `speculative_token_capacity`: see `aot.CoreOptions`.
        spec_width, mtp_adaptive_verification_alpha, async_scheduling, enable_prefix_caching: See
            `config.EngineConfig`; None is the config's.
        config: How the engine serves; see `config.EngineConfig`. Gives way to what is said here.
        progress: Called as (stage, done, total, detail) while loading; see `aot.progress`.
        core_options: More of `aot.CoreOptions`: page_size, num_pages, prefill_chunk, ...

    Example:
        async with AsyncLLM(model="smollm2") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams()):
                print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_slots: int | None = None,
        max_context: int | None = None,
        dtype: str | None = None,
        core: str | Path | None = None,
        policy: str | None = None,
        spec_method: str | None = None,
        spec_width: str | None = None,
        mtp_adaptive_verification_alpha: float | None = None,
        async_scheduling: bool | None = None,
        enable_prefix_caching: bool | None = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **core_options: Any,
    ) -> None:
        options = {"max_slots": max_slots, "max_context": max_context, "dtype": dtype, "spec_method": spec_method}
        target = Target(model=model, core=core, options=options | core_options)
        alpha = mtp_adaptive_verification_alpha
        self._config = configured(
            config,
            policy=policy,
            spec_width=spec_width,
            mtp_adaptive_verification_alpha=alpha,
            async_scheduling=async_scheduling,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._clock: Callable[[], int] = time.monotonic_ns
        self._make: Callable[[], Assembly] = lambda: assemble(target.open(progress), self._config)
        self._assembly: Assembly | None = None
        self._loading: asyncio.Future[Assembly] | None = None
        self._load_error: BaseException | None = None
        self._closed = False
        self._sinks: dict[asyncio.AbstractEventLoop, LoopSink] = {}

    @classmethod
    def from_core(
        cls,
        core: Any,
        *,
        tokenizer: Any = None,
        clock: Callable[[], int] = time.monotonic_ns,
        config: EngineConfig | None = None,
    ) -> AsyncLLM:
        """Serve an open core (or a fake one), which is this engine's alone: what it keeps lies in the core's memory."""
        self = cls(config=config)
        self._clock = clock
        self._make = lambda: assemble(core, self._config, tokenizer, clock)
        return self

    # ---- life

    async def start(self) -> None:
        """Load the core, start the engine, return when it is ready. Safe to call again.

        Raises:
            HeliosError: The model or core cannot be loaded; `health` says so from then on.
        """
        if self._closed:
            raise UnavailableError("the engine was closed")
        if self._assembly is not None:
            return
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._make))
        try:
            assembly = await asyncio.shield(self._loading)
        except Exception as error:
            self._load_error = error
            raise
        if self._assembly is None:
            if self._closed:
                raise UnavailableError("the engine was closed while it was loading")
            self._assembly = assembly
            assembly.engine.start()

    async def drain(self, timeout: float | None = None) -> bool:
        """Accept nothing more; True when everything accepted ended within `timeout` seconds."""
        return await asyncio.to_thread(self._ready.engine.drain, timeout)

    async def close(self) -> None:
        """End what runs with an `UnavailableError` and free the core. Idempotent."""
        self._closed = True
        if self._loading is not None and self._assembly is None and self._load_error is None:
            try:  # compilation cannot be interrupted: free the core once it is there
                self._assembly = await asyncio.shield(self._loading)
            except Exception as error:
                self._load_error = error
        if self._assembly is not None:
            await asyncio.to_thread(self._assembly.engine.close)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- requests

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        arrival_ns: int | None = None,
        *,
        prompt_text: str | None = None,
        message_ends: Sequence[int] = (),
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one request, in the kind that `params.output_kind` says.

        Closing the iterator, or cancelling the task that waits on it, cancels the request.
        An abort from elsewhere ends the stream with finish reason "abort".

        Args:
            prompt: Text, or token ids.
            params: Default: `SamplingParams()`.
            request_id: Default: a new one.
            arrival_ns: When the request came, `time.monotonic_ns`; default: now.
            prompt_text: Text of the prompt where ids are given, for `RequestOutput.prompt`.
            message_ends: After how many prompt tokens each complete message ends; see `Intake.request`.

        Raises:
            RequestError: Before the first output; the request is wrong.
            CapacityError: Before the first output; slots and queue are full.
            UnavailableError: Not started, draining, or the engine stopped or was closed.
            DeviceError: An execution failed and took the request's state with it.
        """
        assembly = self._ready
        sink = self._sink()
        params = params or SamplingParams()
        try:
            grammar = assembly.intake.kept_grammar(params)
            if grammar is None and params.structured_outputs is not None:
                grammar = await asyncio.wrap_future(assembly.intake.compile_grammar(params))
            request = assembly.intake.request(
                prompt,
                params,
                request_id=request_id or f"req-{uuid.uuid4().hex}",
                sink=sink,
                arrival_ns=self._clock() if arrival_ns is None else arrival_ns,
                text=prompt_text,
                grammar=grammar,
                message_ends=message_ends,
            )
        except Exception:
            assembly.engine.board.count_refused()
            raise
        box = sink.open(request)
        ended = True  # nothing to abort unless the engine accepted it
        try:
            assembly.engine.board.submit(request)
            ended = False
            while not ended:
                try:
                    output = await box.get()
                except Exception:
                    ended = True
                    raise
                ended = output.finished
                yield output
        finally:
            sink.close(request)
            if not ended:
                self._abort(request)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        self._ready.engine.board.abort(request_id)

    def _abort(self, request: Request) -> None:
        if self._assembly is not None:
            self._assembly.engine.board.abort(request.request_id)

    def _sink(self) -> LoopSink:
        loop = asyncio.get_running_loop()
        for old in [known for known in self._sinks if known.is_closed()]:
            del self._sinks[old]
        return self._sinks.setdefault(loop, LoopSink(loop))

    # ---- facts

    @property
    def _ready(self) -> Assembly:
        if self._assembly is None:
            raise UnavailableError(self.health().reason)
        return self._assembly

    @property
    def tokenizer(self) -> Any:
        return self._ready.tokenizer

    @property
    def model_name(self) -> str:
        return self._ready.model_name

    @property
    def max_context(self) -> int:
        """Tokens of one request, prompt and output."""
        return self._ready.intake.max_context

    @property
    def vocab_size(self) -> int:
        return self._ready.intake.vocab_size

    @property
    def core(self) -> Any:
        """The prepared core, for its report."""
        return self._ready.engine.core

    def health(self) -> EngineHealth:
        """Liveness and readiness, also while loading."""
        if self._assembly is not None:
            return self._assembly.engine.health()
        if self._load_error is not None:
            return EngineHealth(False, False, f"the model could not be loaded: {self._load_error}")
        if self._closed:
            return EngineHealth(False, False, "the engine was closed")
        return EngineHealth(True, False, "loading" if self._loading else "the engine has not been started")

    def stats(self) -> EngineStats:
        """Counts and gauges of the engine."""
        return self._ready.engine.stats()
