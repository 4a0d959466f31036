"""Scheduler events into text, and text into outputs; the last host step of a frame.

1. `apply` gives each sequence its tokens and log-probabilities, in lane order, and notes which
   ones became visible; a stop string found here ends its sequence on the host.
2. The engine reports each publication before it processes another completion.
3. `flush` hands what readers should know to their sinks, once a frame.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping

from helios_jax.engine.frames import ROUNDS, Fields
from helios_jax.engine.logprobs import prompt_logprobs, sampled_logprobs
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.request import Request, Sequence, Sink
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.types import Event, GeneratedToken, RequestFinished, RequestHandle, ScheduledPlan

log = logging.getLogger("helios_jax.engine")

DECODED_TOKENS = 65536  # texts of single tokens kept for log-probabilities


@dataclasses.dataclass
class FrameEffects:
    """What a frame's events did to sequences.

    Attributes:
        published: Handles whose visible text grew by tokens of this frame. Text held back that an
            end without a token releases is no delivery of the frame: it served nothing.
        stopped: Sequences that a stop string or the end of a grammar ended; the scheduler has not heard of it.
        ended: Sequences that have a finish reason now (the stopped ones included).
        failed: Sequences whose grammar cannot go on; they have no finish reason.
        tokens: Tokens that sequences took.
    """

    published: list[RequestHandle] = dataclasses.field(default_factory=list)
    stopped: list[Sequence] = dataclasses.field(default_factory=list)
    ended: list[Sequence] = dataclasses.field(default_factory=list)
    failed: list[Sequence] = dataclasses.field(default_factory=list)
    tokens: int = 0


class Publisher:
    """Turns the events of frames into outputs and keeps what has not been delivered yet.

    Args:
        decode_token: Text of one token, for log-probabilities.
        eos_token_ids: A stop by one of these has no stop reason, as in vLLM.
    """

    def __init__(self, decode_token: Callable[[int], str], eos_token_ids: Iterable[int]) -> None:
        self._decode = functools.lru_cache(DECODED_TOKENS)(decode_token)
        self._eos = frozenset(eos_token_ids)
        self._dirty: dict[Request, None] = {}  # in order
        self._batches: dict[Sink, list[tuple[Request, RequestOutput | Exception]]] = {}

    def apply(
        self,
        plan: ScheduledPlan,
        events: Iterable[Event],
        fields: Fields,
        sequences: Mapping[RequestHandle, Sequence],
        now_ns: int,
    ) -> FrameEffects:
        """Give the events of one completed frame to their sequences; cancelled ones are skipped."""
        effects = FrameEffects()
        if plan.shape.kind is ProgramKind.SCORED_PREFILL:
            self._score(plan, fields, sequences)
        rows = {lane.handle: row for row, lane in enumerate(plan.lanes)}
        in_round = plan.shape.kind in ROUNDS
        burst: dict[RequestHandle, int] = {}  # tokens so far of each lane of a round
        grown: dict[RequestHandle, int] = {}
        ordered = list(events)
        ends = {event.handle: event for event in ordered if isinstance(event, RequestFinished)}
        finals = {event.handle: event for event in ordered if isinstance(event, GeneratedToken)}
        for event in ordered:
            sequence = sequences.get(event.handle)
            if sequence is None:
                continue
            self._dirty[sequence.request] = None
            grown.setdefault(event.handle, len(sequence.text))
            if isinstance(event, GeneratedToken):
                number = burst.get(event.handle, 0)
                burst[event.handle] = number + 1
                if sequence.is_host_ended:
                    continue  # the rest of the burst lies behind its end
                effects.tokens += 1
                index = (rows[event.handle], number) if in_round else (rows[event.handle],)
                last = ends.get(event.handle)
                # Only the last token of a burst can be the one that ended it.
                final = last if last is not None and event is finals.get(event.handle) else None
                self._take(sequence, event, final, fields, index, now_ns)
            elif isinstance(event, RequestFinished) and not sequence.has_failed:
                stop = event.stop_token
                sequence.close(str(event.reason), None if stop is None or stop in self._eos else stop)
                effects.ended.append(sequence)
        for handle, before in grown.items():
            sequence = sequences[handle]
            if sequence.has_failed:
                effects.failed.append(sequence)
            elif sequence.is_host_ended and sequence.finish_reason is None:
                sequence.close("stop")
                effects.stopped.append(sequence)
                effects.ended.append(sequence)
            if handle in burst and len(sequence.text) > before:
                effects.published.append(handle)
        return effects

    def _take(
        self,
        sequence: Sequence,
        event: GeneratedToken,
        end: RequestFinished | None,
        fields: Fields,
        index: tuple[int, ...],
        now_ns: int,
    ) -> None:
        metrics, params = sequence.request.metrics, sequence.params
        metrics.first_token_ns = metrics.first_token_ns or now_ns
        metrics.last_token_ns = now_ns
        if params.logprobs is not None:
            sequence.logprobs.append(sampled_logprobs(fields, index, event.token, params.logprobs, self._decode))
        sequence.push(event.token, ends_output=end is not None and end.stop_token is not None)

    def _score(self, plan: ScheduledPlan, fields: Fields, sequences: Mapping[RequestHandle, Sequence]) -> None:
        offset = 0
        for lane in plan.lanes:
            sequence = sequences.get(lane.handle)
            if sequence is not None and sequence.request.prompt_logprobs is not None:
                count = sequence.params.prompt_logprobs or 0
                scores = prompt_logprobs(fields, offset, lane, sequence.prompt, count, self._decode)
                sequence.request.prompt_logprobs.extend(scores)
            offset += lane.length

    def touch(self, request: Request) -> None:
        """The request changed outside a frame (aborted, nothing to do)."""
        self._dirty[request] = None

    def fail(self, request: Request, error: Exception) -> None:
        """The request ends with an error instead of an output."""
        self._dirty.pop(request, None)
        self._batches.setdefault(request.sink, []).append((request, error))

    def flush(self) -> None:
        """Hand everything new to the sinks."""
        for request in self._dirty:
            if request.has_news:
                self._batches.setdefault(request.sink, []).append((request, request.take_output()))
        self._dirty.clear()
        while self._batches:
            sink = next(iter(self._batches))
            sink.deliver(self._batches.pop(sink))

    def answer_all(self, requests: Iterable[Request], error: Exception) -> None:
        """The end: open requests get the error, ended ones the last output that they are owed.

        Does not raise: an output that cannot be made, or a sink that breaks, costs only its own reader.
        """
        for request in requests:
            self.fail(request, error)
        for request in self._dirty:
            try:
                news = request.take_output() if request.has_news else None
            except Exception:
                log.exception("the last output of %s cannot be made", request.request_id)
                self._batches.setdefault(request.sink, []).append((request, error))
                continue
            if news is not None:
                self._batches.setdefault(request.sink, []).append((request, news))
        self._dirty.clear()
        while self._batches:
            sink = next(iter(self._batches))
            try:
                sink.deliver(self._batches.pop(sink))
            except Exception:
                log.exception("outputs could not be delivered")
