"""A host of mixed programs: `speculative_toy.Rounds` with a prompt chunk among the lanes of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from helios_jax.scheduler.catalog import ProgramKind, ProgramShape, ProposalSource
from tests.unit.programs_toy import VOCAB, Chunk, Toy
from tests.unit.speculative_toy import IDENTITY, Offer, Rounds, other_params

Row = Offer | Chunk | None  # a decoding lane, the prompt row, or an inactive one


def mixed_shape(
    rows: int, width: int, prompt: int = 64, source: ProposalSource = ProposalSource.COPY, depth: int | None = None
) -> ProgramShape:
    """A mixed program as catalogues have it: the packed rows hold the prompt and every other lane at full width."""
    packed, depth = prompt + (rows - 1) * width, width - 1 if depth is None else depth
    return ProgramShape(ProgramKind.MIXED, rows, width, depth, packed, prompt, source)


# the programs that most tests share: each is compiled once a process
PLAIN = mixed_shape(4, 1, source=ProposalSource.NONE)
WIDE = mixed_shape(4, 4)
KEEPING = mixed_shape(4, 1, source=ProposalSource.LEARNED)
DRAFTING = mixed_shape(4, 4, source=ProposalSource.LEARNED)


class Joint(Rounds):
    """A host that also runs mixed programs."""

    def mixed(
        self, shape: ProgramShape, rows: Sequence[Row], *, logprobs: bool = False,
        calibration: tuple[float, float] = IDENTITY,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """One execution; lanes beyond `rows` are inactive, and what no lane uses holds nonsense.

        `bits`, if they are set, are read.
        """
        b, d = shape.batch_capacity, shape.proposal_depth
        fields: dict[str, Any] = {
            "slot": np.full(b, self.dims.slots, np.int32),
            "query_len": np.zeros(b, np.int32),
            "page_table": np.zeros((b, self.dims.pages_per_slot), np.int32),
            "want_logprobs": int(logprobs),
            "masked": int(self.bits is not None),
            "prefill_row": -1,
            "tokens": np.full(shape.prefill_capacity, VOCAB + 7, np.int32),
        }
        if d:
            fields["calibration"] = calibration
        if d and shape.proposal_source is ProposalSource.COPY:
            fields["proposal"] = np.full((b, d), -1, np.int32)
            fields["confidence"] = np.zeros((b, d), np.float32)
        for lane, row in enumerate(rows):
            if row is None:
                continue
            fields["slot"][lane], fields["page_table"][lane] = row.slot, self.tables[row.slot]
            if isinstance(row, Chunk):
                used = -(-(row.start + len(row.tokens)) // self.dims.page_size)
                fields["page_table"][lane, used:] = 0
                fields["query_len"][lane], fields["prefill_row"] = len(row.tokens), lane
                fields["start"], fields["sample"] = row.start, row.sample
                fields["tokens"][: len(row.tokens)] = row.tokens
                continue
            fields["query_len"][lane] = row.limit
            if "proposal" in fields:
                fields["proposal"][lane, : len(row.tokens)] = row.tokens
                fields["confidence"][lane, : len(row.confidence)] = row.confidence
        return self.run(shape, **fields)


def toy_joint(**options: Any) -> Joint:
    """A host of the toy with a draft toy of other weights, unless `draft_params` says otherwise."""
    return Joint(draft=Toy(), draft_params=options.pop("draft_params", None) or other_params(), **options)
