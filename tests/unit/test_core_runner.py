"""The device runner: order, donation, timing, failure and reset, and no compilation after ready."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.compile import Compiler
from helios_jax.aot.core import PreparedCore, prepare
from helios_jax.aot.counters import compile_counter
from helios_jax.aot.runner import MAX_IN_FLIGHT, DeviceRunner
from helios_jax.errors import CoreError, DeviceError, InvariantError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape, serving_catalog
from tests.unit import core_toy
from tests.unit.core_toy import FACTORY, ToyModel, ToySource, frame, small_options

DIMS = Dims(slots=2, pages_per_slot=4, num_pages=9, page_size=16, vocab_size=32)
DECODE = ProgramShape(ProgramKind.DECODE, 1, 1)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreparedCore]:
    base = tmp_path_factory.mktemp("runner")
    with prepare(ToySource(base / "model"), small_options(), base / "core", factory=FACTORY) as prepared:
        yield prepared


def committed(core: PreparedCore, shape: ProgramShape, ints: np.ndarray, floats: np.ndarray) -> int:
    return int(completion_layout(shape, core.dims).split(ints, floats)["committed_len"][0])


def control(shape: ProgramShape = DECODE) -> tuple[np.ndarray, np.ndarray]:
    ints, floats, _ = control_layout(shape, DIMS).new()
    return ints, floats


class Counted:
    """A program that returns how often it was called, and may fail to be dispatched once."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls, self.fail_at = 0, fail_at

    def __call__(self, params: Any, state: Any, ints: Any, floats: Any, bits: Any) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return state, (jnp.asarray(np.full(1, self.calls, np.int32)), jnp.asarray(floats))


def runner_of(call: Any) -> DeviceRunner:
    return DeviceRunner({DECODE: call}, {}, lambda: jnp.asarray(np.zeros(3, np.float32)), DIMS)


def test_frames_see_the_state_of_the_frames_before_them(core: PreparedCore) -> None:
    core.reset()
    shape = core.catalog.of_kind(ProgramKind.DECODE)[0]
    for expected in range(1, 6):
        ints, floats, _ = frame(core, shape, slot=1).wait()
        assert committed(core, shape, ints, floats) == expected
    core.reset()
    ints, floats, _ = frame(core, shape, slot=1).wait()
    assert committed(core, shape, ints, floats) == 1


def test_the_pool_is_updated_in_place(core: PreparedCore) -> None:
    core.reset()
    pool = core.runner._state.pages
    address = pool.unsafe_buffer_pointer()
    for shape in core.catalog:
        frame(core, shape).wait()
        assert core.runner._state.pages.unsafe_buffer_pointer() == address
    assert pool.is_deleted()


def test_every_program_aliases_exactly_what_is_donated(core: PreparedCore) -> None:
    for line in core.report:
        assert line.alias_bytes == line.donated_bytes == core.memory.state_bytes


def test_a_program_that_copies_its_state_is_refused() -> None:
    factory = FACTORY._replace(build_program=core_toy.copying_program)
    with pytest.raises(CoreError, match=r"decode-b1-t1 copies its state: \d+ of \d+ donated bytes"):
        Compiler(ToyModel(), DIMS, "float32", factory).compile(DECODE)


def test_inactive_lanes_change_only_scratch(core: PreparedCore) -> None:
    core.reset()
    for shape in core.catalog:
        frame(core, shape, slot=core.dims.slots).wait()
    runs = np.asarray(core.runner._state.runs)
    assert runs[: core.dims.slots].tolist() == [0] * core.dims.slots
    assert runs[-1] > 0


def test_two_frames_may_be_in_flight_and_times_do_not_overlap(core: PreparedCore) -> None:
    shape = core.catalog.of_kind(ProgramKind.PREFILL)[0]
    frame(core, shape).wait()
    before = time.monotonic_ns()
    first, second = frame(core, shape), frame(core, shape)
    timings = [first.wait()[2], second.wait()[2]]
    elapsed = time.monotonic_ns() - before
    assert all(t.device_ns[0] > 0 for t in timings)
    assert sum(t.device_ns[0] for t in timings) <= elapsed
    assert all(t.wall_ns >= t.device_ns[0] for t in timings)


def test_control_vectors_may_be_reused_at_once(core: PreparedCore) -> None:
    core.reset()
    shape = core.catalog.of_kind(ProgramKind.DECODE)[0]
    ints, floats, fields = control_layout(shape, core.dims).new()
    fields["slot"][:] = 1
    submitted = core.execute(shape, ints, floats)
    fields["slot"][:] = 0  # the next frame's slot, while this one may still be read
    echoed = completion_layout(shape, core.dims).split(*submitted.wait()[:2])["slot"]
    assert echoed.tolist() == [1]


