"""Layouts of the control and completion vectors, read by host and device alike.

A program takes one int32 and one float32 control vector and returns one int32 and one
float32 completion vector. `control_layout` and `completion_layout` are the only places
that know where a field lies: the host writes through numpy views of the same table that
the traced program slices. A program that samples also takes `bits`, the tokens that each of
its rows may sample (see `mask_shape`).

Slots run from 0; `dims.slots` itself is the scratch slot of inactive lanes. Page 0 is the
scratch page. Seeds travel as two int32 words holding uint32 bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from helios_jax.scheduler.catalog import ProgramKind, ProgramShape, ProposalSource

MAX_LOGIT_BIAS = 300  # entries a request, OpenAI's limit
TOP_LOGPROBS = 20  # alternatives reported a position, OpenAI's limit
MASK_BITS = 32  # tokens a word of `bits`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
    """Static extents shared by all programs of a core.

    Attributes:
        slots: Request slots S; row S of every slot table is scratch.
        pages_per_slot: Page-table entries a lane, ceil(max_context / page_size).
        num_pages: Pages in the pool including scratch page 0.
        page_size: Tokens a page.
        vocab_size: V.
        state_rows: Rows for snapshots of complete state, numbered from 1; row 0 is scratch. 0 = none at all.
    """

    slots: int
    pages_per_slot: int
    num_pages: int
    page_size: int
    vocab_size: int
    state_rows: int = 0


@dataclasses.dataclass(frozen=True)
class Field:
    """One named array inside a flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the named int32 and float32 fields lie in their two flat vectors."""

    ints: tuple[Field, ...]
    floats: tuple[Field, ...]

    @property
    def int_size(self) -> int:
        return max(1, sum(f.size for f in self.ints))

    @property
    def float_size(self) -> int:
        return max(1, sum(f.size for f in self.floats))

    def split(self, ints: Any, floats: Any) -> dict[str, Any]:
        """Named views of two flat vectors; numpy views on the host, slices when traced."""
        parts = {f.name: ints[f.offset : f.offset + f.size].reshape(f.shape) for f in self.ints}
        parts |= {f.name: floats[f.offset : f.offset + f.size].reshape(f.shape) for f in self.floats}
        return parts

    def new(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Fresh zeroed host vectors and writable views of their fields."""
        ints = np.zeros(self.int_size, np.int32)
        floats = np.zeros(self.float_size, np.float32)
        return ints, floats, self.split(ints, floats)


def _layout(ints: dict[str, tuple[int, ...]], floats: dict[str, tuple[int, ...]]) -> Layout:
    def place(fields: dict[str, tuple[int, ...]]) -> tuple[Field, ...]:
        placed, offset = [], 0
        for name, shape in fields.items():
            placed.append(Field(name, shape, offset))
            offset += math.prod(shape)
        return tuple(placed)

    return Layout(place(ints), place(floats))


