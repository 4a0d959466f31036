"""Rows and published checkpoints, sentence by sentence of the specification's checkpoint retention."""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import state_rows
from helios_jax.scheduler.checkpoints import (
    Checkpoints,
    Claim,
    Freed,
    evict,
    freed_by,
    identify,
    ids_of,
    is_published,
    new_checkpoints,
    pin,
    publish,
    touch,
    unpin,
    victim_row,
)
from helios_jax.scheduler.row_allocator import arm, obtain, reserve_private
from helios_jax.scheduler.state_rows import Role, Rows, RowUse, new_rows, rows_of
from helios_jax.scheduler.types import RequestHandle

ALICE, BOB = RequestHandle(0, 1), RequestHandle(1, 1)
EXTRA = Claim(5, Role.EXTRA, 10)


def captured(rows: Rows, row: int, handle: RequestHandle = ALICE) -> Rows:
    """The row after a whole capture."""
    rows = state_rows.begin_copy(state_rows.arm(rows, row, handle, 10, Role.ANCHOR), row, 1)
    return state_rows.finish_copy(rows, row, 1, publish=True)


def library(*entries: dict[str, Any]) -> tuple[Rows, Checkpoints]:
    """As many rows as entries; entry i is published from row i with unspecified values from a default."""
    rows, checkpoints = new_rows(len(entries)), new_checkpoints()
    for row, entry in enumerate(entries, start=1):
        values = {"key": f"prefix {row}", "endpoint": 10, "role": Role.EXTRA, "row": row, "demand_ns": 5} | entry
        rows, checkpoints = captured(rows, row), publish(checkpoints, **values).checkpoints
    return rows, checkpoints


@pytest.mark.parametrize(
    ("kept", "victim"),
    [
        ({"demand_ns": 6}, {"role": Role.ANCHOR, "endpoint": 99}),  # recency first
        ({"role": Role.PROMPT_END}, {"role": Role.EXTRA, "endpoint": 99}),  # then role
        ({"role": Role.TERMINAL}, {"role": Role.PROMPT_END, "endpoint": 99}),
        ({"role": Role.ANCHOR}, {"role": Role.TERMINAL, "endpoint": 99}),
        ({"endpoint": 11}, {"endpoint": 10}),  # then length
    ],
)
def test_victims_are_compared_by_recency_then_role_then_length(kept: dict[str, Any], victim: dict[str, Any]) -> None:
    assert victim_row(library(kept, victim)[1]) == 2
    assert victim_row(library(victim, kept)[1]) == 1


def test_equal_checkpoints_fall_by_age() -> None:
    assert victim_row(library({}, {}, {})[1]) == 1


def test_a_demand_protects() -> None:
    _, checkpoints = library({}, {})
    assert victim_row(touch(checkpoints, 1, 6)) == 2
    assert victim_row(touch(touch(checkpoints, 1, 6), 1, 3)) == 2, "an old demand does not undo a new one"


def test_a_row_is_protected_by_its_best_alias() -> None:
    _, checkpoints = library({}, {"demand_ns": 6})
    alias = publish(checkpoints, key="prefix 1", endpoint=10, role=Role.ANCHOR, row=1, demand_ns=7)
    assert (alias.checkpoint, alias.surplus_row) == (3, 0)
    assert victim_row(checkpoints) == 1
    assert victim_row(alias.checkpoints) == 2


def test_evicting_one_of_two_aliases_frees_nothing() -> None:
    rows, checkpoints = library({"pages": (4, 5)})
    checkpoints = publish(checkpoints, key="prefix 1", endpoint=10, role=Role.ANCHOR, row=1, demand_ns=7).checkpoints
    assert freed_by(checkpoints, [1]) == Freed((), ())
    assert freed_by(checkpoints, [1, 2]) == Freed((1,), (4, 5))
    rows, checkpoints = evict(rows, checkpoints, 1)
    assert (rows.use_of(1), len(checkpoints)) == (RowUse.PUBLISHED, 1)
    rows, checkpoints = evict(rows, checkpoints, 2)
    assert (rows.use_of(1), len(checkpoints)) == (RowUse.FREE, 0)


