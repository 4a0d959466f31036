"""One frame in flight against two: the host's time a step, and how long the device waits between decode steps.

    python -m benchmarks.queue [--model smollm2] [--dtype float32] [--streams 1 8] [--rounds 3] [--profile]

One core, two engines over it that differ in `async_scheduling` only, in alternating rounds: absolute
times of a shared machine do not travel, their ratios do. Every round runs so many streams for as
many tokens; only decode frames that carry all of them count. Medians over all such frames:

- decision: plan + commit + complete of the scheduler, wall time of the engine thread;
- host: the engine thread's time a step, waiting for the device not counted (text, packing and the
  call of the executable included), and its CPU time;
- gap: from the end of a decode frame, as the completion watcher sees it, to the submission of the
  next, 0 where that was there already; with `--profile` also from the end of one execution on the
  device to the begin of the next, as `jax.profiler` sees them (`ThunkExecutor::Execute` on CPU);
- queued: share of the frames that were submitted before the one ahead of them was over.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from helios_jax import SamplingParams
from helios_jax.aot.core import CoreOptions, is_core, open_core
from helios_jax.config import EngineConfig, cache_dir
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.engine.request import Request
from helios_jax.engine.setup import assemble
from helios_jax.scheduler.catalog import ProgramKind

PROMPT_LEN, WARM_UP = 32, 6
DECISION = ("plan", "commit", "complete")
EXECUTION = "ThunkExecutor::Execute"  # the span of one program on XLA's CPU device, without what waits


@dataclasses.dataclass
class Frame:
    """One decode frame with all streams; ns."""

    in_flight: Any
    number: int  # of the submission, to find neighbours
    decision_ns: int = 0


@dataclasses.dataclass
class Samples:
    """What was measured of one arm and number of streams."""

    decision_ms: list[float] = dataclasses.field(default_factory=list)
    host_ms: list[float] = dataclasses.field(default_factory=list)
    cpu_ms: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    gap_ms: list[float] = dataclasses.field(default_factory=list)
    profiled_ms: list[float] = dataclasses.field(default_factory=list)
    queued: list[bool] = dataclasses.field(default_factory=list)


class Arm:
    """An engine that is stepped here instead of by a thread of its own; the caller has nothing else to do."""

    def __init__(self, core: Any, *, two: bool) -> None:
        self.core, self.name = core, "two" if two else "one"
        # Nothing is kept: two arms take turns on one core's pages, and prompts are to be computed whole.
        self.assembly = assemble(core, EngineConfig(async_scheduling=two, enable_prefix_caching=False))
        self.engine = self.assembly.engine
        self.samples: dict[int, Samples] = {}
        self._decision_ns = 0
        self._frames: list[Frame] = []
        for name in DECISION:
            setattr(self.engine.scheduler, name, self._timed(getattr(self.engine.scheduler, name)))

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        for _, item in batch:
            if isinstance(item, Exception):
                raise item

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                self._decision_ns += time.perf_counter_ns() - began

        return timed

    def run(self, streams: int, tokens: int, seed: int, samples: Samples) -> None:
        rng, vocab = np.random.default_rng(seed), self.core.dims.vocab_size
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=OutputKind.DELTA
        )  # text of every step is made and delivered, as for a stream
        for number in range(streams):
            prompt = rng.integers(3, vocab, PROMPT_LEN).tolist()
            request = self.assembly.intake.request(
                prompt, params, request_id=f"{seed}-{number}", sink=self, arrival_ns=time.monotonic_ns()
            )
            self.engine.board.submit(request)
        with self._watched(streams):
            self._steps(samples)
        self._gaps(samples)

    @contextlib.contextmanager
    def _watched(self, streams: int) -> Iterator[None]:
        """Keeps the decode frames with all streams while they are submitted."""
        runner, self._frames = self.core.runner, []
        submit, count = runner.submit, [0]

        def watched(shape: Any, *control: Any) -> Any:
            in_flight = submit(shape, *control)
            count[0] += 1
            if shape.kind is ProgramKind.DECODE and shape.batch_capacity >= streams:
                self._frames.append(Frame(in_flight, count[0]))
            return in_flight

        runner.submit = watched
        try:
            yield
        finally:
            runner.submit = submit

    def _steps(self, samples: Samples) -> None:
        totals, running = self.engine.board.totals, True
        while running:
            self._decision_ns, before, began = 0, len(self._frames), time.perf_counter_ns()
            cpu, waited = time.thread_time_ns(), totals.wait_ns
            running = self.engine.step()
            took = time.perf_counter_ns() - began
            if running and len(self._frames) == before + 1 and before > 2:  # a steady step: one in, one out
                samples.decision_ms.append(self._decision_ns / 1e6)
                samples.host_ms.append((took - (totals.wait_ns - waited)) / 1e6)
                samples.cpu_ms.append((time.thread_time_ns() - cpu) / 1e6)
                samples.step_ms.append(took / 1e6)

    def _gaps(self, samples: Samples) -> None:
        for before, after in itertools.pairwise(self._frames[2:]):
            if after.number == before.number + 1:
                samples.gap_ms.append(max(0, after.in_flight.dispatch_ns - before.in_flight.end_ns) / 1e6)
                samples.queued.append(after.in_flight.queued)


def profiled_gaps(arm: Arm, streams: int, tokens: int, seed: int) -> list[float]:
    """Idle time of the device between consecutive executions of decode, ms, from jax's own profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            arm.run(streams, tokens, seed, Samples())
        (path,) = Path(folder).rglob("*.xplane.pb")
        spans = sorted(_executions(path))
    longest = max(end - begin for begin, end in spans)
    whole = [span for span in spans if span[1] - span[0] > longest / 4]  # no copies, no state operations
    return [max(0.0, after[0] - before[1]) / 1e6 for before, after in itertools.pairwise(whole[3:])]


