"""The recurrence and its chunk form against float64 loops; convolution over packed rows; experts by tiles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.models import experts
from helios_jax.models.gated_delta import (
    Heads,
    convolve,
    inverse_unit_lower,
    last_rows,
    read_chunk,
    step,
    write_chunk,
)

N, R, K, V = 2, 2, 4, 3
CHANNELS, KERNEL = 5, 4


def random_heads(rng: np.random.Generator, count: int, alike: float = 0.0) -> Heads:
    """`count` tokens; `alike` near 1 makes all keys nearly the same, the worst case of the chunk form."""
    q, k = rng.standard_normal((2, count, N, K))
    k = alike * rng.standard_normal((1, N, K)) + (1 - alike) * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -np.exp(rng.standard_normal((count, N, R)) * 2 - 3)
    beta = rng.uniform(0.05, 0.999, (count, N, R))
    values = rng.standard_normal((count, N, R, V))
    return Heads(*(jnp.asarray(x, jnp.float32) for x in (q, k, values, decay, beta)))


def oracle(heads: Heads, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of every token, and the state after every token, in float64: the definition itself."""
    q, k, v, decay, beta = (np.asarray(x, np.float64) for x in heads)
    state, outs, states = state.astype(np.float64), [], []
    for t in range(len(q)):
        state = state * np.exp(decay[t])[..., None, None]
        delta = beta[t][..., None] * (v[t] - np.einsum("nk,nrkv->nrv", k[t], state))
        state = state + np.einsum("nk,nrv->nrkv", k[t], delta)
        outs.append(np.einsum("nk,nrkv->nrv", q[t], state))
        states.append(state)
    return np.array(outs), np.array(states)


