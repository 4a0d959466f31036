"""Program shapes and the frozen catalogue that holds every padded size.

A `ProgramShape` names one physical program: an executable compiled ahead of time for
static extents. The `Catalog` is the only place where a padded size is computed; a size
that it does not contain is a bug of ours that shows before serving.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from fractions import Fraction


class ProgramKind(enum.StrEnum):
    """The families of physical programs (specification: "The native catalog")."""

    PREFILL = "prefill"
    SCORED_PREFILL = "scored_prefill"
    DECODE = "decode"
    SPECULATIVE = "speculative"
    MIXED = "mixed"
    VISION = "vision"
    INITIALIZE = "initialize"
    SNAPSHOT = "snapshot"
    RESTORE = "restore"


class ProposalSource(enum.StrEnum):
    """Where the proposals of a speculative program come from."""

    NONE = "none"
    LEARNED = "learned"
    COPY = "copy"


class Allocation(enum.StrEnum):
    """Who fixes the target rows of each lane (specification: value sources)."""

    QUERY_LENGTH = "query_length"  # the host, before the launch
    PREFIX_LIMIT = "prefix_limit"  # the device, below a ceiling per lane


MAX_SLOTS = 64  # specification: "Selection is bounded to 64 request slots."
MAX_MIXED_WIDTH = 8  # decode width of a mixed program: completion token capacity of a core that declares none


@dataclasses.dataclass(frozen=True, order=True)
class ProgramShape:
    """Identity of one physical program; every extent is static.

    Attributes:
        kind: The family.
        batch_capacity: B, request rows.
        token_capacity: Prompt tokens packed over all rows of a prefill; W, the target
            rows a request including its pending token, of a speculative or mixed program;
            features an image of a vision program; 1 for decode; 0 for state operations.
        proposal_depth: D, captured proposals.
        packed_capacity: P, target rows over all lanes.
        prefill_capacity: Prompt tokens of the prompt row of a mixed program; else 0.
        proposal_source: Where proposals come from.
        allocation: Who allocates target rows.
    """

    kind: ProgramKind
    batch_capacity: int
    token_capacity: int
    proposal_depth: int = 0
    packed_capacity: int = 0
    prefill_capacity: int = 0
    proposal_source: ProposalSource = ProposalSource.NONE
    allocation: Allocation = Allocation.QUERY_LENGTH

    @property
    def name(self) -> str:
        """Short stable name, also the file name of the program in a core."""
        parts = [str(self.kind), f"b{self.batch_capacity}"]
        if self.token_capacity:
            parts.append(f"t{self.token_capacity}")
        for letter, value in (("d", self.proposal_depth), ("p", self.packed_capacity), ("f", self.prefill_capacity)):
            if value:
                parts.append(f"{letter}{value}")
        if self.proposal_source is not ProposalSource.NONE:
            parts.append(str(self.proposal_source))
        if self.allocation is not Allocation.QUERY_LENGTH:
            parts.append(str(self.allocation))
        return "-".join(parts)


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The frozen tuple of loaded shapes, without duplicates, in sorted order.

    Attributes:
        shapes: The programs.
        aligned: Mixed prompts are a multiple of 64, as every catalogue that is served has them. Tests
            that enumerate cohorts use prompts of a few tokens and say False.
    """

    shapes: tuple[ProgramShape, ...]
    aligned: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple(sorted(set(self.shapes))))

    def __iter__(self) -> Iterator[ProgramShape]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def of_kind(self, kind: ProgramKind) -> tuple[ProgramShape, ...]:
        """The shapes of one family, smallest first."""
        return tuple(shape for shape in self.shapes if shape.kind is kind)


def lane_width(shape: ProgramShape) -> int:
    """Target rows that one decoding lane can use, its pending token included."""
    if shape.kind is ProgramKind.SPECULATIVE or shape.kind is ProgramKind.MIXED:
        return max(1, min(shape.proposal_depth + 1, shape.token_capacity))
    return 1 if shape.kind is ProgramKind.DECODE else 0


def packed_rows(shape: ProgramShape) -> int:
    """Target rows over all decoding lanes."""
    if shape.kind is ProgramKind.SPECULATIVE:
        return shape.packed_capacity
    return shape.batch_capacity * lane_width(shape)


def prompt_capacity(shape: ProgramShape) -> int:
    """Prompt tokens that one execution can consume."""
    if shape.kind in (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL):
        return shape.token_capacity
    return shape.prefill_capacity