def test_an_eviction_frees_only_pages_that_nobody_shares() -> None:
    """Two prefixes of one conversation share pages 1 and 2; a request holds page 3."""
    _, checkpoints = library({"pages": (1, 2)}, {"pages": (1, 2, 3, 4)})
    assert freed_by(checkpoints, [1]) == Freed((1,), ())
    assert freed_by(checkpoints, [2], used_pages=(3,)) == Freed((2,), (4,))
    assert freed_by(checkpoints, [1, 2]) == Freed((1, 2), (1, 2, 3, 4))


def test_a_victim_goes_with_all_its_aliases() -> None:
    rows, checkpoints = library({}, {"demand_ns": 6})
    checkpoints = publish(
        checkpoints, key="prefix 1", endpoint=10, role=Role.PROMPT_END, row=1, demand_ns=5
    ).checkpoints
    granted = obtain(rows, checkpoints)
    assert granted is not None
    assert (granted.row, granted.evicted, granted.checkpoints.ids.tolist()) == (1, (1, 3), [2])
    assert granted.rows.use_of(1) is RowUse.FREE


def test_the_same_prefix_twice_keeps_one_row() -> None:
    rows, checkpoints = library({}, {"key": "other"})
    rows = captured(state_rows.free_published(rows, 2), 2)
    checkpoints = evict(rows, checkpoints, 2)[1]
    again = publish(checkpoints, key="prefix 1", endpoint=10, role=Role.EXTRA, row=2, demand_ns=9)
    assert (again.checkpoint, again.surplus_row) == (1, 2)
    assert again.checkpoints.demand_ns.tolist() == [9]
    other_role = publish(checkpoints, key="prefix 1", endpoint=10, role=Role.TERMINAL, row=2, demand_ns=9)
    assert (other_role.checkpoint, other_role.surplus_row) == (3, 2)
    assert other_role.checkpoints.rows.tolist() == [1, 1]


def test_ids_are_never_given_twice() -> None:
    rows, checkpoints = library({}, {})
    rows, checkpoints = evict(rows, checkpoints, 2)
    assert publish(checkpoints, key="new", endpoint=3, role=Role.EXTRA, row=2, demand_ns=0).checkpoint == 3
    assert not is_published(checkpoints, 2)


@pytest.mark.parametrize(
    "entry", [{"key": "prefix 1", "endpoint": 11, "row": 1}, {"key": "new", "endpoint": 10, "row": 1}]
)
def test_a_row_has_one_prefix_of_one_length(entry: dict[str, Any]) -> None:
    _, checkpoints = library({})
    with pytest.raises(InvariantError):
        publish(checkpoints, role=Role.ANCHOR, demand_ns=0, **entry)


def test_a_pinned_row_is_no_victim() -> None:
    rows, checkpoints = library({}, {"demand_ns": 6})
    held = pin(pin(checkpoints, 1), 1)
    assert victim_row(held) == 2
    assert victim_row(unpin(held, 1)) == 2
    assert victim_row(unpin(unpin(held, 1), 1)) == 1
    assert victim_row(pin(held, 2)) == 0
    assert obtain(rows, pin(held, 2)) is None
    with pytest.raises(InvariantError, match="restored"):
        evict(rows, held, 1)


def test_a_pin_holds_for_the_aliases_of_the_row() -> None:
    _, checkpoints = library({}, {"demand_ns": 6})
    checkpoints = publish(checkpoints, key="prefix 1", endpoint=10, role=Role.ANCHOR, row=1, demand_ns=5).checkpoints
    assert victim_row(pin(checkpoints, 3)) == 2


def test_unpinning_more_than_was_pinned_is_noticed() -> None:
    with pytest.raises(InvariantError, match="not pinned"):
        unpin(library({})[1], 1)


