"""Counters and gauges of a state under the names that monitoring sees."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from helios_jax.scheduler.programs import KINDS
from helios_jax.scheduler.refresh import PROBES
from helios_jax.scheduler.retention import ROLES, SKIPS
from helios_jax.scheduler.state import FINISHES, REASONS, Phase, State
from helios_jax.scheduler.state_rows import RowUse


def _labelled(labels: Iterable[str], totals: Iterable[int]) -> dict[str, int]:
    return {str(label): int(total) for label, total in zip(labels, totals, strict=True)}


def snapshot_counters(state: State) -> dict[str, int | dict[str, int]]:
    """Everything countable, plain integers; a mapping where a label (reason, kind) tells apart.

    `exploration_credit_nanoseconds` are balances, negative in debt, toward zero to whole ns.
    `..._by_kind` hold the kinds of the catalogue only. `pages_used` counts pages in tables,
    `pages_kept` those of `pages_free` that checkpoints keep until somebody needs them,
    `pages_reserved` those promised to the requests that own a slot. `snapshots` counts
    published captures by checkpoint role, `snapshots_skipped` those not taken, by reason.
    """
    counters, phase = state.counters, state.requests.phase
    kept, captures = state.retention, state.retention.counts
    present = [i for i, kind in enumerate(KINDS) if any(shape.kind is kind for shape in state.catalog)]

    def by_kind(totals: tuple[int, ...]) -> dict[str, int]:
        return {str(KINDS[i]): totals[i] for i in present}

    return {
        "flare_scheduler_executions_total": _labelled(REASONS, counters.executions),
        "flare_scheduler_execution_nanoseconds_total": _labelled(REASONS, counters.execution_ns),
        "exploration_credit_nanoseconds": {str(r): int(state.ledgers.of(r).balance_ns) for r in PROBES},
        "programs_by_kind": by_kind(counters.programs),
        "used_tokens_by_kind": by_kind(counters.used_tokens),
        "padded_tokens_by_kind": by_kind(counters.padded_tokens),
        "requests_admitted": counters.admitted,
        "requests_finished": _labelled(FINISHES, counters.finished),
        "requests_cancelled": counters.cancelled,
        "requests_preempted": counters.preempted,
        "completions_ignored": counters.ignored_completions,
        "frames_unmeasured": counters.unmeasured_frames,
        "frames_in_flight": len(state.frames),
        "slots_total": state.limits.slots,
        "slots_used": int(np.count_nonzero(phase != Phase.FREE)),
        "pages_total": state.limits.pages,
        "pages_free": state.pool.num_free + state.pool.num_kept,
        "pages_kept": state.pool.num_kept,
        "pages_used": state.pool.used,
        "pages_reserved": int(state.requests.reserved_pages.sum()),
        "snapshots": _labelled(ROLES, captures.captured),
        "snapshots_skipped": _labelled(SKIPS, captures.skipped),
        "snapshots_private": captures.windows,
        "checkpoints_evicted": captures.evicted,
        "checkpoints_published": len(kept.checkpoints),
        "state_rows_evicted": captures.evicted_rows,
        "state_rows_total": len(kept.rows),
        "state_rows_free": int(np.count_nonzero(kept.rows.use == RowUse.FREE)),
        "programs_measured": int(np.count_nonzero(state.costs.estimate_ns)),
        "programs_total": len(state.catalog),
    }
