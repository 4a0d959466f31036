"""A prepared core without a model: the fake device behind the same attributes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from helios_jax.aot.abi import Dims
from helios_jax.aot.speculation import DEFAULT_DRAFT_TOKENS, default_rows, joint_shapes, reduced, round_shapes
from helios_jax.config import EngineConfig
from helios_jax.engine.async_llm import AsyncLLM
from helios_jax.engine.host_copying import CopySizes
from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import Catalog, copy_shapes, serving_catalog
from helios_jax.scheduler.types import Limits
from helios_jax.testing.device import FakeRunner
from helios_jax.testing.tokenizer import ByteTokenizer

MOST_COPIED_BYTES = 1 << 20


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

    def enable_host_copies(self) -> CopySizes:
        """The fake device always copies; these are its sizes.

        Raises:
            ConfigError: The core has no state rows.
        """
        if not self.dims.state_rows:
            raise ConfigError("host_checkpoint_bytes needs a core with state rows: this one keeps no checkpoints")
        return CopySizes(4 * self.dims.page_size, 4 * self.dims.page_size + 24, MOST_COPIED_BYTES)

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
    spec_method: str = "none",
    num_draft_tokens: int | None = None,
    speculative_token_capacity: int | None = None,
    mixed_prefill: bool = False,
    state_rows: int = 0,
    recurrent: bool = True,
    frames: int = 2,
    **runner_options: Any,
) -> FakeCore:
    """A core that needs no compilation.

    Args:
        max_slots, max_context, page_size, prefill_chunk, vocab_size: As of a real core.
        num_pages: Usable pages; None gives every slot a full context.
        spec_method, num_draft_tokens, speculative_token_capacity, mixed_prefill: As of a real core; "draft" and
            "mtp" are the runner's `FakeDraft`.
        state_rows: States that are kept for prompts that begin alike; 0 = none.
        recurrent: The model has state outside of pages.
        frames: Frames in flight, 1 or 2.
        runner_options: Of `FakeRunner`: next_token, draft, clock, duration_ns, gate, on_submit, on_complete,
            on_copy.
    """
    depth = 0 if spec_method == "none" else num_draft_tokens or DEFAULT_DRAFT_TOKENS[spec_method]
    extent = 0 if spec_method == "copy" else depth
    per_slot = -(-(max_context + extent) // page_size)
    usable = num_pages if num_pages is not None else max_slots * per_slot
    dims = Dims(
        slots=max_slots,
        pages_per_slot=per_slot,
        num_pages=usable + 1,
        page_size=page_size,
        vocab_size=vocab_size,
        state_rows=state_rows,
    )
    limits = Limits(
        slots=max_slots,
        pages=usable,
        page_size=page_size,
        max_context=max_context,
        state_rows=state_rows,
        draft_extent=extent,
        frames=frames,
        shares_parts=not recurrent and not extent,
    )
    shapes = list(serving_catalog(max_slots=max_slots, prefill_chunk=prefill_chunk))
    shapes += copy_shapes(max_slots) if state_rows else ()
    rows = speculative_token_capacity or default_rows(max_slots, depth)
    shapes += round_shapes(method=spec_method, max_slots=max_slots, draft_tokens=depth, token_capacity=rows)
    if mixed_prefill:
        joint = joint_shapes(
            method=spec_method,
            max_slots=max_slots,
            prefill_chunk=prefill_chunk,
            draft_tokens=depth,
            token_capacity=rows,
        )
        shapes += reduced(joint, method=spec_method, draft_tokens=None, token_capacity=None, mixed=True)
    info = FakeSourceInfo(name=name)
    return FakeCore(Catalog(tuple(shapes)), dims, limits, FakeRunner(dims, recurrent=recurrent, **runner_options), info)


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
