"""Executes programs once with inactive lanes, before anyone depends on them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.progress import VERIFY, Progress
from helios_jax.aot.runner import DeviceRunner
from helios_jax.errors import CoreError, DeviceError
from helios_jax.scheduler.catalog import ProgramShape

# On a CPU a wide prefill takes seconds even for inactive rows: once a program has been
# executed as loaded from the core, later starts execute it only up to this many tokens.
QUICK_TOKENS = 64


def inactive_control(shape: ProgramShape, dims: Dims) -> tuple[np.ndarray, np.ndarray]:
    """Control vectors whose every row is the scratch slot: the program must change nothing else."""
    ints, floats, fields = control_layout(shape, dims).new()
    fields["slot"][:] = dims.slots
    for name in ("bias_ids", "target", "proposal"):
        if name in fields:
            fields[name][:] = -1
    for name in ("top_p", "repetition_penalty"):
        if name in fields:
            fields[name][:] = 1.0
    if "calibration" in fields:
        fields["calibration"][:] = (1.0, 0.0)  # the identity
    return ints, floats


class FailedProgram(CoreError):
    """A program did not pass its check; `shape` says which."""

    def __init__(self, shape: ProgramShape, message: str) -> None:
        super().__init__(message)
        self.shape = shape


def smoke(runner: DeviceRunner, shapes: Iterable[ProgramShape], dims: Dims, progress: Progress) -> None:
    """Runs every shape once and checks what comes back.

    Raises:
        FailedProgram: An execution failed, or its completion has a wrong size or echoes other slots.
    """
    todo = list(shapes)
    for done, shape in enumerate(todo, 1):
        layout = completion_layout(shape, dims)
        try:
            ints, floats, _ = runner.submit(shape, *inactive_control(shape, dims)).wait()
        except DeviceError as error:
            raise FailedProgram(shape, str(error)) from error
        sizes = (ints.shape, floats.shape)
        if sizes != ((layout.int_size,), (layout.float_size,)):
            raise FailedProgram(shape, f"program {shape.name} returns vectors of {sizes}, not as its layout says")
        if (layout.split(ints, floats)["slot"] != dims.slots).any():
            raise FailedProgram(shape, f"program {shape.name} does not echo the slots of its lanes")
        progress(VERIFY, done, len(todo), shape.name)
