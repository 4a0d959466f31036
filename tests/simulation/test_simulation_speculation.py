"""Adaptive speculation never loses: output tokens a second beside "off" and every fixed width, in virtual time.

The measured loads, and what discovery costs in the first seconds, are in docs/LOG.md; rates here are of
short runs, after a warm-up of a quarter of each. Everything is deterministic.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from benchmarks.speculation_sim import CASES, Case, cases, compare, ratios
from helios_jax.simulation.profiles import CostProfile, load_profile
from tests.unit.simulation_toy import shared_data

H100, A100 = "llama3.1-8b.h100-sxm.bf16.tp1", "llama3.1-8b.a100-sxm.bf16.tp1"
LEAST = 0.97


@functools.cache
def profile(name: str) -> CostProfile:
    return load_profile(shared_data("cost_profiles/step_costs.json"), name)


@functools.cache
def case(name: str) -> Case:
    known = cases(str(shared_data("acceptance.json")))
    assert tuple(known) == CASES
    return known[name]


def adaptive_over_best(gpu: str, name: str, streams: int, seconds: float, **others: Any) -> float:
    return ratios(compare(case(name), profile(gpu), streams, seconds, **others))[0]


def test_adaptive_makes_as_much_as_the_best_choice_in_hindsight() -> None:
    assert adaptive_over_best(H100, "published", 4, 2.0) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("fades", "awakes")])
def test_eight_streams_of_every_acceptance(name: str) -> None:
    assert adaptive_over_best(H100, name, 8, 4.0) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fades", "awakes"])
def test_acceptance_that_changes_in_the_middle_of_long_outputs(name: str) -> None:
    """What no fixed choice can follow. Shorter than the memory of the estimates it loses: docs/LOG.md."""
    assert adaptive_over_best(H100, name, 4, 8.0) >= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["published", "repeats"])
def test_sixteen_streams_without_ragged_rounds(name: str) -> None:
    assert adaptive_over_best(A100, name, 16, 4.0, rectangular=True) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize(("name", "streams"), [("all", 1), ("none", 64), ("copies", 64), ("mixed", 32)])
def test_one_stream_and_many(name: str, streams: int) -> None:
    assert adaptive_over_best(A100, name, streams, 6.0) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize(("name", "streams"), [("deep", 64), ("worst", 32)])
def test_tokens_are_all_that_throughput_wants(name: str, streams: int) -> None:
    """`balanced` takes shorter rounds here, for more deliveries and 3 % fewer tokens."""
    assert adaptive_over_best(A100, name, streams, 6.0, policy="throughput") >= LEAST
