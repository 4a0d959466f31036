"""Speculative rounds of a toy model: plain decode's tokens, whatever is proposed (faults P1 to P6, P11)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from helios_jax.scheduler.catalog import ProgramKind, ProgramShape, ProposalSource
from tests.unit.programs_toy import TABLES, VOCAB, Chunk, prompt_of, reference_greedy, reference_logits, toy_params
from tests.unit.speculative_toy import (
    LEARNED,
    NARROW,
    RAGGED,
    RECTANGLE,
    Offer,
    Rounds,
    other_params,
    toy_rounds,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy_penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.5},
    "greedy_bias": {"bias": {4: 5.0, 9: -100.0, 17: 3.0}, "frequency_penalty": 1.5},
    "sampled": {"temperature": 0.9, "seed": (3, 8)},
    "everything": {
        "temperature": 1.1,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "bias": {4: 2.0},
        "seed": (2**32 - 1, 5),
    },
}


def begin(host: Rounds, slot: int, prompt: list[int], **settings: Any) -> int:
    host.initialize(slot, len(prompt), **settings)
    return int(host.prefill([Chunk(slot, prompt)])["token"][0])


def drafts_of(rng: np.random.Generator, truth: list[int], at: int, depth: int) -> list[int]:
    """Up to `depth` proposals, each right with probability 0.7."""
    wrong = rng.random(depth) > 0.7
    right = np.resize(truth[at : at + depth] or [0], depth)
    return np.where(wrong, rng.integers(0, VOCAB, depth), right)[: rng.integers(0, depth + 1)].tolist()


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    """What plain decode says after the prompts of slots 0 .. 4, one for each of SETTINGS."""
    host = Rounds()
    out = {}
    for slot, (name, settings) in enumerate(SETTINGS.items()):
        out[name] = host.generate(0, prompt_of(20, slot), 40, **settings)
    return out


def test_copies_give_plain_decode_s_tokens(plain: dict[str, list[int]]) -> None:
    """Penalties, bias, filters and seeds at every width and in any lane; lanes idle, widths and programs change."""
    rng, host, names = np.random.default_rng(4), Rounds(), list(SETTINGS)
    outputs = {slot: [begin(host, slot, prompt_of(20, slot), **SETTINGS[n])] for slot, n in enumerate(names)}
    accepted = 0
    while any(len(o) < 40 for o in outputs.values()):
        offers: list[Offer | None] = []
        unfinished = [slot for slot in rng.permutation(5).tolist() if len(outputs[slot]) < 40][:4]
        for slot in unfinished:
            at = len(outputs[slot])
            tokens = drafts_of(rng, plain[names[slot]], at, 3)
            limit = int(min(rng.integers(1, 5), 40 - at))
            offers.append(Offer(slot, limit, tokens, np.sort(rng.random(len(tokens)))[::-1].tolist()))
            if rng.random() < 0.2:
                offers.append(None)
        offers = offers[:4]
        shape = [RECTANGLE, RAGGED][rng.integers(2)]
        out = host.round(shape, offers)
        host.extend(outputs, offers, out)
        accepted += int(out["accepted"].sum())
        for lane, offer in enumerate(offers):
            if offer is not None:
                assert 1 <= out["num_tokens"][lane] <= min(offer.limit, 1 + len(offer.tokens))
                assert out["accepted"][lane] + 1 == out["num_tokens"][lane]
                assert out["committed_len"][lane] == 20 + len(outputs[offer.slot]) - 1
        assert out["offered"].sum() + sum(o is not None for o in offers) <= shape.packed_capacity
    assert {names[slot]: tokens for slot, tokens in outputs.items()} == plain
    assert accepted > 40
    for slot, name in enumerate(names):  # emitted tokens are counted once, rejected ones never
        counts = np.bincount(plain[name], minlength=VOCAB)
        np.testing.assert_array_equal(host.state.output_counts[slot], counts)


def test_200_rejections_leave_plain_decode_s_state() -> None:
    """P1: committed keys and values, counts, lengths and pending tokens, after 200 rounds that accept nothing."""
    hosts = [Rounds(), Rounds()]
    first = [begin(host, 1, prompt_of(20)) for host in hosts]
    host, quiet = hosts
    said, token = [first[0]], first[1]
    narrow = []
    for _ in range(200):
        truth = int(quiet.round(RECTANGLE, [Offer(1, 1)])["tokens"][0, 0])
        wrong = [(truth + 1) % VOCAB, truth, (truth + 2) % VOCAB]
        out = host.round(RECTANGLE, [Offer(1, 4, wrong, [0.9, 0.9, 0.9])])
        assert (out["accepted"][0], out["offered"][0]) == (0, 3)
        assert out["survival"][1].tolist() == [0, 0, 0]
        said.append(int(out["tokens"][0, 0]))
        narrow.append(truth)
    assert said[1:] == narrow
    decoded = Rounds()
    assert decoded.generate(1, prompt_of(20), 201) == said
    assert token == said[0]
    positions = np.arange(220)
    pages, offsets = host.tables[1, positions // 16], positions % 16
    pools = [[np.array(p)[pages, offsets] for p in jax.tree.leaves(h.state.kv)] for h in (host, quiet, decoded)]
    for mine, same, other in zip(*pools, strict=True):
        np.testing.assert_array_equal(mine, same)  # bit for bit: the same program without proposals
        np.testing.assert_allclose(mine, other, atol=2e-5)  # decode's products have one row, and other rounding
    for name in host.state.__dataclass_fields__:
        if name not in TABLES:
            left, right = (np.array(getattr(h.state, name))[:5] for h in (host, decoded))
            np.testing.assert_array_equal(left, right, err_msg=name)


def test_an_accepted_block_reports_every_token_in_order(plain: dict[str, list[int]]) -> None:
    """P2, P3: what a stop token censors is the host's to drop; the device reports the whole run, at most `limit`."""
    host, truth = Rounds(), plain["greedy"]
    begin(host, 0, prompt_of(20, 0))
    out = host.round(RECTANGLE, [Offer(0, 4, truth[1:4], [0.9] * 3)])
    assert out["tokens"][0].tolist() == truth[1:5]
    for limit in (1, 2, 3):  # what is left of max_tokens
        at = 5 + sum(range(1, limit))
        out = host.round(RECTANGLE, [None, Offer(0, limit, truth[at : at + 3], [0.9] * 3)])
        assert out["tokens"][1].tolist() == truth[at : at + limit] + [-1] * (4 - limit)
        assert out["offered"][1] == limit - 1


