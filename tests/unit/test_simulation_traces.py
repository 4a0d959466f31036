"""Traces: each format from a small file, the shared files whole, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import ConfigError
from helios_jax.simulation.traces import SYNTHETIC_CLIENTS, Trace, load_trace
from tests.unit.simulation_toy import azure_file, shared_data


def same(first: Trace, second: Trace) -> bool:
    names = ("at_s", "prompt_len", "output_len", "client")
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def test_azure_times_are_those_of_the_file(tmp_path: Path) -> None:
    path = azure_file(tmp_path, [(5.25, 10, 3), (7.5, 20, 4), (65.0, 30, 5)])
    trace = load_trace(str(path), seconds=100)
    assert trace.at_s == pytest.approx([0, 2.25, 59.75], abs=1e-6)
    assert trace.prompt_len.tolist() == [10, 20, 30]
    assert trace.output_len.tolist() == [3, 4, 5]


def test_azure_times_of_2024_have_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "azure2024.csv"
    rows = ["2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 02:00:02+02:00,2399,6", "2024-05-10 00:00:03,1,2",
            "2024-05-10T00:00:04.5Z,1,2"]  # fmt: skip
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    trace = load_trace(str(path), seconds=100)
    assert trace.at_s == pytest.approx([0, 1.99007, 2.99007, 4.49007], abs=1e-6)
    assert trace.prompt_len.tolist() == [2162, 2399, 1, 1]


def test_speed_multiplies_the_load_and_start_skips(tmp_path: Path) -> None:
    path = azure_file(tmp_path, [(0, 1, 1), (10, 2, 1), (20, 3, 1), (30, 4, 1)])
    fast = load_trace(str(path), seconds=10, speed=2)
    assert fast.at_s == pytest.approx([0, 5])  # second 20 of the trace is second 10 of the run, and no longer in it
    later = load_trace(str(path), seconds=15, start_s=15)
    assert later.prompt_len.tolist() == [3]
    assert later.at_s == pytest.approx([5])


def test_mooncake_is_spread_over_its_grid(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 3000 * (i // 50), "input_length": i + 1, "output_length": 2, "hash_ids": []} for i in range(200)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    trace = load_trace(str(path), seconds=100, seed=1)
    assert (np.diff(trace.at_s) >= 0).all()
    grid = (trace.prompt_len - 1) // 50 * 3.0
    assert ((trace.at_s >= grid) & (trace.at_s < grid + 3)).all()
    assert len(np.unique(trace.at_s)) == 200


def client_model(**changes: Any) -> dict[str, Any]:
    model = {
        "category": "chat", "client": "1", "quantile_pct": [0, 50, 100],
        "windows_10min": [[0, 20.0, 1.0, "Gamma", 1.0, 0.05], [600, 5.0, 2.0, "Weibull", 0.5, 0.1]],
        "token_quantiles_6h": {"0": {"input_tokens": [10, 20, 40], "output_tokens": [1, 2, 3]}},
    }  # fmt: skip
    return {**model, **changes}


def test_client_models_keep_their_rates_and_quantiles(tmp_path: Path) -> None:
    path = tmp_path / "clients.json"
    path.write_text(json.dumps([client_model(), client_model(), client_model(category="reason")]))
    trace = load_trace(f"{path}:chat", seconds=1200, seed=2)
    assert set(trace.client.tolist()) == {0, 1}
    first = int((trace.at_s < 600).sum())
    assert first == pytest.approx(2 * 20 * 600, rel=0.05)
    assert len(trace) - first == pytest.approx(2 * 5 * 600, rel=0.15)
    assert trace.prompt_len.min() >= 10
    assert trace.prompt_len.max() <= 40
    assert np.median(trace.prompt_len) == pytest.approx(20, abs=1)
    with pytest.raises(ConfigError, match="needs a category: give FILE:CATEGORY with one of chat, reason"):
        load_trace(str(path), seconds=1)
    with pytest.raises(ConfigError, match="has no category 'code'"):
        load_trace(f"{path}:code", seconds=1)


def test_lengths_need_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n100,7\n200,9\n")
    trace = load_trace(str(path), seconds=200, seed=3, rate=10)
    assert len(trace) == pytest.approx(2000, rel=0.1)
    assert set(zip(trace.prompt_len.tolist(), trace.output_len.tolist(), strict=True)) == {(100, 7), (200, 9)}
    with pytest.raises(ConfigError, match="give --rate"):
        load_trace(str(path), seconds=200)


def test_poisson_arrivals_and_documented_lengths() -> None:
    trace = load_trace("poisson:50", seconds=400, seed=4)
    gaps = np.diff(trace.at_s)
    assert len(trace) == pytest.approx(20_000, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert np.median(trace.prompt_len) == pytest.approx(512, rel=0.05)
    assert np.median(trace.output_len) == pytest.approx(128, rel=0.05)
    assert set(trace.client.tolist()) == set(range(SYNTHETIC_CLIENTS))


def test_one_seed_one_trace() -> None:
    first, second, other = (load_trace("poisson:5", seconds=50, seed=seed) for seed in (1, 1, 2))
    assert same(first, second)
    assert not same(first, other)


@pytest.mark.parametrize(
    ("name", "kind", "requests"),
    [
        ("traces/azure_llm_2023_conv.csv", "azure", 19_366),
        ("traces/mooncake_conversation.jsonl", "mooncake", 3000),
        ("traces/servegen_clients.json:language/m-small", "servegen", 100_000),
        ("traces/servegen_clients.json:reason/deepseek-r1", "servegen", 1000),
        ("traces/arxiv_summarization_lengths.csv", "lengths", 3000),
    ],
)
def test_the_shared_traces_are_read_whole(name: str, kind: str, requests: int) -> None:
    file, _, category = name.partition(":")
    path = shared_data(file)
    source = f"{path}:{category}" if category else str(path)
    trace = load_trace(source, seconds=3600, rate=1.0 if kind == "lengths" else None)
    assert trace.kind == kind
    exact = kind in ("azure", "mooncake")
    assert len(trace) == requests if exact else len(trace) > requests
    assert (np.diff(trace.at_s) >= 0).all()
    assert trace.prompt_len.min() >= 1
    assert trace.output_len.min() >= 1


def mooncake(**changes: str) -> str:
    """One line of a trace, values as JSON text."""
    entry = {"timestamp": "0", "input_length": "5", "output_length": "5", **changes}
    return "{" + ", ".join(f'"{key}": {value}' for key, value in entry.items()) + "}\n"


def clients(shape: object = 1.0, rate: object = 20.0, **changes: Any) -> str:
    """A file of one client model."""
    return json.dumps([client_model(windows_10min=[[0, rate, 1.0, "Weibull", shape, 0.1]], **changes)])


def quantiles(*values: object) -> dict[str, Any]:
    return {"0": {"input_tokens": values, "output_tokens": [1, 2, 3]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (clients(shape=0), "chat is malformed .*shape 0"),
        (clients(shape=0.001), r"chat is malformed .*shape 0\.001"),
        (clients(shape=math.nan), "chat is malformed .*shape nan"),
        (clients(shape=1e9), "chat is malformed .*shape 1000000000"),
        (clients(rate=math.nan), "chat is malformed .*rate nan"),
        (clients(rate=1e300), "chat is malformed .*too large"),
        (clients(rate=None), "chat is malformed"),
        (clients(category=None), "is no list of client models .*a category that is no text"),
        (clients(token_quantiles_6h=quantiles(1, math.nan, 3)), "chat is malformed .*must rise within"),
        (clients(token_quantiles_6h=quantiles(1, 2, 1e30)), "chat is malformed .*must rise within"),
        (clients(token_quantiles_6h=quantiles(3, 2, 1)), "chat is malformed .*must rise within"),
        (clients(token_quantiles_6h=quantiles(1, 2)), "chat is malformed .*same length"),
        (clients(token_quantiles_6h=quantiles("a", 2, 3)), "chat is malformed"),
        (clients(token_quantiles_6h={}), "chat is malformed .*token_quantiles_6h is empty"),
        (clients(token_quantiles_6h=None), "chat is malformed"),
        (clients(quantile_pct=[]), "chat is malformed .*must rise within"),
    ],
)
def test_broken_client_models_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "clients.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(f"{path}:chat", seconds=10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "is no trace that is known here"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: 'yesterday,1,2' is no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,0,5\n", "lengths at least 1"),
        ('{"timestamp": 0}\n', "line 1: no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+25:00,1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5e9,1,2\n", "line 2: .*the time is not"),
        (f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,{10**400},2\n", "line 2: .*at most 2147483647"),
        (f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'9' * 200_000},1,2\n", "line 2: .*field larger"),
        ("{broken\n", "line 1: no request"),
        (mooncake(input_length="Infinity"), "line 1: no request .a length or an id must be a whole number, not inf"),
        (mooncake(input_length="10.7"), "line 1: no request .a length or an id must be a whole number, not 10.7"),
        (mooncake(output_length="true"), "line 1: no request .a length or an id must be a whole number, not True"),
        (mooncake(timestamp="NaN"), "line 1: no request .times must be finite"),
        (mooncake(timestamp="1" + "0" * 400), "line 1: no request"),
        (mooncake(output_length="1" + "0" * 400), "line 1: no request .*at most 2147483647"),
        ("[1, 2]", "is no list of client models"),
    ],
)
def test_broken_traces_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(str(path), seconds=10)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("poisson:", {}, "needs a rate"),
        ("poisson:-1", {}, "needs a rate"),
        ("poisson:nan", {}, "needs a rate"),
        ("poisson:1e9", {}, "shorten --seconds"),
        ("poisson:1", {"seconds": 0.0}, "seconds must be finite"),
        ("poisson:1", {"rate": 2.0}, "has arrival times of its own"),
        ("poisson:1", {"start_s": 2.0}, "are the same from any start"),
        ("poisson:1", {"seed": -1}, "seed must be at least 0, got -1"),
        ("x" * 5000, {}, "cannot read the trace"),
        ("poisson:1", {"speed": -2.0}, "speed must be finite"),
        ("poisson:1", {"start_s": -2.0}, "start must be finite"),
        ("/nonexistent/trace.csv", {}, "cannot read the trace"),
        (".", {}, "cannot read the trace"),
    ],
)
def test_parameters_out_of_range(source: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_trace(source, **{"seconds": 10.0, **options})
