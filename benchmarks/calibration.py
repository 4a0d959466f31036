"""Reliability of confidence on real prompts: predicted against accepted, before and after the learned map.

    python -m benchmarks.calibration [--model smollm2] [--draft DRAFT_MODEL] [--core DIR] [--prompts 40] [--tokens 96]

Prompts are the first ones of each category of spec_bench that fit, greedy, with copies or with a draft model. Every
proposal that the target judged counts once: those that were accepted, and the first one that was not.
`before` is the confidence of the source (of a copy its history, of a draft its probability); `after` is what the
two-parameter logistic map made of it with the parameters that earlier rounds had taught. Neither has seen the verdict
that it is compared with. The expected calibration error is the mean distance between prediction and share
accepted over ten bins of equal width, each weighted by its proposals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from helios_jax import LLM, SamplingParams
from helios_jax.aot import CoreOptions, prepare
from helios_jax.engine.calibration import Calibration
from helios_jax.engine.drafting import Drafting

PROMPTS = Path(__file__).parents[2] / "shared" / "data" / "prompts" / "spec_bench.jsonl"
BINS = 10
CONTEXT, CHUNK = 512, 64


class Bin(NamedTuple):
    """One bin of a reliability curve; means are NaN without proposals."""

    low: float
    high: float
    count: int
    predicted: float
    accepted: float


def reliability(predicted: np.ndarray, accepted: np.ndarray, bins: int = BINS) -> list[Bin]:
    """The curve: mean prediction and share accepted in bins of equal width; 1 belongs to the last one.

    Args:
        predicted: float64 [n], in [0, 1].
        accepted: bool [n].
    """
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    curve = []
    for number in range(bins):
        mine = place == number
        means = (float(predicted[mine].mean()), float(accepted[mine].mean())) if mine.any() else (np.nan, np.nan)
        curve.append(Bin(number / bins, (number + 1) / bins, int(mine.sum()), *means))
    return curve


def calibration_error(curve: Sequence[Bin]) -> float:
    """Expected calibration error, 0 without proposals."""
    total = sum(entry.count for entry in curve)
    return sum(e.count * abs(e.predicted - e.accepted) for e in curve if e.count) / max(1, total)


class Recording(Calibration):
    """A map that keeps what it was told, and what it said before."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[float] = []
        self.after: list[float] = []
        self.accepted: list[bool] = []

    def observe(self, raw_logits: np.ndarray, accepted: int) -> None:
        raw = 1.0 / (1.0 + np.exp(-np.asarray(raw_logits, np.float64)))
        self.before += raw.tolist()
        self.after += self.apply(raw).tolist()
        self.accepted += [depth < accepted for depth in range(len(raw))]
        super().observe(raw_logits, accepted)


def record(drafting: Drafting) -> Recording:
    """Put a recording map in the place of the source's own; a core has one source."""
    (source,) = drafting._calibrations
    drafting._calibrations[source] = recording = Recording()
    return recording


def table(recording: Recording) -> list[str]:
    """Markdown rows of both curves, and a line with the errors and the map."""
    accepted = np.array(recording.accepted, np.bool_)
    curves = [reliability(np.array(column), accepted) for column in (recording.before, recording.after)]
    lines = [
        "| confidence | proposals | mean | accepted | after the map: proposals | mean | accepted |",
        "|" + "---|" * 7,
    ]
    for before, after in zip(*curves, strict=True):
        cells = [f"{before.low:.1f} to {before.high:.1f}"]
        for entry in (before, after):
            means = ["-" if np.isnan(value) else f"{value:.3f}" for value in (entry.predicted, entry.accepted)]
            cells += [str(entry.count), *means]
        lines.append(f"| {' | '.join(cells)} |")
    errors = " -> ".join(f"{calibration_error(curve):.4f}" for curve in curves)
    share = float(accepted.mean()) if len(accepted) else 0.0
    lines.append(
        f"\n{len(accepted)} judged proposals, {share:.3f} accepted; expected calibration error {errors}; "
        f"map: scale {recording.scale:.3f}, shift {recording.shift:.3f}"
    )
    return lines


def questions(path: Path, llm: LLM, count: int, longest: int) -> list[list[int]]:
    """Token ids of the first chats that fit, the categories in turn."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        question = json.loads(line)
        if len(found[question["category"]]) < count:
            ids = llm.chat_prompt([{"role": "user", "content": question["turns"][0]}])["prompt_token_ids"]
            if len(ids) <= longest:
                found[question["category"]].append(ids)
    turns = [ids for number in range(count) for ids in (rows[number] for rows in found.values() if number < len(rows))]
    return turns[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="a draft model in place of copies")
    parser.add_argument("--questions", type=Path, default=PROMPTS, help="spec_bench.jsonl")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument(
        "--core", type=Path, default=Path("calibration-core"), help="made where it is missing, used as it is elsewhere"
    )
    args = parser.parse_args()
    source = {"spec_method": "draft", "draft_model": args.draft} if args.draft else {"spec_method": "copy"}
    if not args.core.exists():
        options = CoreOptions(max_slots=args.slots, max_context=CONTEXT, prefill_chunk=CHUNK, **source)
        prepare(args.model, options, args.core, lambda *a: print(*a, file=sys.stderr)).close()
    with LLM(core=args.core, progress=False) as llm:
        recording = record(llm._assembly.engine._drafting)
        prompts = questions(args.questions, llm, args.prompts, llm.max_context - args.tokens - 1)
        print(f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens", file=sys.stderr, flush=True)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=args.tokens))
    print("\n".join(table(recording)))


if __name__ == "__main__":
    main()
