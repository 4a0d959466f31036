"""Between the device and the host tier: copies that nobody waits for, and copies back.

1. A checkpoint gives way on the device: `save` submits copies of its row and of those of its pages that the tier
   lacks. They are ordered ahead of whatever overwrites them, and the call does not wait.
2. A thread waits for the transfers and puts the contents into the tier.
3. A prompt comes whose beginning is there: `find`, then `bring_back` into a row and pages of the device.

Nothing here fails a request: a copy that cannot be made or fails is one checkpoint less. Contents outlive a device
state that was lost; they are of the model, not of the state.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from helios_jax.engine.host_tier import Content, HostTier
from helios_jax.engine.stats import HostTierStats
from helios_jax.errors import DeviceError

CLOSE_TIMEOUT_S = 10.0
log = logging.getLogger("helios_jax.engine")


class ParcelLike(Protocol):
    """As `aot.host_copies.Parcel`."""

    def read(self) -> tuple[list[Content], Content]: ...


class CopyingDevice(Protocol):
    """The part of a runner that copies; see `aot.runner.DeviceRunner`."""

    def take_out(self, row: int, pages: Sequence[int]) -> ParcelLike: ...

    def put_in(self, row: int, pages: Sequence[int], contents: Sequence[Content], kept: Content) -> None: ...


@dataclasses.dataclass(frozen=True)
class CopySizes:
    """What copies take on the device, in bytes.

    Attributes:
        page_bytes, row_bytes: A page, a state row.
        most_bytes: What may be on its way to the host at a time: so much is on the device twice.
    """

    page_bytes: int
    row_bytes: int
    most_bytes: int


class Found(NamedTuple):
    """A checkpoint of the tier; its contents stay as they are, whatever becomes of the tier."""

    endpoint: int
    pages: list[Content]
    row: Content


class _Job(NamedTuple):
    tokens: np.ndarray
    num_pages: int
    places: list[int]
    parcel: ParcelLike
    num_bytes: int


class HostCopying:
    """Owns the tier and the thread that fills it. Methods are for the engine thread, `stats` for any.

    Args:
        device: Copies; a real runner or a fake one.
        sizes: Of its copies.
        budget_bytes: Of the tier, above 0.
        page_size: Tokens of a page.
    """

    def __init__(self, device: CopyingDevice, sizes: CopySizes, budget_bytes: int, page_size: int) -> None:
        self._device, self._sizes, self._tier = device, sizes, HostTier(budget_bytes, page_size)
        self._lock = threading.Lock()  # of the tier, the counts and the bytes on their way
        self._on_the_way = 0
        self._counts = HostTierStats(bytes_total=budget_bytes)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="helios-host-copies", daemon=True)
        self._thread.start()

    def save(self, tokens: np.ndarray, pages: Sequence[int], row: int) -> bool:
        """Start to copy a checkpoint that gives way, unless it is here already; False if it is lost.

        Args:
            tokens: int32 [endpoint], its prefix.
            pages: Its whole pages on the device, the first of the prefix first.
            row: Its state row.
        """
        with self._lock:
            lacking = self._tier.lacking(tokens, len(pages))
            busy = self._on_the_way
        if lacking is None:
            return True
        num_bytes = self._sizes.row_bytes + len(lacking) * self._sizes.page_bytes
        if busy + num_bytes > self._sizes.most_bytes:
            return self._lost("too much is on its way")
        try:
            parcel = self._device.take_out(row, [pages[index] for index in lacking])
        except Exception as error:  # no memory for the transient copy, a lost state: XLA's own types
            return self._lost(str(error))
        with self._lock:
            self._on_the_way += num_bytes
        self._jobs.put(_Job(tokens.copy(), len(pages), lacking, parcel, num_bytes))
        return True

    def find(self, prompt: np.ndarray, beyond: int) -> Found | None:
        """The longest checkpoint of more than `beyond` tokens that a prompt begins with and goes on behind."""
        with self._lock:
            found = self._tier.find(prompt, beyond)
            return None if found is None else Found(found.endpoint, self._tier.contents(found), found.row)

    def bring_back(self, found: Found, row: int, pages: Sequence[int], gained: int) -> bool:
        """Copy a checkpoint into a row and pages of the device, ahead of every frame to come; False if that failed.

        Args:
            gained: Tokens that are not computed because of it, for the counts.

        Raises:
            DeviceError: The device state was lost in the attempt.
        """
        try:
            self._device.put_in(row, pages, found.pages, found.row)
        except DeviceError:
            raise
        except Exception as error:  # no memory, most likely: the state is as it was
            return self._lost(str(error))
        with self._lock:
            self._counts.restored += 1
            self._counts.restored_tokens += gained
        return True

    def stats(self) -> HostTierStats:
        with self._lock:
            return dataclasses.replace(
                self._counts, bytes_used=self._tier.used_bytes, checkpoints=len(self._tier), evicted=self._tier.evicted
            )

    def settle(self) -> None:
        """Return once everything that is on its way has arrived."""
        self._jobs.join()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _lost(self, why: str) -> bool:
        log.debug("a checkpoint is not kept on the host: %s", why)
        with self._lock:
            self._counts.lost += 1
        return False

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._receive(job)
            except Exception as error:  # the transfer, or memory of the host
                self._lost(str(error))
            finally:
                with self._lock:
                    self._on_the_way -= job.num_bytes
                self._jobs.task_done()

    def _receive(self, job: _Job) -> None:
        contents, row = job.parcel.read()
        pages: dict[int, Any] = dict(zip(job.places, contents, strict=True))
        with self._lock:
            kept = self._tier.put(job.tokens, job.num_pages, pages, row)
            self._counts.saved += kept
        if not kept:
            self._lost("it does not fit, or a page that it shares went meanwhile")
