"""The reliability curve of benchmarks/calibration.py, and what the map does to a source that is known to lie."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.calibration import Recording, calibration_error, record, reliability, table
from helios_jax.engine.calibration import REFIT_EVERY, logit
from helios_jax.engine.drafting import Drafting
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProgramShape, ProposalSource


def test_bins_hold_their_proposals_and_the_error_is_their_mean_distance() -> None:
    predicted = np.array([0.0, 0.05, 0.31, 0.39, 0.95, 1.0])
    accepted = np.array([False, True, True, True, True, False])
    curve = reliability(predicted, accepted)
    assert [entry.count for entry in curve] == [2, 0, 0, 2, 0, 0, 0, 0, 0, 2]
    assert curve[3].predicted == pytest.approx(0.35)
    assert curve[3].accepted == 1.0
    assert np.isnan(curve[1].accepted)
    assert calibration_error(curve) == pytest.approx((2 * 0.475 + 2 * 0.65 + 2 * 0.475) / 6)
    assert calibration_error(reliability(np.zeros(0), np.zeros(0, np.bool_))) == 0.0


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.4, -1.0), (2.0, 0.8)])
def test_the_map_repairs_a_source_that_is_too_sure_and_leaves_an_honest_one(scale: float, shift: float) -> None:
    """4000 rounds of four proposals; the truth is a logistic map of what the source says."""
    rng, recording = np.random.default_rng(7), Recording()
    for _ in range(4000):
        said = rng.beta(2.0, 1.0, 4)
        right = rng.random(4) < 1.0 / (1.0 + np.exp(-(scale * logit(said) + shift)))
        accepted = int(np.logical_and.accumulate(right).sum())
        recording.observe(logit(said[: min(4, accepted + 1)]), accepted)
    judged = np.array(recording.accepted)
    before, after = (
        calibration_error(reliability(np.array(column), judged)) for column in (recording.before, recording.after)
    )
    assert recording.after[:REFIT_EVERY] == pytest.approx(recording.before[:REFIT_EVERY])  # nothing is taught yet
    assert recording.scale == pytest.approx(scale, abs=0.25)
    assert recording.shift == pytest.approx(shift, abs=0.25)
    assert after < 0.03
    if scale != 1.0:
        assert before > 2 * after
    lines = table(recording)
    assert sum(int(line.split("|")[2]) for line in lines[2:-1]) == len(judged)
    assert f"{before:.4f} -> {after:.4f}" in lines[-1]


def test_the_recording_takes_the_place_of_the_only_source() -> None:
    shape = ProgramShape(ProgramKind.SPECULATIVE, 1, 4, 3, 4, proposal_source=ProposalSource.COPY)
    drafting = Drafting(Catalog((shape,)))
    recording = record(drafting)
    assert drafting._calibrations == {ProposalSource.COPY: recording}
