"""Copies to the host that nobody waits for, copies back, and everything that may go wrong with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from helios_jax.engine.host_copying import CopySizes, HostCopying
from helios_jax.engine.host_tier import Content
from helios_jax.errors import DeviceError

PAGE = 4
TOKENS = np.arange(10, dtype=np.int32)  # two pages, and two tokens behind them


class ToyDevice:
    """Pages and rows are one number each; parcels arrive when the test lets them."""

    def __init__(self) -> None:
        self.pages, self.rows = np.arange(100, 120), np.arange(200, 210)
        self.arrives = threading.Event()
        self.arrives.set()
        self.trouble: Exception | None = None
        self.taken: list[list[int]] = []

    def take_out(self, row: int, pages: Sequence[int]) -> ToyParcel:
        self.raise_trouble()
        self.taken.append(list(pages))
        contents = [(self.pages[[page]],) for page in pages]  # copies, as they are now
        return ToyParcel(self, contents, (self.rows[[row]],))

    def put_in(self, row: int, pages: Sequence[int], contents: Sequence[Content], kept: Content) -> None:
        self.raise_trouble()
        assert len(pages) == len(contents)
        for page, content in zip(pages, contents, strict=True):
            self.pages[page] = content[0][0]
        self.rows[row] = kept[0][0]

    def raise_trouble(self) -> None:
        if self.trouble is not None:
            raise self.trouble


class ToyParcel:
    def __init__(self, device: ToyDevice, contents: list[Content], row: Content) -> None:
        self.device, self.contents, self.row = device, contents, row

    def read(self) -> tuple[list[Content], Content]:
        assert self.device.arrives.wait(30)
        self.device.raise_trouble()
        return self.contents, self.row


Make = Callable[..., HostCopying]


@pytest.fixture
def device() -> ToyDevice:
    return ToyDevice()


@pytest.fixture
def make(device: ToyDevice) -> Iterator[Make]:
    made: list[HostCopying] = []

    def copying(budget: int = 10_000) -> HostCopying:
        made.append(HostCopying(device, CopySizes(page_bytes=10, row_bytes=30, most_bytes=100), budget, PAGE))
        return made[-1]

    yield copying
    device.arrives.set()
    for each in made:
        each.close()


def test_a_checkpoint_goes_round(device: ToyDevice, make: Make) -> None:
    copying = make()
    assert copying.save(TOKENS, [3, 7], 2)
    device.pages[:], device.rows[:] = 0, 0  # overwritten right behind it
    copying.settle()
    prompt = np.append(TOKENS, 5).astype(np.int32)
    assert copying.find(TOKENS, 0) is None  # the last token of a prompt is computed
    assert copying.find(prompt, 10) is None  # the device has as much
    found = copying.find(prompt, 9)
    assert found is not None
    assert copying.bring_back(found, 5, [1, 2], gained=6)
    assert (device.pages[[1, 2]].tolist(), device.rows[5]) == ([103, 107], 202)
    stats = copying.stats()
    assert (stats.saved, stats.restored, stats.restored_tokens, stats.checkpoints, stats.lost) == (1, 1, 6, 1, 0)
    assert stats.bytes_total == 10_000
    assert stats.bytes_used == 2 * (8 + PAGE * 4) + 8 + 2 * 4


def test_only_what_the_host_lacks_is_copied(device: ToyDevice, make: Make) -> None:
    copying = make()
    assert copying.save(TOKENS[:9], [3, 7], 2)
    copying.settle()
    assert copying.save(TOKENS[:9], [3, 7], 2)  # it is there
    assert copying.save(np.append(TOKENS[:8], [90, 91, 92, 93]).astype(np.int32), [3, 7, 9], 4)
    copying.settle()
    assert device.taken == [[3, 7], [9]]
    assert copying.stats().saved == copying.stats().checkpoints == 2


def test_saving_waits_for_nothing_and_only_so_much_is_on_its_way(device: ToyDevice, make: Make) -> None:
    """30 bytes a row and 10 a page, of at most 100."""
    device.arrives.clear()
    copying = make()
    prefixes = [np.full(4, n, np.int32) for n in range(4)]
    kept = [copying.save(prefix, [1] * (n < 2), 1) for n, prefix in enumerate(prefixes)]
    assert kept == [True, True, False, False]
    assert copying.find(np.full(9, 1, np.int32), 0) is None
    device.arrives.set()
    copying.settle()
    assert (copying.stats().saved, copying.stats().lost) == (2, 2)
    assert copying.save(prefixes[3], [3], 1)
    long = np.full(40, 50, np.int32)
    assert not copying.save(long, list(range(10)), 1)


def test_copies_that_fail_are_one_checkpoint_less(device: ToyDevice, make: Make) -> None:
    copying = make()
    assert copying.save(TOKENS, [3, 7], 2)
    copying.settle()
    found = copying.find(np.append(TOKENS, 5).astype(np.int32), 0)
    assert found is not None
    device.trouble = RuntimeError("no memory")
    assert not copying.save(TOKENS[:5], [3], 2)
    assert not copying.bring_back(found, 5, [1, 2], gained=6)
    device.trouble = None
    device.arrives.clear()
    assert copying.save(TOKENS[:6], [3], 2)
    device.trouble = RuntimeError("the transfer broke")
    device.arrives.set()
    copying.settle()
    stats = copying.stats()
    assert (stats.lost, stats.saved, stats.restored, stats.checkpoints) == (3, 1, 0, 1)


def test_a_state_that_was_lost_in_copying_back_is_the_engines_business(device: ToyDevice, make: Make) -> None:
    copying = make()
    copying.save(TOKENS, [3, 7], 2)
    copying.settle()
    found = copying.find(np.append(TOKENS, 5).astype(np.int32), 0)
    assert found is not None
    device.trouble = DeviceError("the state was lost")
    with pytest.raises(DeviceError):
        copying.bring_back(found, 5, [1, 2], gained=6)


def test_contents_that_were_found_stay_although_the_tier_forgets_them(device: ToyDevice, make: Make) -> None:
    copying = make(budget=2 * (8 + PAGE * 4) + 8 + 2 * 4)  # one checkpoint
    copying.save(TOKENS, [3, 7], 2)
    copying.settle()
    found = copying.find(np.append(TOKENS, 5).astype(np.int32), 0)
    copying.save(TOKENS[::-1].copy(), [4, 8], 3)
    copying.settle()
    assert (copying.stats().checkpoints, copying.stats().evicted) == (1, 1)
    assert copying.find(np.append(TOKENS, 5).astype(np.int32), 0) is None
    assert found is not None
    assert copying.bring_back(found, 5, [1, 2], gained=10)
    assert device.pages[[1, 2]].tolist() == [103, 107]


def test_what_does_not_fit_is_lost(make: Make) -> None:
    copying = make(budget=20)
    assert copying.save(TOKENS, [3, 7], 2)
    copying.settle()
    assert (copying.stats().lost, copying.stats().saved, copying.stats().bytes_used) == (1, 0, 0)
