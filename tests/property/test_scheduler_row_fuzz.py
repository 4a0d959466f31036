"""The allocator of state rows through long random walks beside sets of rows, recounted after every step.

A seed is a whole walk. The model knows who owns which row and who may lose it, not which row is taken: what
is exact about the choice is checked in `test_scheduler_rows`.
"""

from __future__ import annotations

import random
import secrets

import pytest

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler import row_allocator, state_rows
from helios_jax.scheduler.row_allocator import Grant
from helios_jax.scheduler.state_rows import Role, RowUse
from helios_jax.scheduler.types import RequestHandle

STEPS = 150
OWNED = (RowUse.GUARDED, RowUse.ARMED, RowUse.COPYING, RowUse.PRIVATE)


class Walk:
    """Real rows and checkpoints; the model: sets of rows by use, owners, rows by checkpoint, pins."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = self.rng.randrange(0, 7)
        self.rows, self.known = state_rows.new_rows(self.count), library.new_checkpoints()
        self.sets: dict[RowUse, set[int]] = {use: set() for use in RowUse}
        self.sets[RowUse.FREE] = set(range(1, self.count + 1))
        self.owner: dict[int, RequestHandle] = {}
        self.named: dict[int, int] = {}  # checkpoint -> row
        self.pinned: list[int] = []
        self.generation = [1] * 4
        self.fence = 0

    # ---- model

    def handle(self) -> RequestHandle:
        slot = self.rng.randrange(4)
        return RequestHandle(slot, self.generation[slot])

    def move(self, row: int, use: RowUse, owner: RequestHandle | None) -> None:
        for rows in self.sets.values():
            rows.discard(row)
        self.sets[use].add(row)
        self.owner.pop(row, None)
        if owner is not None:
            self.owner[row] = owner

    def accept(self, grant: Grant | None, handle: RequestHandle, use: RowUse, claim: library.Claim | None) -> None:
        """A grant takes a free row, the asker's own guard, or a published row without pins; only without any, none."""
        evictable = self.sets[RowUse.PUBLISHED] - {self.named[i] for i in self.pinned}
        if grant is None:
            assert not self.sets[RowUse.FREE] or (use is RowUse.ARMED and len(self.sets[RowUse.FREE]) < 2)
            assert claim is not None or not (evictable or self.sets[RowUse.GUARDED])
            return
        lost = {self.named[i] for i in grant.evicted}
        assert lost <= evictable
        assert {i for i, row in self.named.items() if row in lost} == set(grant.evicted)  # all aliases of a row go
        for identity in grant.evicted:
            del self.named[identity]
        for row in range(1, self.count + 1):
            now = grant.rows.use_of(row)
            before = next(use for use, rows in self.sets.items() if row in rows)
            if now is not before or (now in OWNED and grant.rows.handle(row) != self.owner[row]):
                revoked = before is RowUse.GUARDED and (use is RowUse.PRIVATE or self.owner[row] == handle)
                assert before is RowUse.FREE or row in lost or revoked, (row, before, now)
                assert grant.rows.handle(row) == handle
                self.move(row, now, handle)
        assert self.owner[grant.row] == handle
        assert grant.row in self.sets[use]
        self.rows, self.known = grant.rows, grant.checkpoints

    def recount(self) -> None:
        """Every row has one use; owned rows their owner; published ones, and only they, are named."""
        for row in range(1, self.count + 1):
            assert row in self.sets[self.rows.use_of(row)]
            assert self.rows.handle(row) == self.owner.get(row, RequestHandle(0, 0))
            assert bool(self.rows.fence[row - 1]) <= (self.rows.use_of(row) in (RowUse.COPYING, RowUse.PRIVATE))
        assert sum(map(len, self.sets.values())) == self.count
        assert dict(zip(self.known.ids.tolist(), self.known.rows.tolist(), strict=True)) == self.named
        assert set(self.named.values()) == self.sets[RowUse.PUBLISHED]
        assert int(self.known.pins.sum()) == len(self.pinned)

    # ---- deeds

    def arm(self) -> None:
        handle, role = self.handle(), self.rng.choice(list(Role))
        mine = [row for row in self.sets[RowUse.ARMED] | self.sets[RowUse.COPYING] if self.owner[row] == handle]
        if mine:
            return  # a request has one destination at most
        claim = library.Claim(self.rng.randrange(4), role, self.rng.randrange(1, 9))
        anchor = 0 if role is Role.ANCHOR else self.rng.randrange(12)
        grant = row_allocator.arm(self.rows, self.known, handle, claim, anchor=anchor)
        self.accept(grant, handle, RowUse.ARMED, claim)

    def reserve(self) -> None:
        handle = self.handle()
        self.accept(row_allocator.reserve_private(self.rows, self.known, handle), handle, RowUse.PRIVATE, None)

    def submit(self) -> None:
        ready = [row for row in sorted(self.sets[RowUse.ARMED]) if not self.rows.fence[row - 1]]
        if ready:
            row = self.rng.choice(ready)
            self.fence += 1
            self.rows = state_rows.begin_copy(self.rows, row, self.fence)
            self.move(row, RowUse.COPYING, self.owner[row])

    def complete(self) -> None:
        if not self.sets[RowUse.COPYING]:
            return
        row = self.rng.choice(sorted(self.sets[RowUse.COPYING]))
        role, fence = Role(int(self.rows.role[row - 1])), int(self.rows.fence[row - 1])
        publish = self.rng.random() < 0.8
        self.rows = state_rows.finish_copy(self.rows, row, fence, publish=publish)
        self.move(row, RowUse.PUBLISHED if publish else RowUse.FREE, None)
        if publish:
            key = "a" * self.rng.randrange(1, 5)
            done = library.publish(
                self.known, key=key, endpoint=len(key), role=role, row=row, demand_ns=self.fence, pages=(row,)
            )
            self.known = done.checkpoints
            if done.surplus_row:
                self.rows = state_rows.free_published(self.rows, row)
                self.move(row, RowUse.FREE, None)
            twins = {self.named[i] for i in library.ids_of(self.known, key) if i in self.named}
            assert len(twins) <= 1  # equal keys share a row
            self.named[done.checkpoint] = twins.pop() if twins else row

    def use(self) -> None:
        if self.pinned and self.rng.random() < 0.6:
            identity = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            self.known = library.unpin(self.known, identity)
        elif self.named:
            identity = self.rng.choice(sorted(self.named))
            self.known = library.pin(self.known, identity)
            self.pinned.append(identity)

    def leave(self) -> None:
        handle = self.handle()
        mine = [row for row, owner in self.owner.items() if owner == handle]
        if any(row in self.sets[RowUse.COPYING] for row in mine):
            return  # its slot waits for the fence
        self.rows = state_rows.release_handle(self.rows, handle)
        for row in mine:
            self.move(row, RowUse.FREE, None)
        self.generation[handle.slot] += 1

    def run(self) -> None:
        deeds = (self.arm, self.arm, self.reserve, self.submit, self.submit, self.complete, self.use, self.leave)
        for _ in range(STEPS):
            self.rng.choice(deeds)()
            self.recount()


def test_walks_of_fixed_seeds() -> None:
    for seed in range(60):
        Walk(seed).run()


@pytest.mark.slow
def test_walks_of_fresh_seeds() -> None:
    for seed in (secrets.randbits(32) for _ in range(500)):
        try:
            Walk(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