def test_an_identified_prefix_keeps_its_row_unless_it_is_known() -> None:
    rows, checkpoints = library({"key": ("capture", 1)}, {"key": ("capture", 2), "role": Role.ANCHOR})
    rows, checkpoints, _ = identify(rows, checkpoints, 1, "tokens")
    assert ids_of(checkpoints, "tokens") == (1,)
    with pytest.raises(InvariantError, match="restored"):
        identify(rows, pin(checkpoints, 2), 2, "tokens")
    rows, checkpoints, merged = identify(rows, checkpoints, 2, "tokens")
    assert merged == {}, "another role: an alias under its own id"
    assert checkpoints.rows.tolist() == [1, 1]
    assert (rows.use_of(1), rows.use_of(2)) == (RowUse.PUBLISHED, RowUse.FREE)


def test_an_optional_capture_needs_a_second_row_beside_the_guard() -> None:
    assert arm(new_rows(1), new_checkpoints(), ALICE, EXTRA, anchor=20) is None
    granted = arm(new_rows(2), new_checkpoints(), ALICE, EXTRA, anchor=20)
    assert granted is not None
    assert rows_of(granted.rows, ALICE, RowUse.GUARDED) == [1]
    assert rows_of(granted.rows, ALICE, RowUse.ARMED) == [granted.row] == [2]
    assert arm(granted.rows, granted.checkpoints, BOB, EXTRA) is None, "a guard is not free"


def test_the_anchor_takes_its_guarded_row() -> None:
    first = arm(new_rows(2), new_checkpoints(), ALICE, EXTRA, anchor=20)
    assert first is not None
    rows = state_rows.begin_copy(first.rows, first.row, 7)
    anchor = arm(rows, first.checkpoints, ALICE, Claim(5, Role.ANCHOR, 20))
    assert anchor is not None
    assert (anchor.row, anchor.rows.use_of(2)) == (1, RowUse.COPYING)


def test_only_its_request_arms_a_guarded_row() -> None:
    with pytest.raises(InvariantError, match="guarded for"):
        state_rows.arm(state_rows.guard(new_rows(1), 1, ALICE, 20), 1, BOB, 20, Role.ANCHOR)


def test_mandatory_rows_revoke_an_unused_guard_only_when_nothing_else_is_left() -> None:
    rows = state_rows.guard(state_rows.guard(new_rows(3), 1, ALICE, 30), 2, BOB, 20)
    first = reserve_private(rows, new_checkpoints(), RequestHandle(2, 1))
    assert first is not None
    assert first.row == 3
    second = reserve_private(first.rows, first.checkpoints, RequestHandle(3, 1))
    assert second is not None
    assert second.row == 2, "the guard of the shorter anchor"
    third = reserve_private(second.rows, second.checkpoints, RequestHandle(4, 1))
    assert third is not None
    assert third.row == 1
    assert reserve_private(third.rows, third.checkpoints, RequestHandle(5, 1)) is None


def test_mandatory_rows_evict_before_they_revoke() -> None:
    rows, checkpoints = library({}, {"demand_ns": 6})
    rows, checkpoints = evict(rows, checkpoints, 2)
    granted = reserve_private(state_rows.guard(rows, 2, BOB, 20), checkpoints, ALICE)
    assert granted is not None
    assert (granted.row, granted.evicted) == (1, (1,))


def test_armed_and_copying_rows_are_nobody_elses() -> None:
    rows = state_rows.arm(new_rows(2), 1, ALICE, 10, Role.ANCHOR)
    rows = state_rows.begin_copy(state_rows.arm(rows, 2, BOB, 10, Role.ANCHOR), 2, 3)
    assert obtain(rows, new_checkpoints()) is None
    assert reserve_private(rows, new_checkpoints(), RequestHandle(2, 1)) is None


