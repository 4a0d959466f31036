"""Executes every program once at work, before anyone depends on it.

A program that cannot run, or does not answer as its layout says, is found out here. And what XLA puts off to the
first execution is behind it then: on a CPU it links a kernel when it first runs, also those inside of loops over a
context's pages, which do not turn for lanes without work. The first execution in earnest took twice as long as the
second without this (a decode step of SmolLM2 177 and 96 ms, a prefill of 256 tokens 1,469 and 432), and the
scheduler, for which the first duration of a program is its estimate, avoided it from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.progress import VERIFY, Progress
from helios_jax.aot.runner import DeviceRunner
from helios_jax.errors import CoreError, DeviceError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape


def busy_control(shape: ProgramShape, dims: Dims) -> tuple[np.ndarray, np.ndarray]:
    """Control vectors in which every lane that has a slot works, and everything that can be asked for is asked for.

    Lane b has slot b, and page b + 1 (or the last one) wherever its table is read; what it computes is nonsense.
    """
    ints, floats, fields = control_layout(shape, dims).new()
    lanes = np.arange(shape.batch_capacity)
    fields["slot"][:] = np.minimum(lanes, dims.slots)
    page, prompt = np.minimum(lanes + 1, dims.num_pages - 1), min(shape.batch_capacity, dims.slots) - 1
    constant: dict[str, Any] = {"want_logprobs": 1, "sample": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    constant |= {"temperature": lanes % 2, "repetition_penalty": 1.1, "presence_penalty": 0.1, "bias_ids": -1}
    constant |= {"page_table": page[:, None], "page": page, "row": np.where(lanes < dims.state_rows, lanes + 1, 0)}
    constant |= {"confidence": 0.5, "calibration": (1.0, 0.0), "prefill_row": prompt}
    for name, value in constant.items():
        if name in fields:
            fields[name][:] = value
    width = min(shape.proposal_depth + 1, shape.token_capacity)
    rows = np.full(shape.batch_capacity, max(1, min(width, shape.packed_capacity // shape.batch_capacity)))
    match shape.kind:
        case ProgramKind.SPECULATIVE:
            fields["limit"][:] = rows
        case ProgramKind.PREFILL | ProgramKind.SCORED_PREFILL:
            fields["query_len"][:] = max(1, shape.token_capacity // shape.batch_capacity)
        case ProgramKind.MIXED:
            rows[prompt] = 0
            rows[prompt] = max(1, min(shape.prefill_capacity, shape.packed_capacity - int(rows.sum())))
            fields["query_len"][:] = rows
    return ints, floats


class FailedProgram(CoreError):
    """A program did not pass its check; `shape` says which."""

    def __init__(self, shape: ProgramShape, message: str) -> None:
        super().__init__(message)
        self.shape = shape


def smoke(runner: DeviceRunner, shapes: Iterable[ProgramShape], dims: Dims, progress: Progress) -> None:
    """Runs every shape once and checks what comes back; the device state is fresh afterwards.

    Raises:
        FailedProgram: An execution failed, or its completion has a wrong size or echoes other slots.
    """
    todo = list(shapes)
    for done, shape in enumerate(todo, 1):
        layout, control = completion_layout(shape, dims), busy_control(shape, dims)
        try:
            ints, floats, _ = runner.submit(shape, *control).wait()
        except DeviceError as error:
            raise FailedProgram(shape, str(error)) from error
        sizes = (ints.shape, floats.shape)
        if sizes != ((layout.int_size,), (layout.float_size,)):
            raise FailedProgram(shape, f"program {shape.name} returns vectors of {sizes}, not as its layout says")
        asked = control_layout(shape, dims).split(*control)["slot"]
        if (layout.split(ints, floats)["slot"] != asked).any():
            raise FailedProgram(shape, f"program {shape.name} does not echo the slots of its lanes")
        progress(VERIFY, done, len(todo), shape.name)
    runner.reset()
