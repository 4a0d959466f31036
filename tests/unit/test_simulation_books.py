"""The synthetic device's books of shared pages: what a scheduler that shares wrongly runs into."""

from __future__ import annotations

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler.types import Lane, LaneRole, RequestHandle, RequestSpec
from helios_jax.simulation.books import Books

FIRST, SECOND, THIRD = (RequestHandle(slot, 1) for slot in range(3))
PROMPT = np.zeros(20, np.int32)


def table(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def written(row: int = 0) -> Books:
    """The first request wrote 10 tokens to pages 1, 2 and 3, and left a state in `row`."""
    books = Books(4)
    for handle in (FIRST, SECOND, THIRD):
        books.admit(handle, RequestSpec(prompt=PROMPT, max_tokens=4, restored_len=8, restore_from=1))
    books.initialize(Lane(FIRST, LaneRole.INITIALIZE, 0, 0, emits=False), table())
    books.prefill(Lane(FIRST, LaneRole.PROMPT, 0, 10, emits=False), table(1, 2, 3))
    if row:
        books.snapshot(Lane(FIRST, LaneRole.SNAPSHOT, 10, 0, emits=False, row=row), table(1, 2, 3))
    return books


def begins(handle: RequestHandle, start: int = 8) -> Lane:
    return Lane(handle, LaneRole.INITIALIZE, start, 0, emits=False)


def goes_on(handle: RequestHandle, start: int = 8) -> Lane:
    return Lane(handle, LaneRole.PROMPT, start, 4, emits=False)


def restores(handle: RequestHandle) -> Lane:
    return Lane(handle, LaneRole.RESTORE, 10, 0, emits=False, row=7)


def test_pages_are_read_by_several_and_outlive_their_writer() -> None:
    books = written()
    books.initialize(begins(SECOND), table(1, 2))
    books.forget(FIRST)
    books.initialize(begins(THIRD), table(1, 2))
    assert books.prefill(goes_on(SECOND), table(1, 2, 4)) == 12
    assert books.prefill(goes_on(THIRD), table(1, 2, 5)) == 12


def test_a_page_that_others_read_is_not_written() -> None:
    books = written()
    books.initialize(begins(SECOND), table(1, 2))
    books.forget(FIRST)
    books.initialize(begins(THIRD, 0), table())
    with pytest.raises(InvariantError, match="page 1, which others read"):
        books.prefill(goes_on(THIRD, 0), table(1))
    books.forget(SECOND)
    assert books.prefill(goes_on(THIRD, 0), table(1)) == 4


@pytest.mark.parametrize(("start", "pages"), [(4, (1, 2)), (8, (1,)), (8, (1, 9))])
def test_a_part_is_what_the_request_was_admitted_with(start: int, pages: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="share"):
        written().initialize(begins(SECOND, start), table(*pages))


def test_a_restore_is_beside_the_pages_of_its_state() -> None:
    books = written(row=7)
    books.restore(restores(SECOND), table(1, 2, 4))
    with pytest.raises(InvariantError, match="restores beside pages"):
        books.restore(restores(THIRD), table(5, 6, 8))
    books.restore(restores(THIRD), table(1, 5, 8))  # the last whole page may be a copy
    assert books.position(THIRD) == 10


def test_a_page_that_changed_hands_is_no_part_of_a_state_any_more() -> None:
    books = written(row=7)
    books.forget(FIRST)
    books.initialize(begins(THIRD, 0), table())
    books.prefill(goes_on(THIRD, 0), table(2))
    with pytest.raises(InvariantError, match="shares page 2 of"):
        books.restore(restores(SECOND), table(1, 2, 4))