def _executions(path: Path) -> Iterator[tuple[float, float]]:
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith(EXECUTION):
                    yield event.start_ns, event.start_ns + event.duration_ns


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def _p90(values: list[float]) -> str:
    return f"{np.percentile(values, 90):.2f}" if values else "-"


def report(arms: list[Arm], streams: list[int]) -> str:
    """The table; a row a number of streams and arm."""
    lines = [
        "| streams | frames | step ms | decision ms | host ms (CPU) | gap ms, median (p90) | by profiler | queued |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number in streams:
        for arm in arms:
            s = arm.samples[number]
            queued = f"{statistics.mean(s.queued):.0%}" if s.queued else "-"
            profiled = f"{_median(s.profiled_ms)} ({_p90(s.profiled_ms)})"
            lines.append(
                f"| {number} | {arm.name} | {_median(s.step_ms)} | {_median(s.decision_ms)}"
                f" | {_median(s.host_ms)} ({_median(s.cpu_ms)}) | {_median(s.gap_ms)} ({_p90(s.gap_ms)})"
                f" | {profiled} | {queued} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name, directory, GGUF file, or a core")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="one more round each under jax.profiler")
    args = parser.parse_args()
    if is_core(args.model):
        core = open_core(args.model)
    else:
        options = CoreOptions(max_slots=max(args.streams), dtype=args.dtype)
        core = open_core(args.model, options, cache_dir() / "cores")
    with core:
        arms = [Arm(core, two=two) for two in (False, True)]
        for arm in arms:
            for streams in args.streams:
                arm.samples[streams] = Samples()
                for number in range(2):  # every program is measured before anything counts
                    arm.run(streams, WARM_UP, 1000 + number, Samples())
        for number in range(args.rounds):
            for streams in args.streams:
                for arm in arms if number % 2 else reversed(arms):
                    arm.run(streams, args.tokens, number, arm.samples[streams])
        if args.profile:
            for streams in args.streams:
                for arm in arms:
                    arm.samples[streams].profiled_ms = profiled_gaps(arm, streams, args.tokens, args.rounds)
        print(f"{args.model}, {args.dtype}, {jax.default_backend()}, {args.rounds} rounds of {args.tokens} tokens,"
              f" load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")  # fmt: skip
        print(report(arms, args.streams))
        print(f"\ncompiles after ready: {core.compiles_after_ready()}")


if __name__ == "__main__":
    main()
