"""The host's part of speculation: what it offers, what it supplies, what completed rounds teach it.

1. After every completion `offer` looks up what followed the present suffix of each sequence, cuts it
   where a grammar does not go on, and tells the scheduler how many tokens it could supply.
2. A committed copy round gets its tokens and their confidence from `copies`; any round gets its
   source's logistic map from `calibration`.
3. `observe` teaches the copy history and the maps, and counts (`RoundCounts`).

One `CopyIndex` a running sequence, dropped with it. Learned sources need nothing but their map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from helios_jax.engine.calibration import Calibration
from helios_jax.engine.copy_index import Copy, CopyHistory, CopyIndex
from helios_jax.engine.request import Sequence
from helios_jax.engine.window import Outstanding
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProposalSource
from helios_jax.scheduler.types import UNTYPICAL, CompletionRecord, LaneRole, RequestHandle, ScheduledPlan

OfferCopy = Callable[[RequestHandle, int], None]
NO_COPY = Copy((), 0)
NO_CONFIDENCE = np.zeros(0, np.float32)


@dataclasses.dataclass
class RoundCounts:
    """Totals of complete speculative programs of one source and lane width.

    Attributes:
        rounds: Programs completed. `lanes`: their requests.
        proposed: Proposals made or supplied. `offered`: judged by the target. `accepted`: of those.
        emitted: Output tokens that the programs' lanes produced, later censored ones included.
    """

    rounds: int = 0
    lanes: int = 0
    proposed: int = 0
    offered: int = 0
    accepted: int = 0
    emitted: int = 0


class Drafting:
    """Speculation on the host side of one engine.

    Args:
        catalog: Of the core; without copy programs nothing is indexed.
    """

    def __init__(self, catalog: Catalog) -> None:
        rounds = [s for s in catalog if s.kind in (ProgramKind.SPECULATIVE, ProgramKind.MIXED) and s.proposal_depth]
        depths = [s.proposal_depth for s in rounds if s.proposal_source is ProposalSource.COPY]
        self.copy_depth = max(depths, default=0)
        self.counts: dict[tuple[str, int], RoundCounts] = {}
        self._history = CopyHistory(self.copy_depth)
        self._calibrations = {source: Calibration() for source in {s.proposal_source for s in rounds}}
        self._indexes: dict[RequestHandle, CopyIndex] = {}
        self._offers: dict[RequestHandle, Copy] = {}

    def offer(self, sequences: Iterable[Sequence], tell: OfferCopy) -> None:
        """Look up a copy for each sequence that has a pending token, and tell the scheduler its length."""
        if not self.copy_depth:
            return
        for sequence in sequences:
            handle = sequence.handle
            if handle is None or not sequence.token_ids or sequence.finish_reason is not None:
                continue
            index = self._indexes.get(handle)
            if index is None:
                index = self._indexes[handle] = CopyIndex(sequence.prompt.tolist())
            known = len(index) - len(sequence.prompt)
            index.extend(sequence.token_ids[known:])
            found = index.propose(self.copy_depth)
            if sequence.matcher is not None:
                found = found._replace(tokens=found.tokens[: sequence.matcher.allowed(found.tokens)])
            self._offers[handle] = found
            tell(handle, len(found.tokens))

    def forget(self, handle: RequestHandle) -> None:
        """The sequence left its slot."""
        self._indexes.pop(handle, None)
        self._offers.pop(handle, None)

    def rebind(self, handle: RequestHandle, fresh: RequestHandle) -> None:
        """The sequence's slot was bound to a fresh generation."""
        if handle in self._indexes:
            self._indexes[fresh] = self._indexes.pop(handle)
        if handle in self._offers:
            self._offers[fresh] = self._offers.pop(handle)

    def supplied(self, plan: ScheduledPlan) -> dict[RequestHandle, Copy]:
        """The copies that a plan is submitted with now; later offers are of later contexts."""
        if plan.shape.proposal_source is not ProposalSource.COPY or not plan.shape.proposal_depth:
            return {}
        return {lane.handle: self._offers[lane.handle] for lane in plan.lanes if lane.handle in self._offers}

    def copies(self, handle: RequestHandle) -> tuple[tuple[int, ...], np.ndarray]:
        """The tokens offered for a lane, and float64 [copy_depth] how likely each is right if those before it are."""
        copy = self._offers.get(handle, NO_COPY)
        return copy.tokens, self._history.confidence(copy.match_len)

    def calibration(self, source: ProposalSource) -> tuple[float, float]:
        """Scale and shift of a source's logistic map; (1, 0) until it is taught."""
        known = self._calibrations.get(source)
        return (known.scale, known.shift) if known else (1.0, 0.0)

    def observe(
        self,
        frame: Outstanding,
        records: Iterable[CompletionRecord],
        confidence: np.ndarray | None,
        running: Mapping[RequestHandle, Sequence],
    ) -> None:
        """Count a completed round, and learn from it.

        A lane whose request ended or was cancelled while the frame was outstanding teaches nothing. What is
        learnt here is shared by all requests, so those that the target alone restricts (penalties, bias,
        grammars) teach nothing either: their drafts fail for reasons that others do not have.

        Args:
            frame: With the calibration and the copies that it was submitted with.
            records: In lane order.
            confidence: float32 [slots, D] calibrated confidence of each proposal; None where D is 0.
            running: The sequences that had not ended before this frame.
        """
        plan, source = frame.plan, frame.plan.shape.proposal_source
        width = max((lane.length for lane in plan.lanes if lane.role is LaneRole.DECODE), default=0)
        if not width:
            return  # the prompt of a mixed program alone
        counts = self.counts.setdefault((str(source), width), RoundCounts())
        counts.rounds += 1
        for lane, record in zip(plan.lanes, records, strict=True):
            if lane.role is not LaneRole.DECODE or not record.valid or lane.handle not in running:
                continue
            row = NO_CONFIDENCE if confidence is None else confidence[lane.handle.slot]
            counts.lanes += 1
            counts.proposed += int(np.count_nonzero(row))
            counts.offered += record.offered
            counts.accepted += record.accepted
            counts.emitted += len(record.tokens)
            if record.offered and not running[lane.handle].spec.constraints & UNTYPICAL:
                match_len = frame.copies.get(lane.handle, NO_COPY).match_len
                self._learn(source, match_len, record, row, frame.mapped)

    def _learn(
        self, source: ProposalSource, match_len: int, record: CompletionRecord, row: np.ndarray,
        mapped: tuple[float, float],
    ) -> None:  # fmt: skip
        judged = min(record.offered, record.accepted + 1)
        if source is ProposalSource.COPY:
            self._history.observe(match_len, record.offered, record.accepted)
        calibration = self._calibrations[source]
        calibration.observe(calibration.raw_logit(row[:judged], mapped), record.accepted)

    def snapshot(self) -> Mapping[tuple[str, int], RoundCounts]:
        """Copies of the counts by (source, lane width)."""
        return {key: dataclasses.replace(counts) for key, counts in self.counts.items()}
