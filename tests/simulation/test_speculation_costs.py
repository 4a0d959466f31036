"""Rounds without cost data, and with cost data that say little: what is chosen, and what the trace says of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax.scheduler.catalog import ProgramShape
from helios_jax.testing import FakeDraft, expected_tokens, hashed_text
from tests.simulation.window_kit import Stepped

HOUR_NS = 3_600_000_000_000
PROMPTS, TOKENS = ("one", "another one"), 60


def played(folder: Path, duration_ns: Callable[[ProgramShape], int], agreement: float = 0.8) -> list[dict[str, Any]]:
    """The trace of two requests, whose output must be that of plain decode."""
    path = folder / "trace.jsonl"
    world = Stepped(
        max_slots=2, max_context=128, spec_method="draft", num_draft_tokens=3, draft=FakeDraft(agreement), trace=path,
        duration_ns=duration_ns,
    )  # fmt: skip
    names = [world.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS]
    world.run()
    for name, prompt in zip(names, PROMPTS, strict=True):
        wanted = expected_tokens(hashed_text, world.rig.tokenizer.encode(prompt), TOKENS)
        assert world.rig.text(name) == bytes(wanted).decode()
    world.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def rounds(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [frame for frame in frames if frame["kind"] == "speculative"]


def test_without_cost_data_every_program_is_discovered_once_and_alone(tmp_path: Path) -> None:
    """No estimate, no age of one, nothing in flight beside it; afterwards the measured time is the estimate."""
    frames = played(tmp_path, lambda shape: 1_000_000 + 50_000 * shape.packed_capacity)
    measured: dict[str, int] = {}
    for frame in frames:
        if frame["reason"] == "discovery":
            assert (frame["estimated_ns"], frame["observation_age_ns"], frame["queued"]) == (0, None, False)
            assert frame["shape"] not in measured
        else:
            assert frame["estimated_ns"] == measured[frame["shape"]]
            assert frame["observation_age_ns"] >= 0
        measured[frame["shape"]] = frame["device_ns"][0]
    reasons = Counter(frame["reason"] for frame in rounds(frames))
    assert reasons["discovery"] >= 4
    assert reasons["ordinary"] >= 4


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_a_flat_table_makes_width_free(tmp_path: Path, agreement: float) -> None:
    """Programs that all take the same: nothing is lost by the widest round, for everybody, whatever is accepted."""
    frames = played(tmp_path, lambda shape: 2_000_000, agreement)
    known = [frame for frame in rounds(frames) if frame["reason"] == "ordinary"]
    assert {frame["estimated_ns"] for frame in known} == {2_000_000}
    assert known
    for frame in known[: len(known) // 2]:  # later ones shrink to the output that is left
        assert (frame["d"], frame["lanes"]) == (3, 2)


def test_intervals_that_are_not_valid_teach_nothing(tmp_path: Path) -> None:
    """A device that reports no time: every program stays unknown, runs alone, and the requests are served."""
    frames = played(tmp_path, lambda shape: 0)
    assert {frame["reason"] for frame in frames} == {"discovery"}
    assert {frame["estimated_ns"] for frame in frames} == {0}
    assert {frame["observation_age_ns"] for frame in frames} == {None}
    assert not any(frame["queued"] for frame in frames)
    assert any(frame["d"] for frame in frames)


@pytest.mark.parametrize("proposing_is_slow", [False, True])
def test_times_of_a_nanosecond_and_an_hour_decide_widths(tmp_path: Path, proposing_is_slow: bool) -> None:
    """Scores stay finite, and only what is cheap is chosen once it is known."""
    frames = played(tmp_path, lambda shape: HOUR_NS if bool(shape.proposal_depth) == proposing_is_slow else 1)
    decoding = [frame for frame in frames if frame["kind"] in ("decode", "speculative")]
    chosen = [frame for frame in decoding if frame["reason"] == "ordinary"]
    assert chosen
    assert all(np.isfinite(frame["value_rate"]) and np.isfinite(frame["log_scale"]) for frame in frames)
    assert {bool(frame["d"]) for frame in chosen} == {not proposing_is_slow}