def test_a_third_frame_in_flight_is_our_bug() -> None:
    runner = runner_of(Counted())
    runner._in_flight = _Held()  # frames submitted now are never observed
    for _ in range(MAX_IN_FLIGHT):
        runner.submit(DECODE, *control())
    with pytest.raises(InvariantError, match="in flight"):
        runner.submit(DECODE, *control())


class _Held:
    def put(self, frame: Any) -> None:
        """Drops the frame, so that it stays in flight for ever."""


def test_waiting_has_a_timeout() -> None:
    runner = runner_of(Counted())
    runner._in_flight = _Held()
    with pytest.raises(TimeoutError, match="decode-b1-t1"):
        runner.submit(DECODE, *control()).wait(timeout=0.01)


def test_a_failed_dispatch_breaks_the_runner_until_reset() -> None:
    runner = runner_of(Counted(fail_at=2))
    assert runner.submit(DECODE, *control()).wait()[0].tolist() == [1]
    with pytest.raises(DeviceError, match=r"decode-b1-t1 failed: RESOURCE_EXHAUSTED"):
        runner.submit(DECODE, *control())
    with pytest.raises(DeviceError, match="reset"):
        runner.submit(DECODE, *control())
    runner.reset()
    assert runner.submit(DECODE, *control()).wait()[0].tolist() == [3]
    runner.close()


def test_a_failure_on_the_device_reaches_the_waiter_and_breaks_the_runner() -> None:
    def explode(ints: np.ndarray) -> np.ndarray:
        raise RuntimeError("the device caught fire")

    @jax.jit
    def program(params: Any, state: Any, ints: Any, floats: Any) -> Any:
        out = jax.pure_callback(explode, jax.ShapeDtypeStruct(ints.shape, np.int32), ints)
        return state, (out, floats)

    runner = runner_of(program)
    with pytest.raises(DeviceError, match="decode-b1-t1 failed"):
        runner.submit(DECODE, *control()).wait()
    with pytest.raises(DeviceError, match="reset"):
        runner.submit(DECODE, *control())
    runner.reset()
    runner.close()


def test_foreign_shapes_and_vectors_are_our_bug(core: PreparedCore) -> None:
    ints, floats = control()
    with pytest.raises(InvariantError, match="not in the core's catalogue"):
        core.execute(ProgramShape(ProgramKind.DECODE, 64, 1), ints, floats)
    with pytest.raises(InvariantError, match=r"need int32"):
        core.execute(DECODE, ints[:-1], floats)
    with pytest.raises(InvariantError, match=r"need int32"):
        core.execute(DECODE, ints.astype(np.int64), floats)
    with pytest.raises(InvariantError, match=r"need float32"):
        core.execute(DECODE, ints, floats.astype(np.float64))


def test_a_closed_runner_says_so() -> None:
    runner = runner_of(Counted())
    runner.close()
    runner.close()
    with pytest.raises(DeviceError, match="closed"):
        runner.submit(DECODE, *control())
    with pytest.raises(DeviceError, match="closed"):
        runner.reset()


def test_nothing_is_compiled_after_ready(core: PreparedCore) -> None:
    before = core.compiles_after_ready()
    for shape in core.catalog:
        for slot in range(core.dims.slots):
            frame(core, shape, slot).wait()
    core.reset()
    assert core.compiles_after_ready() == before


def test_the_counter_sees_a_compilation_and_leaves_out_announced_ones() -> None:
    counter = compile_counter()
    value = np.arange(3, dtype=np.float32)
    start = counter.total
    jax.jit(lambda x: x * 3 - 1)(value)
    seen = counter.total - start
    assert seen >= 1
    with counter.expected():
        jax.jit(lambda x: x * 5 - 1)(value)
    assert counter.total - start == seen


@pytest.mark.parametrize(("slots", "context", "chunk", "pages"), [(1, 2, 1, 1), (3, 61, 53, 7), (7, 127, 127, 11)])
def test_prime_sizes_have_programs_of_exactly_the_catalogues_sizes(
    tmp_path: Path, slots: int, context: int, chunk: int, pages: int
) -> None:
    options = small_options(max_slots=slots, max_context=context, prefill_chunk=chunk, num_pages=pages)
    with prepare(ToySource(tmp_path / "model"), options, tmp_path / "core", factory=FACTORY) as core:
        assert core.catalog == serving_catalog(max_slots=slots, prefill_chunk=chunk)
        assert (core.limits.slots, core.limits.pages, core.limits.max_context) == (slots, pages, context)
        for shape in core.catalog:
            ints, floats, _ = frame(core, shape, slot=slots - 1).wait()
            layout = completion_layout(shape, core.dims)
            assert (len(ints), len(floats)) == (layout.int_size, layout.float_size)
        assert core.compiles_after_ready() == 0
