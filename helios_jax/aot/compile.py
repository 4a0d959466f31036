"""Turns program functions into executables: lower, compile, serialise, load, check.

An executable takes (params, state, ints, floats), and bits if it samples, with the state donated and
returns (state, (ints, floats)). Its input and output trees are never stored: they follow from the
model and the dims, so the only pickle in a program file is the one that jax itself reads,
and it is read only after the file's digest was compared with the manifest's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from helios_jax.aot.abi import Dims, control_layout, mask_shape
from helios_jax.aot.counters import compile_counter
from helios_jax.aot.memory import AbstractState, tree_bytes
from helios_jax.errors import CoreError
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import ProgramShape

Program = Callable[..., tuple[Any, tuple[Any, Any]]]


def abstract_params(model: Draft, dtype: str) -> Any:
    """The parameter tree of programs of one model."""
    return model.abstract_params(dtype)


class ProgramFactory(NamedTuple):
    """Where program functions, their parameters and device states come from (a test may bring its own)."""

    build_program: Callable[[ProgramShape, Model, Dims, str], Program]
    abstract_state: AbstractState
    new_state: Callable[[Model, Dims, str], Any]
    abstract_params: Callable[[Draft, str], Any] = abstract_params

    def with_draft(self, draft: Draft | None) -> ProgramFactory:
        """The factory of a core with this draft model: every program takes and keeps its weights and context."""
        if draft is None:
            return self
        # Only the functions of a core with a draft model take one: a factory without may leave the argument out.
        build, abstract, new = (functools.partial(cast("Any", f), draft=draft) for f in self[:3])
        return ProgramFactory(
            build,
            abstract,
            new,
            lambda model, dtype: {
                "target": self.abstract_params(model, dtype),
                "draft": self.abstract_params(draft, dtype),
            },
        )


def default_factory() -> ProgramFactory:
    """The programs that serve real models."""
    from helios_jax.aot.device_state import abstract_state, new_state
    from helios_jax.aot.programs import build_program

    return ProgramFactory(build_program, abstract_state, new_state)


class ProgramMemory(NamedTuple):
    """Bytes of one execution, as XLA counts them."""

    temp_bytes: int
    argument_bytes: int
    alias_bytes: int


@dataclasses.dataclass(frozen=True)
class Executable:
    """A program that can run, and what its making cost.

    Attributes:
        call: (params, state, ints, floats[, bits]) -> (state, (ints, floats)); asynchronous.
        memory: XLA's analysis, or None where the backend has none.
        seconds: Compiling, or loading.
    """

    shape: ProgramShape
    call: jax.stages.Compiled
    memory: ProgramMemory | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles and loads the programs of one core; safe to use from several threads."""

    model: Model
    dims: Dims
    dtype: str
    factory: ProgramFactory

    def arguments(self, shape: ProgramShape) -> tuple[Any, ...]:
        """The abstract (params, state, ints, floats) of a program, and the bits of one that samples."""
        layout, mask = control_layout(shape, self.dims), mask_shape(shape, self.dims)
        bits = () if mask is None else (jax.ShapeDtypeStruct(mask, np.uint32),)
        return (
            self.factory.abstract_params(self.model, self.dtype),
            self.factory.abstract_state(self.model, self.dims, self.dtype),
            jax.ShapeDtypeStruct((layout.int_size,), np.int32),
            jax.ShapeDtypeStruct((layout.float_size,), np.float32),
            *bits,
        )

    def compile(self, shape: ProgramShape) -> Executable:
        """Traces, lowers and compiles one program (seconds).

        Raises:
            CoreError: It does not compile, or would copy the donated state at every step.
        """
        started = time.monotonic()
        try:
            program = self.factory.build_program(shape, self.model, self.dims, self.dtype)
            with compile_counter().expected():
                call = jax.jit(program, donate_argnums=1).lower(*self.arguments(shape)).compile()
        except Exception as error:  # XLA, jax and our own tracing fail in many types
            raise CoreError(f"program {shape.name} does not compile: {_first_line(error)}") from error
        executable = Executable(shape, call, analyse(call), time.monotonic() - started)
        self.check(executable)
        return executable

    def load(self, shape: ProgramShape, payload: bytes) -> Executable:
        """Makes an executable from a serialised one whose digest was already checked.

        Raises:
            CoreError: It cannot be deserialised here, or has other arguments than expected.
        """
        started = time.monotonic()
        arguments = self.arguments(shape)
        in_tree = jax.tree.structure((arguments, {}))
        out_tree = jax.tree.structure((arguments[1], (arguments[2], arguments[3])))
        try:
            call = serialize_executable.deserialize_and_load(payload, in_tree, out_tree)
        except Exception as error:  # a foreign payload fails inside pickle or XLA, in many types
            raise CoreError(f"program {shape.name} cannot be loaded: {_first_line(error)}") from error
        executable = Executable(shape, call, analyse(call), time.monotonic() - started)
        self.check(executable)
        return executable

    def check(self, executable: Executable) -> None:
        """Arguments as the ABI says, and the whole state updated in place.

        Raises:
            CoreError: Naming the program and the numbers.
        """
        name, arguments = executable.shape.name, self.arguments(executable.shape)
        given = [(a.shape, a.dtype) for a in jax.tree.leaves(executable.call.in_avals)]
        wanted = [(a.shape, a.dtype) for a in jax.tree.leaves(arguments)]
        if given != wanted:
            raise CoreError(f"program {name} takes other arguments than this version passes")
        donated = tree_bytes(arguments[1])
        # Some backends pad buffers, so more than the state may alias, never less.
        if executable.memory is not None and executable.memory.alias_bytes < donated:
            raise CoreError(
                f"program {name} copies its state: {executable.memory.alias_bytes} of {donated} donated bytes"
                " are updated in place"
            )

    def compile_new_state(self) -> Callable[[], Any]:
        """A compiled function that makes a fresh device state, so a reset compiles nothing."""
        with compile_counter().expected():
            make = jax.jit(lambda: self.factory.new_state(self.model, self.dims, self.dtype))
            return make.lower().compile()


_CACHE_LOCK = threading.Lock()  # jax's cache setting is the process's, so one user at a time


@contextlib.contextmanager
def without_jax_cache() -> Iterator[None]:
    """Compiles inside the block do not read jax's persistent compilation cache.

    An executable that jax took from its cache serialises without error on CPU (0.10.2), but
    what loads from that has lost its kernels ("Function ... not found") and fails when it
    first runs. Cores are the cache here, so nothing is lost.
    """
    settings: Any = jax.config  # its attributes are made at run time
    if settings.jax_compilation_cache_dir is None or not settings.jax_enable_compilation_cache:
        yield
        return
    with _CACHE_LOCK:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # jax decides once whether the cache is used
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()


def serialize(executable: Executable) -> bytes:
    """The executable as bytes for `Compiler.load`.

    Raises:
        CoreError: The backend cannot serialise it.
    """
    try:
        return serialize_executable.serialize(executable.call)[0]
    except Exception as error:  # its type differs by backend
        raise CoreError(f"program {executable.shape.name} cannot be stored: {_first_line(error)}") from error


def analyse(call: jax.stages.Compiled) -> ProgramMemory | None:
    """XLA's memory analysis of an executable, or None where the backend has none."""
    stats = call.memory_analysis()
    if stats is None:
        return None
    return ProgramMemory(
        int(stats.temp_size_in_bytes), int(stats.argument_size_in_bytes), int(stats.alias_size_in_bytes)
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
