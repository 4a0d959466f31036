"""A toy model, its programs and its checkpoint, small enough to prepare in a second.

Every program adds `scale` to the pages of its rows and counts executions in the slot table,
so a test can tell which state a frame saw, and that inactive lanes changed only scratch.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.compile import ProgramFactory
from helios_jax.aot.core import CoreOptions
from helios_jax.models.interface import AttentionSpec
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape

WIDTH = 8


@dataclasses.dataclass(frozen=True)
class ToyModel:
    family: str = "toy"
    vocab_size: int = 32
    max_position_embeddings: int = 512
    attention_layers: tuple[AttentionSpec, ...] = (AttentionSpec(0, 1, 1, WIDTH, 1.0),)

    def abstract_params(self, dtype: Any) -> Any:
        return {"model": {"scale": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.dtype(dtype))}}


@flax.struct.dataclass
class ToyState:
    pages: jax.Array  # [P, page_size, WIDTH]
    runs: jax.Array  # [S + 1] int32, executions of each slot


def abstract_state(model: Any, dims: Dims, dtype: str) -> ToyState:
    return ToyState(
        pages=jax.ShapeDtypeStruct((dims.num_pages, dims.page_size, WIDTH), jnp.dtype(dtype)),
        runs=jax.ShapeDtypeStruct((dims.slots + 1,), jnp.int32),
    )


def new_state(model: Any, dims: Dims, dtype: str) -> ToyState:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_state(model, dims, dtype))


def build_program(shape: ProgramShape, model: Any, dims: Dims, dtype: str) -> Any:
    layout, out = control_layout(shape, dims), completion_layout(shape, dims)

    def program(params: Any, state: ToyState, ints: Any, floats: Any, bits: Any = None) -> Any:
        fields = layout.split(ints, floats)
        slot = fields["slot"]
        page = jnp.where(slot < dims.slots, 1 + slot % max(1, dims.num_pages - 1), 0)
        row = params["model"]["scale"][0]
        state = ToyState(state.pages.at[page].add(row), state.runs.at[slot].add(1))
        parts = [jnp.zeros(f.shape, jnp.int32).ravel() for f in out.ints]
        for index, field in enumerate(out.ints):
            if field.name == "slot":
                parts[index] = slot
            if field.name == "committed_len":
                parts[index] = state.runs[slot]
        reals = [jnp.full(f.shape, state.pages[page[0], 0, 0], jnp.float32).ravel() for f in out.floats]
        empty = jnp.zeros(out.float_size, jnp.float32)
        return state, (jnp.concatenate(parts), jnp.concatenate(reals) if reals else empty)

    return program


def copying_program(shape: ProgramShape, model: Any, dims: Dims, dtype: str) -> Any:
    """Like `build_program`, but returns pages of half the size: the pool cannot be updated in place."""
    inner = build_program(shape, model, dims, dtype)

    def program(params: Any, state: ToyState, ints: Any, floats: Any, bits: Any = None) -> Any:
        state, outputs = inner(params, state, ints, floats)
        return ToyState(state.pages[: dims.num_pages // 2], state.runs), outputs

    return program


FACTORY = ProgramFactory(build_program, abstract_state, new_state)


def failing(kind: ProgramKind, message: str = "the compiler ran out of registers") -> ProgramFactory:
    """A factory whose programs of one kind do not compile."""

    def build(shape: ProgramShape, model: Any, dims: Dims, dtype: str) -> Any:
        if shape.kind is kind:
            raise RuntimeError(message)
        return build_program(shape, model, dims, dtype)

    return ProgramFactory(build, abstract_state, new_state)


class CountingFactory:
    """`FACTORY` that remembers the names of the programs it was asked to build."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.factory = ProgramFactory(self._build, abstract_state, new_state)

    def _build(self, shape: ProgramShape, model: Any, dims: Dims, dtype: str) -> Any:
        self.built.append(shape.name)
        return build_program(shape, model, dims, dtype)


@dataclasses.dataclass
class ToyTextFiles:
    kind: str
    path: pathlib.Path


class ToySource:
    """A checkpoint of the toy: one array and a tokenizer file, in a directory."""

    name = "toy/model"
    num_params = WIDTH * WIDTH
    eos_token_ids = (2,)
    bos_token_id = 1

    def __init__(self, directory: pathlib.Path, value: float = 1.0, model: ToyModel | None = None) -> None:
        self.model = model or ToyModel()
        self.directory = directory
        self.value = value
        self.loads = 0
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text('{"toy": true}')
        (directory / "config.json").write_text(json.dumps(self.model_config()))

    def config_digest(self) -> str:
        return f"toy-{self.model.vocab_size}-{self.model.max_position_embeddings}"

    def weights_digest(self) -> str:
        return f"value-{self.value}"

    def model_config(self) -> dict[str, Any]:
        return {"vocab_size": self.model.vocab_size, "max_position_embeddings": self.model.max_position_embeddings}

    def load_params(self, dtype: str, put: Any = jax.device_put, progress: Any = None) -> Any:
        self.loads += 1
        value = put(np.full((WIDTH, WIDTH), self.value, jnp.dtype(dtype)))
        if progress is not None:
            progress(value.nbytes, value.nbytes)
        return {"model": {"scale": value}}

    def text_files(self) -> ToyTextFiles:
        return ToyTextFiles("hf", self.directory)


def small_options(**changes: Any) -> CoreOptions:
    """Two slots, one bucket, no state rows: seven programs."""
    return CoreOptions(**({"max_slots": 2, "max_context": 64, "prefill_chunk": 64, "state_rows": 0} | changes))


def frame(core: Any, shape: ProgramShape, slot: int = 0) -> Any:
    """Submits `shape` with its first row on `slot` and the others inactive."""
    ints, floats, fields = control_layout(shape, core.dims).new()
    fields["slot"][:] = core.dims.slots
    fields["slot"][0] = slot
    return core.execute(shape, ints, floats)
