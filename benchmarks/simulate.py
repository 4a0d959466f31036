"""Policies side by side in virtual time: the table of docs/simulate.md.

    python -m benchmarks.simulate --costs FILE --profile ID --trace FILE [--speeds 1 3] [--policies ...] [...]

Every further option is one of `helios-jax simulate`. Rows are Markdown; the numbers depend on the
arguments only. With --time a last column has the CPU milliseconds a simulated frame.
"""

from __future__ import annotations

import argparse
import time

from helios_jax.cli import parser
from helios_jax.simulation.command import experiment_of, source_of
from helios_jax.simulation.experiment import POLICIES, Outcome, run_experiment
from helios_jax.simulation.traces import load_trace

COLUMNS = ("speed", "policy", "requests/s", "TTFT p50", "p99", "gap p50", "p99", "max", "output tokens/s", "goodput",
           "padding")  # fmt: skip
RATIOS = {"output_tokens_per_s": 0, "goodput": 3, "padding_ratio": 3}


def row(speed: float, outcome: Outcome) -> list[str]:
    """The cells of one run; times in ms."""
    report = outcome.report
    ttft, gap = report["ttft_ms"], report["gap_ms"]
    times = [ttft["p50"], ttft["p99"], gap["p50"], gap["p99"], gap["max"]]
    cells = [f"{speed:g}", report["policy"], f"{outcome.offered_per_s:.1f}"]
    cells += ["-" if value is None else f"{value:.0f}" for value in times]
    return [*cells, *(f"{report[key]:.{digits}f}" for key, digits in RATIOS.items())]


def main() -> None:
    own = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    own.add_argument("--speeds", type=float, nargs="+", default=[1.0, 3.0])
    own.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    own.add_argument("--time", action="store_true")
    ours, rest = own.parse_known_args()
    columns = [*COLUMNS, *(["CPU ms a frame"] if ours.time else [])]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for speed in ours.speeds:
        for policy in ours.policies:
            options = parser().parse_args(["simulate", *rest, "--policy", policy])
            trace = load_trace(speed=speed, **source_of(options))
            begun = time.process_time()
            outcome = run_experiment(experiment_of(options), trace)
            cells = row(speed, outcome)
            if ours.time:
                cells.append(f"{1000 * (time.process_time() - begun) / max(1, outcome.recorder.frames):.2f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
