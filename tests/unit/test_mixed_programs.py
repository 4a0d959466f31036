"""Mixed programs of a toy model do what separate prefills, decodes and rounds of copies do."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from helios_jax.aot.abi import completion_layout, mask_shape
from helios_jax.aot.programs import build_program
from helios_jax.aot.verify import busy_control
from helios_jax.scheduler.catalog import ProgramShape, ProposalSource
from tests.unit.mixed_toy import PLAIN, WIDE, Joint, Row, mixed_shape
from tests.unit.programs_toy import TABLES, VOCAB, Chunk, Toy, no_bits, prompt_of, reference_logits
from tests.unit.speculative_toy import Offer
from tests.unit.test_speculative_rounds import SETTINGS, begin, drafts_of

NAMES, LONGEST = list(SETTINGS), 48  # tokens of an output before its slot begins again
PROMPTED = 4  # the slot of the prompts


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    """What plain decode says after the prompts of slots 0 .. 3."""
    host = Joint()
    return {n: host.generate(0, prompt_of(20, slot), LONGEST + 4, **SETTINGS[n]) for slot, n in enumerate(NAMES[:4])}


class Neighbours:
    """Three of four slots that decode beside prompts; each begins again when its reference ends."""

    def __init__(self, host: Joint, plain: dict[str, list[int]], seed: int) -> None:
        self.host, self.plain, self.rng = host, plain, np.random.default_rng(seed)
        self.outputs = {slot: self._begin(slot) for slot in range(4)}
        self.accepted = 0

    def _begin(self, slot: int) -> list[int]:
        return [begin(self.host, slot, prompt_of(20, slot), **SETTINGS[NAMES[slot]])]

    def offers(self, shape: ProgramShape, most: int) -> list[Offer]:
        """Up to `most` lanes in random order, with copies that are partly right."""
        found = []
        for slot in self.rng.permutation(4).tolist()[: int(self.rng.integers(0, most + 1))]:
            if len(self.outputs[slot]) >= LONGEST:
                self.outputs[slot] = self._begin(slot)
            truth = self.plain[NAMES[slot]]
            tokens = drafts_of(self.rng, truth, len(self.outputs[slot]), 3) if shape.proposal_depth else []
            limit = int(self.rng.integers(1, shape.token_capacity + 1))
            found.append(Offer(slot, limit, tokens, [0.7] * len(tokens)))
        return found

    def check(self, rows: list[Row], out: dict[str, np.ndarray]) -> None:
        for lane, row in enumerate(rows):
            if not isinstance(row, Offer):
                continue
            output = self.outputs[row.slot]
            count = int(out["num_tokens"][lane])
            assert 1 <= count <= min(row.limit, 1 + len(row.tokens))
            assert out["accepted"][lane] + 1 == count
            output += out["tokens"][lane, :count].tolist()
            assert out["tokens"][lane, count:].tolist() == [-1] * (out["tokens"].shape[1] - count)
            assert out["committed_len"][lane] == 20 + len(output) - 1
            assert output == self.plain[NAMES[row.slot]][: len(output)]
            self.accepted += count - 1


def placed(rng: np.random.Generator, rows: list[Row], capacity: int) -> list[Row]:
    """The rows in random order among inactive ones."""
    padded = [*rows, *[None] * (capacity - len(rows))]
    return [padded[i] for i in rng.permutation(capacity)]


def slot_row(host: Joint, slot: int) -> dict[str, np.ndarray]:
    """The slot table's row of one slot."""
    names = [name for name in host.state.__dataclass_fields__ if name not in TABLES]
    return {name: np.array(getattr(host.state, name))[slot] for name in names}


