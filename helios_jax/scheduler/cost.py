"""Duration estimates of the prepared programs, learned from device intervals.

One entry a physical shape; the number of active rows does not change an entry's identity.
The life of an entry:

1. Indeterminate: the estimate is zero, whatever the core's descriptor claimed.
2. The first positive observation sets it.
3. While fresh, an observation makes it the median of the last nine.
4. More than `estimate_ttl_ns` without a valid observation makes it stale. It keeps its
   value for ranking; the next valid observation replaces it and restarts the window.

Knows nothing of requests, prices or reasons of selection.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from helios_jax.scheduler.types import ExecutionTiming

WINDOW = 9  # specification: "the median of the last nine replay observations"
NS_PER_MS = 1e6


@dataclasses.dataclass(frozen=True, eq=False)
class CostTable:
    """Read-only columns, one row a program of the catalogue.

    Attributes:
        estimate_ns: int64 [programs], 0 = indeterminate.
        observed_ns: int64 [programs], time of the last valid observation.
        attempted_ns: int64 [programs], time of the last committed dispatch, whatever came of it.
        num_samples: int64 [programs], observations in the window, 0 to 9.
        samples_ns: int64 [programs, 9], oldest first; entries from `num_samples` on are 0.
    """

    estimate_ns: np.ndarray
    observed_ns: np.ndarray
    attempted_ns: np.ndarray
    num_samples: np.ndarray
    samples_ns: np.ndarray


def new_costs(num_programs: int) -> CostTable:
    """A table in which every program is indeterminate."""
    estimate, observed, attempted, counts = np.zeros((4, num_programs), np.int64)
    return _sealed(CostTable(estimate, observed, attempted, counts, np.zeros((num_programs, WINDOW), np.int64)))


def durations_ms(costs: CostTable) -> np.ndarray:
    """float64 [programs] estimates in ms, 0 where indeterminate."""
    return costs.estimate_ns / NS_PER_MS


def is_fresh(costs: CostTable, index: int, now_ns: int, ttl_ns: int) -> bool:
    """Whether the program is measured and not stale (stale means strictly more than the TTL)."""
    return bool(costs.estimate_ns[index] > 0 and now_ns - costs.observed_ns[index] <= ttl_ns)


def stale(costs: CostTable, now_ns: int, ttl_ns: int) -> np.ndarray:
    """bool [programs], measured but not fresh: the cost counts, the dispatch needs feedback."""
    old: np.ndarray = (costs.estimate_ns > 0) & (now_ns - costs.observed_ns > ttl_ns)
    return old


def raw_device_ns(timing: ExecutionTiming) -> int:
    """The raw observation: the largest positive interval of any rank, 0 when there is none."""
    return max(0, *timing.device_ns) if timing.device_ns else 0


def sample_ns(timing: ExecutionTiming) -> int:
    """The cost sample: the raw observation less the exposed embedding delay, 0 when invalid.

    Host dispatch, delivery and polling are outside the device interval, so they never enter.
    """
    raw = raw_device_ns(timing)
    return max(0, raw - timing.embedding_delay_ns) if raw else 0


def execution_ns(timing: ExecutionTiming) -> int:
    """Physical time that the frame took: what service and exploration budgets are charged.

    A queued frame takes its device interval; an isolated one the larger of that and its wall time.
    Without a valid interval the wall time is all there is, for a queued frame as well.
    """
    raw = raw_device_ns(timing)
    return raw if timing.queued and raw else max(raw, timing.wall_ns)


def observe(costs: CostTable, index: int, sample: int, now_ns: int, ttl_ns: int) -> CostTable:
    """The table after one observation of a program; an invalid sample (0) changes nothing."""
    if sample <= 0:
        return costs
    count = int(costs.num_samples[index]) if is_fresh(costs, index, now_ns, ttl_ns) else 0
    window = [*costs.samples_ns[index, :count].tolist(), sample][-WINDOW:]
    estimate, observed, counts, samples = (
        column.copy() for column in (costs.estimate_ns, costs.observed_ns, costs.num_samples, costs.samples_ns)
    )
    estimate[index], observed[index], counts[index] = median_ns(window), now_ns, len(window)
    samples[index] = window + [0] * (WINDOW - len(window))
    return _sealed(CostTable(estimate, observed, costs.attempted_ns, counts, samples))


def attempt(costs: CostTable, index: int, now_ns: int) -> CostTable:
    """The table after a committed dispatch of a program."""
    attempted = costs.attempted_ns.copy()
    attempted[index] = now_ns
    attempted.setflags(write=False)
    return dataclasses.replace(costs, attempted_ns=attempted)


def median_ns(window: list[int]) -> int:
    """Median of 1 to 9 samples; the middle pair is averaged, at least 1 ns."""
    ordered, middle = sorted(window), len(window) // 2
    if len(window) % 2:
        return ordered[middle]
    return max(1, (ordered[middle - 1] + ordered[middle]) // 2)


def _sealed(costs: CostTable) -> CostTable:
    for column in (costs.estimate_ns, costs.observed_ns, costs.attempted_ns, costs.num_samples, costs.samples_ns):
        column.setflags(write=False)
    return costs
