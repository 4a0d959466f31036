"""Reports: goodput and percentiles by hand, exact keys, the interval that a frame counts in."""

from __future__ import annotations

import json
from array import array

import numpy as np
import pytest

from helios_jax.scheduler import Limits, ProgramKind, ProgramShape, Scheduler
from helios_jax.scheduler.types import ScheduledPlan, SelectionReason
from helios_jax.simulation.driver import Ran, Served
from helios_jax.simulation.experiment import simulation_catalog
from helios_jax.simulation.report import MIX_BUCKETS, Objectives, Recorder, as_json, goodput, make_report, percentiles

MS = 1_000_000
LIMITS = Limits(slots=4, pages=64, page_size=16, max_context=256)


def served(first_ms: float, gaps_ms: list[float], reason: str | None = "length") -> Served:
    request = Served(10 * MS, reason=reason)
    if first_ms:
        request.first_ns = round((10 + first_ms) * MS)
        request.gaps_ns = array("q", [round(gap * MS) for gap in gaps_ms])
        request.num_tokens = 1 + len(gaps_ms)
    return request


OBJECTIVES = Objectives(ttft_ms=100.0, gap_ms=20.0)


@pytest.mark.parametrize(
    ("request_", "good"),
    [
        (served(100, [20, 5]), True),
        (served(100.1, [20, 5]), False),
        (served(50, []), True),
        (served(50, [20] * 300 + [500]), True),  # one gap in 301 is beyond the 99th percentile
        (served(50, [20] * 30 + [500]), False),
        (served(50, [5], "stop"), True),
        (served(50, [5], "cancelled"), False),
        (served(50, [5], None), False),
        (served(0, [], "refused"), False),
    ],
)
def test_a_request_is_good_within_both_objectives(request_: Served, good: bool) -> None:
    assert goodput([request_], OBJECTIVES) == float(good)


def test_keys_and_numbers_of_a_report() -> None:
    requests = [served(50, [5, 10]), served(150, [30]), served(0, [], "refused")]
    scheduler = Scheduler(simulation_catalog(4, 128), LIMITS)
    report = make_report("balanced", requests, scheduler, OBJECTIVES, 1234, 10.0)
    assert " ".join(report) == (
        "policy requests ttft_ms gap_ms output_tokens_per_s goodput preemptions programs padding_ratio ledgers"
    )
    assert report["requests"] == {"arrived": 3, "completed": 2, "refused": 1}
    assert report["ttft_ms"] == {"p50": 100.0, "p90": 140.0, "p99": 149.0, "max": 150.0}
    assert report["gap_ms"]["max"] == 30.0
    assert report["goodput"] == pytest.approx(1 / 3, abs=1e-4)
    assert report["output_tokens_per_s"] == 123.4
    assert report["ledgers"] == {
        name: {"spent": 0.0, "ordinary": 0.0, "bound": 0.0} for name in ("timing_refresh", "acceptance_learning")
    }
    assert json.loads(as_json(report)) == report


def test_nothing_observed_is_null() -> None:
    report = make_report("vtc", [], Scheduler(simulation_catalog(4, 128), LIMITS), OBJECTIVES, 0, 10.0)
    assert report["goodput"] is None
    assert report["ttft_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}
    assert "NaN" not in as_json(report)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=1001)
    found = percentiles(values)
    assert found == {
        k: round(float(np.percentile(values, q)), 4) for k, q in zip(found, (50, 90, 99, 100), strict=True)
    }


def test_a_frame_counts_in_every_interval_that_it_touches() -> None:
    recorder = Recorder(Scheduler(simulation_catalog(4, 128), LIMITS), float(MIX_BUCKETS), -1)  # 1 s each
    shape = ProgramShape(ProgramKind.DECODE, 1, 1)
    plan = ScheduledPlan(shape, (), (), 0, 0.0, 0.0, SelectionReason.ORDINARY, False)
    recorder(Ran(plan, 900 * MS, 1500 * MS, {}))
    recorder(Ran(plan, 100 * MS, 50 * MS, {}))
    assert dict(recorder.mix[ProgramKind.DECODE]) == {0: 150 * MS, 1: 1000 * MS, 2: 400 * MS}
