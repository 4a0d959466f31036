"""The catalogue as columns, so that a decision works on arrays instead of on shape objects."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from helios_jax.errors import ConfigError, InvariantError
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProgramShape

KINDS = tuple(ProgramKind)  # order of every per-kind counter


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramTable:
    """Read-only int64 columns in the order of the catalogue, and the rows of each kind.

    Attributes:
        batch: [programs] request rows.
        tokens: [programs] token capacity.
        decode, prefill, scored_prefill, initialize: Row numbers of the kind.
    """

    batch: np.ndarray
    tokens: np.ndarray
    decode: np.ndarray
    prefill: np.ndarray
    scored_prefill: np.ndarray
    initialize: np.ndarray


def tabulate(catalog: Catalog) -> ProgramTable:
    """Columns of a catalogue.

    Raises:
        ConfigError: No program of a kind without which no request can be served.
    """

    def rows(kind: ProgramKind, needed: bool = True) -> np.ndarray:
        found = [i for i, shape in enumerate(catalog) if shape.kind is kind]
        if needed and not found:
            raise ConfigError(f"the catalogue has no {kind} program; it needs initialize, prefill and decode programs")
        return np.array(found, np.int64)

    columns = [
        np.array([shape.batch_capacity for shape in catalog], np.int64),
        np.array([shape.token_capacity for shape in catalog], np.int64),
        rows(ProgramKind.DECODE),
        rows(ProgramKind.PREFILL),
        rows(ProgramKind.SCORED_PREFILL, needed=False),
        rows(ProgramKind.INITIALIZE),
    ]
    for column in columns:
        column.setflags(write=False)
    return ProgramTable(*columns)


def index_of(catalog: Catalog, shape: ProgramShape) -> int:
    """Row of a shape.

    Raises:
        InvariantError: The shape is not in the catalogue.
    """
    index = bisect.bisect_left(catalog.shapes, shape)
    if index == len(catalog) or catalog.shapes[index] != shape:
        raise InvariantError(f"program {shape.name} is not in the catalogue of {len(catalog)} programs")
    return index


def physical_tokens(shape: ProgramShape) -> int:
    """Token rows that one execution computes, used or not; 0 for state operations."""
    if shape.kind in (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL):
        return shape.token_capacity
    return shape.batch_capacity if shape.kind is ProgramKind.DECODE else 0
