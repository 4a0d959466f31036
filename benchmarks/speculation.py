"""Copies on real prompts: adaptive width beside speculation off and every fixed width.

    python -m benchmarks.speculation [--streams 1 4 8] [--tokens 128] [--rounds 2] [--core DIR]

One core serves all modes, in turns (off, adaptive, fixed 2, ... and again), because absolute times of
a shared machine do not travel; the ratios of one turn do. A turn gives each mode the same requests, greedy, by as
many clients as there are streams: each asks again as soon as it has its answer, until none of
`max(6, 2 x streams)` requests is left. There the turn's clocks stop, since fewer streams are another workload, and the
other clients leave. Outputs have half, all and one and a half of `tokens` in turns, lest streams march in step.

- summaries: prompts of spec_bench's summarization category of at most LONGEST tokens;
- edits: functions of this project, to be repeated with one name changed.

The first turn is not counted: it is where costs and acceptance are learnt. A turn's figure is output
tokens over its time, prompts included, by three clocks: wall time; the process's
CPU time; and the sum over the frames that ran of the median duration of their program in all modes and turns
of the workload. The speed of a shared machine doubles and halves within seconds, and the third clock does not
see it: what it compares is which programs a mode chose, and how much they emitted. Reported are medians over
turns of the ratio to `off` in the same turn, and of adaptive to the best of the others.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
LENGTHS = (0.5, 1.0, 1.5)  # of outputs, in turns


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
    """One mode's part of a turn: tokens a second by every clock, and tokens a lane of its rounds.

    `outputs` are what clients got, by request, the broken off ones too; `frames` are (program, device time in ns).
    """

    tokens: int
    wall: float
    cpu: float
    outputs: dict[int, list[int]]
    emitted: int
    lanes: int
    frames: list[tuple[str, int]]
    median: float = 0.0


class Mode:
    """An engine and its frame trace."""

    def __init__(self, core: PreparedCore, width: str, depth: int | None, trace: Path) -> None:
        config = EngineConfig(spec_width=width, enable_prefix_caching=False, trace=trace)
        self.llm, self._trace, self._read = LLM.from_core(Shared(core, depth), config=config), trace, 0

    def frames(self, until_ns: int) -> list[tuple[str, int]]:
        """Those since the last call that were over by then."""
        lines = self._trace.read_text().splitlines()
        new, self._read = map(json.loads, lines[self._read :]), len(lines)
        return [(frame["shape"], max(frame["device_ns"])) for frame in new if frame["now_ns"] <= until_ns]


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


class Clients:
    """Those of one turn.

    Args:
        requests: Prompts and numbers of output tokens.
    """

    def __init__(self, llm: LLM, requests: Sequence[tuple[list[int], int]]) -> None:
        self._llm, self._requests, self._next = llm, requests, itertools.count()
        self.outputs: dict[int, list[int]] = {number: [] for number in range(len(requests))}
        self.over = threading.Event()

    def ask(self) -> None:
        """One request after the other, until somebody finds none."""
        try:
            while not self.over.is_set() and (number := next(self._next)) < len(self._requests):
                self._answer(number)
        finally:
            self.over.set()

    def _answer(self, number: int) -> None:
        prompt, tokens = self._requests[number]
        with contextlib.closing(self._llm.stream(prompt, SamplingParams(temperature=0, max_tokens=tokens))) as stream:
            for output in stream:
                if self.over.is_set():
                    return
                for part in output.outputs:
                    self.outputs[number] += part.token_ids


def play(mode: Mode, requests: Sequence[tuple[list[int], int]], streams: int) -> Turn:
    """All requests by so many clients; measured until one of them finds none left."""
    clients, before = Clients(mode.llm, requests), _rounds(mode.llm)
    cpu, wall = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        asking = [pool.submit(clients.ask) for _ in range(streams)]
        clients.over.wait()
        wall, cpu, until_ns = time.perf_counter() - wall, time.process_time() - cpu, time.monotonic_ns()
        said = {number: list(tokens) for number, tokens in clients.outputs.items()}
        after = _rounds(mode.llm)
    for one in asking:
        one.result()
    while mode.llm.stats().running:  # the next mode writes over the pages of requests that were left
        time.sleep(0.01)
    count, frames = sum(map(len, said.values())), mode.frames(until_ns)
    return Turn(count, count / wall, count / cpu, said, after[0] - before[0], after[1] - before[1], frames)


def _rounds(llm: LLM) -> tuple[int, int]:
    counts = llm.stats().rounds.values()
    return sum(c.emitted for c in counts), sum(c.lanes for c in counts)


def requests_of(prompts: Sequence[list[int]], streams: int, tokens: int) -> list[tuple[list[int], int]]:
    """The requests of a turn; a prompt that comes again has the same output."""
    count = max(6, 2 * streams)
    lengths = [max(1, round(tokens * LENGTHS[number % len(LENGTHS)])) for number in range(len(prompts))]
    return list(itertools.islice(itertools.cycle(zip(prompts, lengths, strict=True)), count))


def measure(
    llms: Mapping[str, Mode], prompts: Sequence[list[int]], streams: int, args: argparse.Namespace
) -> list[dict[str, Turn]]:
    """The counted turns; the order of the modes is turned around every time."""
    turns, order, requests = list[dict[str, Turn]](), list(llms), requests_of(prompts, streams, args.tokens)
    for number in range(1 + args.rounds):
        turn = {name: play(llms[name], requests, streams) for name in order}
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
        one.median = one.tokens / sum(medians[shape] for shape, _ in one.frames) * 1e9
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
    """Outputs of other modes that are not those of `off`, token for token, as far as both clients stayed."""
    pairs = [(one.outputs, turn["off"].outputs) for turn in turns for one in turn.values()]
    both = [(mine[number], off[number]) for mine, off in pairs for number in off]
    return sum(any(a != b for a, b in zip(said, wanted, strict=False)) for said, wanted in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--core", type=Path, default=Path("speculation-core"), help="made where it is missing")
    parser.add_argument("--questions", type=Path, default=PROMPTS, help="spec_bench.jsonl")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=["summaries", "edits"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
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
                turns = measure(llms, found[kind], streams, args)
                print("\n".join(report(kind, streams, turns)), flush=True)
                unequal += differing(turns)
        print(
            f"\noutputs that differ from those of off: {unequal}; compiles after ready: {core.compiles_after_ready()}"
        )
        for mode in llms.values():
            mode.llm.close()


if __name__ == "__main__":
    main()
