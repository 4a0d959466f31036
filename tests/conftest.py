"""Fixtures shared by all rooms: where prepared cores live, and the one real core of a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before jax is imported anywhere: two test processes on two cores must not fight for threads.
os.environ.setdefault("JAX_PLATFORMS", "cpu" if not os.environ.get("FLARE_RUN_CUDA_TESTS") else "")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of prepared cores; HELIOS_JAX_TEST_CACHE keeps it between runs.

    Parallel workers share it: preparing locks a core's directory, so each is compiled once.
    """
    named = os.environ.get("HELIOS_JAX_TEST_CACHE")
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    path = Path(named) if named else base / "cores"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def smollm2_core_dir(cache_dir: Path) -> Path:
    """A prepared core of the default model: 8 slots, context 512, float32, chunk 128.

    One a session: every test that needs the real model shares it.
    """
    from helios_jax.aot import CoreOptions, prepare
    from helios_jax.aot.core import load_core
    from helios_jax.errors import CoreError
    from helios_jax.models.source import open_source

    out = cache_dir / "smollm2-8x512"
    options = CoreOptions(max_slots=8, max_context=512, dtype="float32", prefill_chunk=128)
    try:
        load_core(out).close()
    except CoreError:
        prepare(open_source("smollm2"), options, out).close()
    return out


@pytest.fixture(scope="session")
def smollm2_rounds_core_dir(cache_dir: Path) -> Path:
    """The default model with rounds of up to 3 copied proposals: 4 slots, context 512, chunk 128.

    Loaded with `spec_method` none it is a plain core of four slots.
    """
    from helios_jax.aot import CoreOptions, prepare
    from helios_jax.aot.core import load_core
    from helios_jax.errors import CoreError
    from helios_jax.models.source import open_source

    out = cache_dir / "smollm2-copy-4x512"
    options = CoreOptions(
        max_slots=4, max_context=512, prefill_chunk=128, spec_method="copy", num_draft_tokens=3, state_rows=0
    )
    try:
        load_core(out).close()
    except CoreError:
        prepare(open_source("smollm2"), options, out).close()
    return out


@pytest.fixture(scope="session")
def tiny_core_dir(cache_dir: Path) -> Path:
    """A prepared core of a tiny Llama with transformers' goldens: 8 slots, context 128, chunk 64."""
    from helios_jax.aot import CoreOptions, prepare
    from tests.golden.tiny import tiny_checkpoint

    out = cache_dir / "tiny-llama3-8x128"
    options = CoreOptions(max_slots=8, max_context=128, prefill_chunk=64)
    prepare(tiny_checkpoint("llama3"), options, out).close()
    return out


@pytest.fixture(scope="session")
def tiny_copy_core_dir(cache_dir: Path) -> Path:
    """The tiny Llama with rounds of up to 3 copied proposals: 2 slots, context 128, chunk 64."""
    from helios_jax.aot import CoreOptions, prepare
    from tests.golden.tiny import tiny_checkpoint

    out = cache_dir / "tiny-llama3-copy-2x128"
    options = CoreOptions(
        max_slots=2, max_context=128, prefill_chunk=64, spec_method="copy", num_draft_tokens=3, state_rows=0
    )
    prepare(tiny_checkpoint("llama3"), options, out).close()
    return out


@pytest.fixture(scope="session")
def tiny_draft_core_dir(cache_dir: Path) -> Path:
    """The tiny Llama with a tiny Qwen3 as draft model, 2 proposals a round: 1 slot, context 128; 7 programs."""
    from helios_jax.aot import CoreOptions, prepare
    from tests.golden.tiny import tiny_checkpoint

    out = cache_dir / "tiny-llama3-draft"
    options = CoreOptions(
        max_slots=1,
        max_context=128,
        prefill_chunk=64,
        spec_method="draft",
        draft_model=str(tiny_checkpoint("qwen3")),
        num_draft_tokens=2,
        state_rows=0,
    )
    prepare(tiny_checkpoint("llama3"), options, out).close()
    return out


@pytest.fixture(scope="session")
def tiny_hybrid_core_dir(cache_dir: Path) -> Path:
    """A tiny Qwen3-Next with few rows for checkpoints: 2 slots, context 256, chunk 64, 3 state rows."""
    from helios_jax.aot import CoreOptions, prepare
    from tests.golden.tiny import tiny_checkpoint

    out = cache_dir / "tiny-qwen3_next-rows"
    options = CoreOptions(max_slots=2, max_context=256, prefill_chunk=64, state_rows=3)
    prepare(tiny_checkpoint("qwen3_next"), options, out).close()
    return out
