"""Attendance: work is done for a client that is there, by a server that goes on; else it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

from helios_jax.errors import UnavailableError
from helios_jax.server.context import ServerContext
from helios_jax.server.errors import ClientGone
from helios_jax.server.record import Outcome, RequestRecord


async def attended(
    work: Coroutine[Any, Any, None], receive: Receive, context: ServerContext, record: RequestRecord
) -> None:
    """Run the work until it ends, the client leaves, or the server stops.

    Raises:
        ClientGone: The client left; the work has been cancelled and has cleaned up.
        UnavailableError: The server stopped before the work was done.
    """

    async def departure() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(work)
    gone = asyncio.create_task(departure())
    stop = asyncio.create_task(context.stopping.wait())
    everything = (task, gone, stop)
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if task.done() or record.response_complete:  # after the last byte the server reports a disconnect as well
            await task
        elif stop.done():
            record.outcome = Outcome.FAILED
            raise UnavailableError("the server stopped before the request was finished")
        else:
            raise ClientGone("the client left before its answer was complete")
    finally:
        for each in everything:
            each.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
