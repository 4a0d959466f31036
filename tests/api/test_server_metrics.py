"""Metrics over HTTP: counts that reconcile at every moment, histograms from HTTP arrival, the scheduler's names."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.engine.stats import CheckpointStats, HostTierStats
from helios_jax.server.metrics import SCHEDULER_GAUGES
from helios_jax.testing import Gate
from tests.api.server_kit import ScriptedEngine, async_test, chat_body, client_for, fake_client, one_output

TEXT = "/v1/completions"


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    """All samples; labels are part of the key."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def outcomes(samples: dict[str, float]) -> dict[str, float]:
    return {k.split("=")[1][:-1]: v for k, v in samples.items() if k.startswith("helios_requests_total{")}


@async_test
async def test_counts_reconcile_at_every_scrape() -> None:
    """arrived = finished + cancelled + failed + refused + in flight, while requests come, end and are cancelled."""
    rng = random.Random(7)
    async with fake_client(max_slots=2, max_queue=6) as client:
        tasks: list[asyncio.Task[httpx.Response]] = []
        for number in range(60):
            body = {"prompt": "abc", "max_tokens": rng.randint(0, 9), "stream": rng.random() < 0.5}
            if rng.random() < 0.2:
                body["temperature"] = -1
            tasks.append(asyncio.create_task(client.post(TEXT, json=body)))
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if number % 7 == 0:
                samples = await scrape(client)
                ended = sum(outcomes(samples).values())
                assert samples["helios_requests_arrived_total"] == ended + samples["helios_requests_in_flight"]
        await asyncio.gather(*tasks, return_exceptions=True)
        while client.llm.stats().requests.active or client.llm.stats().pages_used:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        samples = await scrape(client)
    counts = outcomes(samples)
    assert samples["helios_requests_in_flight"] == 0
    assert samples["helios_requests_arrived_total"] == sum(counts.values())
    assert counts["finished"] > 0
    assert counts["refused"] > 0
    assert samples["helios_pages_used"] == samples["helios_engine_sequences_running"] == 0
    assert samples["helios_engine_queue"] == samples["helios_compiles_after_ready"] == 0
    engine = {k: v for k, v in samples.items() if k.startswith("helios_engine_requests_total{")}
    arrived = engine.pop("helios_engine_requests_total{outcome=arrived}")
    assert arrived == sum(engine.values())


@async_test
async def test_time_to_first_token_counts_from_http_arrival() -> None:
    """Queueing is part of it: a request held back for 0.2 s cannot show less."""
    gate = Gate()
    gate.close()
    async with fake_client(gate=gate, max_slots=1) as client:
        tasks = [
            asyncio.create_task(client.post(TEXT, json={"prompt": "abc", "max_tokens": 4, "stream": stream}))
            for stream in (True, False)
        ]
        await asyncio.sleep(0.2)
        # Frame by frame: outputs of a free-running fake device reach a reader merged, without gaps.
        while await asyncio.to_thread(gate.wait_for_frame, 1.0):
            gate.step()
        gate.open()
        await asyncio.gather(*tasks)
        samples = await scrape(client)
    assert samples["helios_time_to_first_token_seconds_count"] == 2
    assert samples["helios_time_to_first_token_seconds_sum"] >= 0.4
    assert samples["helios_request_seconds_count"] == 2
    assert samples["helios_queue_seconds_count"] >= 1
    assert samples["helios_time_per_output_token_seconds_count"] == 2
    assert 1 <= samples["helios_inter_token_seconds_count"] <= 3
    assert samples["helios_generation_tokens_total"] == 8
    assert samples["helios_prompt_tokens_total"] == 6
    assert samples["helios_choices_total{finish_reason=length}"] == 2


@async_test
async def test_scheduler_counters_have_the_names_of_the_specification() -> None:
    async with fake_client() as client:
        await client.post(TEXT, json={"prompt": "abc", "max_tokens": 4})
        samples = await scrape(client)
        text = (await client.get("/metrics")).text
    executions = [v for k, v in samples.items() if k.startswith("flare_scheduler_executions_total{reason=")]
    nanoseconds = [v for k, v in samples.items() if k.startswith("flare_scheduler_execution_nanoseconds_total{reason=")]
    assert sum(executions) == samples["helios_frames_total"] > 0
    assert sum(nanoseconds) > 0
    assert samples["flare_scheduler_used_tokens_by_kind_total{kind=prefill}"] == 3
    assert samples["flare_scheduler_requests_admitted_total"] == 1
    text_types = {f.name: f.type for f in text_string_to_metric_families(text) if f.name.startswith("flare_")}
    gauges = {name.removeprefix("flare_scheduler_") for name, kind in text_types.items() if kind == "gauge"}
    assert gauges == SCHEDULER_GAUGES
    assert set(text_types.values()) == {"counter", "gauge"}


