"""From a body to an answer: prompts x n outputs of the engine, watched for the client's departure.

1. Read the body (`body.py`); refuse at once if there is no engine to give it to.
2. From here on one task watches `http.disconnect`; whichever phase the work is in, it is cancelled.
3. Parse into a `Job`: prompts as ids, sampling parameters, and a `Writer` for the answer's form.
4. Run the engine; outputs of several prompts are merged in the order in which they come.
5. Plain: collect and answer once. Streamed: `streaming.EventStream` sends each delta.
6. A failure before the first byte is an HTTP error, later an error event. Nobody is left waiting.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helios_jax.engine.outputs import CompletionOutput, RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.errors import InvariantError
from helios_jax.server.attendance import attended
from helios_jax.server.body import read_body
from helios_jax.server.context import ServerContext
from helios_jax.server.errors import ClientGone
from helios_jax.server.gate import RECORD_KEY
from helios_jax.server.job import Job, Parse, Tally
from helios_jax.server.record import Outcome, RequestRecord
from helios_jax.server.streaming import EventStream

MERGE_DEPTH = 64  # outputs of several prompts that wait for a slow client before the pumps wait too

Source = Callable[[], AsyncIterator[RequestOutput]]


async def engine_outputs(
    context: ServerContext, job: Job, answer_id: str, arrival_ns: int
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(prompt index, output) of all prompts, as they come; closing it cancels what still runs."""
    engine = context.engine

    def source(index: int) -> Source:
        name = answer_id if len(job.prompts) == 1 else f"{answer_id}-{index}"
        return lambda: engine.generate(
            job.prompts[index], job.params, request_id=name, arrival_ns=arrival_ns, message_ends=job.message_ends
        )

    if len(job.prompts) == 1:
        async with aclosing(source(0)()) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield 0, output
        return
    async with aclosing(merged([source(index) for index in range(len(job.prompts))])) as pairs:
        async for pair in pairs:
            yield pair


async def merged(sources: list[Source]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Interleave streams through a bounded queue; the first error ends all of them."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(MERGE_DEPTH)

    async def pump(index: int) -> None:
        try:
            async with aclosing(sources[index]()) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(index)) for index in range(len(sources))]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def collected(outputs: AsyncIterator[tuple[int, RequestOutput]], prompts: int) -> list[RequestOutput]:
    """The finished outputs of each prompt, in the order of the prompts and of their indices."""
    last: dict[int, RequestOutput] = {}
    choices: dict[int, dict[int, CompletionOutput]] = {index: {} for index in range(prompts)}
    async for index, output in outputs:
        last[index] = output
        choices[index].update({choice.index: choice for choice in output.outputs if choice.finished})
    if len(last) != prompts:
        raise InvariantError(f"the engine answered {len(last)} of {prompts} prompts")
    return [
        dataclasses.replace(last[index], outputs=[choices[index][i] for i in sorted(choices[index])])
        for index in range(prompts)
    ]


class GenerationResponse(Response):
    """Answer of a generation endpoint: parses, runs and answers, under attendance.

    Args:
        request: Whose body has not been read yet.
        context: The server.
        parse: Body to `Job`.
        prefix: Of the answer's id, such as `chatcmpl`.
    """

    def __init__(self, request: Request, context: ServerContext, parse: Parse, prefix: str) -> None:
        self._request = request
        self._context = context
        self._parse = parse
        self._answer_id = f"{prefix}-{uuid.uuid4().hex}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD_KEY]
        self._context.check_accepting()
        body = await read_body(self._request, self._context)
        stream = EventStream(send, self._context.metrics)
        try:
            await attended(self._work(body, send, stream, record), receive, self._context, record)
        except ClientGone:
            raise
        except Exception as error:
            if record.response_started:
                record.outcome = Outcome.FAILED
                await stream.fail(error, record.request_id)
            raise

    async def _work(self, body: bytes, send: Send, stream: EventStream, record: RequestRecord) -> None:
        job = await self._parse(body, self._context, self._answer_id)
        job.params.output_kind = OutputKind.DELTA if job.stream else OutputKind.FINAL_ONLY
        tally = Tally(job, record, self._context)
        record.accepted = self._context.engine.health().ready  # one that stopped meanwhile refuses by itself
        async with aclosing(engine_outputs(self._context, job, self._answer_id, record.arrival_ns)) as outputs:
            if job.stream:
                await stream.run(job, outputs, tally)
                return
            results = await collected(outputs, len(job.prompts))
        for index, output in enumerate(results):
            tally.add(index, output)
        await send_json(send, job.writer.plain(results, tally.finish()))


async def send_json(send: Send, answer: msgspec.Struct) -> None:
    body = msgspec.json.encode(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
