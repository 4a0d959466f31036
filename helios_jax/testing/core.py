"""A prepared core without a model: the fake device behind the same attributes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from helios_jax.aot.abi import Dims
from helios_jax.config import EngineConfig
from helios_jax.engine.async_llm import AsyncLLM
from helios_jax.scheduler.catalog import Catalog, serving_catalog
from helios_jax.scheduler.types import Limits
from helios_jax.testing.device import FakeRunner
from helios_jax.testing.tokenizer import ByteTokenizer


@dataclasses.dataclass(frozen=True)
class FakeSourceInfo:
    """What a core says of its model."""

    name: str = "fake"
    eos_token_ids: tuple[int, ...] = (257,)
    bos_token_id: int | None = 256


class FakeCore:
    """Catalogue, sizes and a `FakeRunner`; see `fake_core`."""

    def __init__(self, catalog: Catalog, dims: Dims, limits: Limits, runner: FakeRunner, info: FakeSourceInfo) -> None:
        self.catalog, self.dims, self.limits, self.runner, self.source_info = catalog, dims, limits, runner, info
        self.report: tuple[Any, ...] = ()

    def compiles_after_ready(self) -> int:
        """Nothing is ever compiled."""
        return 0

    def close(self) -> None:
        self.runner.close()


def fake_core(
    *,
    max_slots: int = 4,
    max_context: int = 256,
    page_size: int = 16,
    num_pages: int | None = None,
    prefill_chunk: int = 64,
    vocab_size: int = 260,
    name: str = "fake",
    **runner_options: Any,
) -> FakeCore:
    """A core that needs no compilation.

    Args:
        max_slots, max_context, page_size, prefill_chunk, vocab_size: As of a real core.
        num_pages: Usable pages; None gives every slot a full context.
        runner_options: Of `FakeRunner`: next_token, clock, duration_ns, gate, on_submit, on_complete.
    """
    per_slot = -(-max_context // page_size)
    usable = num_pages if num_pages is not None else max_slots * per_slot
    dims = Dims(
        slots=max_slots,
        pages_per_slot=per_slot,
        num_pages=usable + 1,
        page_size=page_size,
        vocab_size=vocab_size,
    )
    limits = Limits(slots=max_slots, pages=usable, page_size=page_size, max_context=max_context)
    catalog = serving_catalog(max_slots=max_slots, prefill_chunk=prefill_chunk)
    return FakeCore(catalog, dims, limits, FakeRunner(dims, **runner_options), FakeSourceInfo(name=name))


ENGINE_OPTIONS = tuple(field.name for field in dataclasses.fields(EngineConfig))


def fake_async_llm(**options: Any) -> AsyncLLM:
    """An AsyncLLM over `fake_core` and `ByteTokenizer`, not started: use `async with`.

    Args:
        options: Of `fake_core`, and of the engine (`ENGINE_OPTIONS`); a `clock` goes to both.
    """
    config = EngineConfig(**{key: options.pop(key) for key in ENGINE_OPTIONS if key in options})
    clock = options.get("clock") or time.monotonic_ns
    tokenizer = options.pop("tokenizer", None) or ByteTokenizer(vocab_size=options.get("vocab_size", 260))
    return AsyncLLM.from_core(fake_core(**options), tokenizer=tokenizer, clock=clock, config=config)