def control_layout(shape: ProgramShape, dims: Dims) -> Layout:
    """Control fields of one program.

    Every program that samples: `masked` [1], 0 = `bits` are not read (see `mask_shape`).
    initialize: `slot` [B], `prompt_len` [B] (tokens before it are prompt, later ones count
      as output for the penalties), `seed` [B, 2], `top_k` [B] (0 = off), `bias_ids`
      [B, MAX_LOGIT_BIAS] (-1 = unused), and the float settings of the lane.
    prefill, scored_prefill: tokens of the rows packed in row order; `query_len` [B] (0 =
      inactive row), `start` [B] position of the row's first token, `sample` [B] 1 where the
      chunk ends the prompt and a token is to be sampled, `want_logprobs` [1].
      scored_prefill adds `target` [T]: the next prompt token of each packed token, -1 none.
    decode: `slot`, `page_table`, `want_logprobs`; pending token and position are on the device.
    speculative: as decode, and `limit` [B], most target rows of the lane, its pending token's included, so
      also the most tokens that it emits: at most min(D + 1, W, output left, context left, 1 + proposals of
      a copy). Under `query_length` it is exact and the limits sum to at most P; under `prefix_limit` the
      device chooses below it. 0 = inactive row. With proposals (D > 0) `calibration` [2] float: scale and shift
      of the source's logistic map, (1, 0) = identity. Copies (source `copy`, D > 0) add `proposal` [B, D], the
      supplied prefix that continues the pending token, -1 behind its end, and `confidence` [B, D] float,
      the host's estimate that each proposal is accepted if those before it are, before calibration.
    mixed: one prompt row beside decoding rows. `query_len` [B]: a decoding row's is its `limit` in a round of
      the same proposals, the prompt row's the prompt tokens of its chunk; 0 = inactive row. `prefill_row` [1]
      the prompt row's index, -1 without one; `start` [1] the position of its first token, `sample` [1] 1 if
      the chunk ends the prompt, `tokens` [F] its tokens from index 0 on, F the prefill capacity.
      `calibration`, `proposal` and `confidence` as in a round; the prompt row has no proposals.
    snapshot: `slot`, `row` [B] state row (0 = inactive), `page` [B] of the pool that is copied out of; 0 = none.
    restore: as a snapshot, `page` is copied into; and all of initialize, which it begins with.
    """
    b, t = shape.batch_capacity, shape.token_capacity
    table: dict[str, tuple[int, ...]] = {"page_table": (b, dims.pages_per_slot)}
    match shape.kind:
        case ProgramKind.INITIALIZE:
            return _layout({"slot": (b,)} | _settings(b)[0], _settings(b)[1])
        case ProgramKind.PREFILL | ProgramKind.SCORED_PREFILL:
            rows: dict[str, tuple[int, ...]] = {"slot": (b,), "query_len": (b,), "start": (b,), "sample": (b,)}
            ints = rows | _flags() | table | {"tokens": (t,)}
            if shape.kind is ProgramKind.SCORED_PREFILL:
                ints["target"] = (t,)
            return _layout(ints, {})
        case ProgramKind.DECODE:
            return _layout({"slot": (b,)} | _flags() | table, {})
        case ProgramKind.SPECULATIVE:
            lanes: dict[str, tuple[int, ...]] = {"slot": (b,), "limit": (b,)} | _flags()
            proposal, confidence = _proposals(shape)
            return _layout(lanes | table | proposal, confidence)
        case ProgramKind.MIXED:
            proposal, confidence = _proposals(shape)
            one: dict[str, tuple[int, ...]] = dict.fromkeys(("prefill_row", "start", "sample"), (1,)) | _flags()
            prompt: dict[str, tuple[int, ...]] = {"tokens": (shape.prefill_capacity,)}
            return _layout({"slot": (b,), "query_len": (b,)} | one | table | proposal | prompt, confidence)
        case ProgramKind.SNAPSHOT:
            return _layout(dict.fromkeys(("slot", "row", "page"), (b,)), {})
        case ProgramKind.RESTORE:
            return _layout(dict.fromkeys(("slot", "row", "page"), (b,)) | _settings(b)[0], _settings(b)[1])
        case _:
            raise ValueError(f"program kind {shape.kind} has no control layout")


