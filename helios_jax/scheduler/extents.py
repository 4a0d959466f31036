"""Which extents a program may have: checked once, when a catalogue is loaded.

Nothing later asks again, so a shape that could not run (more lanes than target rows, a prompt row
without room for a decode width) must not get in.

Source: specification, "The native catalog", "Speculative graph coverage" and "Mixed execution contract".
"""

from __future__ import annotations

from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import (
    MAX_MIXED_WIDTH,
    MAX_SLOTS,
    Allocation,
    ProgramKind,
    ProgramShape,
    ProposalSource,
)

PROMPT_UNIT = 64
_PROMPTS = (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL)


def check_shape(shape: ProgramShape, *, aligned: bool = True) -> None:
    """Refuse a program whose extents contradict its kind.

    Args:
        aligned: Whether the prompt row of a mixed program must be a multiple of 64.

    Raises:
        ConfigError: With the program, the extent and what is allowed.
    """
    extents = (shape.batch_capacity, shape.token_capacity, shape.proposal_depth, shape.packed_capacity,
               shape.prefill_capacity)  # fmt: skip
    if not all(isinstance(extent, int) and not isinstance(extent, bool) and extent >= 0 for extent in extents):
        raise ConfigError(f"program {shape.name} has extents {extents}; all must be integers of at least 0")
    if shape.kind is ProgramKind.MIXED:
        problem = _mixed_problem(shape, aligned)
    elif shape.kind is ProgramKind.SPECULATIVE:
        problem = _round_problem(shape)
    else:
        problem = _plain_problem(shape)
    if not 1 <= shape.batch_capacity <= MAX_SLOTS:
        problem = f"batch_capacity must be 1 to {MAX_SLOTS}, got {shape.batch_capacity}"
    if shape.kind is not ProgramKind.MIXED and shape.prefill_capacity:
        problem = f"prefill_capacity must be 0, got {shape.prefill_capacity}"
    if problem:
        raise ConfigError(f"program {shape.name} cannot be loaded: {problem}")


def _mixed_problem(shape: ProgramShape, aligned: bool) -> str:
    rows, width, prompt = shape.batch_capacity, shape.token_capacity, shape.prefill_capacity
    if rows < 2 or rows & (rows - 1):
        return f"batch_capacity must be a power of two of 2 to {MAX_SLOTS}, got {rows}"
    if prompt < 1 or (aligned and prompt % PROMPT_UNIT):
        return f"prefill_capacity must be a positive multiple of {PROMPT_UNIT}, got {prompt}"
    if width > MAX_MIXED_WIDTH:
        return f"token_capacity, the decode width, must be 1 to {MAX_MIXED_WIDTH}, got {width}"
    if prompt < width:
        return f"prefill_capacity must be at least the decode width {width}, got {prompt}"
    whole = prompt + (rows - 1) * width
    if shape.packed_capacity not in (0, whole):
        return f"packed_capacity must be prompt and decoding rows, {whole}, got {shape.packed_capacity}"
    return _proposal_problem(shape)


def _round_problem(shape: ProgramShape) -> str:
    rows, whole = shape.batch_capacity, shape.batch_capacity * shape.token_capacity
    problem = _proposal_problem(shape)
    if not problem and not rows <= shape.packed_capacity <= whole:
        return f"packed_capacity must be {rows} to {whole} (B to B x W), got {shape.packed_capacity}"
    return problem


def _proposal_problem(shape: ProgramShape) -> str:
    """Width and depth of the decoding rows."""
    if shape.token_capacity < 1:
        return f"token_capacity, the decode width, must be at least 1, got {shape.token_capacity}"
    if shape.proposal_source is ProposalSource.NONE and (shape.proposal_depth or shape.token_capacity > 1):
        return "rows beyond the pending one need a proposal source"
    return ""


def _plain_problem(shape: ProgramShape) -> str:
    if shape.proposal_depth or shape.packed_capacity or shape.proposal_source is not ProposalSource.NONE:
        return f"nothing is proposed in {shape.kind}: depth, packed_capacity and source must be unset"
    if shape.allocation is not Allocation.QUERY_LENGTH:
        return f"nothing is allocated in {shape.kind}"
    if shape.kind is ProgramKind.DECODE and shape.token_capacity != 1:
        return f"token_capacity must be 1, got {shape.token_capacity}"
    if (shape.kind in _PROMPTS or shape.kind is ProgramKind.VISION) and shape.token_capacity < 1:
        return "token_capacity must be at least 1, got 0"
    return ""
