"""Plans into control vectors, completion vectors into records; `aot.abi` says where fields lie.

It knows lanes, pages and sampling settings; it does not know text, streams or time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from helios_jax.aot.abi import Dims, Layout, completion_layout, control_layout
from helios_jax.engine.drafting import Drafting
from helios_jax.engine.grammar import frame_bits, has_masks
from helios_jax.engine.request import Sequence
from helios_jax.errors import InvariantError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape, ProposalSource
from helios_jax.scheduler.resources import shared_pages
from helios_jax.scheduler.types import CompletionRecord, Lane, LaneRole, RequestHandle, ScheduledPlan

PageTable = Callable[[RequestHandle], np.ndarray]
Fields = dict[str, np.ndarray]
FLOAT_SETTINGS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}  # of inactive rows; all other settings 0
COPIES = (ProgramKind.SNAPSHOT, ProgramKind.RESTORE)
ROUNDS = (ProgramKind.SPECULATIVE, ProgramKind.MIXED)  # several tokens a lane: their completions have columns


class FrameBuilder:
    """Packs and unpacks the vectors of one core; layouts are computed once a shape."""

    def __init__(self, dims: Dims, drafting: Drafting | None = None, draft_extent: int = 0) -> None:
        self.dims, self.draft_extent = dims, draft_extent
        self._drafting = drafting
        self._control: dict[ProgramShape, Layout] = {}
        self._completion: dict[ProgramShape, Layout] = {}

    def control(
        self, plan: ScheduledPlan, sequences: Mapping[RequestHandle, Sequence], page_table: PageTable
    ) -> tuple[np.ndarray, np.ndarray]:
        """The int32 and float32 control vectors of a committed plan.

        Args:
            sequences: Every lane's sequence.
            page_table: The pages of a handle after the commit, in position order.
        """
        shape = plan.shape
        layout = self._control.get(shape) or self._control.setdefault(shape, control_layout(shape, self.dims))
        ints, floats, fields = layout.new()
        fields["slot"][:] = self.dims.slots  # inactive rows work on the scratch slot
        for row, lane in enumerate(plan.lanes):
            fields["slot"][row] = lane.handle.slot
        if shape.kind in (ProgramKind.INITIALIZE, ProgramKind.RESTORE):
            self._initialize(fields, plan.lanes, sequences)
        if shape.kind in COPIES:
            self._copied(fields, plan.lanes, page_table)
        if shape.kind is ProgramKind.INITIALIZE or shape.kind in COPIES:
            return ints, floats
        for row, lane in enumerate(plan.lanes):
            pages = page_table(lane.handle)
            fields["page_table"][row, : len(pages)] = pages
        if shape.kind is ProgramKind.SPECULATIVE:
            fields["limit"][: len(plan.lanes)] = [lane.length for lane in plan.lanes]
            self._proposals(fields, plan)
        elif shape.kind is ProgramKind.MIXED:
            self._mixed(fields, plan, sequences)
        elif shape.kind is not ProgramKind.DECODE:
            self._prompt(fields, plan.lanes, sequences)
        wanted = any(lane.emits and sequences[lane.handle].params.logprobs is not None for lane in plan.lanes)
        fields["want_logprobs"][0] = wanted
        fields["masked"][0] = has_masks(plan, sequences)
        return ints, floats

    def bits(self, plan: ScheduledPlan, sequences: Mapping[RequestHandle, Sequence]) -> np.ndarray | None:
        """The mask of a frame whose lanes have grammars; None if none has."""
        return frame_bits(plan, sequences, self.dims, self._copies)

    def _copies(self, handle: RequestHandle) -> tuple[int, ...]:
        return self._drafting.copies(handle)[0] if self._drafting is not None else ()

    def _initialize(self, fields: Fields, lanes: tuple[Lane, ...], sequences: Mapping[RequestHandle, Sequence]) -> None:
        fields["bias_ids"][:] = -1
        for name, value in NEUTRAL.items():
            fields[name][:] = value
        for row, lane in enumerate(lanes):
            sequence = sequences[lane.handle]
            params = sequence.params
            fields["prompt_len"][row] = len(sequence.prompt)
            words = np.array([sequence.seed >> 32, sequence.seed & 0xFFFFFFFF], np.uint32)
            fields["seed"][row] = words.view(np.int32)
            fields["top_k"][row] = min(params.top_k, self.dims.vocab_size)
            for name in FLOAT_SETTINGS:
                fields[name][row] = getattr(params, name)
            bias = params.logit_bias or {}
            fields["bias_ids"][row, : len(bias)] = list(bias.keys())
            fields["bias_values"][row, : len(bias)] = list(bias.values())

    def _copied(self, fields: Fields, lanes: tuple[Lane, ...], page_table: PageTable) -> None:
        """The state rows, and of each lane the page that is copied with its state."""
        size = self.dims.page_size
        for row, lane in enumerate(lanes):
            shared = shared_pages(lane.start, size, self.draft_extent)
            fields["row"][row] = lane.row
            fields["page"][row] = page_table(lane.handle)[shared] if lane.start > shared * size else 0

    def _mixed(self, fields: Fields, plan: ScheduledPlan, sequences: Mapping[RequestHandle, Sequence]) -> None:
        """Rows of every lane, the chunk of the prompt row if there is one, and the others' proposals."""
        fields["query_len"][: len(plan.lanes)] = [lane.length for lane in plan.lanes]
        fields["prefill_row"][0] = plan.prompt_row
        if plan.prompt_row >= 0:
            lane = plan.lanes[plan.prompt_row]
            fields["start"][0], fields["sample"][0] = lane.start, lane.emits
            chunk = sequences[lane.handle].spec.prompt[lane.start : lane.start + lane.length]
            fields["tokens"][: lane.length] = chunk
        self._proposals(fields, plan)

    def _proposals(self, fields: Fields, plan: ScheduledPlan) -> None:
        """The source's map, and the tokens of lanes whose proposals are copied; a prompt row has none."""
        source = plan.shape.proposal_source
        if not plan.shape.proposal_depth:
            return
        assert self._drafting is not None  # a core with proposals has an engine with drafting
        fields["calibration"][:] = self._drafting.calibration(source)
        if source is not ProposalSource.COPY:
            return
        fields["proposal"][:] = -1
        for row, lane in enumerate(plan.lanes):
            if lane.role is not LaneRole.DECODE:
                continue
            tokens, confidence = self._drafting.copies(lane.handle)
            tokens = tokens[: plan.shape.proposal_depth]
            fields["proposal"][row, : len(tokens)] = tokens
            fields["confidence"][row] = confidence[: plan.shape.proposal_depth]

    def _prompt(self, fields: Fields, lanes: tuple[Lane, ...], sequences: Mapping[RequestHandle, Sequence]) -> None:
        offset = 0
        for row, lane in enumerate(lanes):
            prompt = sequences[lane.handle].spec.prompt
            end = lane.start + lane.length
            fields["query_len"][row], fields["start"][row] = lane.length, lane.start
            fields["sample"][row] = lane.emits
            fields["tokens"][offset : offset + lane.length] = prompt[lane.start : end]
            if "target" in fields:
                targets = prompt[lane.start + 1 : end + 1]  # one short where the prompt ends
                fields["target"][offset : offset + lane.length] = -1
                fields["target"][offset : offset + len(targets)] = targets
            offset += lane.length
        if "target" in fields:
            fields["target"][offset:] = -1

    def completion(
        self, plan: ScheduledPlan, ints: np.ndarray, floats: np.ndarray
    ) -> tuple[tuple[CompletionRecord, ...], Fields]:
        """One record a lane in lane order, and the named completion fields.

        Raises:
            InvariantError: The device answered for another slot or with an impossible token.
        """
        shape = plan.shape
        layout = self._completion.get(shape) or self._completion.setdefault(shape, completion_layout(shape, self.dims))
        fields = layout.split(ints, floats)
        slots = fields["slot"].tolist()
        if shape.kind in ROUNDS:
            return self._round_records(plan, fields, slots), fields
        if shape.kind in COPIES:
            return self._copy_records(plan, fields, slots), fields
        if shape.kind is ProgramKind.INITIALIZE:
            tokens, lengths, status = [-1] * len(slots), [lane.start for lane in plan.lanes], [0] * len(slots)
        else:
            tokens, lengths, status = (fields[name].tolist() for name in ("token", "committed_len", "status"))
        records = []
        for row, lane in enumerate(plan.lanes):
            if slots[row] != lane.handle.slot:
                raise InvariantError(f"{shape.name} row {row} answers for slot {slots[row]}, not {lane.handle.slot}")
            valid = status[row] == 0
            token = tokens[row]
            if valid and lane.emits and not 0 <= token < self.dims.vocab_size:
                raise InvariantError(f"{shape.name} row {row} sampled {token}, vocabulary {self.dims.vocab_size}")
            # A decode lane may start before `lane.start`, which counts with the most that the frame ahead could emit.
            consumed = lane.length if lane.role is LaneRole.DECODE else lengths[row] - lane.start
            records.append(
                CompletionRecord(
                    handle=lane.handle,
                    consumed=0 if lane.role is LaneRole.INITIALIZE else consumed,
                    tokens=(token,) if valid and lane.emits else (),
                    committed_len=lengths[row],
                    valid=valid,
                )
            )
        return tuple(records), fields

    def _copy_records(self, plan: ScheduledPlan, fields: Fields, slots: list[int]) -> tuple[CompletionRecord, ...]:
        """A snapshot of another length than was planned is a failed one; nothing is restored from those."""
        records = []
        for lane, slot, row, length in zip(
            plan.lanes, slots, fields["row"].tolist(), fields["committed_len"].tolist(), strict=False
        ):
            if (slot, row) != (lane.handle.slot, lane.row):
                raise InvariantError(f"{plan.shape.name} copies slot {slot} and row {row}, not those of {lane}")
            exact = length == lane.start
            if not exact and lane.role is LaneRole.RESTORE:
                raise InvariantError(f"{plan.shape.name} restores {length} tokens to {lane}")
            records.append(CompletionRecord(lane.handle, 0, (), lane.start, valid=exact))
        return tuple(records)

    def _round_records(self, plan: ScheduledPlan, fields: Fields, slots: list[int]) -> tuple[CompletionRecord, ...]:
        names = ("num_tokens", "offered", "accepted", "committed_len", "status")
        columns = zip(*(fields[name].tolist() for name in names), strict=True)
        records = []
        for lane, slot, tokens, values in zip(plan.lanes, slots, fields["tokens"].tolist(), columns, strict=False):
            count, offered, accepted, committed, status = values
            if slot != lane.handle.slot:
                raise InvariantError(f"{plan.shape.name} answers for slot {slot}, not {lane.handle.slot}")
            emitted = tuple(tokens[:count])
            if status == 0 and not all(0 <= token < self.dims.vocab_size for token in emitted):
                raise InvariantError(f"{plan.shape.name} sampled {emitted}, vocabulary {self.dims.vocab_size}")
            consumed = count if lane.role is LaneRole.DECODE else committed - lane.start
            records.append(
                CompletionRecord(
                    handle=lane.handle,
                    consumed=consumed,
                    tokens=emitted if status == 0 else (),
                    committed_len=committed,
                    valid=status == 0,
                    offered=offered,
                    accepted=accepted,
                )
            )
        return tuple(records)
