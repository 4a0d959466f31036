"""The device's allocation of target rows against a sort in float64, for every B up to 64 and W up to 9."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.programs.allocation import allocate, fit

LANES, DEPTH = 64, 8


@functools.cache
def device() -> Any:
    return jax.jit(jax.vmap(allocate))


def oracle(joint: np.ndarray, ceiling: np.ndarray, slot: np.ndarray, budget: int) -> np.ndarray:
    """Every proposal below the ceilings, sorted by (probability falling, depth, slot); the first ones fit."""
    lengths = np.minimum(ceiling, 1)
    offered = [
        (-float(joint[lane, depth]), depth, int(slot[lane]), lane)
        for lane in range(len(ceiling))
        for depth in range(ceiling[lane] - 1)
    ]
    for *_, lane in sorted(offered)[: max(0, budget - int(lengths.sum()))]:
        lengths[lane] += 1
    return lengths


def falling(rng: np.random.Generator, flavour: str) -> np.ndarray:
    """Joint probabilities [64, 8] that never rise along a lane."""
    shape = (LANES, DEPTH)
    match flavour:
        case "random":
            return np.cumprod(rng.random(shape), axis=1).astype(np.float32)
        case "tied":
            return np.cumprod(rng.choice([1.0, 0.5, 0.25], shape), axis=1).astype(np.float32)
        case "zero":
            return np.cumprod(rng.choice([1.0, 0.5, 0.0], shape), axis=1).astype(np.float32)
        case "denormal":
            steps = rng.integers(0, 40, shape)[:, ::-1]
            return (np.sort(steps, axis=1)[:, ::-1] * np.float32(1.4e-45)).astype(np.float32)
        case "equal":
            return np.full(shape, rng.random(), np.float32)
    raise ValueError(flavour)


@pytest.mark.parametrize("flavour", ["random", "tied", "zero", "denormal", "equal"])
def test_allocation_equals_the_sort(flavour: str) -> None:
    """Lanes are a random subset of 64 in random slots; ceilings 1 .. W; any budget from B to more than enough."""
    rng = np.random.default_rng(len(flavour))
    cases = [(b, w) for b in (*range(1, 65), 1, 1, 2) for w in (*range(1, 10),)]
    joints, ceilings, slots, budgets = [], [], [], []
    for lanes, width in cases:
        ceiling = np.zeros(LANES, np.int32)
        there = rng.choice(LANES, lanes, replace=False)
        ceiling[there] = rng.integers(1, width + 1, lanes) if rng.random() < 0.7 else width
        joints.append(falling(rng, flavour))
        ceilings.append(ceiling)
        slots.append(np.where(ceiling > 0, rng.permutation(LANES), LANES).astype(np.int32))
        budgets.append(rng.integers(lanes, lanes * width + 2))
    found = device()(*map(jnp.asarray, (np.stack(joints), np.stack(ceilings), np.stack(slots), np.array(budgets))))
    for i in range(len(cases)):
        expected = oracle(joints[i], ceilings[i], slots[i], int(budgets[i]))
        np.testing.assert_array_equal(found[i], expected, err_msg=f"{cases[i]} budget {budgets[i]}")


@pytest.mark.parametrize(("lanes", "width"), [(1, 1), (1, 9), (3, 1), (2, 5)])
def test_allocation_at_its_own_size(lanes: int, width: int) -> None:
    """D = W - 1, no padding lanes; D = 0 has nothing to choose."""
    rng = np.random.default_rng(width)
    joint = np.cumprod(rng.random((lanes, width - 1)), axis=1).astype(np.float32)
    for budget in range(lanes, lanes * width + 1):
        ceiling = rng.integers(1, width + 1, lanes).astype(np.int32)
        found = jax.jit(allocate)(joint, ceiling, np.arange(lanes)[::-1], budget)
        np.testing.assert_array_equal(found, oracle(joint, ceiling, np.arange(lanes)[::-1], budget))


def test_broken_confidence_counts_as_zero_and_the_loop_ends() -> None:
    joint = np.array([[np.nan, np.nan], [0.5, 0.25], [-1.0, -0.0], [np.inf, 0.1]], np.float32)
    find = jax.jit(allocate)
    ceiling, slot = np.full(4, 3, np.int32), np.arange(4, dtype=np.int32)
    assert find(joint, ceiling, slot, 7).tolist() == [1, 3, 1, 2]  # inf, 0.5, 0.25
    assert find(joint, ceiling, slot, 9).tolist() == [2, 3, 1, 3]  # then 0.1, and the NaN of the lower slot
    assert find(joint, ceiling, slot, 11).tolist() == [3, 3, 2, 3]
    assert find(joint, ceiling + 100, slot, 10**6).tolist() == [3, 3, 3, 3]


def test_host_lengths_beyond_the_rows_are_cut() -> None:
    assert fit(jnp.array([2, 0, 3, 4]), 9).tolist() == [2, 0, 3, 4]
    assert fit(jnp.array([2, 0, 3, 4]), 6).tolist() == [2, 0, 3, 1]
    assert fit(jnp.array([2, 0, 3, 4]), 1).tolist() == [1, 0, 0, 0]
