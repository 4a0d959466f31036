"""Prefix reuse of the checkpoint policy beside a plain LRU cache of the same size: the table of docs/simulate.md.

    python -m benchmarks.prefix_replay --trace FILE [--blocks 500 2000 10000 50000 60000] [--requests N] [--recurrent]

The trace has hash ids (Mooncake). Prompts come one after the other, served in no time. A capacity is a number of
blocks of 512 tokens: LRU has as many blocks, the checkpoints as many tokens of cache in pages and state rows
together. Token hit ratios; the columns "LRU, blocks" and "unlimited" are what is published of the whole trace.
"""

from __future__ import annotations

import argparse
import time

from helios_jax.simulation.prefix_replay import replay_checkpoints, size_of
from helios_jax.simulation.prefixes import Prompt, prompts_of, replay_lru
from helios_jax.simulation.traces import load_trace

COLUMNS = ("blocks", "rows", "LRU, blocks", "LRU, tokens", "checkpoints", "difference")
HOURS = 1e6  # seconds: any trace, whole


def row(prompts: list[Prompt], blocks: int, page_size: int, recurrent: bool) -> list[str]:
    """The cells of one capacity."""
    size = size_of(blocks, page_size)
    lru = replay_lru(prompts, blocks, page_size)
    ours = replay_checkpoints(prompts, size, partial=True).token_ratio
    cells = [f"{blocks}", f"{size.rows}", f"{lru.block_ratio:.4f}", f"{lru.token_ratio:.4f}"]
    cells += [f"{ours:.4f}", f"{ours - lru.token_ratio:+.5f}"]
    if recurrent:
        cells.append(f"{replay_checkpoints(prompts, size, partial=False).token_ratio:.4f}")
    return cells


def main() -> None:
    own = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    own.add_argument("--trace", required=True)
    own.add_argument("--blocks", type=int, nargs="+", default=[500, 2000, 10_000, 50_000, 60_000])
    own.add_argument("--requests", type=int, help="only the first ones")
    own.add_argument("--page-size", type=int, default=64)
    own.add_argument("--recurrent", action="store_true", help="also states that are reused whole or not at all")
    options = own.parse_args()
    prompts = prompts_of(load_trace(options.trace, seconds=HOURS))[: options.requests]
    unlimited = replay_lru(prompts, None, options.page_size)
    print(f"{len(prompts)} requests; unlimited LRU {unlimited.block_ratio:.4f} (tokens {unlimited.token_ratio:.4f})\n")
    columns = [*COLUMNS, *(["recurrent"] if options.recurrent else [])]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    begun = time.process_time()
    for blocks in options.blocks:
        print(f"| {' | '.join(row(prompts, blocks, options.page_size, options.recurrent))} |", flush=True)
    print(f"\n{time.process_time() - begun:.0f} s of one core")


if __name__ == "__main__":
    main()
