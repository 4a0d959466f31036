"""Mixed programs that keep a draft context: a draft model's, and multi-token-prediction heads'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from helios_jax.scheduler.catalog import ProgramShape
from tests.parity.test_speculative_mtp import PROMPT, agreeing, context_of, loaded
from tests.unit.mixed_toy import DRAFTING, KEEPING, Joint, Row, mixed_shape, toy_joint
from tests.unit.programs_toy import Chunk, prompt_of, toy_params
from tests.unit.speculative_toy import LEARNED, NARROW, Offer
from tests.unit.test_mixed_programs import TABLES, placed
from tests.unit.test_speculative_rounds import SETTINGS

pytestmark = pytest.mark.long  # ten programs with a draft in them
MIXED_COPY = mixed_shape(4, 4)  # copies in a core with a draft: its context is kept, too
SETTINGS_OF = [SETTINGS[name] for name in ("greedy", "everything", "sampled", "greedy_penalties")]


def agreeing_toy() -> Joint:
    """The target is its own draft."""
    return toy_joint(draft_params=toy_params())


def agreeing_heads() -> Joint:
    model, _, heads, _ = loaded()
    params, own = agreeing(0.1)
    return Joint(model, params, draft=heads, draft_params=own, slots=5, context=96)


def same_context(host: Joint, apart: Joint, slot: int, committed: int) -> None:
    """Slot table and both caches of a slot, up to where they are read."""
    for name in host.state.__dataclass_fields__:
        if name not in TABLES:
            mine, theirs = (np.array(getattr(h.state, name))[slot] for h in (host, apart))
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
    for field, count in (("kv", committed), ("draft_kv", committed - 1)):
        position = np.arange(count)
        pages, offsets = host.tables[slot, position // 16], position % 16
        for mine, theirs in zip(*(jax.tree.leaves(getattr(h.state, field)) for h in (host, apart)), strict=True):
            np.testing.assert_allclose(
                np.array(mine)[pages, offsets], np.array(theirs)[pages, offsets], atol=2e-4, err_msg=field
            )
    for mine, theirs in zip(host.state.mtp_hidden, apart.state.mtp_hidden, strict=True):
        np.testing.assert_allclose(mine[slot], theirs[slot], atol=2e-4)


@pytest.mark.parametrize("make", [toy_joint, agreeing_toy, agreeing_heads], ids=["other_draft", "same_draft", "heads"])
def test_joint_and_separate_programs_leave_the_same_state(make: Callable[[], Joint]) -> None:
    """Prompts in chunks at any row, lanes at width one or with drafts, sampled and greedy: tokens, tables, caches."""
    host, apart, rng = make(), make(), np.random.default_rng(6)
    vocabulary = host.dims.vocab_size
    lengths: dict[int, int] = {}  # committed tokens of slots that decode
    prompts: dict[int, tuple[list[int], int]] = {}  # prompt and position of the slot that prefills
    accepted = emitted = finished = 0
    for step in range(60):
        if not prompts and len(lengths) < 4:
            slot = next(s for s in range(5) if s not in lengths)
            prompt = [token % vocabulary for token in prompt_of(int(rng.integers(1, 70)), step)]
            for each in (host, apart):
                each.initialize(slot, len(prompt), **SETTINGS_OF[slot % 4])
            prompts[slot] = (prompt, 0)
        shape = (KEEPING, DRAFTING)[int(rng.integers(2))]
        width = shape.token_capacity
        chosen = [slot for slot in lengths if rng.random() < 0.8][: 3 if prompts else 4]
        offers = [Offer(slot, int(rng.integers(1, width + 1))) for slot in chosen]
        chunks = []
        for slot, (prompt, at) in prompts.items():
            end = (
                len(prompt)
                if rng.random() < 0.6 and len(prompt) - at <= 64
                else min(at + 1 + step, len(prompt), at + 64)
            )
            chunks.append(Chunk(slot, prompt[at:end], at, end == len(prompt)))
        rows: list[Row] = placed(rng, [*offers, *chunks], 4)
        out = host.mixed(shape, rows)
        separate = apart.round(_separate(shape), offers) if offers else {}
        for index, offer in enumerate(offers):
            lane = rows.index(offer)
            for name in ("num_tokens", "accepted", "offered", "committed_len", "status"):
                assert out[name][lane] == separate[name][index], name
            assert out["tokens"][lane].tolist() == separate["tokens"][index].tolist()
            lengths[offer.slot] = int(out["committed_len"][lane])
            accepted, emitted = accepted + int(out["accepted"][lane]), emitted + int(out["num_tokens"][lane])
            if shape.proposal_depth:
                slot = offer.slot
                np.testing.assert_allclose(out["confidence"][:, slot], separate["confidence"][:, slot], atol=1e-3)
                np.testing.assert_allclose(out["survival"][slot], separate["survival"][slot], atol=1e-3)
        for chunk in chunks:
            lane, alone = rows.index(chunk), apart.prefill([chunk])
            assert out["tokens"][lane, 0] == alone["token"][0]
            end = chunk.start + len(chunk.tokens)
            prompts[chunk.slot] = (prompts[chunk.slot][0], end)
            same_context(host, apart, chunk.slot, end)
            if chunk.sample:
                lengths[chunk.slot] = end
                del prompts[chunk.slot]
                finished += 1
        for slot, committed in list(lengths.items()):
            same_context(host, apart, slot, committed)
            if committed > 80:
                del lengths[slot]
    assert finished >= 4
    assert emitted > 80
    assert accepted > 10 if make is not toy_joint else True


def _separate(shape: ProgramShape) -> ProgramShape:
    """The round that does for the same lanes what a mixed program does."""
    return NARROW if shape.token_capacity == 1 else ROUND


ROUND = ProgramShape(LEARNED.kind, 4, 4, 3, 16, 0, LEARNED.proposal_source)


def test_the_heads_context_is_one_dense_pass_over_the_target() -> None:
    """A prompt in three mixed chunks, then mixed and separate rounds: the heads' cache has no hole."""
    host = agreeing_heads()
    host.initialize(1, len(PROMPT))
    host.initialize(0, len(PROMPT))
    host.prefill([Chunk(0, PROMPT)])
    for start, end in ((0, 1), (1, 13), (13, len(PROMPT))):
        out = host.mixed(DRAFTING, [Offer(0, 3), Chunk(1, PROMPT[start:end], start, end == len(PROMPT))])
    said = [int(out["tokens"][1, 0])]
    for shape, limit in ((DRAFTING, 4), (KEEPING, 1), (None, 4), (MIXED_COPY, 3), (DRAFTING, 4)):
        offers: list[Any] = [Offer(1, limit, [3, 4], [0.5, 0.5])]
        out = host.round(ROUND, offers) if shape is None else host.mixed(shape, offers)
        said += out["tokens"][0, : out["num_tokens"][0]].tolist()
    known = PROMPT + said
    count = len(known) - 1
    cache, hidden = context_of(0.1)(known)
    pages, offsets = host.tables[1, np.arange(count - 1) // 16], np.arange(count - 1) % 16
    for mine, theirs in zip(host.state.draft_kv[0], cache, strict=True):
        np.testing.assert_allclose(np.array(mine)[pages, offsets], theirs[: count - 1], atol=1e-4)
    np.testing.assert_allclose(host.state.mtp_hidden[0][1], hidden[count - 1], atol=1e-4)
    assert len(said) > 6


def test_a_program_of_plain_decoding_leaves_the_draft_context_alone() -> None:
    """It serves a load without speculation: nobody reads the context, and nothing is spent on it."""
    host = toy_joint()
    for slot in (0, 1):
        host.initialize(slot, 20)
    host.prefill([Chunk(0, prompt_of(20))])
    before = [np.array(pool) for pool in jax.tree.leaves(host.state.draft_kv)]
    truth = Joint().generate(0, prompt_of(20), 2)
    plain = mixed_shape(4, 1, source=KEEPING.proposal_source.NONE)
    out = host.mixed(plain, [Offer(0, 1), Chunk(1, prompt_of(20))])
    assert out["tokens"][:2, 0].tolist() == [truth[1], truth[0]]
    for old, new in zip(before, jax.tree.leaves(host.state.draft_kv), strict=True):
        np.testing.assert_array_equal(old, np.array(new))
