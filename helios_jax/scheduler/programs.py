"""The catalogue as columns, so that a decision works on arrays instead of on shape objects."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from helios_jax.errors import ConfigError, InvariantError
from helios_jax.scheduler.catalog import (
    Allocation,
    Catalog,
    ProgramKind,
    ProgramShape,
    ProposalSource,
    lane_width,
    packed_rows,
    physical_tokens,
    prompt_capacity,
)
from helios_jax.scheduler.extents import check_shape
from helios_jax.scheduler.speculation import COPY, LEARNED
from helios_jax.scheduler.types import Lane, LaneRole

KINDS = tuple(ProgramKind)  # order of every per-kind counter


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramTable:
    """Read-only int64 columns in the order of the catalogue, and the rows of each kind.

    Attributes:
        batch: [programs] request rows B.
        tokens: [programs] token capacity: prompt tokens of a prefill, W of a round.
        width: [programs] target rows that one decoding lane can use: min(D + 1, W) of a round,
            1 for decode, 0 where nothing decodes.
        depth: [programs] proposal depth D.
        packed: [programs] P, target rows over all decoding lanes; 0 where nothing decodes.
        prompt: [programs] prompt tokens of a prefill or of a mixed program's prompt row.
        source: [programs] index in `SOURCES`.
        device_allocates: bool [programs], the device allocates target rows.
        lane_class: [programs] which programs mean the same for one lane: equal width, depth, source and allocation.
        class_program: [classes] a program of each class.
        extents: [programs, 4] batch, tokens, prompt and packed beside each other: what padding is measured by.
        padding_of: bool [programs, programs], [i, j] that i may be redundant padding of j: the kind is the
            same, no extent is smaller, and a cohort may mean the same in both. Copy programs count with
            what they are supplied with, so of these any two may; a prompt alone proposes nothing, so
            of mixed programs any two may as well.
        physical: [programs] token rows that one execution computes, used or not (`physical_tokens`).
        class_source: [classes] row of the acceptance estimates that a lane of each class reads.
        delivers: bool [programs], those that decode.
        decode, prefill, ... : Row numbers of the kind; `delivering` are all that decode.
    """

    batch: np.ndarray
    tokens: np.ndarray
    width: np.ndarray
    depth: np.ndarray
    packed: np.ndarray
    prompt: np.ndarray
    source: np.ndarray
    device_allocates: np.ndarray
    lane_class: np.ndarray
    class_program: np.ndarray
    extents: np.ndarray
    padding_of: np.ndarray
    physical: np.ndarray
    class_source: np.ndarray
    delivers: np.ndarray
    decode: np.ndarray
    prefill: np.ndarray
    scored_prefill: np.ndarray
    initialize: np.ndarray
    speculative: np.ndarray
    mixed: np.ndarray
    vision: np.ndarray
    snapshot: np.ndarray
    restore: np.ndarray
    delivering: np.ndarray


SOURCES = tuple(ProposalSource)
SOURCE_ROW = tuple(COPY if source is ProposalSource.COPY else LEARNED for source in SOURCES)
_ROW_COLUMNS = {
    "decode": (ProgramKind.DECODE,),
    "prefill": (ProgramKind.PREFILL,),
    "scored_prefill": (ProgramKind.SCORED_PREFILL,),
    "initialize": (ProgramKind.INITIALIZE,),
    "speculative": (ProgramKind.SPECULATIVE,),
    "mixed": (ProgramKind.MIXED,),
    "vision": (ProgramKind.VISION,),
    "snapshot": (ProgramKind.SNAPSHOT,),
    "restore": (ProgramKind.RESTORE,),
    "delivering": (ProgramKind.DECODE, ProgramKind.SPECULATIVE, ProgramKind.MIXED),
}


def tabulate(catalog: Catalog) -> ProgramTable:
    """Columns of a catalogue.

    Raises:
        ConfigError: No program of a kind without which no request can be served, or extents that contradict a kind.
    """
    for shape in catalog:
        check_shape(shape, aligned=catalog.aligned)
    rows = {
        name: np.array([i for i, shape in enumerate(catalog) if shape.kind in kinds], np.int64)
        for name, kinds in _ROW_COLUMNS.items()
    }
    for names in (("initialize",), ("prefill",), ("decode", "speculative")):
        if not any(len(rows[name]) for name in names):
            raise ConfigError(
                f"the catalogue has no {' or '.join(names)} program; it needs initialize, prefill and decode programs"
            )
    columns = {
        "batch": [shape.batch_capacity for shape in catalog],
        "tokens": [shape.token_capacity for shape in catalog],
        "width": [lane_width(shape) for shape in catalog],
        "depth": [shape.proposal_depth for shape in catalog],
        "packed": [packed_rows(shape) for shape in catalog],
        "prompt": [prompt_capacity(shape) for shape in catalog],
        "physical": [physical_tokens(shape) for shape in catalog],
        "source": [SOURCES.index(shape.proposal_source) for shape in catalog],
    }
    device = np.array([shape.allocation is Allocation.PREFIX_LIMIT for shape in catalog])
    lanes = np.stack([np.array(columns[name]) for name in ("width", "depth", "source")] + [device], axis=1)
    _, class_program, lane_class = np.unique(lanes, axis=0, return_index=True, return_inverse=True)
    extents = np.array([columns[name] for name in ("batch", "tokens", "prompt", "packed")], np.int64).T.copy()
    table = ProgramTable(
        **{name: np.array(column, np.int64) for name, column in columns.items()},
        device_allocates=device,
        lane_class=lane_class.ravel(),
        class_program=class_program,
        extents=extents,
        padding_of=_padding_of(catalog, extents),
        class_source=np.array([SOURCE_ROW[columns["source"][program]] for program in class_program.tolist()]),
        delivers=np.isin(np.arange(len(catalog)), rows["delivering"]),
        **rows,
    )
    for field in dataclasses.fields(table):
        getattr(table, field.name).setflags(write=False)
    return table


def _padding_of(catalog: Catalog, extents: np.ndarray) -> np.ndarray:
    """`ProgramTable.padding_of`."""
    kind = np.array([KINDS.index(shape.kind) for shape in catalog])
    depth = np.array([shape.proposal_depth for shape in catalog])
    device = np.array([shape.allocation is Allocation.PREFIX_LIMIT for shape in catalog]) & (depth > 0)
    copies = np.array([shape.proposal_source is ProposalSource.COPY for shape in catalog])
    alike = (depth[:, None] == depth) & (device[:, None] == device) | copies[:, None] | copies
    no_smaller = (extents[:, None] >= extents).all(axis=2)
    # The filter of mixed cohorts looks at three extents, and for a prompt alone at no proposals (`mixed`).
    joint = np.array([shape.kind is ProgramKind.MIXED for shape in catalog])
    alike |= joint[:, None] & joint
    no_smaller = np.where(joint[:, None] & joint, (extents[:, None, :3] >= extents[:, :3]).all(axis=2), no_smaller)
    return (kind[:, None] == kind) & alike & no_smaller & ~np.eye(len(catalog), dtype=np.bool_)


def index_of(catalog: Catalog, shape: ProgramShape) -> int:
    """Row of a shape.

    Raises:
        InvariantError: The shape is not in the catalogue.
    """
    index = bisect.bisect_left(catalog.shapes, shape)
    if index == len(catalog) or catalog.shapes[index] != shape:
        raise InvariantError(f"program {shape.name} is not in the catalogue of {len(catalog)} programs")
    return index


def misfit(shape: ProgramShape, lanes: Sequence[Lane], prompt_row: int = -1) -> str:
    """Why the lanes cannot run in one execution of the shape; empty if they can.

    Lane ceilings of a device-allocated round may sum above P; everything else must fit.
    """
    if not 1 <= len(lanes) <= shape.batch_capacity:
        return f"{len(lanes)} lanes in {shape.batch_capacity} rows"
    handles, roles, _, lengths, _, _ = zip(*lanes, strict=True)
    slots, width = [handle[0] for handle in handles], lane_width(shape)
    if len(set(slots)) != len(slots):
        return f"slots {slots} repeat"
    if shape.kind is not ProgramKind.MIXED and prompt_row >= 0:
        return f"prompt row {prompt_row} in a program of kind {shape.kind}"
    decoding = [length for length, role in zip(lengths, roles, strict=True) if role is LaneRole.DECODE]
    if shape.kind is ProgramKind.MIXED:
        prompts = [row for row, lane in enumerate(lanes) if lane.role is LaneRole.PROMPT]
        if prompts != ([prompt_row] if prompt_row >= 0 else []):
            return f"prompt rows {prompts}, prompt_row says {prompt_row}"
        if prompts and not 1 <= lengths[prompt_row] <= shape.prefill_capacity:
            return f"{lengths[prompt_row]} prompt tokens in {shape.prefill_capacity}"
    elif shape.kind is ProgramKind.VISION:
        if max(lengths) > shape.token_capacity:
            return f"an image of {max(lengths)} features in {shape.token_capacity}"
    elif not decoding and sum(lengths) > physical_tokens(shape):
        return f"{sum(lengths)} tokens in {physical_tokens(shape)}"
    if decoding and not (min(decoding) >= 1 and max(decoding) <= width):
        return f"lanes of {decoding} target rows, {width} at most"
    if shape.allocation is Allocation.QUERY_LENGTH and sum(decoding) > packed_rows(shape):
        return f"{sum(decoding)} target rows in {packed_rows(shape)}"
    return ""
