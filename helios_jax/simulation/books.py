"""The synthetic device's own memory: positions, pages, state rows and image features.

It is an independent check of the scheduler. Nothing here is read from the scheduler's state: the
books change by what lanes say and complain when a lane contradicts what the device did before. An
expectation that fails is our bug, an `InvariantError`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler.resources import pages_for
from helios_jax.scheduler.types import Lane, RequestHandle, RequestSpec


class Books:
    """Ledger of one device.

    Args:
        page_size: Tokens a page.
        pages: Keep the ownership of pages as well (a scan of every page that a lane may read).
    """

    def __init__(self, page_size: int, *, pages: bool = True) -> None:
        self._page_size, self._pages = page_size, pages
        self.committed: dict[RequestHandle, int] = {}
        self._owner: dict[int, RequestHandle] = {}
        self._shared: dict[RequestHandle, dict[int, RequestHandle]] = {}  # page that a request reads only -> its writer
        self._sharers: Counter[int] = Counter()  # requests that share a page
        self._rows: dict[int, int] = {}  # state row -> committed length of the state that it holds
        self._kept: dict[int, list[tuple[int, RequestHandle]]] = {}  # state row -> whole pages before it, their writers
        self._features: dict[RequestHandle, set[int]] = {}
        self._specs: dict[RequestHandle, RequestSpec] = {}

    def admit(self, handle: RequestHandle, spec: RequestSpec) -> None:
        """Learn what a request is: image spans and restored tokens are checked against it."""
        self._specs[handle] = spec

    def forget(self, handle: RequestHandle) -> None:
        """The request's resources were freed; its pages may belong to others from now on."""
        self._sharers.subtract(self._shared.pop(handle, {}).keys())
        for book in (self.committed, self._features, self._specs):
            book.pop(handle, None)

    def rebind(self, old: RequestHandle, fresh: RequestHandle) -> None:
        """A restore between image windows bound the request to a fresh generation: features are gone."""
        self.committed[fresh] = self.committed.pop(old)
        if old in self._specs:
            self._specs[fresh] = self._specs.pop(old)
        self._features.pop(old, None)
        for page, owner in list(self._owner.items()):
            if owner == old:
                self._owner[page] = fresh
        if old in self._shared:
            self._shared[fresh] = self._shared.pop(old)
        for kept in self._kept.values():
            kept[:] = [(page, fresh if writer == old else writer) for page, writer in kept]

    def initialize(self, lane: Lane, table: np.ndarray | None) -> None:
        """Begin a request; `lane.start` tokens of its prompt are in pages that it shares."""
        spec = self._specs.get(lane.handle)
        if lane.start and (spec is None or not spec.restore_from or lane.start != spec.restored_len):
            raise InvariantError(f"{lane} begins with tokens that it does not share")
        self.committed[lane.handle] = lane.start
        if self._pages and lane.start:
            self._share(lane, table, lane.start // self._page_size)

    def snapshot(self, lane: Lane, table: np.ndarray | None) -> None:
        """Copy the state of a request into a row; the copy is of exactly the committed position."""
        at = self._position(lane)
        if lane.start != at:
            raise InvariantError(f"{lane} copies a state at {at}")
        if lane.row < 1:
            raise InvariantError(f"{lane} has no destination row")
        self._rows[lane.row] = at
        if self._pages:
            pages = [] if table is None else table[: at // self._page_size].tolist()
            self._kept[lane.row] = [(page, self._owner[page]) for page in pages]

    def restore(self, lane: Lane, table: np.ndarray | None) -> None:
        """Bring a state back: from outside the device (row 0) with its pages, or from a row.

        The whole pages before the state of a row are shared, or the request's own; the last may be a copy.
        """
        spec = self._specs.get(lane.handle)
        if lane.row:
            if lane.row not in self._rows:
                raise InvariantError(f"{lane} reads row {lane.row}, which nothing was copied to")
            at = self._rows[lane.row]
        else:
            at = spec.restored_len if spec is not None else lane.start
        if at != lane.start:
            raise InvariantError(f"{lane} restores a state of {at} tokens")
        shared = 0
        if self._pages and lane.row:
            shared = self._pages_of_row(lane, table, at // self._page_size)
            self._share(lane, table, shared)
        self._write(lane, table, shared * self._page_size, at)
        self.committed[lane.handle] = at

    def encode(self, lane: Lane) -> None:
        """Write the features of image `lane.row`; they stay until the request is rebound or freed."""
        spec, images = self._specs.get(lane.handle), self._features.setdefault(lane.handle, set())
        if spec is not None:
            span = spec.image_spans[lane.row]
            if span.end - span.start != lane.length:
                raise InvariantError(f"{lane} encodes image {lane.row} of {span.end - span.start} features")
        if lane.row in images:
            raise InvariantError(f"{lane} encodes image {lane.row} again")
        images.add(lane.row)

    def prefill(self, lane: Lane, table: np.ndarray | None) -> int:
        """Consume a chunk of a prompt; returns where it ends."""
        at, end = self._position(lane), lane.start + lane.length
        if at != lane.start:
            raise InvariantError(f"{lane} starts elsewhere than {at}")
        spec = self._specs.get(lane.handle)
        for number, span in enumerate(spec.image_spans if spec is not None else ()):
            if span.start < end and span.end > lane.start:
                if span.start < lane.start or span.end > end:
                    raise InvariantError(f"{lane} splits image {number}, tokens {span.start} to {span.end}")
                if number not in self._features.get(lane.handle, ()):
                    raise InvariantError(f"{lane} consumes image {number}, which was not encoded")
        self._write(lane, table, at, end)
        self.committed[lane.handle] = end
        return end

    def decode(self, lane: Lane, table: np.ndarray | None, tokens: int, *, uncertain: bool) -> int:
        """Commit the pending token and an accepted prefix; returns the new committed length.

        Args:
            tokens: How many are committed; every row up to the ceiling `lane.length` was written.
            uncertain: An outstanding round of the same request may have stopped short of its bound,
                so the planned start is only the latest possible one.
        """
        at = self._position(lane)
        if at > lane.start or (at < lane.start and not uncertain):
            raise InvariantError(f"{lane} starts elsewhere than {at}")
        self._write(lane, table, at, at + lane.length)
        self.committed[lane.handle] = at + tokens
        return at + tokens

    def position(self, handle: RequestHandle) -> int:
        """Committed length of a request, 0 before its initialisation."""
        return self.committed.get(handle, 0)

    def stops(self, handle: RequestHandle) -> frozenset[int]:
        """Token ids that end the request's output; the device stops a burst there."""
        spec = self._specs.get(handle)
        return spec.stop_token_ids if spec is not None else frozenset()

    def _position(self, lane: Lane) -> int:
        at = self.committed.get(lane.handle)
        if at is None:
            raise InvariantError(f"{lane} starts elsewhere than {at}: no initialise or restore ran before it")
        return at

    def _pages_of_row(self, lane: Lane, table: np.ndarray | None, whole: int) -> int:
        """How many leading pages of a table are those before the state of a row, all but one at least."""
        pages, kept = [] if table is None else table[:whole].tolist(), self._kept[lane.row]
        same = [page == before for page, (before, _) in zip(pages, kept, strict=False)]
        shared = [*same, False].index(False)
        if shared < whole - 1:
            raise InvariantError(f"{lane} restores beside pages {pages}, the state was behind {kept}")
        for page, writer in kept[:shared]:
            if self._owner.get(page) != writer:
                raise InvariantError(
                    f"{lane} shares page {page} of {writer}, {self._owner.get(page)} wrote to it since"
                )
        return shared

    def _share(self, lane: Lane, table: np.ndarray | None, count: int) -> None:
        """A request reads the first pages of its table from now on; those that others wrote stay theirs."""
        pages = [] if table is None else table[:count].tolist()
        if len(pages) < count or not all(page in self._owner for page in pages):
            raise InvariantError(f"{lane} shares pages {pages}, of which {count} were to be written already")
        fresh = {page: self._owner[page] for page in pages if self._owner[page] != lane.handle}
        self._sharers.subtract(self._shared.get(lane.handle, {}).keys())
        self._shared[lane.handle] = fresh
        self._sharers.update(fresh.keys())

    def _write(self, lane: Lane, table: np.ndarray | None, start: int, end: int) -> None:
        if not self._pages:
            return
        if table is None or len(table) < pages_for(end, self._page_size):
            raise InvariantError(f"{lane} has pages {table}, it ends at {end}")
        first = start // self._page_size
        for page in table[first : pages_for(end, self._page_size)].tolist():
            owner = self._owner.get(page)
            if owner is not None and owner != lane.handle and owner in self.committed:
                raise InvariantError(f"page {page} of {owner} is given to {lane.handle}")
            if self._sharers[page] > 0:
                raise InvariantError(f"{lane} writes to page {page}, which others read")
            self._owner[page] = lane.handle
        shared = self._shared.get(lane.handle, {})
        for page in table[:first].tolist():
            if self._owner.get(page) != shared.get(page, lane.handle):
                raise InvariantError(f"{lane.handle} lost page {page} to {self._owner.get(page)}")
