"""Short experiments on the shared profiles and traces, and what must hold in every one of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from helios_jax.errors import ConfigError
from helios_jax.scheduler import ProgramKind
from helios_jax.scheduler.catalog import Allocation
from helios_jax.simulation.acceptance import load_acceptance
from helios_jax.simulation.experiment import POLICIES, Experiment, Outcome, run_experiment, simulation_catalog
from helios_jax.simulation.profiles import CostProfile, load_profile
from helios_jax.simulation.traces import Trace, load_trace
from tests.unit.simulation_toy import azure_file, profile_document, profile_file, shared_data

H100, A100 = "llama3.1-8b.h100-sxm.bf16.tp1", "llama3.1-8b.a100-sxm.bf16.tp1"


def shared_profile(profile_id: str) -> CostProfile:
    return load_profile(shared_data("cost_profiles/step_costs.json"), profile_id)


def assert_sound(outcome: Outcome, trace: Trace) -> None:
    """Everyone is answered, every token is there, budgets hold, times are ordered."""
    report = outcome.report
    assert report["requests"] == {"arrived": len(trace), "completed": len(trace), "refused": 0}
    assert [served.num_tokens for served in outcome.requests] == trace.output_len.tolist()
    for served in outcome.requests:
        assert served.arrival_ns < served.first_ns <= served.last_ns
        assert served.first_ns + sum(served.gaps_ns) == served.last_ns
    for ledger in report["ledgers"].values():
        assert 0 <= ledger["spent"] <= ledger["bound"] + 1e-3
    assert 0 <= report["padding_ratio"] < 1
    assert 0 <= report["goodput"] <= 1


@pytest.mark.parametrize("profile_id", [H100, A100])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_everybody(policy: str, profile_id: str) -> None:
    trace = load_trace(str(shared_data("traces/azure_llm_2023_conv.csv")), seconds=1.5, start_s=120.0, speed=2.0)
    short = dataclasses.replace(trace, output_len=np.minimum(trace.output_len, 40))
    experiment = Experiment(profile=shared_profile(profile_id), policy=policy, seconds=1.5, prefill_chunk=512)
    assert_sound(run_experiment(experiment, short), short)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["balanced", "throughput", "fcfs-chunked"])
@pytest.mark.parametrize("name", ["", "eagle3/Llama-3.1-8B", "golden_al/glm5.2_mtp"])
def test_invariants_hold_at_every_step_of_an_overload(policy: str, name: str) -> None:
    trace = load_trace(str(shared_data("traces/azure_llm_2023_conv.csv")), seconds=2.0, start_s=120.0, speed=4.0)
    table = load_acceptance(f"{shared_data('acceptance.json')}:{name}") if name else None
    experiment = Experiment(
        profile=shared_profile(H100),
        policy=policy,
        seconds=2.0,
        slots=16,
        acceptance=table,
        prefill_chunk=512,
        check=True,
    )
    short = dataclasses.replace(trace, output_len=np.minimum(trace.output_len, 60))
    assert_sound(run_experiment(experiment, short), short)


@pytest.mark.slow
def test_ten_minutes_of_a_busy_server(tmp_path: Path) -> None:
    """3300 requests of Azure's sizes, end to end: long runs stay possible, and nobody is forgotten in one."""
    rng, count = np.random.default_rng(7), 3300
    at_s = np.sort(rng.uniform(0.0, 599.0, count))
    prompts = np.clip(rng.lognormal(6.5, 1.0, count), 1, 8000).astype(int)  # mean about 1000
    outputs = np.clip(rng.lognormal(5.0, 0.8, count), 1, 1500).astype(int)  # mean about 200
    path = azure_file(tmp_path, list(zip(at_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)))
    trace = load_trace(str(path), seconds=600.0)
    experiment = Experiment(profile=slow_profile(tmp_path), seconds=600.0, max_context=6144)
    outcome = run_experiment(experiment, trace)
    report, fits = outcome.report, trace.prompt_len + trace.output_len <= experiment.max_context
    assert len(trace) == count
    assert 0 < count - fits.sum() < 100
    assert report["requests"] == {"arrived": count, "completed": fits.sum(), "refused": count - fits.sum()}
    for fitted, length, served in zip(fits, trace.output_len, outcome.requests, strict=True):
        assert (served.reason, served.num_tokens) == (("length", length) if fitted else ("refused", 0))
    for ledger in report["ledgers"].values():
        assert 0 <= ledger["spent"] <= ledger["bound"] + 1e-3
    assert report["ledgers"]["timing_refresh"]["ordinary"] > 300_000  # ms: busy for more than half of the time
    assert max(served.last_ns for served in outcome.requests) < 660e9  # it kept up
    print(f"{outcome.recorder.frames} frames, goodput {report['goodput']}")


