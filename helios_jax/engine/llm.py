"""LLM: offline use, one call for a list of prompts, with the names that vLLM's users know."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from helios_jax.config import DEFAULT_MODEL, EngineConfig
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind, SamplingParams
from helios_jax.engine.request import Request
from helios_jax.engine.setup import Assembly, Target, assemble, configured
from helios_jax.engine.stats import EngineStats
from helios_jax.errors import CapacityError, RequestError

SETTLE_S = 10.0  # more than any frame takes; `stats` waits no longer
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class _QueueSink:
    """Outputs of one `generate` call; the caller's thread waits on it."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[tuple[Request, RequestOutput | Exception]] = queue.SimpleQueue()

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        for item in batch:
            self.items.put(item)


class LLM:
    """A model for offline use; loading may prepare a core first (minutes, once).

    Args:
        model: Name, directory, GGUF file, hub id, or directory of a core.
        max_slots: Requests that run at the same time.
        max_context: Tokens of one request, prompt and output.
        dtype: float32, bfloat16 or float16.
        core: Directory of a prepared core to serve; prepared there if it does not exist and
            `model` is given.
        policy: Scheduler preset, "balanced" or "throughput"; None is the config's.
        spec_method: Speculative decoding: "none", "copy", "draft" or "mtp"; with a core, "none" leaves its
            rounds out and everything else is the core's. Likewise
            `draft_model`, `num_draft_tokens` and `speculative_token_capacity`: see `aot.CoreOptions`.
        spec_width, mtp_adaptive_verification_alpha, async_scheduling, enable_prefix_caching: See
            `config.EngineConfig`; None is the config's.
        progress: Show progress while loading: True, False, or a function (see `aot.progress`).
        config: More of the engine (trace, timeouts); gives way to what is said here.
        core_options: More of `aot.CoreOptions`: page_size, num_pages, prefill_chunk, ...

    Example:
        with LLM() as llm:
            print(llm.generate("Once upon a time")[0].outputs[0].text)
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
        progress: Any = True,
        config: EngineConfig | None = None,
        **core_options: Any,
    ) -> None:
        options = {"max_slots": max_slots, "max_context": max_context, "dtype": dtype, "spec_method": spec_method}
        alpha = mtp_adaptive_verification_alpha
        config = configured(
            config,
            policy=policy,
            spec_width=spec_width,
            mtp_adaptive_verification_alpha=alpha,
            async_scheduling=async_scheduling,
            enable_prefix_caching=enable_prefix_caching,
        )
        if model is None and core is None:
            model = DEFAULT_MODEL
        target = Target(model=model, core=core, options=options | core_options)
        with _shown(progress) as show:
            opened = target.open(show)
        self._begin(assemble(opened, config))

    @classmethod
    def from_core(cls, core: Any, *, tokenizer: Any = None, config: EngineConfig | None = None) -> LLM:
        """Use an open core (or a fake one), which is this engine's alone: what it keeps lies in the core's memory."""
        self = cls.__new__(cls)
        self._begin(assemble(core, config or EngineConfig(), tokenizer))
        return self

    def _begin(self, assembly: Assembly) -> None:
        self._assembly = assembly
        assembly.engine.start()

    def close(self) -> None:
        """Stop the engine and free the core. Idempotent."""
        self._assembly.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        return self._assembly.tokenizer

    def get_tokenizer(self) -> Any:
        """The tokenizer, under vLLM's name."""
        return self._assembly.tokenizer

    @property
    def model_name(self) -> str:
        return self._assembly.model_name

    @property
    def max_context(self) -> int:
        """Tokens of one request, prompt and output."""
        return self._assembly.intake.max_context

    @property
    def core(self) -> Any:
        """The prepared core, for its report and sizes."""
        return self._assembly.engine.core

    def stats(self) -> EngineStats:
        """Counts and gauges of the engine; between calls, once the last frame is complete and has left its pages."""
        board = self._assembly.engine.board
        if not board.open_requests():
            board.wait_until_empty(SETTLE_S)
        return self._assembly.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate for every prompt; results are in the order of the prompts.

        Args:
            prompts: A prompt or a list of them. A prompt is text, token ids, or a mapping with
                "prompt" or "prompt_token_ids", and perhaps "message_ends" (see `Intake.request`).
            sampling_params: For all prompts, or one each.
            use_tqdm: Show a progress bar (vLLM's name for it).

        Raises:
            RequestError: A prompt or parameter is wrong; nothing was run.
            UnavailableError, DeviceError: The engine stopped, or an execution failed.
        """
        several = as_prompts(prompts)
        params = _one_each(sampling_params, len(several))
        sink = _QueueSink()
        requests = [
            self._request(prompt, setting, OutputKind.FINAL_ONLY, sink)
            for prompt, setting in zip(several, params, strict=True)
        ]
        with _bar(use_tqdm, len(requests)) as advance:
            return self._run(requests, sink, advance)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield what is new (text and ids are deltas).

        Leaving the loop early, by an exception or Ctrl-C too, cancels the request.

        Raises:
            RequestError: The prompt or a parameter is wrong.
            UnavailableError, DeviceError: The engine stopped, or an execution failed.
        """
        sink, board = _QueueSink(), self._assembly.engine.board
        request = self._request(prompt, sampling_params or SamplingParams(), OutputKind.DELTA, sink)
        board.submit(request)
        try:
            finished = False
            while not finished:
                _, item = sink.items.get()
                if isinstance(item, Exception):
                    raise item
                finished = item.finished
                yield item
        finally:
            board.abort(request.request_id)  # of no effect on one that has ended

    def _request(self, prompt: Prompt, params: SamplingParams, kind: OutputKind, sink: _QueueSink) -> Request:
        value, text = _prompt_value(prompt)
        ends = (prompt.get("message_ends") or ()) if isinstance(prompt, Mapping) else ()
        return self._assembly.intake.request(
            value,
            dataclasses.replace(params, output_kind=kind),
            request_id=f"llm-{uuid.uuid4().hex}",
            sink=sink,
            arrival_ns=time.monotonic_ns(),
            text=text,
            message_ends=ends,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Args:
            messages: Mappings with "role" and "content"; or a list of such lists.
            tools: OpenAI's descriptions; told in the system message where the template does not render tools.
            template_options: Given to the template.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools} | template_options
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **template_options: Any) -> dict[str, Any]:
        """The prompt that `chat` makes of a conversation: its token ids, its text, and where its messages end."""
        from helios_jax.text.conversation import encode_conversation
        from helios_jax.text.tools import adapt

        if template_options.get("tools"):
            messages, tools = adapt(self.tokenizer, messages, template_options["tools"])
            template_options |= {"tools": tools}
        made = encode_conversation(self.tokenizer, messages, **template_options)
        return {"prompt_token_ids": made.token_ids, "prompt": made.text, "message_ends": made.message_ends}

    def _run(self, requests: list[Request], sink: _QueueSink, advance: Any) -> list[RequestOutput]:
        """Keep slots and queue full until every request has ended."""
        board = self._assembly.engine.board
        done: dict[Request, RequestOutput] = {}
        waiting, open_sequences = list(reversed(requests)), 0
        try:
            while len(done) < len(requests):
                while waiting:
                    try:
                        board.submit(waiting[-1])
                    except CapacityError:
                        if not open_sequences:
                            raise  # other threads fill the queue: there is nothing of ours to wait for
                        break
                    open_sequences += waiting.pop().params.n
                request, item = sink.items.get()
                open_sequences -= request.params.n
                if isinstance(item, Exception):
                    raise item
                done[request] = item
                advance()
        except BaseException:  # also Ctrl-C: leave nothing running behind the caller's back
            for request in requests:
                board.abort(request.request_id)
            raise
        return [done[request] for request in requests]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several: a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)):
        raise RequestError(f"prompts are text, token ids, mappings, or a list of them, got {prompts!r}", param="prompt")
    several = list(prompts)
    if several and isinstance(several[0], (int, np.integer)):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]


def _prompt_value(prompt: Prompt) -> tuple[str | Sequence[int], str | None]:
    """What to run, and the text that goes with it."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    text = prompt.get("prompt")
    if prompt.get("prompt_token_ids") is not None:
        return prompt["prompt_token_ids"], text
    if text is None:
        raise RequestError(
            f"a prompt mapping needs 'prompt' or 'prompt_token_ids', got keys {sorted(prompt)}", param="prompt"
        )
    return text, None


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts: give one, or one each")
    return list(params)


@contextlib.contextmanager
def _shown(progress: Any) -> Iterator[Any]:
    """A progress function for loading: bars, nothing, or the caller's own."""
    if progress is not True:
        yield progress or None
        return
    from helios_jax.aot.progress import RichProgress

    with RichProgress() as bars:
        yield bars


@contextlib.contextmanager
def _bar(show: bool, total: int) -> Iterator[Any]:
    """A function to call once a finished prompt."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("prompts", total=total)
        yield lambda: bars.advance(task)
