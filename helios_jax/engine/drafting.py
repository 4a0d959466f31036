"""The host's part of speculation: what it offers, what it supplies, what completed rounds teach it.

1. After every completion `offer` looks up what followed the present suffix of each sequence and
   tells the scheduler how many tokens it could supply.
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
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProposalSource
from helios_jax.scheduler.types import CompletionRecord, LaneRole, RequestHandle, ScheduledPlan

OfferCopy = Callable[[RequestHandle, int], None]
NO_COPY = Copy((), 0)


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
            self._offers[handle] = found = index.propose(self.copy_depth)
            tell(handle, len(found.tokens))

    def forget(self, handle: RequestHandle) -> None:
        """The sequence left its slot."""
        self._indexes.pop(handle, None)
        self._offers.pop(handle, None)

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
        plan: ScheduledPlan,
        records: Iterable[CompletionRecord],
        confidence: np.ndarray,
        mapped: tuple[float, float],
    ) -> None:
        """Learn from a completed round.

        Args:
            records: In lane order.
            confidence: float32 [slots, D] calibrated confidence of each proposal.
            mapped: The scale and shift that the round was submitted with.
        """
        shape = plan.shape
        width = max(lane.length for lane in plan.lanes if lane.role is LaneRole.DECODE)
        counts = self.counts.setdefault((str(shape.proposal_source), width), RoundCounts())
        counts.rounds += 1
        for lane, record in zip(plan.lanes, records, strict=True):
            if lane.role is not LaneRole.DECODE or not record.valid:
                continue
            row = confidence[lane.handle.slot]
            counts.lanes += 1
            counts.proposed += int(np.count_nonzero(row))
            counts.offered += record.offered
            counts.accepted += record.accepted
            counts.emitted += len(record.tokens)
            if record.offered:
                self._learn(shape.proposal_source, lane.handle, record, row, mapped)

    def _learn(
        self, source: ProposalSource, handle: RequestHandle, record: CompletionRecord, row: np.ndarray,
        mapped: tuple[float, float],
    ) -> None:  # fmt: skip
        judged = min(record.offered, record.accepted + 1)
        if source is ProposalSource.COPY:
            match = self._offers.get(handle, NO_COPY).match_len
            self._history.observe(match, record.offered, record.accepted)
        calibration = self._calibrations[source]
        calibration.observe(calibration.raw_logit(row[:judged], mapped), record.accepted)

    def snapshot(self) -> Mapping[tuple[str, int], RoundCounts]:
        """Copies of the counts by (source, lane width)."""
        return {key: dataclasses.replace(counts) for key, counts in self.counts.items()}