def slow_profile(folder: Path) -> CostProfile:
    """The toy's tables with steps of 35 ms and cheap prompts: a server that 5.5 requests a second keep busy."""
    components = profile_document()["profiles"][0]["components"]
    tokens = components["linear_ms"]["tokens"]
    components["linear_ms"]["ms"] = [34 + 0.005 * count for count in tokens]
    components["attn_decode_ms"]["ms"] = [[value / 10 for value in row] for row in components["attn_decode_ms"]["ms"]]
    return load_profile(profile_file(folder, components=components), "toy.gpu")


def test_device_time_follows_the_profile_and_the_acceptance(tmp_path: Path) -> None:
    """Tokens a round approach the published mean; a lone request's rounds take the profile's times."""
    table = load_acceptance(f"{shared_data('acceptance.json')}:eagle3/Llama-3.1-8B")
    profile = shared_profile(H100)
    lone = Trace(
        name="lone", kind="poisson", at_s=np.array([0.0]), prompt_len=np.array([500]),
        output_len=np.array([3000]), client=np.array([0]),
    )  # fmt: skip
    experiment = Experiment(profile=profile, policy="fcfs-prefill", seconds=1.0, acceptance=table, host_ms=0.0)
    outcome = run_experiment(experiment, lone)
    rounds = len(outcome.requests[0].gaps_ns)
    assert 2999 / rounds == pytest.approx(1 + sum(table.rates), rel=0.05)
    gaps = np.array(outcome.requests[0].gaps_ns) / 1e6
    expected = np.interp(2000, [1, 32768], [gaps.min(), gaps.max()])
    width_four = 6.1681 + 0.4267 + 3 * 0.3203  # linear and head of four rows, three drafts
    assert gaps.min() == pytest.approx(width_four + 0.42, abs=0.03)
    assert gaps.max() < expected + 1.0


def test_without_a_host_delay_frames_follow_each_other(tmp_path: Path) -> None:
    """A lone stream of two frames in flight: gaps are the device's step times, whatever the host takes."""
    profile = load_profile(profile_file(tmp_path), "toy.gpu")
    lone = Trace(
        name="lone", kind="poisson", at_s=np.array([0.0]), prompt_len=np.array([100]),
        output_len=np.array([300]), client=np.array([0]),
    )  # fmt: skip
    gaps = {}
    for frames in (1, 2):
        experiment = Experiment(
            profile=profile, seconds=1.0, slots=1, frames=frames, host_ms=0.7, kv_gib=0.1, warm=True
        )
        gaps[frames] = np.array(run_experiment(experiment, lone).requests[0].gaps_ns) / 1e6
    device_ms = 2.01 + 0.501 + 1e-4 * np.maximum(128, np.arange(101, 400))  # attention's grid starts at 128
    assert gaps[1] == pytest.approx(device_ms + 0.7, abs=1e-3)
    assert np.median(gaps[2]) == pytest.approx(np.median(device_ms), abs=0.05)


def test_the_catalogue_has_what_the_experiment_needs() -> None:
    plain, drafted = simulation_catalog(64, 2048), simulation_catalog(64, 2048, 3)
    assert [shape.batch_capacity for shape in plain.of_kind(ProgramKind.DECODE)] == [1, 2, 4, 8, 16, 32, 64]
    assert {shape.batch_capacity for shape in plain.of_kind(ProgramKind.PREFILL)} == {1, 8}
    assert plain.of_kind(ProgramKind.MIXED)
    rounds = drafted.of_kind(ProgramKind.SPECULATIVE)
    assert {shape.proposal_depth for shape in rounds} == {0, 1, 2, 3}
    ragged = [shape for shape in rounds if shape.packed_capacity < shape.batch_capacity * shape.token_capacity]
    assert {shape.allocation for shape in ragged} == set(Allocation)
    assert not drafted.of_kind(ProgramKind.DECODE)


def test_goodput_falls_with_load_and_the_objectives(tmp_path: Path) -> None:
    profile = load_profile(profile_file(tmp_path), "toy.gpu")
    goodputs = []
    for rate, limit in ((5, 200.0), (40, 200.0), (40, 1.0)):
        trace = load_trace(f"poisson:{rate}", seconds=1.0, seed=1)
        experiment = Experiment(profile=profile, seconds=1.0, slots=8, kv_gib=0.1, policy="fcfs-chunked")
        strict = dataclasses.replace(experiment.objectives, ttft_ms=limit)
        outcome = run_experiment(dataclasses.replace(experiment, objectives=strict), trace)
        goodputs.append(outcome.report["goodput"])
    assert goodputs[0] > goodputs[1] > goodputs[2] == 0


def test_an_experiment_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    profile = load_profile(profile_file(tmp_path), "toy.gpu")
    with pytest.raises(ConfigError, match="unknown policy 'sjf'; choose one of balanced"):
        Experiment(profile=profile, policy="sjf")
    with pytest.raises(ConfigError, match="frames must be in"):
        Experiment(profile=profile, frames=3)