def test_log_probabilities_equal_plain_decode_s_at_every_position(plain: dict[str, list[int]]) -> None:
    """P5: raw logits, ranks and alternatives of each emitted token, none behind it, up to the last page's end."""
    host = Rounds()
    prompt, truth = prompt_of(20, 0), plain["greedy"]
    begin(host, 2, prompt)
    said = 1
    for wrong_at in (3, 1, 2, 0, 3):
        tokens = truth[said : said + 3]
        if wrong_at < 3 and wrong_at < len(tokens):
            tokens[wrong_at] = (tokens[wrong_at] + 1) % VOCAB
        limit = min(4, 32 - (20 + said - 1))
        out = host.round(RECTANGLE, [None, None, Offer(2, limit, tokens, [0.5] * 3)], logprobs=True, pages=2)
        logits = reference_logits(prompt + truth[: said + 4])
        for column in range(4):
            if column >= out["num_tokens"][2]:
                assert not out["top_logprobs"][2, column].any()
                assert (out["rank"][2, column], out["logprob"][2, column]) == (0, 0)
                continue
            row = logits[20 + said + column - 1]
            expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
            order = np.argsort(-expected, kind="stable")[:20]
            assert out["tokens"][2, column] == truth[said + column]
            np.testing.assert_allclose(out["logprob"][2, column], expected[truth[said + column]], atol=1e-3)
            np.testing.assert_allclose(out["top_logprobs"][2, column], expected[order], atol=1e-3)
            assert out["rank"][2, column] == 1
        said += int(out["num_tokens"][2])
    assert 20 + said - 1 == 32  # the last position that the pages hold is committed
    assert not host.round(RECTANGLE, [None])["top_logprobs"].any()