@async_test
async def test_reuse_of_prefixes() -> None:
    """Tokens under vLLM's names, why matches were cut by reason, and checkpoints come and go."""
    stats = CheckpointStats(hits=1, misses=2, queried_tokens=30, hit_tokens=4, snapshots=5, restores=6, evictions=7,
                            rows_total=8, rows_used=3, published=2, pages_held=9)  # fmt: skip
    stats.cuts["evicted"], stats.cut_tokens["evicted"] = 10, 11

    async def outputs(request_id: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        yield one_output(request_id)

    engine = ScriptedEngine(outputs)
    engine.checkpoints = stats
    async with client_for(engine) as client:
        samples = await scrape(client)
    prefixes = ("helios_prefix_", "helios_checkpoint", "helios_state_")
    assert {name: value for name, value in samples.items() if name.startswith(prefixes)} == {
        "helios_prefix_cache_queries_total": 30,
        "helios_prefix_cache_hits_total": 4,
        "helios_prefix_cache_requests_total{result=hit}": 1,
        "helios_prefix_cache_requests_total{result=miss}": 2,
        "helios_prefix_cache_cuts_total{reason=no_state}": 0,
        "helios_prefix_cache_cuts_total{reason=evicted}": 10,
        "helios_prefix_cache_cuts_total{reason=too_short}": 0,
        "helios_prefix_cache_cut_tokens_total{reason=no_state}": 0,
        "helios_prefix_cache_cut_tokens_total{reason=evicted}": 11,
        "helios_prefix_cache_cut_tokens_total{reason=too_short}": 0,
        "helios_checkpoint_snapshots_total": 5,
        "helios_checkpoint_restores_total": 6,
        "helios_checkpoint_evictions_total": 7,
        "helios_checkpoint_pages": 9,
        "helios_checkpoints": 2,
        "helios_state_rows_total": 8,
        "helios_state_rows_used": 3,
    }


@async_test
async def test_checkpoints_on_the_host() -> None:
    async def outputs(request_id: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        yield one_output(request_id)

    engine = ScriptedEngine(outputs)
    async with client_for(engine) as client:
        assert not [name for name in await scrape(client) if "_host_checkpoint" in name]
        engine.host_tier = HostTierStats(saved=1, lost=2, evicted=3, restored=4, restored_tokens=5, checkpoints=6,
                                         bytes_used=7, bytes_total=8)  # fmt: skip
        samples = await scrape(client)
    assert {name: value for name, value in samples.items() if "_host_checkpoint" in name} == {
        "helios_host_checkpoints_saved_total": 1,
        "helios_host_checkpoints_lost_total": 2,
        "helios_host_checkpoints_evicted_total": 3,
        "helios_host_checkpoints_restored_total": 4,
        "helios_host_checkpoints_restored_tokens_total": 5,
        "helios_host_checkpoints": 6,
        "helios_host_checkpoint_bytes": 7,
        "helios_host_checkpoint_bytes_limit": 8,
    }


@async_test
async def test_one_access_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="helios_jax.access"):
        async with fake_client() as client:
            headers = {"x-request-id": "req-7"}
            await client.post("/v1/chat/completions", json=chat_body(max_tokens=3), headers=headers)
            await client.post(TEXT, json={"prompt": ""})
            await client.get("/health")
    chat, refused, health = [r.getMessage() for r in caplog.records if r.name == "helios_jax.access"]
    for part in ("POST /v1/chat/completions", "status=200", "id=req-7", "outcome=finished", "completion_tokens=3"):
        assert part in chat
    assert "ttft_ms=" in chat
    assert "finish=length" in chat
    assert "status=400" in refused
    assert "outcome=refused" in refused
    assert health.startswith("GET /health status=200")
