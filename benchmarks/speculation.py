"""Copies on real prompts: adaptive width beside speculation off and every fixed width.

    python -m benchmarks.speculation [--streams 1 4 8] [--tokens 128] [--rounds 3] [--core DIR]

One core serves all modes, in turns (off, adaptive, fixed 2, ... and again), because absolute times of
a shared machine do not travel; the ratios of one turn do. Every turn gives each mode the same requests,
greedy, as many at a time as there are streams:

- summaries: prompts of spec_bench's summarization category of at most LONGEST tokens;
- edits: functions of this project, to be repeated with one name changed.

The first turn is not counted: it is where costs and acceptance are learnt. A turn's figure is output
tokens over the whole time of its requests, their prompts included, by three clocks: wall time; the process's
CPU time; and the sum over the frames that ran of the median duration of their program in all modes and turns
of the workload. The speed of a shared machine doubles and halves within seconds, and the third clock does not
see it: what it compares is which programs a mode chose, and how much they emitted. Reported are medians over
turns of the ratio to `off` in the same turn, and of adaptive to the best of the others.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helios_jax import LLM, SamplingParams
from helios_jax.aot import CoreOptions, prepare
from helios_jax.aot.prepared import PreparedCore
from helios_jax.aot.speculation import reduced
from helios_jax.config import EngineConfig
from helios_jax.scheduler.catalog import Catalog, ProgramKind

PROMPTS = Path(__file__).parents[2] / "shared" / "data" / "prompts" / "spec_bench.jsonl"
SOURCES = Path(__file__).parents[1] / "helios_jax" / "scheduler"
LONGEST = 480  # tokens of a summary's prompt
CONTEXT = 1024
CLOCKS = ("wall", "cpu", "median")


class Shared:
    """A core for one of several engines that take turns: perhaps fewer rounds, and it outlives its engine."""

    def __init__(self, core: PreparedCore, draft_tokens: int | None) -> None:
        self._core = core
        shapes = reduced(core.catalog, method="copy", draft_tokens=draft_tokens, token_capacity=None, mixed=True)
        self.catalog = Catalog(shapes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def close(self) -> None:
        """The core stays open for the others."""


@dataclasses.dataclass
class Turn:
    """One mode's part of a turn: tokens a second of wall time and of CPU time, and tokens a lane of its rounds.

    `frames` are (program, device time in ns); `median` is tokens a second of their programs' median durations.
    """

    wall: float
    cpu: float
    outputs: list[list[int]]
    emitted: int
    lanes: int
    frames: list[tuple[str, int]]
    median: float = 0.0

    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class Mode:
    """An engine and its frame trace."""

    def __init__(self, core: PreparedCore, width: str, depth: int | None, trace: Path) -> None:
        config = EngineConfig(spec_width=width, enable_prefix_caching=False, trace=trace)
        self.llm, self._trace, self._read = LLM.from_core(Shared(core, depth), config=config), trace, 0

    def frames(self) -> list[tuple[str, int]]:
        """Those since the last call."""
        lines = self._trace.read_text().splitlines()
        new, self._read = lines[self._read :], len(lines)
        return [(frame["shape"], max(frame["device_ns"])) for frame in map(json.loads, new)]


def modes(core: PreparedCore, folder: Path) -> dict[str, Mode]:
    """An engine for each mode. None keeps prefixes: the next one writes over the pages they would lie in."""
    depths = {s.proposal_depth for s in core.catalog.of_kind(ProgramKind.SPECULATIVE) if s.proposal_depth}
    wanted: dict[str, tuple[str, int | None]] = {"off": ("off", None), "adaptive": ("adaptive", None)}
    wanted |= {f"fixed {depth + 1}": ("fixed", depth) for depth in sorted(depths)}
    return {
        name: Mode(core, width, depth, folder / f"{number}.jsonl")
        for number, (name, (width, depth)) in enumerate(wanted.items())
    }


def summaries(path: Path, llm: LLM) -> Iterator[list[int]]:
    """Chats of the summarization category, in file order."""
    for line in path.read_text().splitlines():
        question = json.loads(line)
        if question["category"] == "summarization":
            ids = llm.chat_prompt([{"role": "user", "content": question["turns"][0]}])["prompt_token_ids"]
            if len(ids) <= LONGEST:
                yield ids


def edits(llm: LLM) -> Iterator[list[int]]:
    """Chats that ask for a function with another name, by file and line."""
    for path in sorted(SOURCES.glob("*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and 12 <= node.end_lineno - node.lineno <= 24:  # type: ignore[operator]
                code = ast.get_source_segment(text, node)
                ask = f"Rename the function {node.name} to compute. Repeat the whole code with this change.\n\n{code}"
                yield llm.chat_prompt([{"role": "user", "content": ask}])["prompt_token_ids"]


def play(mode: Mode, prompts: Sequence[list[int]], tokens: int) -> Turn:
    """All `prompts` at once."""
    llm, before = mode.llm, _rounds(mode.llm)
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    said = [output.outputs[0].token_ids for output in outputs]
    count, after = sum(map(len, said)), _rounds(llm)
    return Turn(count / wall, count / cpu, said, after[0] - before[0], after[1] - before[1], mode.frames())


def _rounds(llm: LLM) -> tuple[int, int]:
    counts = llm.stats().rounds.values()
    return sum(c.emitted for c in counts), sum(c.lanes for c in counts)


def measure(llms: dict[str, Mode], prompts: Sequence[list[int]], args: argparse.Namespace) -> list[dict[str, Turn]]:
    """The counted turns; the order of the modes is turned around every time."""
    turns, order = list[dict[str, Turn]](), list(llms)
    for number in range(1 + args.rounds):
        turn = {name: play(llms[name], prompts, args.tokens) for name in order}
        order.reverse()
        speeds = "  ".join(f"{name} {one.wall:.1f}/{one.cpu:.1f}" for name, one in sorted(turn.items()))
        print(f"  turn {number}, tokens a second of wall/CPU time: {speeds}", file=sys.stderr, flush=True)
        if number:
            turns.append(turn)
    durations = collections.defaultdict(list)
    for one in (one for turn in turns for one in turn.values()):
        for shape, duration_ns in one.frames:
            durations[shape].append(duration_ns)
    medians = {shape: statistics.median(values) for shape, values in durations.items()}
    for one in (one for turn in turns for one in turn.values()):
        one.median = one.tokens() / sum(medians[shape] for shape, _ in one.frames) * 1e9
    return turns


def report(kind: str, streams: int, turns: Sequence[dict[str, Turn]]) -> Iterator[str]:
    """The rows of one workload."""
    others = [name for name in turns[0] if name != "adaptive"]
    for name in sorted(turns[0], key=lambda n: (n == "adaptive", n != "off", n)):
        rows = [turn[name] for turn in turns]
        ratios = []
        for clock in CLOCKS:
            ratios.append(f"{_ratio(turns, name, 'off', clock):.2f}")
        speed = statistics.median(one.wall for one in rows)
        emitted, lanes = sum(one.emitted for one in rows), sum(one.lanes for one in rows)
        best = []
        if name == "adaptive":
            # The best mode of all turns together: the best of each turn would be picked by its noise.
            for clock in CLOCKS:
                rival = max(others, key=lambda n: _ratio(turns, n, "off", clock))
                best.append(f"{_ratio(turns, name, rival, clock):.2f} of {rival}")
        a_lane = f"{emitted / lanes:.2f}" if lanes else "-"
        yield f"| {kind}, {streams} | {name} | {speed:.1f} | {' | '.join(ratios)} | {a_lane} | {', '.join(best)} |"


def _ratio(turns: Sequence[dict[str, Turn]], name: str, other: str, clock: str) -> float:
    return statistics.median(getattr(turn[name], clock) / getattr(turn[other], clock) for turn in turns)


def differing(turns: Sequence[dict[str, Turn]]) -> int:
    """Outputs of other modes that are not those of `off`, token for token."""
    pairs = [(one.outputs, turn["off"].outputs) for turn in turns for one in turn.values()]
    return sum(said != wanted for mine, off in pairs for said, wanted in zip(mine, off, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--core", type=Path, default=Path("speculation-core"), help="made where it is missing")
    parser.add_argument("--questions", type=Path, default=PROMPTS, help="spec_bench.jsonl")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=["summaries", "edits"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options = CoreOptions(
        max_slots=max(args.streams), max_context=CONTEXT, dtype="float32", prefill_chunk=256, spec_method="copy"
    )
    head = "| prompts, streams | mode | tokens/s | x off: wall | CPU | median | tokens a lane | adaptive / best other |"
    print(f"{head}\n|---|---|---|---|---|---|---|---|")
    with (
        prepare(args.model, options, args.core, lambda *a: print(*a, file=sys.stderr)) as core,
        tempfile.TemporaryDirectory() as folder,
    ):
        llms = modes(core, Path(folder))
        plain = llms["off"].llm
        found = {"summaries": list(summaries(args.questions, plain)), "edits": list(edits(plain))}
        unequal = 0
        for kind in args.kinds:
            for streams in args.streams:
                print(f"{kind}, {streams} streams", file=sys.stderr)
                turns = measure(llms, found[kind][:streams], args)
                print("\n".join(report(kind, streams, turns)), flush=True)
                unequal += differing(turns)
        print(
            f"\noutputs that differ from those of off: {unequal}; compiles after ready: {core.compiles_after_ready()}"
        )
        for mode in llms.values():
            mode.llm.close()


if __name__ == "__main__":
    main()