@functools.cache
def chunk_program() -> Any:
    def run(heads: Heads, state: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, deltas = read_chunk(heads, state)
        return out, write_chunk(deltas, kept, state)

    return jax.jit(run)


@pytest.mark.parametrize("alike", [0.0, 0.98])
def test_chunks_equal_the_recurrence_at_every_kept_length(alike: float) -> None:
    """Outputs of all tokens, and the state after each prefix: what a round keeps of its rows."""
    rng, count = np.random.default_rng(3), 13  # the size of every chunk here: one program
    heads = random_heads(rng, count, alike)
    state = rng.standard_normal((N, R, K, V)).astype(np.float32)
    outs, states = oracle(heads, state)
    for kept in range(count + 1):
        out, after = chunk_program()(heads, state, kept)
        np.testing.assert_allclose(out, outs, atol=2e-5)
        np.testing.assert_allclose(after, states[kept - 1] if kept else state, atol=2e-5)


def test_single_steps_equal_the_recurrence() -> None:
    rng = np.random.default_rng(4)
    heads, state = random_heads(rng, 9), rng.standard_normal((N, R, K, V)).astype(np.float32)
    outs, states = oracle(heads, state)
    run = jax.jit(step)
    for t in range(9):
        out, state = run(Heads(*(leaf[t] for leaf in heads)), state)
        np.testing.assert_allclose(out, outs[t], atol=2e-5)
        np.testing.assert_allclose(state, states[t], atol=2e-5)


def test_what_lies_behind_the_kept_tokens_does_not_matter() -> None:
    """Rejected rows may be anything: NaN neither comes back through them nor through tokens that are masked."""
    rng = np.random.default_rng(5)
    heads, state = random_heads(rng, 13), rng.standard_normal((N, R, K, V)).astype(np.float32)
    clean_out, clean = chunk_program()(heads, state, 4)
    broken = Heads(*(leaf.at[4:].set(jnp.nan) for leaf in heads))
    masked_out, masked = chunk_program()(broken.where(jnp.arange(13) < 4), state, 13)
    np.testing.assert_allclose(masked, clean, atol=1e-6)
    np.testing.assert_allclose(masked_out[:4], clean_out[:4], atol=1e-6)
    later = Heads(*(leaf.at[4:].set(100.0) for leaf in heads))._replace(decay=heads.decay)
    np.testing.assert_allclose(chunk_program()(later, state, 4)[1], clean, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_inverse_holds_where_the_series_would_not(size: int) -> None:
    """All couplings 1: powers of A grow like binomials, the inverse has entries of -1, 0 and 1."""
    strict = np.tril(np.ones((2, size, size), np.float32), -1)
    strict[1] *= np.random.default_rng(size).uniform(-1, 1, (size, size)).astype(np.float32)
    expected = np.linalg.inv(np.eye(size) + strict.astype(np.float64))
    np.testing.assert_allclose(jax.jit(inverse_unit_lower)(strict), expected, atol=1e-5, rtol=1e-5)


def test_packed_rows_convolve_behind_their_own_lane() -> None:
    """Lanes of 0 to 5 rows, one after the other, against each lane alone; the state after any prefix too."""
    rng = np.random.default_rng(6)
    length = np.array([3, 0, 1, 5, 2])
    offset, total = np.cumsum(length) - length, int(length.sum())
    lane = np.repeat(np.arange(5), length)
    depth = np.arange(total) - offset[lane]
    mixed = rng.standard_normal((total + 2, CHANNELS)).astype(np.float32)  # two rows of padding
    before = rng.standard_normal((5, KERNEL - 1, CHANNELS)).astype(np.float32)
    before[1] = np.nan  # of an inactive lane
    taps = rng.standard_normal((CHANNELS, KERNEL)).astype(np.float32)
    out = jax.jit(convolve)(mixed, before, taps, offset, length, np.pad(depth, (0, 2)))
    run = jax.jit(last_rows)
    states = [np.asarray(run(mixed, before, offset, np.full(5, kept))) for kept in range(6)]
    for b, count in enumerate(length):
        rows = mixed[offset[b] : offset[b] + count]
        whole = np.concatenate([before[b], rows]).astype(np.float64)
        sums = np.array([(whole[i : i + KERNEL] * taps.T).sum(axis=0) for i in range(count)]).reshape(-1, CHANNELS)
        np.testing.assert_allclose(out[offset[b] : offset[b] + count], sums / (1 + np.exp(-sums)), atol=1e-5)
        for kept in range(count + 1):
            expected = np.concatenate([before[b], rows])[kept : kept + KERNEL - 1]
            np.testing.assert_array_equal(states[kept][b], expected)


@pytest.mark.parametrize("tile", [1, 3, 8])
def test_tiles_of_experts_equal_every_row_by_itself(tile: int) -> None:
    """Experts without rows, with one, with more than a tile; a row that is not finite stays alone."""
    rng = np.random.default_rng(7)
    sizes = np.array([0, 5, 1, 0, 9, 2])
    owner = np.repeat(np.arange(6), sizes)
    x = rng.standard_normal((17, 4)).astype(np.float32)
    gate_up, down = rng.standard_normal((6, 10, 4)).astype(np.float32), rng.standard_normal((6, 4, 5))
    x[6] = np.nan
    out = jax.jit(experts.grouped, static_argnums=4)(x, gate_up, down.astype(np.float32), jnp.asarray(sizes), tile)
    for row, expert in enumerate(owner):
        gate, up = np.split(gate_up[expert].astype(np.float64) @ x[row], 2)
        np.testing.assert_allclose(out[row], down[expert] @ (gate / (1 + np.exp(-gate)) * up), atol=1e-4)
    product = np.asarray(experts._grouped_product(x, gate_up, jnp.asarray(sizes)))
    np.testing.assert_allclose(product[7:], [gate_up[e] @ r for e, r in zip(owner[7:], x[7:], strict=True)], atol=1e-5)


def test_tiles_follow_the_rows_an_expert_has() -> None:
    """No expert is padded to more than a tile, and a tile is never longer than twice what is usual for one."""
    assert [experts.tile_rows(rows, 64) for rows in (1, 64, 191, 192, 1024, 1 << 20)] == [1, 1, 1, 8, 16, 64]


def test_routing_divides_by_the_sum_only_if_asked() -> None:
    logits = jnp.log(jnp.asarray([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    weights, chosen = experts.route(logits, 2, False)
    np.testing.assert_array_equal(chosen, [[3, 2], [0, 1]])
    np.testing.assert_allclose(weights, [[0.4, 0.3], [0.4, 0.3]], atol=1e-6)
    np.testing.assert_allclose(experts.route(logits, 2, True)[0], [[4 / 7, 3 / 7]] * 2, atol=1e-6)
