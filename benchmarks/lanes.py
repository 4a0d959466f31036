"""Slots of a prepared core that are driven program by program, without scheduler and engine.

A `Lanes` joins requests, decodes and plays rounds with any lanes of any program, in any order, and
takes pages at random from one pool, so that what a request leaves behind lies under the next one.
All requests are greedy.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from helios_jax.aot.abi import completion_layout, control_layout
from helios_jax.aot.prepared import PreparedCore
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource

GREEDY = {"bias_ids": -1, "top_p": 1.0, "repetition_penalty": 1.0}


@dataclasses.dataclass(frozen=True)
class Said:
    """One emitted token, and by how much its logit led the next best one (None: not asked).

    `second` is the next best token, -1 where nothing was asked.
    """

    token: int
    gap: float | None = None
    second: int = -1


@dataclasses.dataclass(frozen=True)
class Offer:
    """A lane of a round: most target rows, and what is proposed where proposals are copies."""

    slot: int
    limit: int
    copy: Sequence[int] = ()


class Lanes:
    """Every slot of `core`; the core is reset first.

    Args:
        seed: Of page choice, and of the confidences that copies are given.
    """

    def __init__(self, core: PreparedCore, seed: int = 0) -> None:
        core.reset()
        self.core, self.dims = core, core.dims
        self._rng = random.Random(seed)
        self._free = list(range(1, core.dims.num_pages))
        self._pages: dict[int, np.ndarray] = {}
        kinds = core.catalog.of_kind
        self.decodes = {shape.batch_capacity: shape for shape in kinds(ProgramKind.DECODE)}
        self.rounds = kinds(ProgramKind.SPECULATIVE)

    def join(self, slot: int, tokens: Sequence[int], room: int) -> Said:
        """Starts a request in a free slot and returns its first token.

        Args:
            tokens: Prompt, or prompt and output so far.
            room: Tokens that it may grow to, prompt included.
        """
        count = -(-(room + self.core.limits.draft_extent) // self.dims.page_size)
        table = np.zeros(self.dims.pages_per_slot, np.int32)
        table[:count] = [self._free.pop(self._rng.randrange(len(self._free))) for _ in range(count)]
        self._pages[slot] = table
        initialize = self.core.catalog.of_kind(ProgramKind.INITIALIZE)[0]
        self._run(initialize, [slot], prompt_len=len(tokens), **GREEDY)
        prefills = [s for s in self.core.catalog.of_kind(ProgramKind.PREFILL) if s.batch_capacity == 1]
        chunk, out = prefills[-1].token_capacity, {}
        for start in range(0, len(tokens), chunk):
            part = np.asarray(tokens[start : start + chunk], np.int32)
            shape = next(s for s in prefills if s.token_capacity >= len(part))
            packed = np.pad(part, (0, shape.token_capacity - len(part)))
            last = start + chunk >= len(tokens)
            fields = {"query_len": len(part), "start": start, "sample": last, "tokens": packed, "want_logprobs": 1}
            out = self._run(shape, [slot], **fields)
        return _said(out["token"], out["top_logprobs"], out["top_ids"], True, 1)[0]

    def leave(self, slot: int) -> None:
        """The request of `slot` is gone; its pages go to whoever comes."""
        self._free += [int(page) for page in self._pages.pop(slot) if page]

    def decode(self, shape: ProgramShape, slots: Sequence[int], logprobs: bool = True) -> dict[int, Said]:
        """One token of each slot."""
        out = self._run(shape, slots, want_logprobs=int(logprobs))
        said = _said(out["token"], out["top_logprobs"], out["top_ids"], logprobs, len(slots))
        return dict(zip(slots, said, strict=True))

    def round(self, shape: ProgramShape, offers: Sequence[Offer], logprobs: bool) -> dict[int, list[Said]]:
        """One round; what each slot said, in order."""
        count, depth = len(offers), shape.proposal_depth
        fields: dict[str, Any] = {"want_logprobs": int(logprobs)}
        fields["limit"] = np.pad([offer.limit for offer in offers], (0, shape.batch_capacity - count))
        if depth:
            fields["calibration"] = (1.0, 0.0)
        if depth and shape.proposal_source is ProposalSource.COPY:
            proposal = np.full((shape.batch_capacity, depth), -1, np.int32)
            for row, offer in enumerate(offers):
                proposal[row, : len(offer.copy)] = offer.copy
            fields["proposal"] = proposal
            # Any confidence is right: it decides who gets rows, never what is said.
            drawn = np.array([[self._rng.random() for _ in range(depth)] for _ in proposal])
            fields["confidence"] = np.where(proposal >= 0, drawn, 0.0)
        out = self._run(shape, [offer.slot for offer in offers], **fields)
        said: dict[int, list[Said]] = {}
        for row, offer in enumerate(offers):
            emitted = int(out["num_tokens"][row])
            assert 1 <= emitted <= offer.limit
            assert emitted == out["accepted"][row] + 1
            assert out["accepted"][row] <= out["offered"][row] < shape.token_capacity
            top, ids = out["top_logprobs"][row], out["top_ids"][row]
            said[offer.slot] = _said(out["tokens"][row], top, ids, logprobs, emitted)
        assert out["offered"].sum() + count <= shape.packed_capacity
        return said

    def _run(self, shape: ProgramShape, slots: Sequence[int], **values: Any) -> Mapping[str, np.ndarray]:
        ints, floats, fields = control_layout(shape, self.dims).new()
        fields["slot"][:] = self.dims.slots
        fields["slot"][: len(slots)] = slots
        for name, value in values.items():
            fields[name][...] = value
        if "page_table" in fields:
            fields["page_table"][: len(slots)] = [self._pages[slot] for slot in slots]
        done = completion_layout(shape, self.dims).split(*self.core.execute(shape, ints, floats).wait()[:2])
        assert done["slot"][: len(slots)].tolist() == list(slots)
        assert not np.any(done.get("status", 0))
        return done


def limits_of(shape: ProgramShape, wanted: Sequence[int]) -> list[int]:
    """`wanted` rows of each lane, cut where the host allocates them and they exceed the program's rows."""
    limits = list(wanted)
    while shape.allocation is Allocation.QUERY_LENGTH and sum(limits) > shape.packed_capacity:
        limits[int(np.argmax(limits))] -= 1
    return limits


def _said(tokens: Any, top: np.ndarray, ids: np.ndarray, asked: bool, count: int) -> list[Said]:
    """The first `count` tokens; the gap is that of the two largest logits, normalised or not."""
    if not asked:
        return [Said(int(token)) for token in tokens[:count]]
    gaps = top[:count, 0].astype(np.float64) - top[:count, 1]
    return [Said(int(t), float(g), int(s)) for t, g, s in zip(tokens[:count], gaps, ids[:count, 1], strict=True)]