@pytest.mark.parametrize("pages", [2, 3])
def test_proposals_end_where_the_pages_do(pages: int, plain: dict[str, list[int]]) -> None:
    """P11: D larger than what is left, and than W; proposals without a page are not made, confidence is 0 there."""
    shape = ProgramShape(ProgramKind.SPECULATIVE, 1, 6, 8, 6, 0, ProposalSource.COPY)
    host, truth = Rounds(), plain["greedy"]
    outputs = {0: [begin(host, 0, prompt_of(20, 0))]}
    left = 16 * pages - 20
    while left > 0:
        at = len(outputs[0])
        offers = [Offer(0, 9, truth[at : at + 8], [0.9] * 8)]
        out = host.round(shape, offers, pages=pages)
        host.extend(outputs, offers, out)
        proposed = min(8, len(truth[at : at + 8]), left - 1)
        assert np.count_nonzero(out["confidence"][0, 0]) == proposed
        assert out["offered"][0] == out["accepted"][0] == min(proposed, 5)
        assert out["survival"][0].tolist() == [1.0] * min(proposed, 5) + [0.0] * (8 - min(proposed, 5))
        left -= min(proposed, 5) + 1
    assert outputs[0] == truth[: len(outputs[0])]
    assert len(outputs[0]) == 16 * pages - 20 + 1


def test_one_lane_one_row() -> None:
    """P11: capacity 1, width one, no draft model: plain decode."""
    shape = ProgramShape(ProgramKind.SPECULATIVE, 1, 1, 0, 1)
    host = Rounds()
    outputs = {0: [begin(host, 0, prompt_of(20))]}
    for _ in range(8):
        out = host.round(shape, [Offer(0, 1)])
        host.extend(outputs, [Offer(0, 1)], out)
        assert out["confidence"].shape == (2, 5, 0)
    assert outputs[0] == reference_greedy(prompt_of(20), 9)


def test_sidecars_hold_calibrated_confidence_and_its_running_product() -> None:
    host = Rounds()
    for slot in (3, 1):
        begin(host, slot, prompt_of(20, slot))
    given, offers = [0.8, 0.5, 0.25], [Offer(3, 4, [1, 2, 3], [0.8, 0.5, 0.25]), None, Offer(1, 4, [5], [0.6])]
    scale, shift = 0.5, -0.2
    for calibration in ((1.0, 0.0), (scale, shift)):
        planes = host.round(RECTANGLE, offers, calibration=calibration)["confidence"]
        expected = np.array(given)
        if calibration != (1.0, 0.0):
            expected = 1 / (1 + np.exp(-(scale * np.log(expected / (1 - expected)) + shift)))
        np.testing.assert_allclose(planes[0, 3], expected, rtol=1e-6)
        np.testing.assert_allclose(planes[1, 3], np.cumprod(expected), rtol=1e-6)
        assert planes[0, 1, 1:].tolist() == [0, 0]
        assert not planes[:, [0, 2]].any()
    for probability in ([1.0, 0.0, 1.0], [np.nan, 0.5, 0.5]):
        planes = host.round(RECTANGLE, [Offer(3, 4, [1, 2, 3], probability)], calibration=(0.0, 0.0))["confidence"]
        expected = [np.nan if np.isnan(p) else 0.5 for p in probability]
        np.testing.assert_array_equal(planes[0, 3], np.float32(expected))  # NaN is the completion check's to find


