"""Which speculative rounds and mixed programs a core holds, and what a load may leave out.

Each program costs compile time, 7 to 12 CPU seconds of a model as small as SmolLM2 (docs/LOG.md). So
a core holds, of all rounds that `scheduler.catalog.speculative_shapes` lists:

- width one at every request bucket, where there is a draft context to keep. Without one (copy)
  plain decode is that program;
- rectangles at every bucket, of a ladder of widths: powers of two, and the whole D + 1;
- two ragged programs a bucket, of full width and twice as many target rows as requests, one
  allocated by the host (fixed selection uses it too) and one by the device: a few promising
  lanes share the rows of those that have nothing to verify. Where R is too small for the widest
  rectangle, ragged programs of R rows replace it.

With `mixed_prefill` it also holds all of `scheduler.catalog.mixed_shapes`: those of plain decoding, which a
load without speculation uses, and those of its rounds. Without a draft context to keep, the former are
the width one of the latter.

`reduced` shapes are a subset: what is not compiled cannot be selected.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping

from helios_jax.scheduler.catalog import (
    MAX_MIXED_WIDTH,
    MAX_SLOTS,
    Allocation,
    ProgramKind,
    ProgramShape,
    ProposalSource,
    mixed_shapes,
    powers_of_two,
    prompt_buckets,
    speculative_shapes,
)

METHODS = ("none", "copy", "draft", "mtp")
MAX_DRAFT_TOKENS = 8
# Copies cost the host a lookup and repeat for long where they fit at all; a draft model runs once a proposal.
DEFAULT_DRAFT_TOKENS: Mapping[str, int] = types.MappingProxyType({"copy": 7, "draft": 5, "mtp": 3})
MOST_DEFAULT_ROWS = 256  # beyond, a step of any device is bound by arithmetic and wide rounds stop paying
MAX_ROWS = MAX_SLOTS * (MAX_DRAFT_TOKENS + 1)
RAGGED_ROWS = 2  # target rows a request of ragged programs


def default_rows(max_slots: int, draft_tokens: int) -> int:
    """R where nothing was said: the power of two that covers every request at full width, at most 256."""
    return min(powers_of_two(powers_of_two(max_slots)[-1] * (draft_tokens + 1))[-1], MOST_DEFAULT_ROWS)


def widths(draft_tokens: int) -> tuple[int, ...]:
    """Widths of rectangles: powers of two up to 3/4 of D + 1 (a closer one saves little), and D + 1."""
    whole = draft_tokens + 1
    return (*(w for w in powers_of_two(whole)[1:] if 4 * w <= 3 * whole), whole)


def round_shapes(
    *, method: str, max_slots: int, draft_tokens: int, token_capacity: int
) -> tuple[ProgramShape, ...]:  # fmt: skip
    """The speculative programs of a core; none for method "none".

    Args:
        draft_tokens: D, most proposals a request.
        token_capacity: R, most target rows of a program wider than one.
    """
    if method == "none":
        return ()
    source = _source(method)
    found = {
        shape
        for ragged in Allocation
        for shape in speculative_shapes(
            max_slots=max_slots, draft_tokens=draft_tokens, token_capacity=token_capacity, source=source, ragged=ragged
        )
    }
    ladder = widths(draft_tokens)
    return tuple(sorted(shape for shape in found if _is_held(shape, ladder, token_capacity)))


def _is_held(shape: ProgramShape, ladder: tuple[int, ...], token_capacity: int) -> bool:
    if not shape.proposal_depth:
        return shape.proposal_source is ProposalSource.LEARNED
    batch, rows = shape.batch_capacity, shape.packed_capacity
    whole = batch * shape.token_capacity
    if rows == whole:
        return shape.token_capacity in ladder
    return rows == RAGGED_ROWS * batch or (rows == token_capacity and whole > token_capacity)


def joint_shapes(
    *, method: str, max_slots: int, prefill_chunk: int, draft_tokens: int, token_capacity: int
) -> tuple[ProgramShape, ...]:  # fmt: skip
    """The mixed programs of a core: of plain decoding, and of its rounds if it has any.

    Args:
        prefill_chunk: Most prompt tokens of one program.
        draft_tokens, token_capacity: As in `round_shapes`; lanes are at most MAX_MIXED_WIDTH wide here.
    """
    buckets = prompt_buckets(prefill_chunk)
    found = set(mixed_shapes(max_slots=max_slots, buckets=buckets))
    if method != "none":
        found |= {
            shape
            for shape in mixed_shapes(
                max_slots=max_slots,
                buckets=buckets,
                draft_tokens=min(draft_tokens, MAX_MIXED_WIDTH - 1),
                token_capacity=token_capacity,
                source=_source(method),
            )
            if shape.proposal_depth or shape.proposal_source is ProposalSource.LEARNED
        }
    return tuple(sorted(found))


def _source(method: str) -> ProposalSource:
    return ProposalSource.COPY if method == "copy" else ProposalSource.LEARNED


def reduced(
    shapes: Iterable[ProgramShape], *, method: str, draft_tokens: int | None, token_capacity: int | None, mixed: bool,
    copies: bool = True,
) -> tuple[ProgramShape, ...]:  # fmt: skip
    """Those of a core's `shapes` that stay in a load with these options; other kinds stay anyway.

    Args:
        method: "none" leaves all rounds out, and the mixed programs of rounds. A method with a draft context
            leaves out those that do not keep it.
        draft_tokens: Most proposals of a round, or None for all.
        token_capacity: Most target rows of a round with proposals, or None for all.
        mixed: False leaves all mixed programs out.
        copies: False leaves snapshots and restores out.
    """

    def fits(shape: ProgramShape, rows: int) -> bool:
        depth = shape.proposal_depth
        few = token_capacity is None or rows <= token_capacity
        return not depth or (few and (draft_tokens is None or depth <= draft_tokens))

    def stays(shape: ProgramShape) -> bool:
        if shape.kind is ProgramKind.SPECULATIVE:
            return method != "none" and fits(shape, shape.packed_capacity)
        if shape.kind in (ProgramKind.SNAPSHOT, ProgramKind.RESTORE):
            return copies
        if shape.kind is not ProgramKind.MIXED:
            return True
        plain = shape.proposal_source is ProposalSource.NONE
        of_method = plain if method == "none" else method == "copy" or not plain
        return mixed and of_method and fits(shape, shape.batch_capacity * shape.token_capacity)

    return tuple(shape for shape in shapes if stays(shape))
