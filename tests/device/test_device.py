"""One prepared script for one GPU and ten minutes: parity, program memory, speed beside the HBM bound.

    FLARE_RUN_CUDA_TESTS=1 python -m pytest -m device -s tests/device

Prints what it measures. `FLARE_DEVICE_TESTS_ON_CPU=1` runs the same script with a small model
on a CPU, to check the script itself; CI does, so that it works on the day a GPU is there.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.tiny import FAMILIES, GREEDY_LEN, golden, tiny_checkpoint

pytestmark = pytest.mark.device
STREAMS = (1, 8, 32)
PREFILL_LEN, DECODE_PROMPT_LEN = 2048, 32
NEW_TOKENS = 64


@pytest.fixture(scope="module", autouse=True)
def backend() -> str:
    """The accelerator's backend name; skips, saying so, where there is none."""
    import jax

    name = jax.default_backend()
    if not os.environ.get("FLARE_RUN_CUDA_TESTS") or (
        name == "cpu" and not os.environ.get("FLARE_DEVICE_TESTS_ON_CPU")
    ):
        pytest.skip(f"device tests need an accelerator and FLARE_RUN_CUDA_TESTS=1; the backend here is {name}")
    return name


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    from helios_jax import LLM, SamplingParams

    expected = golden(family)
    params = SamplingParams(temperature=0, max_tokens=GREEDY_LEN, ignore_eos=True)
    core = tmp_path / "core"
    with LLM(tiny_checkpoint(family), core=core, max_slots=2, max_context=128, prefill_chunk=64, progress=False) as llm:
        outputs = llm.generate([expected["prompt"].tolist()] * 2, params)
        assert [o.outputs[0].token_ids for o in outputs] == [expected["greedy"].tolist()] * 2
        assert llm.stats().compiles_after_ready == 0


def _device_bandwidth(num_bytes: int) -> float:
    """Bytes/s of reading a buffer once (a sum), best of ten."""
    import jax
    import jax.numpy as jnp

    buffer = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(buffer).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        total(buffer).block_until_ready()
        times.append(time.perf_counter() - start)
    return num_bytes / min(times)


def _speeds(frames: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """By program, over measured frames: (tokens/s of the device, executions/s)."""
    speeds = {}
    for name in sorted({f["shape"] for f in frames if f["kind"] in ("decode", "prefill")}):
        chosen = [f for f in frames if f["shape"] == name and f["reason"] == "ordinary"]
        if chosen:
            seconds = sum(max(f["device_ns"]) for f in chosen) / 1e9
            speeds[name] = (sum(f["tokens"] for f in chosen) / seconds, len(chosen) / seconds)
    return speeds


def test_memory_and_speed_beside_the_bound(backend: str, tmp_path: Path) -> None:
    import jax

    from helios_jax import LLM, SamplingParams
    from helios_jax.aot import CoreOptions, inspect_core, prepare
    from helios_jax.config import EngineConfig
    from tests.device.synthetic import synthetic_source

    on_cpu = backend == "cpu"
    length = 256 if on_cpu else PREFILL_LEN
    options = CoreOptions(
        max_slots=max(STREAMS),
        max_context=2 * length,
        dtype="float32" if on_cpu else "bfloat16",
        page_size=64,
        prefill_chunk=length,
    )
    source = synthetic_source("small" if on_cpu else "full", tiny_checkpoint("qwen3"))
    started = time.perf_counter()
    core = prepare(source, options, tmp_path / "core")
    print(f"\nprepared in {time.perf_counter() - started:.1f} s: {core.summary()}")
    for row in inspect_core(tmp_path / "core"):
        print(row)

    trace = tmp_path / "trace.jsonl"
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(core.params))
    with LLM.from_core(core, config=EngineConfig(trace=trace)) as llm:
        for streams in (*STREAMS, *STREAMS):  # the first pass measures every program once
            prompts = [rng.integers(3, core.dims.vocab_size, length).tolist() for _ in range(streams)]
            outputs = llm.generate(prompts, params)
            assert all(len(o.outputs[0].token_ids) == NEW_TOKENS for o in outputs)
        assert llm.stats().compiles_after_ready == 0
        assert llm.stats().pages_used == 0
    frames = [json.loads(line) for line in trace.read_text().splitlines()]
    bandwidth = _device_bandwidth(1 << (26 if on_cpu else 32))
    print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s, weights {weight_bytes / 1e9:.2f} GB")
    speeds = _speeds(frames)
    for name, (tokens, executions) in speeds.items():
        # a decode step reads every weight once; a prefill is bound by arithmetic instead
        share = f", {executions * weight_bytes / bandwidth:.2f} of the bound" if name.startswith("decode") else ""
        print(f"{name}: {tokens:.0f} tokens/s{share}")
    assert any(name.startswith("decode") for name in speeds)
    assert any(name.startswith("prefill") for name in speeds)
