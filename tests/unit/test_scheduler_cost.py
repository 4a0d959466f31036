"""Duration estimates: median of nine, staleness, what counts as an observation."""

from __future__ import annotations

import pytest

from helios_jax.scheduler.cost import (
    attempt,
    execution_ns,
    is_fresh,
    new_costs,
    observe,
    raw_device_ns,
    sample_ns,
    stale,
)
from helios_jax.scheduler.types import ExecutionTiming

TTL = 30_000_000_000


def estimates(samples: list[int], gap_ns: int = 1) -> list[int]:
    costs, seen = new_costs(2), []
    for number, sample in enumerate(samples):
        costs = observe(costs, 1, sample, number * gap_ns, TTL)
        seen.append(int(costs.estimate_ns[1]))
    assert costs.estimate_ns[0] == 0
    return seen


def test_starts_indeterminate_and_takes_the_first_observation() -> None:
    costs = new_costs(1)
    assert costs.estimate_ns[0] == 0
    assert not is_fresh(costs, 0, 0, TTL)
    assert estimates([100]) == [100]


def test_median_of_nine_averages_the_middle_pair() -> None:
    assert estimates([10, 20, 60, 40]) == [10, 15, 20, 30]


def test_window_forgets_the_tenth_observation() -> None:
    samples = [1000, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert estimates(samples)[-2:] == [5, 5]  # with and without the 1000: {1000, 1..8} and {1..9}


def test_stale_means_strictly_more_than_the_ttl() -> None:
    costs = observe(new_costs(1), 0, 100, 5, TTL)
    assert is_fresh(costs, 0, 5 + TTL, TTL)
    assert not is_fresh(costs, 0, 6 + TTL, TTL)
    assert costs.estimate_ns[0] == 100  # elapsed time alone never makes it unknown


def test_first_observation_of_a_stale_entry_replaces_and_restarts() -> None:
    costs = new_costs(1)
    for _ in range(9):
        costs = observe(costs, 0, 100, 0, TTL)
    fresh = observe(costs, 0, 900, TTL, TTL)
    assert (fresh.estimate_ns[0], fresh.num_samples[0]) == (100, 9)
    replaced = observe(costs, 0, 900, TTL + 1, TTL)
    assert (replaced.estimate_ns[0], replaced.num_samples[0]) == (900, 1)
    assert observe(replaced, 0, 100, TTL + 2, TTL).estimate_ns[0] == 500


@pytest.mark.parametrize("sample", [0, -5])
def test_invalid_observation_neither_changes_nor_freshens(sample: int) -> None:
    costs = observe(new_costs(1), 0, 100, 0, TTL)
    assert observe(costs, 0, sample, TTL + 1, TTL) is costs


def test_observations_of_a_frame() -> None:
    timing = ExecutionTiming((5, -1, 9, 0), wall_ns=20, embedding_delay_ns=2)
    assert (raw_device_ns(timing), sample_ns(timing), execution_ns(timing)) == (9, 7, 20)
    queued = ExecutionTiming((5, 9), wall_ns=20, queued=True)
    assert execution_ns(queued) == 9
    for invalid in (ExecutionTiming((), 20), ExecutionTiming((0, -3), 20)):
        assert (raw_device_ns(invalid), sample_ns(invalid), execution_ns(invalid)) == (0, 0, 20)
    assert sample_ns(ExecutionTiming((5,), 20, embedding_delay_ns=6)) == 0


def test_a_queued_attempt_without_an_interval_takes_its_wall_time() -> None:
    assert execution_ns(ExecutionTiming((0,), wall_ns=20, queued=True)) == 20


def test_an_attempt_is_no_observation() -> None:
    costs = attempt(observe(new_costs(2), 0, 100, 5, TTL), 0, TTL + 6)
    assert (costs.attempted_ns.tolist(), costs.observed_ns.tolist()) == ([TTL + 6, 0], [5, 0])
    assert stale(costs, TTL + 6, TTL).tolist() == [True, False]  # an unmeasured program is not stale
    assert stale(costs, TTL + 5, TTL).tolist() == [False, False]
    assert observe(costs, 0, 100, TTL + 7, TTL).attempted_ns.tolist() == [TTL + 6, 0]