def cached(host: Joint, slot: int, count: int) -> list[np.ndarray]:
    """Keys and values of the first `count` positions of a slot, layer by layer."""
    position = np.arange(count)
    pages, offsets = host.tables[slot, position // 16], position % 16
    return [np.array(pool)[pages, offsets] for pool in jax.tree.leaves(host.state.kv)]


def prompts_in_turn(
    host: Joint, apart: Joint, near: Neighbours, prompt: list[int], number: int, cuts: list[int]
) -> None:
    """One prompt through mixed programs, in chunks, with its neighbours; `apart` prefills it alone."""
    settings, shape = SETTINGS[NAMES[number % len(NAMES)]], (PLAIN, WIDE)[number % 2]
    host.initialize(PROMPTED, len(prompt), **settings)
    apart.initialize(PROMPTED, len(prompt), **settings)
    for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        chunk = Chunk(PROMPTED, prompt[start:end], start, end == len(prompt))
        rows = placed(near.rng, [*near.offers(shape, 3), chunk], 4)
        lane = rows.index(chunk)
        out = host.mixed(shape, rows)
        alone = apart.prefill([chunk])
        near.check(rows, out)
        assert out["slot"][lane] == PROMPTED
        assert (out["num_tokens"][lane], out["committed_len"][lane]) == (int(chunk.sample), end)
        assert (out["offered"][lane], out["accepted"][lane], out["status"][lane]) == (0, 0, 0)
        assert out["tokens"][lane, 0] == alone["token"][0]
        assert (out["tokens"][lane, 1:] == -1).all()
        assert not out["confidence"][:, PROMPTED].any()
        assert not out["survival"][PROMPTED].any()
    for name, value in slot_row(apart, PROMPTED).items():
        np.testing.assert_array_equal(slot_row(host, PROMPTED)[name], value, err_msg=name)
    for mine, theirs in zip(*(cached(h, PROMPTED, len(prompt)) for h in (host, apart)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_every_fitting_tail_at_any_row_beside_any_neighbours(plain: dict[str, list[int]]) -> None:
    """Prompts of 1 to 64 tokens, greedy and sampled, beside up to three lanes with or without copies."""
    host, apart = Joint(), Joint()
    near = Neighbours(host, plain, 1)
    for length in range(1, 65):
        prompts_in_turn(host, apart, near, prompt_of(length, 9), length, [])
    assert near.accepted > 20


def test_prompts_in_chunks_of_any_length(plain: dict[str, list[int]]) -> None:
    host, apart, rng = Joint(), Joint(), np.random.default_rng(3)
    near = Neighbours(host, plain, 2)
    for number in range(10):
        length = int(rng.integers(65, 150))
        cuts, at = [], 0
        while length - at > 64 or rng.random() < 0.3:
            step = int(rng.integers(1, min(64, length - at)))
            at += step
            cuts.append(at)
            if length - at < 2:
                break
        prompts_in_turn(host, apart, near, prompt_of(length, 8), number, cuts)


def test_the_prompt_goes_on_where_its_chunk_ended() -> None:
    """The first token's successors: decode, a round, and the mixed program itself, all on the same context."""
    host, apart = Joint(), Joint()
    prompt = prompt_of(40, 5)
    truth = apart.generate(2, prompt, 10)
    host.initialize(2, 40)
    said = [int(host.mixed(PLAIN, [None, Chunk(2, prompt)])["tokens"][1, 0])]
    said.append(int(host.decode([2])["token"][0]))
    for shape, offer in ((PLAIN, Offer(2, 1)), (WIDE, Offer(2, 4, truth[3:6], [0.9] * 3)), (WIDE, Offer(2, 1))):
        out = host.mixed(shape, [offer])
        said += out["tokens"][0, : out["num_tokens"][0]].tolist()
    assert said == truth[: len(said)]
    assert len(said) == 8


def test_without_a_prompt_every_lane_may_have_the_whole_width(plain: dict[str, list[int]]) -> None:
    host = Joint()
    offers: list[Row] = []
    for slot in (2, 0, 3, 1):
        begin(host, slot, prompt_of(20, slot), **SETTINGS[NAMES[slot]])
        offers.append(Offer(slot, 4, plain[NAMES[slot]][1:4], [0.9] * 3))
    out = host.mixed(WIDE, offers)
    assert out["accepted"].tolist() == [3] * 4
    for lane, slot in enumerate((2, 0, 3, 1)):
        assert out["tokens"][lane].tolist() == plain[NAMES[slot]][1:5]
        np.testing.assert_allclose(out["confidence"][1, slot], np.cumprod([0.9] * 3), rtol=1e-6)


def poisoned(host: Joint, pages: list[int]) -> None:
    """NaN in the cache pages of lanes that do not take part."""
    pools = [
        jax.numpy.asarray(np.array(pool)).at[np.array(pages)].set(np.nan) for pool in jax.tree.leaves(host.state.kv)
    ]
    host.state = host.state.replace(kv=jax.tree.unflatten(jax.tree.structure(host.state.kv), pools))


@pytest.mark.parametrize(
    "rows",
    [
        [None, Offer(1, 1), None, Chunk(PROMPTED, prompt_of(30, 1))],
        [Chunk(PROMPTED, prompt_of(30, 1), 0, False), Offer(1, 0), Offer(0, 1)],
        [Offer(5, 1), Chunk(5, prompt_of(30, 1))],  # slot 5 is no slot
        [Chunk(PROMPTED, [])],
        [],
    ],
    ids=["two_lanes", "no_sample_and_a_lane_without_rows", "foreign_slots", "no_tokens", "nobody"],
)
@pytest.mark.parametrize("shape", [PLAIN, WIDE], ids=["plain", "wide"])
def test_what_is_not_active_mutates_nothing_and_is_not_read(shape: ProgramShape, rows: list[Row]) -> None:
    """Slot table and pages of everybody else stay bit for bit, and NaN in their pages reaches nobody."""
    host = Joint()
    host.tables = np.vstack([host.tables, host.tables[:1]])  # the table row that a foreign slot would use
    for slot in range(4):
        begin(host, slot, prompt_of(20, slot))
    host.initialize(PROMPTED, 30)
    acting = {row.slot for row in rows if row is not None and row.slot < 5 and _has_rows(row)}
    idle = [slot for slot in range(5) if slot not in acting]
    poisoned(host, [0, *host.tables[idle].ravel().tolist()])
    tables = {slot: slot_row(host, slot) for slot in idle}
    pools = [np.array(pool) for pool in jax.tree.leaves(host.state.kv)]
    out = host.mixed(shape, rows)
    for slot in idle:
        for name, value in slot_row(host, slot).items():
            np.testing.assert_array_equal(tables[slot][name], value, err_msg=f"{slot} {name}")
    written = {0}  # the scratch page takes what nobody uses
    for row in rows:
        if row is not None and row.slot in acting:
            first, count = (row.start, len(row.tokens)) if isinstance(row, Chunk) else (20, row.limit)
            written |= set(host.tables[row.slot, np.arange(first, first + count) // 16].tolist())
    untouched = [page for page in range(host.dims.num_pages) if page not in written]
    for before, after in zip(pools, jax.tree.leaves(host.state.kv), strict=True):
        np.testing.assert_array_equal(before[untouched], np.array(after)[untouched])
    assert not out["status"].any()
    for lane in range(4):
        row = rows[lane] if lane < len(rows) else None
        if row is None or row.slot not in acting:
            assert (out["num_tokens"][lane], out["committed_len"][lane]) == (0, 0)
            assert (out["tokens"][lane] == -1).all()


def _has_rows(row: Offer | Chunk) -> bool:
    return bool(row.tokens if isinstance(row, Chunk) else row.limit)


@pytest.mark.parametrize("broken", ["prompt", "lane"])
def test_logits_that_are_not_finite_are_one_row_s_own_business(broken: str, plain: dict[str, list[int]]) -> None:
    host = Joint()
    begin(host, 0, prompt_of(20, 0))
    begin(host, 1, prompt_of(20, 1), **SETTINGS[NAMES[1]])
    host.initialize(PROMPTED, 40)
    host.prefill([Chunk(PROMPTED, prompt_of(40, 1)[:16], 0, False)])
    poisoned(host, [int(host.tables[PROMPTED if broken == "prompt" else 0, 0])])
    out = host.mixed(WIDE, [Offer(0, 1), Chunk(PROMPTED, prompt_of(40, 1)[16:], 16), Offer(1, 1)])
    failed = 1 if broken == "prompt" else 0
    assert out["status"].tolist() == [int(lane == failed) for lane in range(4)]
    assert out["num_tokens"].tolist() == [int(lane != failed) for lane in range(3)] + [0]
    assert out["tokens"][2, 0] == plain[NAMES[1]][1]
    assert out["committed_len"][1] == 40  # the chunk is in the cache, whatever came of it
    assert int(host.state.committed_len[PROMPTED]) == 40


def test_log_probabilities_of_both_phases() -> None:
    host = Joint()
    truth = host.generate(0, prompt_of(20, 0), 6)
    begin(host, 0, prompt_of(20, 0))
    host.initialize(PROMPTED, 33)
    out = host.mixed(
        WIDE, [Offer(0, 4, [*truth[1:3], (truth[3] + 1) % VOCAB], [0.5] * 3), Chunk(PROMPTED, prompt_of(33, 2))],
        logprobs=True,
    )  # fmt: skip
    assert out["num_tokens"].tolist() == [3, 1, 0, 0]
    history = [prompt_of(20, 0) + truth[:4], prompt_of(33, 2)]
    for lane, first, count in ((0, 20, 3), (1, 32, 1)):
        logits = reference_logits(history[lane])
        for column in range(count):
            row = logits[first + column]
            expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
            np.testing.assert_allclose(out["logprob"][lane, column], expected.max(), atol=1e-3)
            np.testing.assert_allclose(out["top_logprobs"][lane, column], np.sort(expected)[:-21:-1], atol=1e-3)
            assert out["rank"][lane, column] == 1
        assert not out["top_logprobs"][lane, count:].any()
    begin(host, 0, prompt_of(20, 0))
    assert not host.mixed(WIDE, [Offer(0, 1)])["top_logprobs"].any()


def test_masks_of_the_prompt_row_and_of_every_depth(plain: dict[str, list[int]]) -> None:
    """Row b x W + j masks depth j of lane b; the prompt row has its own at depth 0."""
    host, truth = Joint(), plain["greedy"]
    begin(host, 0, prompt_of(20, 0))
    host.initialize(PROMPTED, 33)
    extents = mask_shape(WIDE, host.dims)
    assert extents is not None
    bits = np.full(extents, 0xFFFFFFFF, np.uint32)

    def only(row: int, token: int) -> None:
        bits[row] = 0
        bits[row, token // 32] = np.uint32(1) << np.uint32(token % 32)

    only(4 * 1 + 0, 17)  # lane 1 is the prompt row
    other = (truth[2] + 1) % VOCAB
    only(4 * 2 + 1, other)  # lane 2, behind its first proposal
    host.bits = bits
    offer = Offer(0, 4, truth[1:4], [0.9] * 3)
    out = host.mixed(WIDE, [None, Chunk(PROMPTED, prompt_of(33, 2)), offer])
    assert out["tokens"][1, 0] == 17
    assert out["tokens"][2].tolist() == [truth[1], other, -1, -1]
    assert (out["offered"][2], out["accepted"][2]) == (3, 1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ProgramShape(WIDE.kind, 4, 4, 3, 75, 64, ProposalSource.COPY), "76 packed rows, are needed"),
        (ProgramShape(WIDE.kind, 4, 4, 3, 14, 2, ProposalSource.COPY), "a prompt of at least 4 tokens"),
        (mixed_shape(4, 4, source=ProposalSource.NONE), "need a source"),
        (mixed_shape(4, 4, source=ProposalSource.LEARNED), "need a draft model"),
    ],
)
def test_impossible_shapes_are_refused(shape: ProgramShape, message: str) -> None:
    arguments: tuple[Any, ...] = (Toy(), Joint().dims, "float32")
    with pytest.raises(ValueError, match=message):
        build_program(shape, *arguments)


@pytest.mark.parametrize("shape", [PLAIN, WIDE])
def test_what_a_core_is_checked_with_makes_every_row_work(shape: ProgramShape) -> None:
    host = Joint()
    control = (*busy_control(shape, host.dims), *no_bits(shape, host.dims))
    _, outputs = host.program(shape)(host.params, host.state, *control)
    out = completion_layout(shape, host.dims).split(*map(np.asarray, outputs))
    lanes = min(shape.batch_capacity, host.dims.slots)
    assert (out["num_tokens"][:lanes] > 0).all()
    assert not out["status"].any()
    assert out["committed_len"][lanes - 1] > shape.token_capacity  # the chunk of the prompt
