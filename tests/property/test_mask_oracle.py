"""Masks of allowed tokens against numpy: a masked row is a row of a smaller vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.abi import Dims, mask_shape
from helios_jax.aot.device_state import DeviceState, new_state
from helios_jax.aot.programs.lanes import Lanes
from helios_jax.aot.programs.masks import Mask, unpack
from helios_jax.aot.programs.proposals import Proposals
from helios_jax.aot.programs.sampling import PURPOSE_DRAFT, Rows, Sampled, draw, sample
from helios_jax.aot.programs.verification import Verdict, judge, pack_block
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from tests.unit.programs_toy import Toy, with_settings

VOCAB, WIDTH, ROWS = 37, 3, 2000
DIMS = Dims(slots=2, pages_per_slot=1, num_pages=2, page_size=16, vocab_size=VOCAB)
SIGMAS = 6.5
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "filters": {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.03},
    "bias": {"temperature": 0.0, "bias": {3: 100.0, 4: -100.0}},
}


def packed(allowed: np.ndarray) -> np.ndarray:
    """uint32 words of bool [R, V], bit by bit."""
    words = np.zeros((len(allowed), -(-allowed.shape[1] // 32)), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words


def state_with(settings: dict[str, Any]) -> DeviceState:
    return with_settings(new_state(Toy(), DIMS, "float32"), {0: {"temperature": 1.0, "seed": (3, 4)} | settings})


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def masked_oracle(logits: np.ndarray, allowed: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """float64 probabilities: the tokens that are not allowed do not exist, filters included."""
    x = logits.astype(np.float64)
    for token, value in settings.get("bias", {}).items():
        x[token] += value
    ids = np.flatnonzero(allowed)
    out = np.zeros(VOCAB)
    temperature = settings.get("temperature", 1.0)
    if not temperature:
        out[ids[np.argmax(x[ids])]] = 1.0
        return out
    p = softmax(x[ids] / temperature)
    p = np.where(p >= settings.get("min_p", 0) * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    p[order[settings.get("top_k", VOCAB) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= settings.get("top_p", 1.0)]] = 0
    out[ids] = p / p.sum()
    return out


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> None:
    found, wanted = np.bincount(tokens, minlength=VOCAB), expected * len(tokens)
    assert found[wanted == 0].sum() == 0
    common = wanted > 5
    found = np.append(found[common], found[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    statistic = ((found - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    freedom = max(1, int((wanted > 0).sum()) - 1)
    assert statistic < freedom + SIGMAS * np.sqrt(2 * freedom)


@functools.cache
def sampler() -> Any:
    """Slot 0 at ROWS positions, each row with its own mask."""

    def run(logits: jax.Array, bits: jax.Array, used: Any, state: DeviceState) -> Sampled:
        rows = Rows(jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, bool), jnp.arange(ROWS))
        return sample(logits, rows, state, Mask(bits, used))

    return jax.jit(run)


def masks(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((count, VOCAB)) < rng.choice([0.1, 0.5, 0.9], (count, 1))


def test_words_become_tokens_bit_by_bit() -> None:
    for size in (32, VOCAB):
        allowed = np.random.default_rng(size).random((5, size)) < 0.5
        np.testing.assert_array_equal(unpack(jnp.asarray(packed(allowed)), size), allowed)


def test_every_sampling_program_has_a_mask_of_its_rows() -> None:
    dims = Dims(slots=2, pages_per_slot=1, num_pages=2, page_size=16, vocab_size=65)
    assert mask_shape(ProgramShape(ProgramKind.INITIALIZE, 4, 0), dims) is None
    assert mask_shape(ProgramShape(ProgramKind.DECODE, 4, 1), dims) == (4, 3)
    assert mask_shape(ProgramShape(ProgramKind.PREFILL, 4, 512), dims) == (4, 3)
    assert mask_shape(ProgramShape(ProgramKind.SPECULATIVE, 4, 3, 2, 9), dims) == (12, 3)


@pytest.mark.parametrize("name", SETTINGS)
def test_masked_rows_sample_from_the_smaller_vocabulary(name: str) -> None:
    logits = np.random.default_rng(5).normal(0, 2, VOCAB).astype(np.float32)
    same = np.tile(logits, (ROWS, 1))
    for allowed in masks(4, 9):
        allowed[[2, 30]] = True  # somebody must be there
        bits = np.broadcast_to(packed(allowed[None]), (ROWS, 2))
        out = sampler()(same, bits, True, state_with(SETTINGS[name]))
        assert not np.asarray(out.status).any()
        chi_square(np.asarray(out.token), masked_oracle(logits, allowed, SETTINGS[name]))


def test_each_row_has_its_own_mask() -> None:
    """Greedy rows take the best of what their own masks allow; a mask that allows nothing costs its row alone."""
    logits = np.random.default_rng(6).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    allowed = masks(ROWS, 1) & (np.arange(ROWS) % 10 != 3)[:, None]
    empty = ~allowed.any(axis=1)
    out = sampler()(logits, packed(allowed), True, state_with(SETTINGS["greedy"]))
    best = np.where(allowed, logits, -np.inf).argmax(axis=1)
    np.testing.assert_array_equal(out.token, np.where(empty, -1, best))
    np.testing.assert_array_equal(out.status, np.where(empty, 2, 0))
    assert empty.sum() >= ROWS // 10


@pytest.mark.parametrize("name", ["greedy", "filters"])
def test_bits_that_are_not_used_change_nothing(name: str) -> None:
    logits = np.random.default_rng(7).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    state = state_with(SETTINGS[name])
    unread = sampler()(logits, np.zeros((ROWS, 2), np.uint32), False, state)
    everything = sampler()(logits, np.full((ROWS, 2), 0xFFFFFFFF, np.uint32), True, state)
    np.testing.assert_array_equal(unread.token, everything.token)
    assert (np.asarray(unread.token) >= 0).all()


# ---- rounds

LANES = 800


@functools.cache
def judged(drawn: bool) -> Any:
    """LANES lanes of slot 0 at different positions, WIDTH rows each, with the masks of each depth."""

    def run(
        logits: jax.Array, bits: jax.Array, drafts: jax.Array, log_q: jax.Array, state: DeviceState, first: jax.Array
    ) -> tuple[Verdict, jax.Array]:
        zeros, lengths = jnp.zeros(LANES, jnp.int32), jnp.full(LANES, WIDTH)
        position = 10 + first + WIDTH * jnp.arange(LANES, dtype=jnp.int32)
        if drawn:  # drawn from q, as a draft model would
            rows = Rows(zeros, lengths > 0, position)
            columns = [
                draw(jnp.broadcast_to(log_q[d], (LANES, VOCAB)), rows._replace(position=position + d + 1), state,
                     PURPOSE_DRAFT)
                for d in range(WIDTH - 1)
            ]  # fmt: skip
            drafts = jnp.stack(columns, axis=1)
        q = jnp.broadcast_to(log_q[:, None], (WIDTH - 1, LANES, VOCAB))
        proposals = Proposals(drafts, lengths - 1, drafts * 1.0, q if drawn else None)
        lanes = Lanes(zeros, lengths > 0, position, zeros, jnp.ones((LANES, 1), jnp.int32))
        block = pack_block(lanes, proposals, lengths, LANES * WIDTH)
        mask = Mask(bits, jnp.asarray(True)).rows(block.depth)
        return judge(logits[block.depth], block, proposals, state, WIDTH, mask), drafts

    return jax.jit(run)


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["copy", "learned"])
@pytest.mark.parametrize("name", ["greedy", "plain", "filters"])
def test_masked_rounds_emit_the_masked_distribution(name: str, drawn: bool) -> None:
    """Acceptance, residual and bonus all see the masked target; a proposal outside the mask never stands."""
    rng = np.random.default_rng(13)
    logits = rng.normal(0, 1.5, (WIDTH, VOCAB)).astype(np.float32)
    log_q = np.log([softmax(row + rng.normal(0, 0.7, VOCAB)) for row in logits[:-1]]).astype(np.float32)
    allowed = rng.random((WIDTH, VOCAB)) < 0.6
    allowed[np.arange(WIDTH - 1), logits[:-1].argmax(axis=1)] = True
    state = state_with(SETTINGS[name])
    drafts = np.broadcast_to(logits[:-1].argmax(axis=1), (LANES, WIDTH - 1))
    tokens, emitted = [], []
    for batch in range(4):
        found, made = judged(drawn)(logits, packed(allowed), drafts, log_q, state, batch * LANES * WIDTH)
        assert not np.asarray(found.status).any()
        stands = np.arange(WIDTH - 1) < np.asarray(found.accepted)[:, None]
        assert allowed[np.arange(WIDTH - 1), np.asarray(made)][stands].all()
        tokens.append(np.asarray(found.token))
        emitted.append(np.asarray(found.emitted))
    token, count = np.concatenate(tokens), np.concatenate(emitted)
    for depth in range(WIDTH):
        there = token[count > depth, depth]
        if len(there):
            chi_square(there, masked_oracle(logits[depth], allowed[depth], SETTINGS[name]))
    assert (count == WIDTH).sum() > 20 or (drawn and name == "greedy")


def test_a_mask_of_nothing_ends_the_block_there() -> None:
    """Behind a proposal the chain ends as if that proposal had not been made; at the first row the lane fails."""
    logits = np.random.default_rng(2).normal(0, 2, (WIDTH, VOCAB)).astype(np.float32)
    drafts = np.broadcast_to(logits[:-1].argmax(axis=1), (LANES, WIDTH - 1))
    log_q, state = np.zeros((WIDTH - 1, VOCAB), np.float32), state_with(SETTINGS["greedy"])
    for depth in range(WIDTH):
        allowed = np.ones((WIDTH, VOCAB), bool)
        allowed[depth] = False
        found, _ = judged(False)(logits, packed(allowed), drafts, log_q, state, 0)
        expected = [*logits.argmax(axis=1)[:depth], *[-1] * (WIDTH - depth)]
        assert (np.asarray(found.token) == expected).all()
        assert (np.asarray(found.emitted) == depth).all()
        assert (np.asarray(found.offered) == max(0, depth - 1)).all()
        assert (np.asarray(found.status) == (0 if depth else 2)).all()
