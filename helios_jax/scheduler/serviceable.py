"""Whether a catalogue has a program that serves a stream at all, under a selection mode and its restrictions.

What is refused here would otherwise be accepted and wait for ever: a mode without a program that it may
use (`check_mode`), and a request whose restrictions leave none (`check_request`).

Source: specification, "Policy preferences" and "Speculative graph coverage".
"""

from __future__ import annotations

import numpy as np

from helios_jax.errors import ConfigError, RequestError
from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.programs import SOURCES, ProgramTable
from helios_jax.scheduler.types import Constraint, RequestSpec

_REFUSALS = (
    (Constraint.NO_LEARNED, SOURCES.index(ProposalSource.LEARNED)),
    (Constraint.NO_COPY, SOURCES.index(ProposalSource.COPY)),
)


def permitted(programs: ProgramTable, constraints: int) -> np.ndarray:
    """bool [programs]: those that decode and that the restrictions allow; width one proposes nothing."""
    allowed = programs.delivers.copy()
    for constraint, source in _REFUSALS:
        if constraints & int(constraint):
            allowed &= (programs.source != source) | (programs.depth == 0)
    return allowed


def is_served(programs: ProgramTable, mode: str, allowed: np.ndarray) -> bool:
    """Whether the mode can always serve a stream with one of the `allowed` programs, bool [programs].

    - adaptive: any of them, prefixes are cut where rows are few;
    - off: width one;
    - fixed: the widest of each source whose rows the host allocates, if a complete prefix fits its
      P; width one only where no such draft is loaded.
    """
    if mode == "adaptive":
        return bool(allowed.any())
    drafts = allowed & (programs.depth > 0) & ~programs.device_allocates
    if mode == "off" or not drafts.any():
        return bool((allowed & (programs.depth == 0)).any())
    widest = [drafts & (programs.source == s) for s in np.unique(programs.source[drafts]).tolist()]
    widest = [mine & (programs.width == programs.width[mine].max()) for mine in widest]
    return any(bool((programs.packed[mine] >= programs.width[mine]).any()) for mine in widest)


def check_mode(programs: ProgramTable, mode: str) -> None:
    """Raises ConfigError if a selection mode could never decode anything with the catalogue."""
    if is_served(programs, mode, permitted(programs, 0)):
        return
    needs = (
        "width one" if mode == "off" else "width one, or rounds whose rows the host allocates and a whole prefix fits"
    )
    raise ConfigError(
        f"speculation {mode!r} decodes with programs of {needs}, and the catalogue has none; load a decode or "
        "width-one program, or choose speculation 'adaptive'"
    )


def check_request(programs: ProgramTable, mode: str, spec: RequestSpec) -> None:
    """Raises RequestError if the restrictions of a request leave no program that could decode it."""
    if spec.max_tokens <= 1 or is_served(programs, mode, permitted(programs, int(spec.constraints))):
        return  # the first token comes from the prompt
    refused = ", ".join(c.name or "" for c, _ in _REFUSALS if spec.constraints & c)
    message = (
        f"every program that decodes makes proposals that the request's constraints ({refused}) refuse; "
        "allow the proposals, or load a decode or width-one program"
    )
    raise RequestError(message, param="constraints", code="unsupported")
