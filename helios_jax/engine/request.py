"""A request and its sequences between the scheduler and the reader.

A `Request` is what the caller gave; each of its `n` outputs is a `Sequence`, which the
scheduler knows as a request of its own. Life of a sequence:

1. Created by `intake`; waits in the engine's queue without a handle.
2. Admitted: has a handle; its frames run.
   `give_way` takes the handle away again: it waits once more, and goes on where it was.
3. `push` takes each sampled token: detokenise, hold back what may become a stop string.
4. `close` sets the finish reason and releases what was held back. While `awaits_capture`, readers are not told.
5. `RequestOutput`s are made from what became visible since the last one.

Everything here runs in the engine thread. It does not know frames, the scheduler or asyncio.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from helios_jax.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from helios_jax.engine.params import OutputKind, SamplingParams
from helios_jax.scheduler.preemption import resumed
from helios_jax.scheduler.types import RequestHandle, RequestSpec
from helios_jax.text.detokenizer import Detokenizer
from helios_jax.text.grammar import Matcher
from helios_jax.text.stops import StopBuffer


class Sink(Protocol):
    """Where outputs go; called by the engine thread, must not block or raise."""

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        """Outputs, or the error that ended a request, in order."""


@dataclasses.dataclass(eq=False)
class Sequence:
    """One output of a request.

    Attributes:
        index: Its position among the n outputs.
        seed: uint64 of its random numbers.
        spec: What the scheduler is told; after a preemption its prompt holds the output so far.
        text: Visible text. `held_text` is decoded but may still become a stop string.
        number: Its place in order of arrival, over all requests; 0 until the engine knows it.
        matcher: Where it stands in its grammar, if it has one; behind the last of `token_ids`.
        on_device: A frame of it was submitted, so the device holds state of it.
        awaits_capture: It has ended, but its last state is still to be captured: whoever sees its end, and goes on
            with it, shall find that state.
    """

    request: Request
    index: int
    seed: int
    spec: RequestSpec
    detokenizer: Detokenizer
    stops: StopBuffer
    matcher: Matcher | None = None
    handle: RequestHandle | None = None
    number: int = 0
    on_device: bool = False
    awaits_capture: bool = False
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sent_tokens: int = 0
    sent_chars: int = 0
    sent_finish: bool = False

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt(self) -> np.ndarray:
        """int32 [prompt_len] as it was given; output that a resumed spec has for its prompt is not part of it."""
        return self.spec.prompt[: len(self.spec.prompt) - self.spec.output_len]

    @property
    def tokens(self) -> np.ndarray:
        """int32, the prompt as it was given and the output so far, a pending token included."""
        return np.concatenate([self.prompt, np.array(self.token_ids, np.int32)])

    @property
    def has_ended(self) -> bool:
        """It has a finish reason, and readers may know."""
        return self.finish_reason is not None and not self.awaits_capture

    def give_way(self) -> None:
        """Its slot and pages go to others; it is to be admitted again with its output so far."""
        if self.spec.scored and len(self.token_ids) == self.spec.output_len:
            self.request.prompt_logprobs = [None]  # not complete, so nobody was told: scored from the beginning
        self.spec = resumed(self.spec, self.token_ids[self.spec.output_len :])
        self.handle, self.on_device = None, False
        self.request.metrics.preemptions += 1

    def push(self, token: int, ends_output: bool) -> None:
        """Take a sampled token; a stop token that ends the output has no text of its own."""
        self.token_ids.append(token)
        if self.matcher is not None and not ends_output:
            self.matcher.advance(token)
        if self.stop_reason is None and (not ends_output or self.params.include_stop_str_in_output):
            self._show(self.detokenizer.push(token))

    def close(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the output; text held back is shown unless it completes a stop string."""
        if self.finish_reason is not None:
            return
        if self.hit_stop_string:
            self.finish_reason = "stop"
            return
        self._show(self.detokenizer.flush())
        if not self.hit_stop_string:
            self.text += self.stops.flush()
        if self.is_host_ended and reason in ("stop", "length"):
            self.finish_reason = "stop"
        else:
            self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def hit_stop_string(self) -> bool:
        return isinstance(self.stop_reason, str)

    @property
    def is_host_ended(self) -> bool:
        """The host ends it, by a stop string or its grammar: what else the device made of it does not count."""
        return self.hit_stop_string or (self.matcher is not None and (self.matcher.is_over or self.has_failed))

    @property
    def has_failed(self) -> bool:
        """Its grammar cannot go on."""
        return self.matcher is not None and self.matcher.error is not None

    def _show(self, piece: str) -> None:
        result = self.stops.push(piece)
        self.text += result.text
        if result.matched is not None:
            self.stop_reason = result.matched

    @property
    def has_news(self) -> bool:
        """Whether a reader would see something new: text, or the end."""
        return len(self.text) > self.sent_chars or (self.has_ended and not self.sent_finish)

    def output(self, delta: bool) -> CompletionOutput:
        """All of it, or what is new since the last call with `delta`."""
        first, start = (self.sent_tokens, self.sent_chars) if delta else (0, 0)
        return CompletionOutput(
            index=self.index,
            text=self.text[start:],
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:] if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason if self.has_ended else None,
            stop_reason=self.stop_reason if self.has_ended else None,
        )

    def mark_sent(self) -> None:
        self.sent_tokens, self.sent_chars = len(self.token_ids), len(self.text)
        self.sent_finish = self.has_ended


@dataclasses.dataclass(eq=False)
class Request:
    """What the caller gave, and the sequences that serve it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sink: Sink
    metrics: RequestMetrics
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    sent_prompt_logprobs: bool = False
    num_cached_tokens: int | None = None  # of its first output, when it was first given a slot

    @property
    def is_finished(self) -> bool:
        return all(sequence.has_ended for sequence in self.sequences)

    @property
    def is_scored(self) -> bool:
        """The prompt's log-probabilities, if asked for, are complete (or will never be)."""
        scored = self.prompt_logprobs
        return scored is None or len(scored) == len(self.prompt_token_ids) or self.is_finished

    @property
    def has_news(self) -> bool:
        if not self.is_scored:  # every output may be echoed with them: they go first
            return False
        if self.params.output_kind is OutputKind.FINAL_ONLY:
            return self.is_finished
        return any(sequence.has_news for sequence in self.sequences)

    def take_output(self) -> RequestOutput:
        """What the reader is to be told now, in the kind it asked for."""
        delta = self.params.output_kind is OutputKind.DELTA
        told = [s for s in self.sequences if s.has_news] if delta else self.sequences
        outputs = [sequence.output(delta) for sequence in told]
        for sequence in told:
            sequence.mark_sent()
        scored = None if delta and self.sent_prompt_logprobs else self.prompt_logprobs
        self.sent_prompt_logprobs = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished,
            prompt_logprobs=scored,
            num_cached_tokens=self.num_cached_tokens,
            metrics=dataclasses.replace(self.metrics),
        )
