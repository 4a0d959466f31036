"""200 rounds that accept nothing leave the state of rounds without proposals, bit for bit (fault P1).

Every source and width. The other host plays the same program and never has a proposal judged: its rows
are one a lane, so its cache is what decoding one token at a time leaves. Plain decode's own program
sums in another order: its cache is compared up to rounding, its tokens and counts exactly.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from helios_jax.models.params import leaves, tree_of
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource
from tests.parity.test_speculative_mtp import PROMPT, agreeing, loaded
from tests.unit.programs_toy import TABLES, VOCAB, Chunk, prompt_of, toy_params
from tests.unit.speculative_toy import Offer, Rounds, toy_rounds

ROUNDS, SLOT, CONTEXT = 200, 1, 240
SHARE = 0.1


@functools.cache
def opposed_draft() -> Any:
    """The toy with its output matrix turned around: it proposes what the toy finds least likely."""
    return {**toy_params(), "head": -toy_params()["head"]}


@functools.cache
def opposed_heads() -> Any:
    """Heads that know the model, turned around by their last norm, which multiplies by 1 + w."""
    named = dict(leaves(agreeing(0.0)[1]))
    named["mtp.norm.weight"] = -2.0 - named["mtp.norm.weight"]
    return tree_of(named.items())


def host_of(source: str) -> tuple[Rounds, list[int]]:
    """A host and a prompt for it."""
    if source == "mtp":
        model, _, heads, _ = loaded()
        params = agreeing(SHARE)[0]
        return Rounds(model, params, draft=heads, draft_params=opposed_heads(), slots=3, context=CONTEXT), PROMPT[:20]
    host = Rounds(context=CONTEXT) if source == "copy" else toy_rounds(context=CONTEXT, draft_params=opposed_draft())
    return host, prompt_of(20)


def shape_of(source: str, width: int, rows: int, allocation: Allocation) -> ProgramShape:
    kind = ProposalSource.COPY if source == "copy" else ProposalSource.LEARNED
    return ProgramShape(ProgramKind.SPECULATIVE, 4, width, width - 1, rows, 0, kind, allocation)


def begin(host: Rounds, prompt: list[int]) -> int:
    host.initialize(SLOT, len(prompt))
    return int(host.prefill([Chunk(SLOT, prompt)])["token"][0])


def decoded(source: str) -> tuple[Rounds, list[int]]:
    """Plain decode of the same prompt, in a core with the same draft, and its tokens."""
    host, prompt = host_of(source)
    said = [begin(host, prompt)]
    while len(said) <= ROUNDS:
        said.append(int(host.decode([SLOT, None, None, None])["token"][0]))
    return host, said


plain = functools.cache(decoded)


def committed(host: Rounds, pools: Any, count: int) -> list[np.ndarray]:
    positions = np.arange(count)
    pages, offsets = host.tables[SLOT, positions // 16], positions % 16
    return [np.array(pool)[pages, offsets] for pool in jax.tree.leaves(pools)]


CASES = [  # the widths of a core: docs/speculation.md
    *[(source, 2, 8, Allocation.QUERY_LENGTH) for source in ("copy", "draft", "mtp")],
    *[(source, 4, 9, Allocation.PREFIX_LIMIT) for source in ("copy", "draft", "mtp")],
    ("copy", 8, 32, Allocation.QUERY_LENGTH),
    ("draft", 6, 24, Allocation.QUERY_LENGTH),
]


@pytest.mark.long
@pytest.mark.parametrize(("source", "width", "rows", "allocation"), CASES)
def test_rejected_proposals_leave_nothing(source: str, width: int, rows: int, allocation: Allocation) -> None:
    shape = shape_of(source, width, rows, allocation)
    (host, prompt), (quiet, _), (decoder, truth) = host_of(source), host_of(source), plain(source)
    vocab = host.dims.vocab_size
    assert begin(host, prompt) == begin(quiet, prompt) == truth[0]
    for number in range(ROUNDS):
        wrong = (truth[number + 1] + 1 + np.arange(width - 1)) % vocab
        out = host.round(shape, [Offer(SLOT, width, wrong.tolist(), [0.9] * (width - 1))])
        assert (out["accepted"][0], out["offered"][0]) == (0, width - 1)
        assert out["tokens"][0, 0] == truth[number + 1]
        assert not out["survival"].any()
        assert quiet.round(shape, [Offer(SLOT, 1)])["tokens"][0, 0] == truth[number + 1]
    count = len(prompt) + ROUNDS
    for mine, same, other in zip(*(committed(h, h.state.kv, count) for h in (host, quiet, decoder)), strict=True):
        np.testing.assert_array_equal(mine, same)
        np.testing.assert_allclose(mine, other, atol=2e-5)
    for mine, same in zip(*(committed(h, h.state.draft_kv, count - 1) for h in (host, quiet)), strict=True):
        np.testing.assert_array_equal(mine, same)
    for kept, same in zip(host.state.mtp_hidden, quiet.state.mtp_hidden, strict=True):
        np.testing.assert_array_equal(kept[SLOT], same[SLOT])
    for name in host.state.__dataclass_fields__:
        if name not in TABLES:
            left, right = (np.array(getattr(h.state, name))[SLOT] for h in (host, decoder))
            np.testing.assert_array_equal(left, right, err_msg=name)
    assert vocab == VOCAB or source == "mtp"