def mask_shape(shape: ProgramShape, dims: Dims) -> tuple[int, int] | None:
    """Extents [rows, ceil(V / 32)] of a program's `bits`; None if it samples nothing.

    Bit t % 32 of word t // 32 is 1 where the row may sample token t. Prefill and decode have a row a lane.
    Rounds and mixed programs have W a lane: row b * W + j masks the token behind proposal j of lane b, 0
    being its pending token; their prompt row has its mask at j = 0. An active row that may sample nothing
    has status 2; behind a proposal it ends the lane's chain there, as if that proposal had not been made.
    """
    if shape.kind in (ProgramKind.INITIALIZE, ProgramKind.SNAPSHOT, ProgramKind.RESTORE):
        return None
    rounds = shape.kind in (ProgramKind.SPECULATIVE, ProgramKind.MIXED)
    rows = shape.batch_capacity * (shape.token_capacity if rounds else 1)
    return rows, -(-dims.vocab_size // MASK_BITS)


def _settings(b: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The int32 and float32 control fields of a request that takes over a slot."""
    ints = {"prompt_len": (b,), "seed": (b, 2), "top_k": (b,), "bias_ids": (b, MAX_LOGIT_BIAS)}
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return ints, dict.fromkeys(names, (b,)) | {"bias_values": (b, MAX_LOGIT_BIAS)}


def _flags() -> dict[str, tuple[int, ...]]:
    """What is asked of a whole frame."""
    return {"want_logprobs": (1,), "masked": (1,)}


def _proposals(shape: ProgramShape) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The int32 and float32 control fields of a round's proposals."""
    if not shape.proposal_depth:
        return {}, {}
    calibration: dict[str, tuple[int, ...]] = {"calibration": (2,)}
    if shape.proposal_source is not ProposalSource.COPY:
        return {}, calibration
    drafts = (shape.batch_capacity, shape.proposal_depth)
    return {"proposal": drafts}, calibration | {"confidence": drafts}


def completion_layout(shape: ProgramShape, dims: Dims) -> Layout:
    """Completion fields of one program.

    All: `slot` [B] (echoed identity). Prefill, scored prefill and decode: `token` [B] (-1
    where nothing was sampled), `committed_len` [B], `status` [B] (0 = fine, 1 = logits that
    are not finite, 2 = the mask allows no token),
    `top_ids` / `top_logprobs` [B, TOP_LOGPROBS], `rank` [B] and `logprob` [B] of the sampled token
    (0 unless `want_logprobs`). Log-probabilities are those of the raw logits, before
    penalties and temperature, as in vLLM's default. Scored prefill adds `target_logprob`,
    `target_rank` [T] and `target_top_ids` / `target_top_logprobs` [T, TOP_LOGPROBS].

    Snapshot and restore: `slot`, `row` as they were done, `committed_len` [B] the tokens that the state is of.

    Speculative and mixed: see `_round_completion`.
    """
    b, t, n = shape.batch_capacity, shape.token_capacity, TOP_LOGPROBS
    if shape.kind in (ProgramKind.SPECULATIVE, ProgramKind.MIXED):
        return _round_completion(shape, dims)
    if shape.kind in (ProgramKind.SNAPSHOT, ProgramKind.RESTORE):
        return _layout(dict.fromkeys(("slot", "row", "committed_len"), (b,)), {})
    if shape.kind is ProgramKind.INITIALIZE:
        return _layout({"slot": (b,)}, {})
    ints: dict[str, tuple[int, ...]] = {
        "slot": (b,),
        "token": (b,),
        "committed_len": (b,),
        "status": (b,),
        "rank": (b,),
        "top_ids": (b, n),
    }
    floats: dict[str, tuple[int, ...]] = {"logprob": (b,), "top_logprobs": (b, n)}
    if shape.kind is ProgramKind.SCORED_PREFILL:
        ints |= {"target_rank": (t,), "target_top_ids": (t, n)}
        floats |= {"target_logprob": (t,), "target_top_logprobs": (t, n)}
    return _layout(ints, floats)


def _round_completion(shape: ProgramShape, dims: Dims) -> Layout:
    """Completion fields of a speculative round, and of a mixed program, whose decoding rows are one.

    `tokens` [B, W]: emitted tokens in order, -1 behind the last; `num_tokens` [B] how many (0 only if
    `status` is not 0, or the lane is inactive); `offered` [B] proposals that the target judged, `accepted`
    [B] how many stand: num_tokens = accepted + 1. The last token is pending, the others are in the cache:
    `committed_len` grew by num_tokens. Stop tokens do not end a block: the host drops what follows one.
    `rank` [B, W], `top_ids` [B, W, TOP_LOGPROBS], `logprob`, `top_logprobs`: as decode's, for each
    emitted token; 0 behind the last.

    Sidecars, float32, indexed by request slot, zero in the rows of slots without a lane and behind what
    was proposed or judged: `confidence` [2, slots, D], plane 0 the calibrated confidence of each proposal,
    plane 1 the joint probability of the prefix that it ends, the running product of plane 0. A lane has
    min(D, positions behind its pending token that its pages hold) proposals, copies no more than were
    supplied. `survival` [slots, D]: running products of min(1, p / q) of the first `offered` proposals,
    p the target's and q the source's probability as drawn (1 for copies); 1 or 0 where the lane is greedy.

    The prompt row of a mixed program has `num_tokens` 1 (its first output token) if `sample` was set and
    `status` is 0, else 0, no proposals, and `committed_len` = `start` + `query_len`.
    """
    b, w, d, n = shape.batch_capacity, shape.token_capacity, shape.proposal_depth, TOP_LOGPROBS
    each = ("slot", "num_tokens", "offered", "accepted", "committed_len", "status")
    return _layout(
        dict.fromkeys(each, (b,)) | {"tokens": (b, w), "rank": (b, w), "top_ids": (b, w, n)},
        {
            "logprob": (b, w),
            "top_logprobs": (b, w, n),
            "confidence": (2, dims.slots, d),
            "survival": (dims.slots, d),
        },
    )
