"""Drafters of streams: what they draw has the rates that they are made of, and the requests that are meant."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speculation_sim import core_catalog
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.simulation.acceptance import uniform
from helios_jax.simulation.profiles import load_profile
from helios_jax.simulation.streams import (
    STRETCH,
    Drafter,
    Draws,
    Streams,
    after,
    alternating,
    by_request,
    constant,
    run_streams,
)
from tests.unit.simulation_toy import profile_file

PROMPT_LEN, DEPTH = 10, 4


def rates(drafter: Drafter, requests: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Share of the draws of which each prefix is right."""
    accepted = Draws(drafter, PROMPT_LEN).draw(requests, outputs + PROMPT_LEN, DEPTH)[1]
    return np.logical_and.accumulate(accepted, axis=1).mean(axis=0)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_constant_rates_are_met(rate: float) -> None:
    requests, outputs = np.arange(20_000) % 50, np.arange(20_000) // 50
    found = rates(Drafter(tables=(constant(rate, DEPTH),)), requests, outputs)
    np.testing.assert_allclose(found, rate ** np.arange(1, DEPTH + 1), atol=0 if rate in (0.0, 1.0) else 0.015)


def test_kinds_choose_by_request_and_by_place() -> None:
    never, always = constant(0.0, DEPTH), constant(1.0, DEPTH)
    requests, outputs = np.arange(1000) % 10, np.arange(1000) // 10
    turns = Drafter(tables=(never, always, never), kinds=by_request(3))
    for request in range(10):
        assert (rates(turns, requests[requests == request], outputs[requests == request]) == (request % 3 == 1)).all()
    late = Drafter(tables=(never, always), kinds=after(50))
    assert (rates(late, requests[outputs < 50], outputs[outputs < 50]) == 0).all()
    assert (rates(late, requests[outputs >= 50], outputs[outputs >= 50]) == 1).all()


def test_alternating_text_has_stretches_and_its_share() -> None:
    requests, outputs = np.repeat(np.arange(500), 20 * STRETCH), np.tile(np.arange(20 * STRETCH), 500)
    kinds = alternating(0.3)(requests, outputs).reshape(-1, STRETCH)
    assert (kinds == kinds[:, :1]).all()
    assert abs((kinds[:, 0] == 0).mean() - 0.3) < 0.02


def test_confidence_may_be_wrong() -> None:
    drafter = Drafter(tables=(constant(0.0, DEPTH),), shown=(constant(0.9, DEPTH),))
    confidence, accepted = Draws(drafter, PROMPT_LEN).draw(np.arange(4000), np.full(4000, 30), DEPTH)
    assert not accepted.any()
    np.testing.assert_allclose(confidence.mean(axis=0), 0.9, atol=0.02)


def test_copies_are_found_as_often_as_they_should() -> None:
    drafter = Drafter(tables=(constant(0.5, DEPTH),) * 2, found=(0.25, 1.0), kinds=by_request(2))
    found = np.array([[drafter.copies(request, outputs) for outputs in range(400)] for request in (0, 1)])
    assert set(found.ravel().tolist()) == {0, DEPTH}
    assert abs((found[0] > 0).mean() - 0.25) < 0.05
    assert (found[1] > 0).all()


def test_hashes_are_uniform_and_differ_by_every_argument() -> None:
    requests, positions = np.arange(10_000) % 100, np.arange(10_000) // 100
    values = uniform(requests, positions, 1)
    assert len(np.unique(values)) == len(values)
    assert abs(values.mean() - 0.5) < 0.01
    assert (values != uniform(requests, positions, 2)).all()


def test_streams_make_what_arithmetic_says(tmp_path: Path) -> None:
    """Rounds of width 6 that are always right, alone and in lock step: 6 tokens a round, the toy profile's time."""
    profile = load_profile(profile_file(tmp_path), "toy.gpu")
    catalog = core_catalog("draft", 5, 6)
    run = Streams(
        profile=profile, catalog=catalog, mode="fixed", streams=2, seconds=1.5, warm_seconds=0.5,
        outputs=(9000, 9000), host_ms=0.0,
    )  # fmt: skip
    made = run_streams(run, Drafter(tables=(constant(1.0, 5),)))
    # linear and head of 12 rows, attention of two rows, 5 drafts of 2 rows; contexts of the warm part
    contexts = 64 + np.linspace(0.5, 1.5, 50) * made.warm / 2
    attention = 2.0 * 1e-4 * 2 * np.clip(contexts, 128, None)
    step_ms = 2 + 0.12 + 0.5 + 0.012 + attention.mean() + 5 * 0.32
    assert made.programs.most_common(1)[0][0].startswith("speculative-b2-t6")
    assert math.isclose(made.warm, 12 / step_ms * 1e3, rel_tol=0.03)
    assert math.isclose(sum(made.tokens), made.cold * 1.5, rel_tol=0.01)
    assert all(shape.token_capacity in (1, 6) for shape in catalog.of_kind(ProgramKind.SPECULATIVE))
