"""The writable side of a state's `Retention` while one event is handled, and the costs that it looks at.

As `Requests.draft()` is of the request columns: open it, let the steps of `captures` change it,
seal it into the new state.
"""

from __future__ import annotations

import dataclasses

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler import row_allocator
from helios_jax.scheduler.cost import stale
from helios_jax.scheduler.cuts import CutCosts
from helios_jax.scheduler.retention import SKIPS, SLOT_COLUMNS, Retention
from helios_jax.scheduler.state import State
from helios_jax.scheduler.state_rows import Role


class Draft:
    """The writable side of a state's `Retention`.

    Attributes:
        state: The state as it was before the event.
        enabled: The core can take snapshots and has rows for them.
        rows, checkpoints: The current values.
        cuts, used: Of each slot.
        credit_ns, captured_len, demand_ns, pinned: Writable columns.
    """

    def __init__(self, state: State) -> None:
        kept = state.retention
        self.state = state
        self.enabled = len(kept.rows) > 0 and len(state.programs.snapshot) > 0
        self.rows, self.checkpoints = kept.rows, kept.checkpoints
        self.cuts, self.used = list(kept.cuts), list(kept.used)
        self.credit_ns, self.captured_len, self.demand_ns, self.pinned = (
            getattr(kept, name).copy() for name in SLOT_COLUMNS
        )
        self._skipped: dict[str, int] = {}
        self._captured: dict[int, int] = {}
        self._totals: dict[str, int] = {}

    def sealed(self) -> Retention:
        """The new value."""
        columns = {name: getattr(self, name) for name in SLOT_COLUMNS}
        for column in columns.values():
            column.setflags(False)
        counts = self.state.retention.counts
        if self._skipped or self._captured or self._totals:
            counts = dataclasses.replace(
                counts,
                captured=tuple(n + self._captured.get(role, 0) for role, n in enumerate(counts.captured)),
                skipped=tuple(n + self._skipped.get(name, 0) for name, n in zip(SKIPS, counts.skipped, strict=True)),
                **{name: getattr(counts, name) + n for name, n in self._totals.items()},
            )
        return Retention(self.rows, self.checkpoints, tuple(self.cuts), tuple(self.used), **columns, counts=counts)

    @property
    def in_use(self) -> set[int]:
        """Checkpoints that resident requests published or were restored from."""
        return {checkpoint for used in self.used for checkpoint in used}

    def skip(self, reason: str, number: int = 1) -> None:
        if number:
            self._skipped[reason] = self._skipped.get(reason, 0) + number

    def count(self, name: str, number: int = 1) -> None:
        if number:
            self._totals[name] = self._totals.get(name, 0) + number

    def count_captured(self, role: Role) -> None:
        self._captured[role] = self._captured.get(role, 0) + 1

    def accept(self, granted: row_allocator.Grant) -> int:
        """Take over a grant and count what was evicted for it."""
        freed = library.freed_by(self.checkpoints, granted.evicted)
        self.rows, self.checkpoints = granted.rows, granted.checkpoints
        self.count("evicted", len(granted.evicted))
        self.count("evicted_rows", len(freed.rows))
        return granted.row


def snapshot_ns(state: State, *, fresh: bool = True) -> int:
    """Estimate of the cheapest snapshot program, fresh or at least measured; 0 if there is none."""
    usable = state.costs.estimate_ns > 0
    if fresh:
        usable &= ~stale(state.costs, state.now_ns, state.policy.estimate_ttl_ns)
    snapshots = state.programs.snapshot
    known = state.costs.estimate_ns[snapshots[usable[snapshots]]]
    return int(known.min()) if len(known) else 0


def cut_costs(state: State, *, scored: bool) -> CutCosts:
    programs = state.programs.scored_prefill if scored else state.programs.prefill
    measured = programs[state.costs.estimate_ns[programs] > 0]
    return CutCosts(state.programs.tokens[measured], state.costs.estimate_ns[measured], snapshot_ns(state))
