"""Acceptance: published rates come back as frequencies; draws belong to a token, not to a program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helios_jax.errors import ConfigError
from helios_jax.simulation.acceptance import AcceptanceSampler, AcceptanceTable, acceptance_names, load_acceptance
from tests.unit.simulation_toy import acceptance_file, shared_data


def accepted_lengths(table: AcceptanceTable, depth: int, draws: int = 40_000) -> np.ndarray:
    _, verdicts = AcceptanceSampler(table, 3).draw(np.arange(draws) // 100, np.arange(draws) % 100, depth)
    return np.minimum.accumulate(verdicts, axis=1).sum(axis=1)


def test_survival_frequencies_are_the_published_rates() -> None:
    table = AcceptanceTable("t", (0.8, 0.6, 0.3), "eagle3")
    lengths = accepted_lengths(table, 3)
    frequencies = [(lengths >= d).mean() for d in (1, 2, 3)]
    assert frequencies == pytest.approx(table.rates, abs=4 * 0.5 / np.sqrt(40_000))
    assert 1 + lengths.mean() == pytest.approx(1 + sum(table.rates), abs=0.03)


def test_confidence_is_calibrated() -> None:
    """Among proposals of a confidence near p, a share p is accepted, at every depth."""
    table = AcceptanceTable("t", (0.7, 0.5), "eagle3")
    confidence, verdicts = AcceptanceSampler(table).draw(np.arange(50_000), np.zeros(50_000, np.int64), 2)
    for depth in (0, 1):
        bins = np.digitize(confidence[:, depth], [0.2, 0.4, 0.6, 0.8])
        for number in range(5):
            members = bins == number
            share = verdicts[members, depth].mean()
            assert share == pytest.approx(confidence[members, depth].mean(), abs=4 * 0.5 / np.sqrt(members.sum()))


def test_a_draw_depends_on_the_token_only() -> None:
    sampler = AcceptanceSampler(AcceptanceTable("t", (0.8, 0.6, 0.3), "eagle3"), 7)
    requests, positions = np.array([3, 4, 3]), np.array([10, 10, 11])
    confidence, verdicts = sampler.draw(requests, positions, 3)
    alone, verdict = sampler.draw(requests[1:2], positions[1:2], 2)
    assert (alone == confidence[1:2, :2]).all()
    assert (verdict == verdicts[1:2, :2]).all()
    assert len({tuple(row) for row in confidence}) == 3
    other, _ = AcceptanceSampler(sampler.table, 8).draw(requests, positions, 3)
    assert not (other == confidence).any()


def test_names_and_tables_of_a_file(tmp_path: Path) -> None:
    path = acceptance_file(tmp_path)
    assert acceptance_names(path) == (
        "eagle3/Toy", "mtp (1 head)/Toy", "golden_al/toy_eagle3/on", "specforge_al/Big | draft/maths",
    )  # fmt: skip
    assert load_acceptance(f"{path}:eagle3/Toy").rates == (0.8, 0.6, 0.3)
    assert load_acceptance(f"{path}:MTP").method == "mtp"
    golden = load_acceptance(f"{path}:golden")
    assert golden.rates == pytest.approx((0.8, 0.6, 0.3))  # the fourth length falls: noise of a separate run
    bench = load_acceptance(f"{path}:maths")
    assert bench.depth == 5
    assert [1 + sum(bench.rates[:d]) for d in (3, 5)] == pytest.approx([2.4, 2.8])
    assert list(bench.rates) == sorted(bench.rates, reverse=True)


def test_every_table_of_the_shared_file_is_usable() -> None:
    path = shared_data("acceptance.json")
    names = acceptance_names(path)
    assert len(names) > 50
    for name in names:
        table = load_acceptance(f"{path}:{name}")
        assert table.name == name
        assert 1 <= table.depth <= 8
        assert all(0 < b <= a < 1 for a, b in zip(table.rates, table.rates[1:] + table.rates[-1:], strict=True))
    llama = load_acceptance(f"{path}:eagle3/Llama-3.1-8B")
    assert 1 + sum(llama.rates) == pytest.approx(2.605, abs=1e-3)
    assert load_acceptance(f"{path}:llama-3.1-8b-instruct") == llama


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":Toy", "could be any of eagle3/Toy, mtp"),
        (":medusa", "has no acceptance table 'medusa'; it has eagle3/Toy"),
        (":", "has no acceptance table ''"),
        ("", "takes FILE:NAME; .* has eagle3/Toy"),
    ],
)
def test_names_that_do_not_fit(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_acceptance(f"{acceptance_file(tmp_path)}{name}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no acceptance rates"),
        ("{}", "holds no acceptance rates"),
        ('{"per_position": [{"method": "a"}]}', "is malformed"),
        ('{"per_position": [{"method": "a", "target": "b", "per_position": [1.5]}]}', "1.5 is no rate"),
        ('{"per_position": [{"method": "a", "target": "b", "per_position": [0]}]}', "without a positive rate"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_acceptance(f"{path}:a")
    with pytest.raises(ConfigError, match="is no file"):
        load_acceptance(f"{tmp_path / 'absent.json'}:a")