def test_ragged_rows_go_where_the_confidence_is() -> None:
    """Nine rows for four lanes of ceiling four: joint probability decides, and the cohort never changes."""
    host = Rounds()
    offers: list[Offer | None] = []
    for slot in (2, 0, 3, 1):
        begin(host, slot, prompt_of(20, slot))
        offers.append(Offer(slot, 4, [1, 2, 3], [[0.9, 0.9, 0.1], [0.5, 0.9, 0.9], [0.2] * 3, [0.9] * 3][slot]))
    out = host.round(RAGGED, offers)
    # joint: slot 0 .9 .81 .081, slot 1 .5 .45 .405, slot 2 .2 .04, slot 3 .9 .81 .729; five rows beyond the pending
    assert dict(zip([2, 0, 3, 1], out["offered"].tolist(), strict=True)) == {0: 2, 1: 0, 2: 0, 3: 3}
    assert (out["num_tokens"] >= 1).all()


def test_inactive_lanes_mutate_nothing_real() -> None:
    host = toy_rounds()
    for slot in range(3):
        begin(host, slot, prompt_of(20, slot))
    names = [name for name in host.state.__dataclass_fields__ if name not in TABLES]
    before = {name: np.array(getattr(host.state, name)) for name in names}
    pools = [np.array(p) for p in jax.tree.leaves((host.state.kv, host.state.draft_kv))]
    host.round(LEARNED, [None, Offer(1, 0), None])
    host.round(LEARNED, [Offer(1, 2)])
    for name in names:
        same = np.delete(np.arange(host.dims.slots), 1)
        np.testing.assert_array_equal(before[name][same], np.array(getattr(host.state, name))[same], err_msg=name)
    mine = set(host.tables[1].tolist()) | {0}
    others = [page for page in range(host.dims.num_pages) if page not in mine]
    for old, new in zip(pools, jax.tree.leaves((host.state.kv, host.state.draft_kv)), strict=True):
        np.testing.assert_array_equal(old[others], np.array(new)[others])


@pytest.mark.parametrize("same", [True, False], ids=["same_model", "other_model"])
def test_learned_proposals_keep_plain_decode_s_greedy_tokens(same: bool, plain: dict[str, list[int]]) -> None:
    """Acceptance 1 with the target as its own draft, near 0 with another; widths and programs change at random."""
    host = toy_rounds(draft_params=toy_params() if same else None)
    rng, names = np.random.default_rng(7), ["greedy", "greedy_penalties", "greedy_bias"]
    outputs = {slot: [begin(host, slot, prompt_of(20, slot), **SETTINGS[n])] for slot, n in enumerate(names)}
    offered = accepted = 0
    while any(len(o) < 40 for o in outputs.values()):
        shape = [LEARNED, LEARNED, NARROW][rng.integers(3)]  # twice as often
        slots = [slot for slot in rng.permutation(3).tolist() if len(outputs[slot]) < 40]
        width = 1 if shape is NARROW else 4
        offers = [Offer(slot, int(min(width, rng.integers(1, 5), 40 - len(outputs[slot])))) for slot in slots]
        out = host.round(shape, offers)
        host.extend(outputs, offers, out)
        offered, accepted = offered + int(out["offered"].sum()), accepted + int(out["accepted"].sum())
        if shape is not NARROW:
            assert (out["confidence"][:, slots] > 0).all()
            assert (out["confidence"] <= 1).all()
            assert (np.diff(out["confidence"][1], axis=1) <= 0).all()
    for slot, name in enumerate(names):
        assert outputs[slot] == plain[name]
    assert accepted == offered > 20 if same else accepted < offered / 3


