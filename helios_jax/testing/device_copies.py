"""Copies of a fake device's pages and rows to the host and back, in order with its frames."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from helios_jax.engine.host_tier import Content
from helios_jax.errors import DeviceError
from helios_jax.testing.device_state import Consumed, FakeState, SavedState

PATIENCE_S = 30.0  # a copy that nobody's frames let through in this time has failed


class FakeParcel:
    """A page and row on their way: they are there when what was submitted before them is over."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._contents: tuple[list[Content], Content] | None = None

    def arrive(self, state: FakeState | None, row: int, pages: Sequence[int]) -> None:
        """What the device holds now; None where it was lost."""
        if state is not None:
            saved = state.saved[row]
            numbers = np.array([saved.committed, *saved.recurrent], np.int64)
            self._contents = [(state.pages[page].copy(),) for page in pages], (saved.page.copy(), numbers)
        self._over.set()

    def read(self) -> tuple[list[Content], Content]:
        """As `aot.host_copies.Parcel.read`."""
        if not self._over.wait(PATIENCE_S) or self._contents is None:
            raise DeviceError("the copy was lost with the device state")
        return self._contents


def write(state: FakeState, row: int, pages: Sequence[int], contents: Sequence[Content], kept: Content) -> None:
    """Contents of `FakeParcel`s into pages and a row."""
    for page, content in zip(pages, contents, strict=True):
        state.pages[page] = content[0]
    committed, length, checksum = kept[1].tolist()
    state.saved[row] = SavedState(kept[0], committed, Consumed(length, checksum))
