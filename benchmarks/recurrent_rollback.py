"""Three ways to take back recurrent state after a round: time and memory of one layer.

    python -m benchmarks.recurrent_rollback [--lanes 4] [--widths 1 2 4 8]

- `states`: the recurrence row by row, the state after each row kept; the accepted one is taken.
- `replay`: the recurrence row by row; afterwards once more over the accepted rows, from what was projected.
- `deltas`: all rows at once against the state before them; afterwards one product writes the accepted ones.

All three are checked against each other. Sizes are those of one layer of a published model (16 key heads of
128, 32 value heads of 128); the table is donated, as in the programs. Prints the best of several runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.models.gated_delta import Heads, read_chunk, step, write_chunk

N, R, K, V = 16, 2, 128, 128


def _row(heads: Heads, i: int) -> Heads:
    return Heads(*(leaf[:, i] for leaf in heads))


def states(table: jax.Array, heads: Heads, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, W + 1] states in memory."""
    lanes, width = kept.shape[0], heads.k.shape[1]
    every, outs = [table[:lanes]], []
    for i in range(width):
        out, state = step(_row(heads, i), every[-1])
        every.append(state)
        outs.append(out)
    chosen = jnp.stack(every, axis=1)[jnp.arange(lanes), kept]
    return table.at[:lanes].set(chosen), jnp.stack(outs, axis=1)


def replay(table: jax.Array, heads: Heads, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows twice."""
    lanes, width = kept.shape[0], heads.k.shape[1]
    state, outs = table[:lanes], []
    for i in range(width):
        out, state = step(_row(heads, i), state)
        outs.append(out)
    said = jnp.stack(outs, axis=1)
    table, said = jax.lax.optimization_barrier((table, said))  # the verdict lies between the two passes
    state = table[:lanes]
    for i in range(width):
        state = step(_row(heads, i).where(kept > i), state)[1]
    return table.at[:lanes].set(state), said


def deltas(table: jax.Array, heads: Heads, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the programs do."""
    lanes = kept.shape[0]
    said, left = read_chunk(heads, table[:lanes])
    table, said, left = jax.lax.optimization_barrier((table, said, left))
    return table.at[:lanes].set(write_chunk(left, kept, table[:lanes])), said


WAYS: tuple[Callable[..., tuple[jax.Array, jax.Array]], ...] = (states, replay, deltas)


def inputs(rng: np.random.Generator, lanes: int, width: int) -> Heads:
    """Random tokens of every lane."""
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, lanes, width, N, K)))
    decay, beta = -rng.uniform(0, 0.5, (lanes, width, N, R)), rng.uniform(0, 1, (lanes, width, N, R))
    return Heads(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, rng.standard_normal((lanes, width, N, R, V)), decay, beta))
    )


def measure(way: Callable[..., Any], heads: Heads, kept: jax.Array, runs: int) -> tuple[float, float, Any]:
    """Best milliseconds of a run, MiB of temporaries, and the results of one run."""
    table = jnp.ones((kept.shape[0] + 1, N, R, K, V), jnp.float32)
    program = jax.jit(way, donate_argnums=0).lower(table, heads, kept).compile()
    first = jax.tree.map(np.asarray, program(table, heads, kept))
    best, table = np.inf, jnp.ones_like(first[0])
    for _ in range(runs):
        begin = time.perf_counter()
        table, said = program(table, heads, kept)
        jax.block_until_ready((table, said))
        best = min(best, time.perf_counter() - begin)
    return best * 1e3, program.memory_analysis().temp_size_in_bytes / 2**20, first


def main() -> None:
    parser = argparse.ArgumentParser(description="Recurrent state after partial acceptance: time and memory a layer.")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    print(f"state of a lane {N * R * K * V * 4 / 2**20:.1f} MiB; {options.lanes} lanes")
    for width in options.widths:
        heads = inputs(rng, options.lanes, width)
        kept = jnp.asarray(rng.integers(0, width + 1, options.lanes), jnp.int32)
        found = {way.__name__: measure(way, heads, kept, options.runs) for way in WAYS}
        for name, (_, _, result) in found.items():
            for mine, theirs in zip(result, found["replay"][2], strict=True):
                np.testing.assert_allclose(mine[: options.lanes], theirs[: options.lanes], atol=1e-4, err_msg=name)
        shown = ", ".join(f"{name} {ms:.1f} ms {mib:.0f} MiB" for name, (ms, mib, _) in found.items())
        print(f"width {width}: {shown}")


if __name__ == "__main__":
    main()
