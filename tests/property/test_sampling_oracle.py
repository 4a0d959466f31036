"""Sampling against float64 oracles: distributions by chi-square, penalties by counting, seeds by identity."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.abi import Dims
from helios_jax.aot.device_state import DeviceState, new_state
from helios_jax.aot.programs.sampling import Rows, Sampled, sample
from tests.unit.programs_toy import Toy, with_settings

VOCAB, DRAWS = 29, 6000
DIMS = Dims(slots=8, pages_per_slot=1, num_pages=2, page_size=16, vocab_size=VOCAB)
LOGITS = np.random.default_rng(11).normal(0, 2, VOCAB).astype(np.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 5},
    "top_k_beyond_vocabulary": {"top_k": 2**31 - 1},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": -0.4},
    "bias": {"bias": {3: 4.0, 7: -100.0}},
    "everything": {
        "temperature": 1.3,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.3,
        "bias": {0: 1.0, 28: 2.0},
    },
}
# upper 1e-6 quantile of chi-square by degrees of freedom: mean + 6.5 standard deviations is above it here
SIGMAS = 6.5


def state_with(rows: dict[int, dict[str, Any]]) -> DeviceState:
    """Slot tables with settings per slot; token t has occurred t % 3 times as output, even ones in the prompt."""
    state = new_state(Toy(), DIMS, "float32")
    counts = jnp.broadcast_to(jnp.arange(VOCAB) % 3, (DIMS.slots + 1, VOCAB))
    seen = jnp.broadcast_to(jnp.arange(VOCAB) % 2 == 0, (DIMS.slots + 1, VOCAB))
    changed: dict[str, Any] = {"output_counts": counts.astype(jnp.int32), "prompt_seen": seen}
    rows = {slot: {"temperature": 1.0, "seed": (7, 9)} | settings for slot, settings in rows.items()}
    return with_settings(state.replace(**changed), rows)


def oracle(logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """float64 probabilities of each token, from the documented order of operations."""
    x, counts = logits.astype(np.float64), np.arange(VOCAB) % 3
    seen = (np.arange(VOCAB) % 2 == 0) | (counts > 0)
    factor = options.get("repetition_penalty", 1.0)
    x = np.where(seen, np.where(x > 0, x / factor, x * factor), x)
    x = x - options.get("frequency_penalty", 0) * counts - options.get("presence_penalty", 0) * (counts > 0)
    for token, value in options.get("bias", {}).items():
        x[token] += value
    p = softmax(x / options.get("temperature", 1.0))
    p = softmax(np.where(p >= options.get("min_p", 0) * p.max(), np.log(p), -np.inf))
    order = np.argsort(-p, kind="stable")
    if options.get("top_k"):
        p[order[options["top_k"] :]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= options.get("top_p", 1.0)]] = 0
    return p / p.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


@functools.cache
def jitted() -> Any:
    return jax.jit(sample)


@functools.cache
def many() -> Any:
    """Draws at DRAWS positions for slot 2."""

    def draw(state: DeviceState, logits: jax.Array) -> jax.Array:
        rows = Rows(jnp.full(DRAWS, 2), jnp.ones(DRAWS, bool), jnp.arange(DRAWS))
        return sample(jnp.broadcast_to(logits, (DRAWS, VOCAB)), rows, state).token

    return jax.jit(draw)


@pytest.mark.parametrize("name", OPTIONS)
def test_samples_have_the_oracle_s_distribution(name: str) -> None:
    tokens = np.asarray(many()(state_with({2: OPTIONS[name]}), LOGITS))
    expected = oracle(LOGITS, OPTIONS[name]) * DRAWS
    found = np.bincount(tokens, minlength=VOCAB)
    assert found[expected == 0].sum() == 0
    common = expected > 5
    expected = np.append(expected[common], expected[~common].sum())
    found = np.append(found[common], found[~common].sum())
    chi_square = ((found - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    freedom = max(1, int((expected > 0).sum()) - 1)
    assert chi_square < freedom + SIGMAS * np.sqrt(2 * freedom)


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_takes_the_oracle_s_best(name: str) -> None:
    options = OPTIONS[name] | {"temperature": 0.0}
    rng = np.random.default_rng(3)
    for _ in range(10):
        logits = rng.normal(0, 2, (1, VOCAB)).astype(np.float32)
        out = run(state_with({4: options}), logits, [4])
        shaping = {k: v for k, v in options.items() if k not in ("temperature", "top_k", "top_p", "min_p")}
        assert out.token[0] == np.argmax(oracle(logits[0], shaping))


def run(state: DeviceState, logits: np.ndarray, slots: list[int], position: int = 5, active: Any = True) -> Sampled:
    count = len(slots)
    active = np.broadcast_to(active, count)
    return jitted()(logits, Rows(jnp.asarray(slots), jnp.asarray(active), jnp.full(count, position)), state)


def test_a_row_does_not_depend_on_neighbours_slot_or_batch() -> None:
    """The same seed and position give the same token beside any settings, in any lane and slot."""
    mine = OPTIONS["everything"] | {"seed": (42, 1)}
    others = [OPTIONS[n] | {"seed": (i, i)} for i, n in enumerate(OPTIONS)][:8]
    rng = np.random.default_rng(8)
    for position in range(40):
        logits = rng.normal(0, 3, (8, VOCAB)).astype(np.float32)
        alone = run(state_with({0: mine}), logits[:1], [0], position).token[0]
        slot, lane = rng.integers(8), rng.integers(8)
        slots = rng.permutation(8)
        slots[[lane, np.flatnonzero(slots == slot)[0]]] = slots[[np.flatnonzero(slots == slot)[0], lane]]
        batch = rng.normal(0, 3, (8, VOCAB)).astype(np.float32)
        batch[lane] = logits[0]
        state = state_with(dict(enumerate(others)) | {int(slot): mine})
        assert run(state, batch, slots.tolist(), position).token[lane] == alone


def test_seed_and_position_change_the_draw() -> None:
    flat = np.zeros((1, VOCAB), np.float32)

    def draws(seed: tuple[int, int]) -> list[int]:
        state = state_with({1: {"seed": seed}})
        return [int(run(state, flat, [1], at).token[0]) for at in range(30)]

    assert draws((1, 2)) == draws((1, 2))
    assert len({tuple(draws(s)) for s in ((1, 2), (2, 1), (1, 3), (0, 2))}) == 4
    assert len(set(draws((1, 2)))) > 10


def test_top_k_one_is_greedy_even_among_equal_logits() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [4, 9, 20]] = 1.0
    state = state_with({0: {"top_k": 1, "temperature": 2.0}})
    assert {int(run(state, logits, [0], at).token[0]) for at in range(20)} == {4}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused(bad: float) -> None:
    logits = np.stack([LOGITS] * 3)
    logits[1, 17] = bad
    for temperature in (0.0, 1.0):
        rows = {slot: {"temperature": temperature, "top_p": 0.9} for slot in range(3)}
        out = run(state_with(rows), logits, [0, 1, 2])
        assert out.status.tolist() == [0, 1, 0]
        assert out.token[1] == -1
        assert out.token[0] >= 0
        assert out.token[2] >= 0


def test_inactive_rows_sample_nothing() -> None:
    logits = np.full((2, VOCAB), np.nan, np.float32)
    logits[0] = LOGITS
    out = run(state_with({0: {}}), logits, [0, DIMS.slots], active=[True, False])
    assert out.status.tolist() == [0, 0]
    assert out.token[1] == -1


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 0.01},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 100.0},
        {"temperature": 0.01, "repetition_penalty": 1e-38, "bias": {1: 100.0, 2: -100.0}},
        {"top_p": 1e-7},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 1e-7, "min_p": 1.0, "presence_penalty": -2.0},
    ],
)
def test_extreme_settings_still_give_a_token(extreme: dict[str, Any]) -> None:
    for logits in (LOGITS, np.zeros(VOCAB, np.float32), LOGITS * 1e37, np.full(VOCAB, -3e38, np.float32)):
        out = run(state_with({0: extreme}), logits[None], [0])
        assert out.status[0] == 0
        assert 0 <= out.token[0] < VOCAB