def physical_tokens(shape: ProgramShape) -> int:
    """Token rows that one execution computes, used or not; 0 for state operations."""
    if shape.kind is ProgramKind.SPECULATIVE:
        return shape.packed_capacity
    if shape.kind is ProgramKind.MIXED:
        return shape.prefill_capacity + (shape.batch_capacity - 1) * shape.token_capacity
    if shape.kind is ProgramKind.VISION:
        return shape.batch_capacity * shape.token_capacity
    return prompt_capacity(shape) + packed_rows(shape)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Powers of two up to the padded `limit`: 1, 2, 4, ... and the first one >= limit."""
    values = [1]
    while values[-1] < limit:
        values.append(values[-1] * 2)
    return tuple(values)


PROMPT_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)


def prompt_buckets(max_tokens: int) -> tuple[int, ...]:
    """Prompt-token buckets of prefill programs whose largest holds `max_tokens` tokens.

    The specification's ten buckets below `max_tokens`, and `max_tokens` rounded up to 64
    (so a prime chunk size still has a program, the buffer being the rounded size).
    """
    top = -(-max_tokens // 64) * 64
    return (*(b for b in PROMPT_BUCKETS if b < top), top)


def serving_catalog(*, max_slots: int, prefill_chunk: int) -> Catalog:
    """The catalogue of a plain (non-speculative) core.

    Decode and initialise programs for every power of two up to the padded concurrency.
    Every prompt bucket with one request row, and with all rows (packed prompts: short
    prompts must not queue behind each other one program at a time). Scored prefill has one
    row; two buckets suffice because it is rare.
    """
    rows = powers_of_two(max_slots)
    shapes = [ProgramShape(ProgramKind.DECODE, b, 1) for b in rows]
    shapes += [ProgramShape(ProgramKind.INITIALIZE, b, 0) for b in sorted({rows[0], rows[-1]})]
    buckets = prompt_buckets(prefill_chunk)
    for tokens in buckets:
        shapes += [ProgramShape(ProgramKind.PREFILL, b, tokens) for b in sorted({rows[0], rows[-1]})]
    shapes += [ProgramShape(ProgramKind.SCORED_PREFILL, 1, t) for t in sorted({buckets[0], buckets[-1]})]
    return Catalog(tuple(shapes))


def copy_shapes(max_slots: int) -> tuple[ProgramShape, ...]:
    """Snapshots and restores: of one request, and of as many as there are.

    Between the two nothing is worth its compile time: a copy costs what the rows that it names do, those of
    lanes without a request fall on one scratch row.
    """
    rows = powers_of_two(max_slots)
    kinds = (ProgramKind.SNAPSHOT, ProgramKind.RESTORE)
    return tuple(ProgramShape(kind, b, 0) for kind in kinds for b in sorted({rows[0], rows[-1]}))


def speculative_shapes(
    *,
    max_slots: int,
    draft_tokens: int,
    token_capacity: int,
    source: ProposalSource = ProposalSource.LEARNED,
    ragged: Allocation | None = None,
) -> tuple[ProgramShape, ...]:
    """Speculative rounds for every power of two of requests up to the padded concurrency.

    Width one (no proposals, draft context maintained) at every bucket; rectangular programs of
    every width up to `draft_tokens` + 1 whose B x W rows fit R; and with `ragged` the widest one
    with fewer aggregate rows P: the powers of two between B and B x W, and R, all within R. A
    single request has nobody to share rows with: for it a narrower rectangle does the same.

    Args:
        token_capacity: R, the envelope of aggregate target rows of wider programs.
        ragged: Who allocates the rows of ragged programs; None leaves them out.
    """
    kind, shapes = ProgramKind.SPECULATIVE, []
    for b in powers_of_two(max_slots):
        shapes.append(ProgramShape(kind, b, 1, 0, b, proposal_source=source))
        for width in range(2, draft_tokens + 2):
            if b * width <= token_capacity:
                shapes.append(ProgramShape(kind, b, width, width - 1, b * width, proposal_source=source))
        if ragged is not None and draft_tokens and b > 1:
            whole = b * (draft_tokens + 1)
            extents = {p for p in (*powers_of_two(token_capacity), token_capacity) if b < p < whole}
            shapes += [
                ProgramShape(kind, b, draft_tokens + 1, draft_tokens, p, 0, source, ragged)
                for p in sorted(extents)
                if p <= token_capacity
            ]
    return tuple(shapes)


def mixed_shapes(
    *,
    max_slots: int,
    buckets: tuple[int, ...],
    draft_tokens: int = 0,
    token_capacity: int = 0,
    source: ProposalSource = ProposalSource.LEARNED,
) -> tuple[ProgramShape, ...]:
    """Mixed programs: one prompt row beside decoding rows, bounded before anything is compiled.

    For each request bucket of at least two rows: every prompt bucket at width one, and one prompt
    bucket for each wider width within the envelope B x W <= R, the one that minimises
    max(P / P_min, P_max / P), ties smaller. Width one keeps the draft state where drafts are loaded
    and is the ordinary program where they are not.

    Args:
        buckets: Prompt capacities, each a multiple of 64 and at least the widest decode width.
        draft_tokens: Proposals a request; 0 for the ordinary catalogue.
        token_capacity: R, the envelope of decode target rows of wider programs.

    Source: specification, "Mixed execution contract".
    """
    low, high = min(buckets), max(buckets)
    middle = min(sorted(buckets), key=lambda p: max(Fraction(p, low), Fraction(high, p)))
    proposals = source if draft_tokens else ProposalSource.NONE

    def shape(rows: int, width: int, prompt: int) -> ProgramShape:
        packed = prompt + (rows - 1) * width
        return ProgramShape(ProgramKind.MIXED, rows, width, width - 1, packed, prompt, proposals)

    shapes = []
    for rows in powers_of_two(max_slots)[1:]:
        shapes += [shape(rows, 1, prompt) for prompt in sorted(set(buckets))]
        widths = range(2, draft_tokens + 2)
        shapes += [shape(rows, width, middle) for width in widths if rows * width <= token_capacity]
    return tuple(shapes)
