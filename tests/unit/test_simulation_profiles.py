"""Cost profiles: the components compose every published table, and broken files are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource
from helios_jax.simulation.profiles import STATE_MS, CostProfile, ProfileCosts, Work, load_profile, profile_ids
from tests.unit.simulation_toy import interpolated, profile_document, profile_file, shared_data

K = ProgramKind
ROUNDING = 3e-4  # the tables are composed of values rounded to 1e-4
IDS = ("llama3.1-8b.h100-sxm.bf16.tp1", "llama3.1-8b.a100-sxm.bf16.tp1")


def speculative(rows: int, width: int, source: ProposalSource = ProposalSource.LEARNED) -> ProgramShape:
    return ProgramShape(K.SPECULATIVE, rows, width, width - 1, rows * width, proposal_source=source)


@pytest.fixture
def toy(tmp_path: Path) -> CostProfile:
    return load_profile(profile_file(tmp_path), "toy.gpu")


@pytest.mark.parametrize("profile_id", IDS)
def test_components_compose_every_table_of_the_shared_file(profile_id: str) -> None:
    path = shared_data("cost_profiles/step_costs.json")
    assert profile_ids(path) == IDS
    profile = load_profile(path, profile_id)
    entry = next(e for e in json.loads(path.read_text())["profiles"] if e["id"] == profile_id)
    errors = []
    for i, batch in enumerate(entry["decode"]["batch"]):
        for j, ctx in enumerate(entry["decode"]["ctx"]):
            got = profile.duration_ms(ProgramShape(K.DECODE, batch, 1), Work(contexts=(ctx,) * batch))
            errors.append(got - entry["decode"]["ms"][i][j])
    for i, chunk in enumerate(entry["prefill"]["chunk"]):
        for j, prefix in enumerate(entry["prefill"]["prefix"]):
            got = profile.duration_ms(ProgramShape(K.PREFILL, 1, chunk), Work(prompts=((chunk, prefix),)))
            errors.append(got - entry["prefill"]["ms"][i][j])
    for i, width in enumerate(entry["verify"]["width"]):
        for j, batch in enumerate(entry["verify"]["batch"]):
            for k, ctx in enumerate(entry["verify"]["ctx"]):
                shape = speculative(batch, width, source=ProposalSource.COPY)
                got = profile.duration_ms(shape, Work(contexts=(ctx,) * batch))
                errors.append(got - entry["verify"]["ms"][i][j][k])
    for i, chunk in enumerate(entry["mixed"]["chunk"]):
        for j, batch in enumerate(entry["mixed"]["decode_batch"]):
            for k, ctx in enumerate(entry["mixed"]["decode_ctx"]):
                shape = ProgramShape(K.MIXED, batch + 1, 1, prefill_capacity=chunk)
                got = profile.duration_ms(shape, Work(prompts=((chunk, 0),), contexts=(ctx,) * batch))
                errors.append(got - entry["mixed"]["ms"][i][j][k])
    assert np.abs(errors).max() < ROUNDING
    assert len(errors) > 500


@pytest.mark.parametrize("profile_id", IDS)
def test_values_between_grid_points_agree_with_numpy(profile_id: str) -> None:
    path = shared_data("cost_profiles/step_costs.json")
    profile = load_profile(path, profile_id)
    parts = next(e for e in json.loads(path.read_text())["profiles"] if e["id"] == profile_id)["components"]
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, ctx = int(rng.integers(1, 65)), float(rng.uniform(128, 32768))
        expected = interpolated(parts["attn_decode_ms"], "batch", "ctx", rows, ctx)
        assert profile.attn_decode(rows, ctx) == pytest.approx(expected, rel=1e-12)
        chunk, prefix = float(rng.uniform(64, 8192)), float(rng.uniform(0, 8192))
        expected = interpolated(parts["attn_prefill_ms"], "chunk", "prefix", chunk, prefix)
        assert profile.attn_prefill(chunk, prefix) == pytest.approx(expected, rel=1e-12)


def test_longer_contexts_and_prefixes_never_cost_less(toy: CostProfile) -> None:
    """Beyond the grid the last segment goes on."""
    decode = ProgramShape(K.DECODE, 4, 1)
    costs = [toy.duration_ms(decode, Work(contexts=(ctx,))) for ctx in (100, 1000, 8192, 30_000)]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(2.04 + 0.504 + 1e-4 * 30_000)
    prefill = ProgramShape(K.PREFILL, 1, 512)
    assert toy.duration_ms(prefill, Work(prompts=((512, 8192),))) == pytest.approx(
        7.12 + 0.501 + 0.1 + 0.0512 + 0.08192
    )


def test_padding_is_computed_and_attention_follows_the_rows_in_use(toy: CostProfile) -> None:
    full = toy.duration_ms(ProgramShape(K.DECODE, 32, 1), Work(contexts=(1000,) * 32))
    half = toy.duration_ms(ProgramShape(K.DECODE, 32, 1), Work(contexts=(1000,) * 16))
    assert full == pytest.approx(2.32 + 0.532 + 3.2)
    assert half == pytest.approx(2.32 + 0.532 + 1.6)


def test_packed_prompts_launch_the_attention_once(toy: CostProfile) -> None:
    shape = ProgramShape(K.PREFILL, 4, 256)
    got = toy.duration_ms(shape, Work(prompts=((128, 0), (128, 4096))))
    assert got == pytest.approx(4.56 + 0.504 + 0.1064 + 2 * 0.0064 + 0.04096)


def test_speculation_pays_drafts_verification_and_its_packed_rows(toy: CostProfile) -> None:
    work = Work(contexts=(1000,) * 8)
    rectangular = toy.duration_ms(speculative(8, 4), work)
    assert rectangular == pytest.approx(2.32 + 0.532 + 2 * 0.8 + 3 * 0.38)
    ragged = dataclasses.replace(speculative(8, 4), packed_capacity=16, allocation=Allocation.PREFIX_LIMIT)
    assert toy.duration_ms(ragged, work) == pytest.approx(2.16 + 0.516 + 2 * 0.8 + 3 * 0.38)
    assert toy.duration_ms(speculative(8, 4), work, "mtp") == pytest.approx(rectangular + 3 * 0.3)
    assert toy.duration_ms(speculative(8, 4, source=ProposalSource.COPY), work) == pytest.approx(rectangular - 3 * 0.38)
    width_one = ProgramShape(K.SPECULATIVE, 8, 1, 0, 8, proposal_source=ProposalSource.LEARNED)
    assert toy.duration_ms(width_one, work) == pytest.approx(2.08 + 0.508 + 0.8 + 0.38)


def test_mixed_programs_add_their_parts(toy: CostProfile) -> None:
    shape = ProgramShape(K.MIXED, 8, 2, 1, prefill_capacity=256, proposal_source=ProposalSource.LEARNED)
    got = toy.duration_ms(shape, Work(prompts=((200, 4096),), contexts=(500,) * 3))
    assert got == pytest.approx((2 + 2.7) + 0.515 + 2 * 0.15 + (0.1 + 0.02 + 0.04096) + 0.38)
    assert toy.duration_ms(shape, Work()) == pytest.approx((2 + 2.7) + 0.515 + 0.38)


def test_state_operations_vision_and_unknown_methods(toy: CostProfile) -> None:
    for kind in (K.INITIALIZE, K.SNAPSHOT, K.RESTORE):
        assert toy.duration_ms(ProgramShape(kind, 8, 0), Work()) == STATE_MS
    with pytest.raises(ConfigError, match="has no vision times"):
        toy.duration_ms(ProgramShape(K.VISION, 1, 64), Work())
    with pytest.raises(ConfigError, match=r"no draft cost for 'tree'.*eagle3, mtp, ngram"):
        toy.duration_ms(speculative(1, 2), Work(), "tree")
    assert ProfileCosts(toy)(ProgramShape(K.DECODE, 1, 1), Work(contexts=(1000,))) == round(1e6 * (2.01 + 0.501 + 0.1))


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    inner = document["profiles"][0]
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "no JSON file of cost profiles"),
        ("[]", "it needs schema 1"),
        ('{"schema": 2, "profiles": []}', "it needs schema 1"),
        ('{"schema": 1, "profiles": []}', "holds no profiles"),
        (without(profile_document(), "components"), "components is missing"),
        (without(profile_document(), "components", "attn_decode_ms", "ctx"), "attn_decode_ms.ctx is missing"),
        (profile_document(kv_bytes_per_token=-1), "kv_bytes_per_token must hold"),
        (profile_document(kv_bytes_per_token="many"), "kv_bytes_per_token must hold"),
        (profile_document(draft={"batch": [2, 1], "a_per_position_ms": [1, 2]}), "draft.batch must grow strictly"),
        (profile_document(draft={"batch": [1, 2], "a_per_position_ms": [1]}), "must hold 2 numbers"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, document: Any, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(ConfigError, match=message):
        load_profile(path, "toy.gpu")


def test_missing_files_and_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read cost profiles from .*No such file"):
        load_profile(tmp_path / "absent.json", "toy.gpu")
    with pytest.raises(ConfigError, match=r"has no profile 'h100'; it has toy\.gpu"):
        load_profile(profile_file(tmp_path), "h100")
