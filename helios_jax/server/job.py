"""Job, Writer and Tally: one generation request between its parsing and its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from helios_jax.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.errors import InvariantError, RequestError, UnavailableError
from helios_jax.server.context import ServerContext
from helios_jax.server.record import NS_PER_S, RequestRecord
from helios_jax.server.replies import Usage, usage_of


class Writer(Protocol):
    """The form of one endpoint's answers; holds what must be remembered between deltas."""

    def plain(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct: ...

    def deltas(self, prompt_index: int, output: RequestOutput) -> Iterator[msgspec.Struct]: ...

    def usage_chunk(self, usage: Usage) -> msgspec.Struct: ...


@dataclass
class Job:
    """A request ready to run: prompts as ids, all with the same sampling parameters.

    Attributes:
        message_ends: Of a conversation, the only prompt then: see `text.conversation`.
    """

    prompts: list[list[int]]
    params: SamplingParams
    writer: Writer
    stream: bool
    include_usage: bool
    message_ends: tuple[int, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


Parse = Callable[[bytes, ServerContext, str], Awaitable[Job]]  # (body, server, id of the answer)


def check_choices(context: ServerContext, prompts: int, n: int) -> None:
    """Raise if one request asks for more outputs than `max_choices`."""
    limit = context.limits.max_choices
    if prompts * n > limit:
        raise RequestError(
            f"max_choices: {prompts} prompts x n={n} are {prompts * n} outputs, at most {limit} a request are allowed",
            param="n",
            code="too_many_choices",
        )


def check_output(output: CompletionOutput) -> None:
    """Raise if the engine ended this output by itself without an answer."""
    if output.finish_reason == "error":
        raise InvariantError("the engine ended an output with an error")
    if output.finish_reason == "abort":
        raise UnavailableError("the engine aborted the request")


class Tally:
    """Tokens, times and finish reasons of a request while its outputs pass."""

    def __init__(self, job: Job, record: RequestRecord, context: ServerContext) -> None:
        self._record = record
        self._metrics = context.metrics
        self._num_choices = job.num_choices
        self._cached: dict[int, int] = {}
        self._last_token_ns = 0
        record.prompt_tokens = sum(len(ids) for ids in job.prompts)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count one output; its tokens must be new ones (a delta, or the only output)."""
        record = self._record
        for choice in output.outputs:
            check_output(choice)
            record.completion_tokens += len(choice.token_ids)
            if choice.finish_reason is not None:
                record.finish_reasons.append(choice.finish_reason)
        self._cached[prompt_index] = output.num_cached_tokens or 0
        record.cached_tokens = sum(self._cached.values())
        self._note_times(output.metrics)

    def _note_times(self, times: RequestMetrics) -> None:
        record = self._record
        self._last_token_ns = max(self._last_token_ns, times.last_token_ns)
        if times.first_token_ns and not record.first_token_ns:
            record.first_token_ns = times.first_token_ns
            self._metrics.first_token(record.ttft_seconds)
            if times.first_scheduled_ns:
                self._metrics.queued(max(times.first_scheduled_ns - record.arrival_ns, 0) / NS_PER_S)

    def finish(self) -> Usage:
        """Usage of the whole request; observes its mean time per token.

        Raises:
            InvariantError: Some output never got its finish reason.
        """
        record = self._record
        if len(record.finish_reasons) != self._num_choices:
            raise InvariantError(f"{len(record.finish_reasons)} of {self._num_choices} outputs were finished")
        steps = record.completion_tokens / self._num_choices - 1
        if steps > 0 and self._last_token_ns > record.first_token_ns > 0:
            self._metrics.per_token((self._last_token_ns - record.first_token_ns) / NS_PER_S / steps)
        return usage_of(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