def test_the_draft_s_context_is_what_a_prefill_would_make(plain: dict[str, list[int]]) -> None:
    """Through full acceptance, rejection, width one and plain decode: no hole and no rejected token stays."""
    host = toy_rounds(draft_params=toy_params())
    truth = plain["greedy"]
    outputs = {0: [begin(host, 0, prompt_of(20, 0))]}
    copies = ProgramShape(ProgramKind.SPECULATIVE, 4, 4, 3, 16, 0, ProposalSource.COPY)
    for number in range(8):
        at = len(outputs[0])
        if number in (2, 6):
            outputs[0].append(int(host.decode([0, None])["token"][0]))
            continue
        shape = [LEARNED, copies, None, NARROW, LEARNED, copies, None, LEARNED][number]
        wrong = [truth[at], (truth[at + 1] + 1) % VOCAB, 3]
        offers = [Offer(0, 1 if shape is NARROW else 4, wrong if number == 1 else truth[at : at + 3], [0.5] * 3)]
        host.extend(outputs, offers, host.round(shape, offers))
    assert outputs[0] == truth[: len(outputs[0])]
    host.round(NARROW, [Offer(0, 1)])  # completes the context up to the pending token
    count = 20 + len(outputs[0])
    fresh = toy_rounds(draft_params=toy_params())
    begin(fresh, 0, prompt_of(20, 0) + outputs[0])
    pages, offsets = host.tables[0, np.arange(count) // 16], np.arange(count) % 16
    for mine, theirs in zip(*(jax.tree.leaves(h.state.draft_kv) for h in (host, fresh)), strict=True):
        np.testing.assert_allclose(np.array(mine)[pages, offsets], np.array(theirs)[pages, offsets], atol=2e-5)
    assert np.isfinite(np.array(fresh.state.draft_kv[0][0])[pages, offsets]).all()


def test_sampled_learned_rounds_of_the_same_model_accept_nearly_everything() -> None:
    """p = q but for rounding, filters and penalties included: the drafts' history is the target's."""
    host = toy_rounds(draft_params=toy_params())
    outputs = {slot: [begin(host, slot, prompt_of(20, slot), **SETTINGS["everything"])] for slot in range(2)}
    offered = accepted = 0
    for _ in range(12):
        offers = [Offer(slot, 4) for slot in outputs]
        out = host.round(LEARNED, offers)
        host.extend(outputs, offers, out)
        offered, accepted = offered + int(out["offered"].sum()), accepted + int(out["accepted"].sum())
        np.testing.assert_allclose(out["survival"][:2], 1.0, atol=1e-3)
    assert accepted >= offered - 1
    assert len({tuple(o) for o in outputs.values()}) == 2


def test_sampled_learned_rounds_follow_the_target_s_distribution() -> None:
    """P6: where each token falls in the cumulative distribution that the reference gives it is uniform."""
    host, rng, temperature = toy_rounds(draft_params=other_params(0.2)), np.random.default_rng(0), 1.3
    places: list[float] = []
    accepted = 0
    for batch in range(2):
        prompts = [prompt_of(20, 10 * batch + slot) for slot in range(4)]
        settings = [{"temperature": temperature, "seed": (batch, slot)} for slot in range(4)]
        outputs = {slot: [begin(host, slot, prompts[slot], **settings[slot])] for slot in range(4)}
        while max(map(len, outputs.values())) < 196:
            offers = [Offer(slot, 4) for slot in rng.permutation(4).tolist()]
            out = host.round(LEARNED, offers)
            host.extend(outputs, offers, out)
            accepted += int(out["accepted"].sum())
        for slot, tokens in outputs.items():
            logits = reference_logits(prompts[slot] + tokens)[19:-1] / temperature
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            below = np.cumsum(p, axis=1) - p
            index = np.arange(len(tokens))
            places += (below[index, tokens] + rng.random(len(tokens)) * p[index, tokens]).tolist()
    found, expected = np.histogram(places, 20, (0, 1))[0], len(places) / 20
    assert ((found - expected) ** 2 / expected).sum() < 19 + 6.5 * np.sqrt(2 * 19)
    assert len(places) > 1000
    assert accepted > 200


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ProgramShape(ProgramKind.SPECULATIVE, 4, 4, 3, 3, 0, ProposalSource.COPY), "packed rows"),
        (ProgramShape(ProgramKind.SPECULATIVE, 4, 4, 3, 17, 0, ProposalSource.COPY), "packed rows"),
        (ProgramShape(ProgramKind.SPECULATIVE, 4, 4, 3, 16, 0), "need a source"),
        (LEARNED, "need a draft model"),
    ],
)
def test_impossible_shapes_are_refused(shape: ProgramShape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rounds().round(shape, [])
