"""The page pool through long random walks beside sets of pages, recounted after every step.

A seed is a whole walk. The model has no stack: it does not say which page comes next, only who may have it.
"""

from __future__ import annotations

import random
import secrets

import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler.resources import PagePool, give_back, new_pool, take

STEPS = 400


class Model:
    """Sets of pages: free ones, and those of each slot; and what every slot got, in order."""

    def __init__(self, pages: int, slots: int) -> None:
        self.every = set(range(1, pages + 1))
        self.free = set(self.every)
        self.order: list[list[int]] = [[] for _ in range(slots)]

    def recount(self, pool: PagePool) -> None:
        """Everything from the arrays: a partition, nothing writeable, ledgers that agree with what they count."""
        free = pool.free[: pool.num_free].tolist()
        tables = [table.tolist() for table in pool.tables]
        assert sorted(free + [page for table in tables for page in table]) == sorted(self.every)
        assert set(free) == self.free
        assert tables == self.order
        assert pool.held.tolist() == list(map(len, tables))
        assert not any(column.flags.writeable for column in (pool.free, pool.held, *pool.tables))


def walk(seed: int) -> None:
    rng = random.Random(seed)
    slots, pages = rng.randrange(1, 9), rng.choice([1, 2, 7, 30, 200])
    pool, model = new_pool(pages, slots), Model(pages, slots)
    earlier: list[tuple[PagePool, list[list[int]], set[int]]] = []
    for _ in range(STEPS):
        if rng.random() < 0.6:
            some = rng.sample(range(slots), rng.randrange(1, slots + 1))
            needs = [(slot, rng.choice([0, 1, 1, 2, 5])) for slot in some]
            if sum(count for _, count in needs) > len(model.free):
                with pytest.raises(InvariantError, match=r"pages, .* are free"):
                    take(pool, needs)
            else:
                pool = take(pool, needs)
                for slot, count in needs:
                    got = pool.tables[slot].tolist()[len(model.order[slot]) :]
                    assert len(set(got)) == count
                    assert set(got) <= model.free
                    model.free -= set(got)
                    model.order[slot] += got
        else:
            some = rng.sample(range(slots), rng.randrange(slots + 1))
            pool = give_back(pool, some)
            for slot in some:
                model.free |= set(model.order[slot])
                model.order[slot] = []
        model.recount(pool)
        if rng.random() < 0.05:
            earlier.append((pool, [list(table) for table in model.order], set(model.free)))
    for value, order, free in earlier:  # what came later changed no earlier value
        model.order, model.free = order, free
        model.recount(value)


def test_walks_of_fixed_seeds() -> None:
    for seed in range(40):
        walk(seed)


@pytest.mark.slow
def test_walks_of_fresh_seeds() -> None:
    for seed in (secrets.randbits(32) for _ in range(150)):
        try:
            walk(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
