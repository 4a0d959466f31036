"""The pool of state rows and the published checkpoints as a random machine beside plain books."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler import row_allocator, state_rows
from helios_jax.scheduler.state_rows import Role, RowUse
from helios_jax.scheduler.types import RequestHandle

HANDLES = [RequestHandle(slot, generation) for slot in range(3) for generation in (1, 2)]
ANY_ROLE = st.sampled_from(list(Role))
Books = dict[int, tuple]  # row -> (use, handle or None, fence)


class RowMachine(RuleBasedStateMachine):
    """Books: what each row is for, and each published (id, key, role, row, demand, pins)."""

    @initialize(num_rows=st.integers(0, 5))
    def start(self, num_rows: int) -> None:
        self.rows, self.published = state_rows.new_rows(num_rows), library.new_checkpoints()
        self.books: Books = {}
        self.entries: dict[int, dict] = {}
        self.in_use: set[int] = set()
        self.fence = self.last_id = 0

    def victim(self, claim: library.Claim | None = None) -> int:
        """By sorting rows on the largest rank of their aliases; only what is worth no more than the claim."""
        ranks: dict[int, tuple] = {}
        for identity, entry in self.entries.items():
            rank = (identity in self.in_use, entry["demand"], entry["role"], len(entry["key"]), identity)
            ranks[entry["row"]] = max(rank, ranks.get(entry["row"], rank))
        for entry in self.entries.values():
            if entry["pins"]:
                ranks.pop(entry["row"], None)
        allowed = [row for row, rank in ranks.items() if claim is None or rank[:4] <= (True, *claim)]
        return min(allowed, key=lambda row: ranks[row], default=0)

    def expected_row(self, claim: library.Claim | None = None) -> int:
        free = [row for row in range(1, len(self.rows) + 1) if row not in self.books]
        return free[0] if free else self.victim(claim)

    def take(self, row: int, use: RowUse, handle: RequestHandle) -> None:
        for identity in [i for i, entry in self.entries.items() if entry["row"] == row]:
            del self.entries[identity]
        self.books[row] = (use, handle, 0)

    def accept(self, granted: row_allocator.Grant | None) -> None:
        assert granted is not None
        self.rows, self.published = granted.rows, granted.checkpoints

    def owned(self, handle: RequestHandle, use: RowUse) -> list[int]:
        return sorted(row for row, (used, owner, _) in self.books.items() if used is use and owner == handle)

    def of(self, *uses: RowUse, busy: bool) -> list[int]:
        return sorted(row for row, (use, _, fence) in self.books.items() if use in uses and bool(fence) == busy)

    @rule(
        handle=st.sampled_from(HANDLES), endpoint=st.integers(1, 9), role=ANY_ROLE, anchor=st.integers(0, 9),
        demand=st.integers(0, 4),
    )  # fmt: skip
    def arms(self, handle: RequestHandle, endpoint: int, role: Role, anchor: int, demand: int) -> None:
        claim = library.Claim(demand, role, endpoint)
        granted = row_allocator.arm(self.rows, self.published, handle, claim, anchor=anchor, in_use=self.in_use)
        guards = self.owned(handle, RowUse.GUARDED)
        if role is Role.ANCHOR and guards:
            self.take(guards[0], RowUse.ARMED, handle)
            self.accept(granted)
            return
        saved = (dict(self.books), dict(self.entries))
        wanted = [(RowUse.ARMED, claim)]
        if anchor > endpoint and not guards:
            wanted.insert(0, (RowUse.GUARDED, library.Claim(demand, Role.ANCHOR, anchor)))
        for use, worth in wanted:
            row = self.expected_row(worth)
            if not row:
                self.books, self.entries = saved
                assert granted is None
                return
            self.take(row, use, handle)
        self.accept(granted)
        assert self.rows.use_of(row) is RowUse.ARMED
        assert granted is not None
        assert granted.row == row

    @rule(handle=st.sampled_from(HANDLES))
    def reserves(self, handle: RequestHandle) -> None:
        row = self.expected_row()
        guards = [r for r, (use, _, _) in self.books.items() if use is RowUse.GUARDED]
        if not row and guards:
            row = min(guards, key=lambda r: (int(self.rows.endpoint[r - 1]), r))
        granted = row_allocator.reserve_private(self.rows, self.published, handle, self.in_use)
        assert (granted.row if granted else 0) == row
        if row:
            self.take(row, RowUse.PRIVATE, handle)
            self.accept(granted)

    @precondition(lambda self: self.of(RowUse.ARMED, RowUse.PRIVATE, busy=False))
    @rule(data=st.data())
    def submits(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.of(RowUse.ARMED, RowUse.PRIVATE, busy=False)))
        self.fence += 1
        self.rows = state_rows.begin_copy(self.rows, row, self.fence)
        use, handle, _ = self.books[row]
        self.books[row] = (RowUse.COPYING if use is RowUse.ARMED else use, handle, self.fence)

    @precondition(lambda self: self.of(RowUse.COPYING, RowUse.PRIVATE, busy=True))
    @rule(data=st.data(), key=st.text("ab", min_size=1, max_size=2), publish=st.booleans(), demand=st.integers(0, 3))
    def completes(self, data: st.DataObject, key: str, publish: bool, demand: int) -> None:
        row = data.draw(st.sampled_from(self.of(RowUse.COPYING, RowUse.PRIVATE, busy=True)))
        use, handle, fence = self.books[row]
        role = Role(int(self.rows.role[row - 1]))
        self.rows = state_rows.finish_copy(self.rows, row, fence, publish=publish)
        if use is RowUse.PRIVATE:
            self.books[row] = (use, handle, 0)
        elif not publish:
            del self.books[row]
        else:
            self.books[row] = (RowUse.PUBLISHED, None, 0)
            self.publishes(row, key, role, demand)

    def publishes(self, row: int, key: str, role: Role, demand: int) -> None:
        result = library.publish(
            self.published, key=key, endpoint=len(key), role=role, row=row, demand_ns=demand, pages=(row,)
        )
        self.published = result.checkpoints
        same = {i: entry for i, entry in self.entries.items() if entry["key"] == key}
        if same:
            kept = next(iter(same.values()))["row"]
            assert result.surplus_row == (row if row != kept else 0)
            twin = [i for i, entry in same.items() if entry["role"] == role]
            if result.surplus_row:
                self.rows = state_rows.free_published(self.rows, row)
                del self.books[row]
            if twin:
                assert result.checkpoint == twin[0]
                self.entries[twin[0]]["demand"] = max(demand, self.entries[twin[0]]["demand"])
                return
            row = kept
        self.last_id += 1
        assert result.checkpoint == self.last_id
        self.entries[self.last_id] = {"key": key, "role": role, "row": row, "demand": demand, "pins": 0}

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), deed=st.sampled_from(["touch", "pin", "unpin", "evict"]), now=st.integers(0, 5))
    def uses(self, data: st.DataObject, deed: str, now: int) -> None:
        identity = data.draw(st.sampled_from(sorted(self.entries)))
        entry = self.entries[identity]
        if deed == "touch":
            self.published = library.touch(self.published, identity, now)
            entry["demand"] = max(now, entry["demand"])
        elif deed == "pin":
            self.published, entry["pins"] = library.pin(self.published, identity), entry["pins"] + 1
        elif entry["pins"]:
            self.published, entry["pins"] = library.unpin(self.published, identity), entry["pins"] - 1
        elif deed == "evict":
            expected = library.freed_by(self.published, [identity])
            self.rows, self.published = library.evict(self.rows, self.published, identity)
            del self.entries[identity]
            last = all(other["row"] != entry["row"] for other in self.entries.values())
            assert expected == library.Freed((entry["row"],) * last, (entry["row"],) * last)
            if last:
                del self.books[entry["row"]]

    @rule(ids=st.sets(st.integers(1, 12)))
    def resides(self, ids: set[int]) -> None:
        self.in_use = ids

    @rule(handle=st.sampled_from(HANDLES))
    def releases(self, handle: RequestHandle) -> None:
        mine = [row for row, (_, owner, _) in self.books.items() if owner == handle]
        if not any(self.books[row][2] for row in mine):
            self.rows = state_rows.release_handle(self.rows, handle)
            for row in mine:
                del self.books[row]

    @invariant()
    def agrees(self) -> None:
        for row in range(1, len(self.rows) + 1):
            use, handle, fence = self.books.get(row, (RowUse.FREE, None, 0))
            assert self.rows.use_of(row) is use
            assert self.rows.handle(row) == (handle or RequestHandle(0, 0))
            assert self.rows.fence[row - 1] == fence
        held = {row for row, (use, _, _) in self.books.items() if use is RowUse.PUBLISHED}
        assert held == {entry["row"] for entry in self.entries.values()} == set(self.published.rows.tolist())
        assert list(self.listed()) == [(i, *entry.values()) for i, entry in sorted(self.entries.items())]
        assert len(self.published) <= library.MAX_ALIASES * len(self.rows)
        assert library.victim_row(self.published, in_use=self.in_use) == self.victim()

    def listed(self) -> Iterator[tuple]:
        p = self.published
        for i, key in enumerate(p.keys):
            yield (*(int(p.ids[i]),), key, Role(int(p.roles[i])), int(p.rows[i]), int(p.demand_ns[i]), int(p.pins[i]))
            assert p.endpoints[i] == len(key)


TestRowMachine = RowMachine.TestCase
TestRowMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