def test_a_copy_keeps_its_row_until_its_fence_completes() -> None:
    rows = state_rows.begin_copy(state_rows.arm(new_rows(1), 1, ALICE, 10, Role.ANCHOR), 1, 3)
    for early in (
        lambda: state_rows.release_handle(rows, ALICE),
        lambda: state_rows.disarm(rows, 1),
        lambda: state_rows.finish_copy(rows, 1, 2, publish=True),
        lambda: state_rows.begin_copy(rows, 1, 4),
    ):
        with pytest.raises(InvariantError):
            early()
    assert state_rows.finish_copy(rows, 1, 3, publish=True).use_of(1) is RowUse.PUBLISHED
    dropped = state_rows.finish_copy(rows, 1, 3, publish=False)
    assert dropped.use_of(1) is RowUse.FREE


def test_a_private_row_is_written_again_and_never_published() -> None:
    rows = state_rows.make_private(new_rows(1), 1, ALICE)
    for fence in (3, 5):
        rows = state_rows.begin_copy(rows, 1, fence)
        with pytest.raises(InvariantError):
            state_rows.free_private(rows, 1)
        rows = state_rows.finish_copy(rows, 1, fence, publish=True)
        assert rows.use_of(1) is RowUse.PRIVATE
    assert state_rows.free_private(rows, 1).use_of(1) is RowUse.FREE


def test_release_returns_everything_of_one_request() -> None:
    rows = state_rows.guard(new_rows(4), 1, ALICE, 30)
    rows = state_rows.arm(rows, 2, ALICE, 10, Role.EXTRA)
    rows = state_rows.make_private(rows, 3, ALICE)
    rows = state_rows.guard(rows, 4, BOB, 30)
    rows = state_rows.release_handle(rows, ALICE)
    assert [rows.use_of(row) for row in (1, 2, 3, 4)] == [RowUse.FREE] * 3 + [RowUse.GUARDED]


@pytest.mark.parametrize("row", [-1, 0, 2])
def test_a_row_that_does_not_exist_is_noticed(row: int) -> None:
    with pytest.raises(InvariantError, match="there are rows 1 to 1"):
        state_rows.guard(new_rows(1), row, ALICE, 5)


@pytest.mark.parametrize(
    ("claim", "obtains"),
    [
        (Claim(4, Role.ANCHOR, 99), False),  # of a request that was admitted before the one that published
        (Claim(6, Role.EXTRA, 1), True),
        (Claim(5, Role.EXTRA, 99), False),  # the extra of the request whose prompt end is published
        (Claim(5, Role.PROMPT_END, 9), False),
        (Claim(5, Role.PROMPT_END, 10), True),
        (Claim(5, Role.ANCHOR, 1), True),
    ],
)
def test_a_capture_never_evicts_what_is_more_protected_than_itself(claim: Claim, obtains: bool) -> None:
    rows, checkpoints = library({"role": Role.PROMPT_END})
    assert (obtain(rows, checkpoints, claim, in_use={1}) is not None) == obtains
    assert (arm(rows, checkpoints, ALICE, claim, in_use={1}) is not None) == obtains
    assert obtain(rows, checkpoints, claim) is not None, "what no resident request uses gives way to one that is"
    assert reserve_private(rows, checkpoints, ALICE, {1}) is not None, "mandatory rows take what they need"


def test_what_residents_use_is_in_demand_now() -> None:
    _, checkpoints = library({"demand_ns": 1, "role": Role.EXTRA}, {"demand_ns": 9, "role": Role.ANCHOR})
    assert victim_row(checkpoints) == 1
    assert victim_row(checkpoints, in_use={1}) == 2
    assert victim_row(checkpoints, in_use={1, 2}) == 1


def test_a_merged_checkpoint_is_a_demand_for_the_older_one() -> None:
    rows, checkpoints = library({"key": "text", "demand_ns": 3, "pages": (1,)}, {"key": ("capture", 2), "pages": (2,)})
    rows, checkpoints, merged = identify(rows, checkpoints, 2, "text")
    assert (merged, checkpoints.ids.tolist(), checkpoints.demand_ns.tolist()) == ({2: 1}, [1], [5])
    assert (checkpoints.pages, rows.use_of(2)) == (((1,),), RowUse.FREE)
    with pytest.raises(InvariantError, match="another number"):
        identify(*library({"key": "text"}, {"endpoint": 11}), 2, "text")
