"""The target's verdict: against plain sampling row by row, against float64 arithmetic, and by chi-square.

Logits are made up; no model runs. Rows of a lane get the logits that a model would give after each
proposal, and the oracle walks through them one token at a time, as plain decode would.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.abi import Dims
from helios_jax.aot.device_state import DeviceState, new_state
from helios_jax.aot.programs.lanes import Lanes
from helios_jax.aot.programs.proposals import Proposals
from helios_jax.aot.programs.sampling import (
    PURPOSE_ACCEPT,
    PURPOSE_DRAFT,
    PURPOSE_SAMPLE,
    Rows,
    draw,
    gumbel,
    record,
    sample,
    uniform,
)
from helios_jax.aot.programs.verification import Verdict, judge, pack_block
from tests.unit.programs_toy import Toy, with_settings

VOCAB, WIDTH = 11, 4
LANES, ROWS = 5, 20
DIMS = Dims(slots=6, pages_per_slot=1, num_pages=2, page_size=16, vocab_size=VOCAB)
SIGMAS = 6.5

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy_penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 2.0, "bias": {3: 2.0}},
    "plain": {},
    "cold": {"temperature": 0.4},
    "filters": {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.03},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "bias": {1: 1.0}},
}


def state_with(rows: dict[int, dict[str, Any]]) -> DeviceState:
    state = new_state(Toy(), DIMS, "float32")
    counts = jnp.broadcast_to(jnp.arange(VOCAB) % 3 == 1, (DIMS.slots + 1, VOCAB)).astype(jnp.int32)
    changed: dict[str, Any] = {"output_counts": counts}
    rows = {slot: {"temperature": 1.0, "seed": (slot, 77)} | settings for slot, settings in rows.items()}
    return with_settings(state.replace(**changed), rows)


def lanes_of(slots: Any, positions: Any) -> Lanes:
    slots = jnp.asarray(slots)
    return Lanes(slots, slots < DIMS.slots, jnp.asarray(positions), slots * 0, jnp.ones((len(slots), 1), jnp.int32))


@functools.cache
def judged(drawn: bool, rows: int = ROWS) -> Any:
    """The compiled verdict of rows packed as the program packs them; one compilation for LANES and ROWS."""

    def run(
        logits: jax.Array, slots: jax.Array, positions: jax.Array, tokens: jax.Array, lengths: jax.Array,
        log_q: jax.Array, state: DeviceState,
    ) -> Verdict:  # fmt: skip
        proposals = Proposals(tokens, lengths - 1, tokens * 1.0, log_q if drawn else None)
        block = pack_block(lanes_of(slots, positions), proposals, lengths, rows)
        return judge(logits, block, proposals, state, WIDTH)

    return jax.jit(run)


@functools.cache
def plain() -> Any:
    return jax.jit(lambda logits, rows, state: (out := sample(logits, rows, state), record(state, rows, out.token)))


def walk(state: DeviceState, slot: int, position: int, logits: np.ndarray, drafts: np.ndarray) -> list[int]:
    """Plain decode through the rows of one lane for as long as its tokens are the proposals."""
    emitted: list[int] = []
    for j, row in enumerate(logits):
        rows = Rows(jnp.array([slot]), jnp.array([True]), jnp.array([position + j + 1]))
        out, state = plain()(row[None], rows, state)
        emitted.append(int(out.token[0]))
        if j == len(logits) - 1 or emitted[-1] != drafts[j]:
            break
    return emitted


@pytest.mark.parametrize("name", SETTINGS)
def test_undrawn_proposals_give_plain_decode_s_tokens(name: str) -> None:
    """Greedy and sampled alike, with penalties that see the drafts, beside lanes with other settings."""
    rng = np.random.default_rng(len(name))
    names = [name, *SETTINGS][: DIMS.slots]
    state = state_with({slot: SETTINGS[n] for slot, n in enumerate(names)})
    run, accepted = judged(False), 0
    for round_ in range(12):
        slots = rng.permutation(DIMS.slots)[:LANES]
        slots[rng.integers(LANES)] = DIMS.slots  # an inactive lane
        lengths = np.where(slots < DIMS.slots, rng.integers(1, WIDTH + 1, LANES), 0)
        positions = rng.integers(3, 400, LANES)
        logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
        drafts, offset = rng.integers(0, VOCAB, (LANES, WIDTH - 1)), np.cumsum(lengths) - lengths
        for lane in range(LANES):  # most proposals are what plain decode would say
            for _ in range(rng.integers(0, WIDTH)):
                mine = logits[offset[lane] : offset[lane] + lengths[lane]]
                if not len(mine) or slots[lane] == DIMS.slots:
                    continue
                said = walk(state, slots[lane], positions[lane], mine, drafts[lane])
                drafts[lane, : min(len(said), WIDTH - 1)] = said[: WIDTH - 1]
        found = run(logits, slots, positions, drafts, lengths, jnp.zeros((1, 1, 1)), state)
        for lane in range(LANES):
            if slots[lane] == DIMS.slots:
                assert (found.emitted[lane], found.token[lane].max()) == (0, -1)
                assert found.survival[lane].sum() == 0
                continue
            mine = logits[offset[lane] : offset[lane] + lengths[lane]]
            expected = walk(state, slots[lane], positions[lane], mine, drafts[lane])
            assert found.token[lane].tolist() == expected + [-1] * (WIDTH - len(expected)), (round_, lane)
            assert (found.emitted[lane], found.accepted[lane]) == (len(expected), len(expected) - 1)
            assert found.offered[lane] == lengths[lane] - 1
            assert found.status[lane] == 0
            accepted += len(expected) - 1
    assert accepted > 10


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def test_drawn_proposals_follow_the_acceptance_rule_in_float64() -> None:
    """min(1, p / q), the residual distribution, bonus tokens, survival; the device's own noise."""
    assert len({PURPOSE_SAMPLE, PURPOSE_DRAFT, PURPOSE_ACCEPT}) == 3  # or they would not be independent
    rng, count = np.random.default_rng(3), LANES
    state = state_with({slot: {"temperature": [1.0, 0.7, 1.6, 0.0, 1.0, 1.0][slot]} for slot in range(6)})
    run, rejected, kept = judged(True), 0, 0
    for _ in range(25):
        slots = np.append(rng.permutation(5)[: count - 1], DIMS.slots)
        lengths = np.append(rng.integers(1, WIDTH + 1, count - 1), 0)
        positions = rng.integers(3, 400, count)
        logits = rng.normal(0, 1.5, (count * WIDTH, VOCAB)).astype(np.float32)
        q = softmax(rng.normal(0, 1.0, (WIDTH - 1, count, VOCAB)))
        drafts = np.stack([[rng.choice(VOCAB, p=q[d, b]) for d in range(WIDTH - 1)] for b in range(count)])
        found = run(logits, slots, positions, drafts, lengths, np.log(q).astype(np.float32), state)
        at = 0
        for lane in range(count - 1):
            temperature = float(state.temperature[slots[lane]])
            expected, survival, alive, doubtful = [], [], 1.0, False
            for j in range(lengths[lane]):
                row, where = logits[at + j].astype(np.float64), positions[lane] + j + 1
                seed, place = state.seed[slots[lane]][None], jnp.array([where])
                noise = np.asarray(gumbel(seed, place, PURPOSE_SAMPLE, VOCAB)[0], np.float64)
                p = softmax(row / temperature) if temperature else np.eye(VOCAB)[row.argmax()]
                if j == lengths[lane] - 1:
                    expected.append(int(np.argmax(np.log(np.maximum(p, 1e-300)) + noise)))
                    break
                d = drafts[lane, j]
                ratio = p[d] if not temperature else min(1.0, p[d] / q[j, lane, d])
                u = float(uniform(seed, place, PURPOSE_ACCEPT)[0])
                doubtful |= abs(u - ratio) < 1e-5
                if u < ratio:
                    expected.append(int(d))
                    kept += 1
                    continue
                rest = np.maximum(p - q[j, lane], 0) if temperature else p
                expected.append(int(np.argmax(np.log(np.maximum(rest / rest.sum(), 1e-300)) + noise)))
                rejected += 1
                break
            for j in range(lengths[lane] - 1):
                row, d = logits[at + j].astype(np.float64), drafts[lane, j]
                p = softmax(row / temperature) if temperature else np.eye(VOCAB)[row.argmax()]
                alive *= p[d] if not temperature else min(1.0, p[d] / q[j, lane, d])
                survival.append(alive)
            np.testing.assert_allclose(found.survival[lane, : len(survival)], survival, atol=1e-5)
            assert not found.survival[lane, len(survival) :].any()
            assert doubtful or found.token[lane, : found.emitted[lane]].tolist() == expected
            at += lengths[lane]
        assert found.emitted[count - 1] == 0
    assert min(rejected, kept) > 15


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Tokens against the probabilities `expected` [V]."""
    found, wanted = np.bincount(tokens, minlength=VOCAB), expected * len(tokens)
    assert found[wanted == 0].sum() == 0
    common = wanted > 5
    found = np.append(found[common], found[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    statistic = ((found - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    freedom = max(1, int((wanted > 0).sum()) - 1)
    assert statistic < freedom + SIGMAS * np.sqrt(2 * freedom), (found, wanted)


def target(logits: np.ndarray, settings: dict[str, Any], history: list[int]) -> np.ndarray:
    """float64 probabilities of the next token by the documented order of operations."""
    x = logits.astype(np.float64)
    counts = (np.arange(VOCAB) % 3 == 1) + np.bincount(history, minlength=VOCAB)
    factor = settings.get("repetition_penalty", 1.0)
    x = np.where(counts > 0, np.where(x > 0, x / factor, x * factor), x)
    x -= settings.get("frequency_penalty", 0) * counts + settings.get("presence_penalty", 0) * (counts > 0)
    for token, value in settings.get("bias", {}).items():
        x[token] += value
    p = softmax(x / settings.get("temperature", 1.0))
    p = np.where(p >= settings.get("min_p", 0) * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    if settings.get("top_k"):
        p[order[settings["top_k"] :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= settings.get("top_p", 1.0)]] = 0
    return p / p.sum()


BLOCKS = 4_000  # lanes of one verdict in the chi-square tests


def blocks_of(state: DeviceState, by_depth: np.ndarray, q: np.ndarray, source: str, first: int) -> tuple[Any, Any]:
    """Tokens [BLOCKS, W] and counts of emitted blocks at other positions for every `first`, all in slot 2."""
    slots, positions = np.full(BLOCKS, 2), 10 + 7 * (first + np.arange(BLOCKS))
    logits, lengths = np.tile(by_depth, (BLOCKS, 1)), np.full(BLOCKS, WIDTH)
    log_q = np.log(q).astype(np.float32)
    if source == "copy":
        drafts = np.broadcast_to(by_depth[:-1].argmax(axis=1), (BLOCKS, WIDTH - 1))
        run, log_q = judged(False, BLOCKS * WIDTH), log_q[:1, None]
    else:
        columns = [draft_column()(log_q[d], positions + d + 1, state) for d in range(WIDTH - 1)]
        drafts, run = np.stack(columns, axis=1), judged(True, BLOCKS * WIDTH)
        log_q = np.broadcast_to(log_q[:, None], (WIDTH - 1, BLOCKS, VOCAB))
    found = run(logits, slots, positions, drafts, lengths, log_q, state)
    return np.asarray(found.token), np.asarray(found.emitted)


@functools.cache
def draft_column() -> Any:
    def column(log_q: jax.Array, positions: jax.Array, state: DeviceState) -> jax.Array:
        rows = Rows(jnp.full(BLOCKS, 2), jnp.ones(BLOCKS, bool), positions)
        return draw(jnp.broadcast_to(log_q, (BLOCKS, VOCAB)), rows, state, PURPOSE_DRAFT)

    return jax.jit(column)


def distribution(name: str, source: str, batches: int) -> None:
    """Every emitted token has the target's distribution after what was emitted before it.

    The first two positions are checked token by token of the history, later ones where the
    history does not matter (no penalties).
    """
    settings, rng = SETTINGS[name], np.random.default_rng(17)
    by_depth = rng.normal(0, 1.5, (WIDTH, VOCAB)).astype(np.float32)
    state = state_with({2: settings})
    q = softmax(by_depth[:-1] + rng.normal(0, 0.7, (WIDTH - 1, VOCAB)))
    parts = [blocks_of(state, by_depth, q, source, BLOCKS * batch) for batch in range(batches)]
    token, emitted = (np.concatenate(column) for column in zip(*parts, strict=True))
    chi_square(token[:, 0], target(by_depth[0], settings, []))
    for first in np.unique(token[emitted > 1, 0]):
        after = token[(emitted > 1) & (token[:, 0] == first), 1]
        if len(after) > 200:
            chi_square(after, target(by_depth[1], settings, [int(first)]))
    if "penalty" not in " ".join(settings):
        for depth in range(1, WIDTH):
            chi_square(token[emitted > depth, depth], target(by_depth[depth], settings, []))
    assert (emitted == WIDTH).sum() > 20


@pytest.mark.parametrize("source", ["copy", "learned"])
@pytest.mark.parametrize("name", ["plain", "filters", "penalties"])
def test_emitted_tokens_have_the_target_s_distribution(name: str, source: str) -> None:
    distribution(name, source, 1)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["copy", "learned"])
@pytest.mark.parametrize("name", ["plain", "cold", "filters", "penalties"])
def test_emitted_tokens_have_the_target_s_distribution_in_200_000_blocks(name: str, source: str) -> None:
    distribution(name, source, 50)


def test_rows_that_are_not_finite_end_the_block() -> None:
    """Before them everything is as if the block were shorter; at the first row the lane fails."""
    rng = np.random.default_rng(1)
    state = state_with({slot: SETTINGS["greedy"] for slot in range(LANES)})
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    drafts = logits.reshape(LANES, WIDTH, VOCAB).argmax(axis=2)[:, :3]
    clean = logits.copy()
    logits[0 * 4 + 2, 5], logits[1 * 4, 1], logits[2 * 4 + 3, 0] = np.nan, np.inf, -np.inf
    for drawn in (False, True):
        log_q = np.log(np.full((3, LANES, VOCAB) if drawn else (1, 1, 1), 1 / VOCAB, np.float32))
        lengths = np.full(LANES, WIDTH)
        found = judged(drawn)(logits, np.arange(LANES), 5 + np.arange(LANES), drafts, lengths, log_q, state)
        assert found.emitted.tolist() == [2, 0, 3, 4, 4]
        assert found.status.tolist() == [0, 1, 0, 0, 0]
        assert found.offered.tolist() == [1, 0, 2, 3, 3]
        assert found.token[0, :2].tolist() == clean[:2].argmax(axis=1).tolist()


def test_a_broken_draft_distribution_falls_back_to_the_target() -> None:
    state = state_with({0: SETTINGS["plain"]})
    logits = np.random.default_rng(2).normal(0, 1, (ROWS, VOCAB)).astype(np.float32)
    log_q = np.full((3, LANES, VOCAB), np.nan, np.float32)
    slots, lengths = np.array([0, 6, 6, 6, 6]), np.array([4, 0, 0, 0, 0])
    drafts = np.zeros((LANES, 3), np.int64)
    found = judged(True)(logits, slots, np.full(LANES, 9), drafts, lengths, log_q, state)
    expected = walk(state, 0, 9, logits[:1], np.zeros(3))
    assert (found.emitted[0], found.accepted[0], found.token[0, 0]) == (1, 0, expected[0])
    assert np.isfinite(found.survival).all()
