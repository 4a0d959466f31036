"""The page pool against a naive model, as a Hypothesis state machine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from helios_jax.errors import InvariantError
from helios_jax.scheduler.resources import give_back, new_pool, pages_for, take

PAGES, SLOTS = 11, 4
slots = st.integers(0, SLOTS - 1)


class PagePoolMachine(RuleBasedStateMachine):
    """Model: a set of free pages and a list of pages a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool(PAGES, SLOTS)
        self.free = set(range(1, PAGES + 1))
        self.tables: list[list[int]] = [[] for _ in range(SLOTS)]

    @rule(needs=st.dictionaries(slots, st.integers(1, 4), min_size=1))
    def takes(self, needs: dict[int, int]) -> None:
        before = self.pool
        if sum(needs.values()) > len(self.free):
            with pytest.raises(InvariantError):
                take(self.pool, needs.items())
            assert self.pool is before
            return
        self.pool = take(self.pool, needs.items())
        for slot, count in needs.items():
            new = self.pool.tables[slot][len(self.tables[slot]) :].tolist()
            assert len(new) == count
            assert set(new) <= self.free
            self.free -= set(new)
            self.tables[slot] += new

    @rule(slot=st.sets(slots))
    def gives_back(self, slot: set[int]) -> None:
        self.pool = give_back(self.pool, slot)
        for number in slot:
            self.free |= set(self.tables[number])
            self.tables[number] = []

    @invariant()
    def agrees(self) -> None:
        assert set(self.pool.free[: self.pool.num_free].tolist()) == self.free
        assert self.pool.num_free == len(self.free)
        assert [table.tolist() for table in self.pool.tables] == self.tables
        assert self.pool.held.tolist() == [len(table) for table in self.tables]


PagePoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPagePool = PagePoolMachine.TestCase


def test_pages_for_rounds_up() -> None:
    assert [pages_for(tokens, 4) for tokens in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


def test_earlier_pools_are_values() -> None:
    """Taking and giving back leave the pool that they started from as it was."""
    first = take(new_pool(4, 2), [(0, 2)])
    second = give_back(take(first, [(1, 2)]), [0])
    assert first.tables[0].tolist() == [1, 2]
    assert first.num_free == 2
    assert second.tables[1].tolist() == [3, 4]
    assert sorted(first.free[: first.num_free].tolist()) == [3, 4]
