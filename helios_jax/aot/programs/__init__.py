"""The physical programs: one function a kind, built for one static shape.

    (params, state, ints, floats[, bits]) -> (state, (ints, floats))

The state is donated. Control and completion vectors are laid out by `aot/abi.py`, and so are the
`bits` of allowed tokens, which programs that sample take. In a core with a draft model or heads
`params` is {"target": ..., "draft": ...} for every program.
"""

from __future__ import annotations

from helios_jax.aot.abi import Dims
from helios_jax.aot.programs.decode import build_decode
from helios_jax.aot.programs.initialize import build_initialize
from helios_jax.aot.programs.mixed import build_mixed
from helios_jax.aot.programs.prefill import build_prefill
from helios_jax.aot.programs.speculative import build_speculative
from helios_jax.aot.programs.state_copies import build_state_copies
from helios_jax.aot.programs.types import Program
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape

__all__ = ["Program", "build_program"]


def build_program(shape: ProgramShape, model: Model, dims: Dims, dtype: str, draft: Draft | None = None) -> Program:
    """The program of `shape`, ready to be traced with the state (argument 1) donated.

    Args:
        draft: The core's draft model or heads, if it has them: prefill and decode keep their context too.
        dtype: Dtype of the weights and the cache. Programs take it from what they are traced with;
            it is part of the signature because a core compiles one program a shape and dtype.

    Raises:
        ValueError: No program of this kind is built yet by this version, or the shape or the draft is impossible.
    """
    match shape.kind:
        case ProgramKind.INITIALIZE:
            return build_initialize(shape, dims)
        case ProgramKind.PREFILL | ProgramKind.SCORED_PREFILL:
            return build_prefill(shape, model, dims, draft)
        case ProgramKind.DECODE:
            return build_decode(shape, model, dims, draft)
        case ProgramKind.SPECULATIVE:
            return build_speculative(shape, model, dims, draft)
        case ProgramKind.MIXED:
            return build_mixed(shape, model, dims, draft)
        case ProgramKind.SNAPSHOT | ProgramKind.RESTORE:
            return build_state_copies(shape, dims)
        case kind:
            raise ValueError(f"there is no program of kind {kind} in this version")
