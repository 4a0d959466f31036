"""Options and memory plan: what is refused, with which words, and the arithmetic of pages."""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.aot.memory import human, make_dims, plan_memory
from helios_jax.aot.options import CoreOptions, conflicts
from helios_jax.errors import ConfigError
from tests.unit.core_toy import WIDTH, ToyModel, abstract_state, small_options

PAGE_BYTES = 16 * WIDTH * 4  # page size x width x float32
PARAMS_BYTES = WIDTH * WIDTH * 4


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_slots", 0, "[1, 64]"),
        ("max_slots", 65, "[1, 64]"),
        ("max_slots", 2.0, "[1, 64]"),
        ("max_slots", True, "[1, 64]"),
        ("max_context", 1, ">= 2"),
        ("max_context", "512", ">= 2"),
        ("dtype", "int8", "float32, bfloat16, float16"),
        ("page_size", 32, "16 or 64"),
        ("num_pages", 0, ">= 1"),
        ("num_pages", 2**31, ">= 1"),
        ("prefill_chunk", 0, ">= 1"),
        ("memory_utilization", 0, "(0, 1]"),
        ("memory_utilization", 1.5, "(0, 1]"),
        ("memory_utilization", float("nan"), "(0, 1]"),
    ],
)
def test_a_bad_option_names_itself_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        CoreOptions(**{name: value})
    assert name in str(error.value)
    assert allowed in str(error.value)
    assert repr(value) in str(error.value)


def test_the_models_context_is_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"max_context must be at most 512.*got 513"):
        CoreOptions(max_context=513).resolve(ToyModel())
    assert CoreOptions(max_context=512).resolve(ToyModel()).max_context == 512


def test_a_chunk_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill_chunk must be at most max_context \(64\), got 65"):
        CoreOptions(max_context=64, prefill_chunk=65).resolve(ToyModel())


def test_defaults_follow_the_model() -> None:
    resolved = CoreOptions().resolve(ToyModel(max_position_embeddings=100_000))
    assert (resolved.max_context, resolved.prefill_chunk) == (2048, 512)
    resolved = CoreOptions().resolve(ToyModel(max_position_embeddings=37))
    assert (resolved.max_context, resolved.prefill_chunk) == (37, 37)


def test_only_options_that_were_set_conflict_with_a_core() -> None:
    held = small_options(dtype="bfloat16")
    assert conflicts(CoreOptions(), held) == []
    assert conflicts(CoreOptions(max_slots=2), held) == []
    assert conflicts(CoreOptions(max_slots=3), held) == ["max_slots: asked 3, the core has 2"]


def test_a_value_that_is_said_conflicts_even_if_it_is_the_default() -> None:
    held = small_options(dtype="bfloat16")
    assert conflicts({"dtype": "float32"}, held) == ["dtype: asked 'float32', the core has 'bfloat16'"]
    assert conflicts({"dtype": None, "max_slots": 2, "page_size": 16}, held) == []
    assert conflicts({"max_slots": CoreOptions().max_slots}, held) == ["max_slots: asked 8, the core has 2"]
    with pytest.raises(ConfigError, match="unknown options max_slot;"):
        conflicts({"max_slot": 2}, held)
    with pytest.raises(ConfigError, match="dtype must be"):
        conflicts({"dtype": "int8"}, held)


def plan(budget: int | None, **changes: Any) -> Any:
    options = small_options(**changes).resolve(ToyModel())
    return plan_memory(ToyModel(), options, abstract_state, budget)


def test_every_slot_gets_its_full_context_when_memory_allows() -> None:
    dims, memory = plan(None, max_slots=3, max_context=65)
    assert dims.pages_per_slot == 5  # 65 tokens need a fifth page of 16
    assert dims.num_pages == 3 * 5 + 1  # and the scratch page
    assert memory.page_bytes == PAGE_BYTES
    assert memory.params_bytes == PARAMS_BYTES
    assert memory.state_bytes == dims.num_pages * PAGE_BYTES + 4 * 4  # run counters of 3 slots and scratch


def test_the_default_is_capped_by_the_budget_to_the_page() -> None:
    fixed = PARAMS_BYTES + PAGE_BYTES + 3 * 4  # weights, scratch page, run counters
    for spare in (0, PAGE_BYTES - 1):
        dims, memory = plan(fixed + 5 * PAGE_BYTES + spare)
        assert dims.num_pages == 6
        assert memory.params_bytes + memory.state_bytes == fixed + 5 * PAGE_BYTES
    dims, _ = plan(fixed + 100 * PAGE_BYTES)
    assert dims.num_pages == 2 * 4 + 1


def test_less_than_one_full_context_is_refused_with_the_numbers() -> None:
    fixed = PARAMS_BYTES + PAGE_BYTES + 3 * 4
    with pytest.raises(ConfigError) as error:
        plan(fixed + 3 * PAGE_BYTES)
    text = str(error.value)
    assert "4 KV pages" in text
    assert "room for 3 pages" in text
    assert "max_context 64" in text


def test_pages_that_were_asked_for_are_given_or_refused_never_cut() -> None:
    fixed = PARAMS_BYTES + PAGE_BYTES + 3 * 4
    dims, _ = plan(fixed + 7 * PAGE_BYTES, num_pages=7)
    assert dims.num_pages == 8
    with pytest.raises(ConfigError, match=r"7 KV pages.*num_pages.*room for 6"):
        plan(fixed + 7 * PAGE_BYTES - 1, num_pages=7)
    with pytest.raises(ConfigError, match="room for 0"):
        plan(0, num_pages=1)


def test_prime_sizes_are_rounded_in_one_place_only() -> None:
    options = small_options(max_slots=7, max_context=61, prefill_chunk=59, num_pages=13).resolve(ToyModel())
    dims = make_dims(ToyModel(), options, 13)
    assert (dims.slots, dims.pages_per_slot, dims.num_pages) == (7, 4, 14)


def test_byte_counts_for_people() -> None:
    assert [human(n) for n in (0, 1023, 1024, 1536, 3 << 30)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "3 GiB"]
