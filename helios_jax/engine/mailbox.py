"""Outputs on their way from the engine thread to asyncio readers.

The engine hands over a batch a frame; one callback an event loop puts each output into its
reader's mailbox. A mailbox merges what its reader has not taken, so a slow reader costs
memory for its own text once, never a queue that grows.
"""

from __future__ import annotations

import asyncio
import dataclasses

from helios_jax.engine.outputs import CompletionOutput, RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.engine.request import Request


class Mailbox:
    """At most one merged output and one error; used by its event loop only."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> None:
        if isinstance(item, Exception):
            self._error = item
        elif self._output is None or self._kind is not OutputKind.DELTA:
            self._output = item
        else:
            self._output = merged(self._output, item)
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """The next output; raises the error that ended the request once outputs are taken."""
        await self._arrived.wait()
        if self._output is not None:
            output, self._output = self._output, None
            if self._error is None:
                self._arrived.clear()
            return output
        assert self._error is not None
        raise self._error


def merged(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """Two successive deltas as one."""
    by_index = {output.index: output for output in old.outputs}
    for output in new.outputs:
        earlier = by_index.get(output.index)
        by_index[output.index] = output if earlier is None else _joined(earlier, output)
    return dataclasses.replace(
        new,
        outputs=[by_index[index] for index in sorted(by_index)],
        prompt_logprobs=old.prompt_logprobs if new.prompt_logprobs is None else new.prompt_logprobs,
    )


def _joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if new.logprobs is None else (old.logprobs or []) + new.logprobs
    return dataclasses.replace(
        new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs
    )


class LoopSink:
    """Carries batches into one event loop with one callback each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._boxes: dict[Request, Mailbox] = {}

    def open(self, request: Request) -> Mailbox:
        """A mailbox for a request that is about to be submitted; called in the loop."""
        box = self._boxes[request] = Mailbox(request.params.output_kind)
        return box

    def close(self, request: Request) -> None:
        """The reader has gone; what still arrives is dropped."""
        self._boxes.pop(request, None)

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        """Called by the engine thread."""
        try:
            self.loop.call_soon_threadsafe(self._put, batch)
        except RuntimeError:  # the loop was closed: its readers are gone with it
            return

    def _put(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        for request, item in batch:
            box = self._boxes.get(request)
            if box is not None:
                box.put(item)
