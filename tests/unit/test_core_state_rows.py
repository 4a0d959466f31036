"""State rows of a core: how many, what they cost, which programs come with them (case K7 of the fault list)."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from helios_jax.aot.device_state import abstract_state
from helios_jax.aot.identity import core_catalog
from helios_jax.aot.memory import default_rows, make_dims, measure, plan_memory, tree_bytes
from helios_jax.aot.options import CoreOptions, conflicts, load_options
from helios_jax.aot.speculation import reduced
from helios_jax.errors import ConfigError
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import ProgramKind
from tests.golden.tiny import tiny_checkpoint

COPIES = (ProgramKind.SNAPSHOT, ProgramKind.RESTORE)


@functools.cache
def model(family: str) -> Any:
    return open_source(tiny_checkpoint(family)).model


def of(family: str, **given: Any) -> CoreOptions:
    return CoreOptions(**({"max_slots": 4, "max_context": 128} | given)).resolve(model(family))


@pytest.mark.parametrize("rows", [-1, 1.5, True, "4", 10**6])
def test_a_number_that_is_none_is_refused(rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"state_rows must be an integer in \[0, "):
        CoreOptions(state_rows=rows)


def test_what_was_not_said_is_not_stored_and_a_load_can_do_without() -> None:
    assert "state_rows" not in CoreOptions().to_json()
    for rows in (0, 7):
        options = CoreOptions(state_rows=rows)
        assert CoreOptions(**json.loads(json.dumps(options.to_json()))) == options
    held = of("llama3", state_rows=7)
    assert conflicts({"state_rows": 0}, held) == []
    assert load_options({"state_rows": 0}, held).state_rows == 0
    assert conflicts({"state_rows": 3}, held) == ["state_rows: asked 3, the core has 7"]


@pytest.mark.parametrize(("slots", "batches"), [(1, {1}), (2, {1, 2}), (6, {1, 8})])
def test_copies_of_one_request_and_of_all_are_in_cores_with_rows(slots: int, batches: set[int]) -> None:
    shapes = core_catalog(of("llama3", max_slots=slots, state_rows=3)).shapes
    for kind in COPIES:
        assert {shape.batch_capacity for shape in shapes if shape.kind is kind} == batches
    without = core_catalog(of("llama3", max_slots=slots, state_rows=0)).shapes
    assert [shape for shape in shapes if shape.kind not in COPIES] == list(without)
    left = reduced(shapes, method="none", draft_tokens=None, token_capacity=None, mixed=False, copies=False)
    assert left == without


@pytest.mark.parametrize("family", ["llama3", "qwen3_next"])
def test_the_default_is_four_a_slot_within_a_sixteenth(family: str) -> None:
    """Recounted from the arrays themselves: what the rows take, what weights and cache take."""
    for slots in (1, 4, 16):
        options = of(family, max_slots=slots)
        rows = default_rows(model(family), options, abstract_state)
        dims = make_dims(model(family), of(family, max_slots=slots, state_rows=1), slots * 8)
        whole = abstract_state(model(family), dims, "float32")
        params, *_ = measure(model(family), dims, "float32", abstract_state)
        saved, rest = tree_bytes(whole.saved) // 2, tree_bytes(whole) - tree_bytes(whole.saved)
        assert rows <= 4 * slots
        assert rows * saved * 16 <= params + rest
        assert rows == 4 * slots or (rows + 1) * saved * 16 > params + rest


def test_rows_that_do_not_fit_are_refused_and_no_pages_are_taken_for_them() -> None:
    """Case K7: a number that is asked for and that the memory does not hold."""
    options = of("qwen3_next", state_rows=500)
    dims = make_dims(model("qwen3_next"), options, 8)
    params, state, _ = measure(model("qwen3_next"), dims, "float32", abstract_state)
    assert plan_memory(model("qwen3_next"), options, abstract_state, params + state)[0].num_pages == 9
    with pytest.raises(ConfigError, match="slot tables and 500 state_rows"):
        plan_memory(model("qwen3_next"), options, abstract_state, params + state - 1)
