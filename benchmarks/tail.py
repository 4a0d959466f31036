"""The largest gap between tokens of decoding streams while long prompts arrive, with and without mixed programs.

    python -m benchmarks.tail [--model smollm2] [--core DIR] [--streams 8] [--prompts 6] [--prompt-len 2048]
                              [--interval S] [--lead S] [--rounds 2]

Eight streams decode; from then on a prompt of 2,048 tokens arrives every `interval` seconds, and asks
for a few tokens. For each preset, with and without `--mixed-prefill`, in alternating rounds: the largest gap
between two deliveries of any stream in the time of the prompts, its 50th and 99th percentiles, the prompts' time
to first token, and the streams' tokens a second. Times are the clients'; a first pass of each engine, not
counted, lets it discover durations.

Beside it the simulator's first-come-first-served baselines, on the same catalogue and arrivals: their
programs take the median time that the same programs took in these runs.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from helios_jax import AsyncLLM, OutputKind, SamplingParams
from helios_jax.aot.core import CoreOptions, prepare
from helios_jax.aot.manifest import read_manifest
from helios_jax.config import EngineConfig
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import Catalog, ProgramShape, ProposalSource, physical_tokens
from helios_jax.scheduler.types import Limits, RequestSpec
from helios_jax.simulation.baselines import VtcAdmission, baseline
from helios_jax.simulation.device import FakeDevice
from helios_jax.simulation.driver import Arrival, Simulation
from helios_jax.simulation.profiles import Work

PRESETS = ("balanced", "throughput")
BASELINES = ("fcfs-prefill", "fcfs-chunked")
STREAM_PROMPT, PROMPT_OUTPUT = 32, 4
PAGE_SIZE = 16
MS = 1e3


@dataclasses.dataclass(frozen=True)
class Load:
    """Who asks for what, and when."""

    streams: int
    prompts: int
    prompt_len: int
    interval_s: float
    lead_s: float  # all streams decode by then
    stream_tokens: int

    @property
    def context(self) -> int:
        return max(STREAM_PROMPT + self.stream_tokens, self.prompt_len + PROMPT_OUTPUT)


@dataclasses.dataclass
class Seen:
    """What the clients of one run saw, s."""

    gaps: list[float]
    first_token: list[float]
    tokens_per_s: float
    kinds: collections.Counter[str]

    def row(self) -> list[str]:
        gaps = np.array(self.gaps) * MS
        values = [gaps.max(), np.percentile(gaps, 99), np.percentile(gaps, 50)]
        first = np.array(self.first_token) * MS
        values += [float(np.median(first)), first.max()]
        return [f"{value:.0f}" for value in values] + [f"{self.tokens_per_s:.1f}"]


def gaps_within(times: list[float], begin: float, end: float) -> list[float]:
    """Gaps between neighbouring times that overlap the window."""
    return [b - a for a, b in itertools.pairwise(times) if b > begin and a < end]


# ---- the real engine


Deliveries = list[tuple[float, int]]  # arrival time at the client, and tokens


async def _answer(llm: AsyncLLM, prompt: list[int], max_tokens: int, done: asyncio.Event | None = None) -> Deliveries:
    """All deliveries of one request; the client leaves once `done` is set."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=OutputKind.DELTA)
    seen, stream = [], llm.generate(prompt, params)
    try:
        async for output in stream:
            if output.outputs and output.outputs[0].token_ids:
                seen.append((time.perf_counter(), len(output.outputs[0].token_ids)))
            if done is not None and done.is_set():
                break
    finally:
        await stream.aclose()
    return seen


async def _stream(llm: AsyncLLM, prompt: list[int], max_tokens: int, done: asyncio.Event) -> list[Deliveries]:
    """One request after the other until `done` is set; a gap between two of them is none of a stream."""
    seen = []
    while not done.is_set():
        seen.append(await _answer(llm, prompt, max_tokens, done))
    return seen


async def _run(llm: AsyncLLM, load: Load, seed: int) -> Seen:
    rng, done = np.random.default_rng(seed), asyncio.Event()
    vocabulary = llm.core.dims.vocab_size

    def prompt(length: int) -> list[int]:
        return rng.integers(3, vocabulary, length).tolist()

    before = collections.Counter(llm.stats().scheduler["programs_by_kind"])
    streams = [
        asyncio.create_task(_stream(llm, prompt(STREAM_PROMPT), load.stream_tokens, done)) for _ in range(load.streams)
    ]
    await asyncio.sleep(load.lead_s)
    begin, late = time.perf_counter(), []
    for number in range(load.prompts):
        await asyncio.sleep(max(0.0, begin + number * load.interval_s - time.perf_counter()))
        asked = time.perf_counter()
        late.append((asked, asyncio.create_task(_answer(llm, prompt(load.prompt_len), PROMPT_OUTPUT))))
    first = [(await task)[0][0] - asked for asked, task in late]
    end = time.perf_counter()
    done.set()
    answers = [seen for task in streams for seen in await task]
    tokens = sum(count for seen in answers for at, count in seen if begin <= at <= end)
    gaps = [gap for seen in answers for gap in gaps_within([at for at, _ in seen], begin, end)]
    kinds = collections.Counter(llm.stats().scheduler["programs_by_kind"])
    kinds.subtract(before)
    return Seen(gaps, first, tokens / (end - begin), kinds)


async def _measure(core: Path, load: Load, preset: str, mixed: bool, trace: Path, seed: int) -> Seen:
    config = EngineConfig(policy=preset, trace=trace, enable_prefix_caching=False)  # the baselines keep nothing
    async with AsyncLLM(core=core, spec_method="none", mixed_prefill=mixed, config=config) as llm:
        await _run(llm, load, seed)  # durations become known
        return await _run(llm, load, seed + 1)


# ---- the simulator's baselines


def measured(traces: Iterator[Path], catalog: Catalog) -> dict[ProgramShape, int]:
    """Median device time, ns, of every program; one that never ran takes that of its nearest kin by rows."""
    times: dict[str, list[int]] = collections.defaultdict(list)
    for trace in traces:
        for line in trace.read_text().splitlines():
            frame = json.loads(line)
            times[frame["shape"]].append(max(frame["device_ns"]))
    known = {shape: int(statistics.median(times[shape.name])) for shape in catalog if times[shape.name]}

    def nearest(shape: ProgramShape) -> int:
        kin = [s for s in known if s.kind is shape.kind] or list(known)
        other = min(kin, key=lambda s: abs(physical_tokens(s) - physical_tokens(shape)))
        return max(1, known[other] * max(1, physical_tokens(shape)) // max(1, physical_tokens(other)))

    return {shape: known.get(shape) or nearest(shape) for shape in catalog}


def simulated(policy: str, durations: dict[ProgramShape, int], load: Load, slots: int, chunk: int) -> Seen:
    """A baseline on the same catalogue and arrivals, in virtual time."""
    catalog = Catalog(tuple(durations))
    limits = Limits(
        slots=slots, pages=slots * -(-load.context // PAGE_SIZE), page_size=PAGE_SIZE, max_context=load.context
    )
    count = load.streams + load.prompts
    lengths = [STREAM_PROMPT] * load.streams + [load.prompt_len] * load.prompts
    scheduler = baseline(policy, catalog, limits, chunk, VtcAdmission([0] * count, lengths))
    at_s = [0.0] * load.streams + [load.lead_s + number * load.interval_s for number in range(load.prompts)]
    outputs = [load.stream_tokens] * load.streams + [PROMPT_OUTPUT] * load.prompts
    arrivals = [
        Arrival(at_ns=round(at * 1e9), spec=RequestSpec(prompt=np.zeros(length, np.int32), max_tokens=output))
        for at, length, output in zip(at_s, lengths, outputs, strict=True)
    ]
    ran: collections.Counter[str] = collections.Counter()

    def duration_of(shape: ProgramShape, work: Work) -> int:
        ran[str(shape.kind)] += 1
        return durations[shape]

    device = FakeDevice(duration_of, PAGE_SIZE, slots=slots)
    simulation = Simulation(scheduler, device, arrivals, check=False, keep=False)
    simulation.run()
    streams, prompts = simulation.requests[: load.streams], simulation.requests[load.streams :]
    end = max(request.first_ns for request in prompts) / 1e9
    times = [(np.cumsum([request.first_ns, *request.gaps_ns]) / 1e9).tolist() for request in streams]
    tokens = sum(load.lead_s <= at <= end for each in times for at in each)
    gaps = [gap for each in times for gap in gaps_within(each, load.lead_s, end)]
    first = [(request.first_ns - request.arrival_ns) / 1e9 for request in prompts]
    return Seen(gaps, first, tokens / (end - load.lead_s), ran)


# ---- the command


def prepared(options: argparse.Namespace, load: Load) -> Path:
    """The core of the run: a slot for every stream and one for a prompt; without speculation."""
    if options.core is not None and (options.core / "manifest.json").exists():
        return options.core
    out = options.core or Path(tempfile.mkdtemp(prefix="helios-tail-"))
    asked = CoreOptions(
        max_slots=load.streams + 1, max_context=load.context, prefill_chunk=options.prefill_chunk, mixed_prefill=True
    )
    prepare(
        open_source(options.model), asked, out, lambda stage, done, total, text="": print(stage, done, total, text)
    ).close()
    return out


def merged(rounds: list[Seen]) -> Seen:
    kinds: collections.Counter[str] = sum((seen.kinds for seen in rounds), collections.Counter())
    gaps, first = ([x for seen in rounds for x in getattr(seen, name)] for name in ("gaps", "first_token"))
    return Seen(gaps, first, statistics.median(seen.tokens_per_s for seen in rounds), kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--core", type=Path, help="where the core is, or is to be made")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--interval", type=float, default=20.0, metavar="S")
    parser.add_argument("--lead", type=float, default=2.0, metavar="S", help="before the first prompt")
    parser.add_argument("--stream-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    load = Load(
        streams=options.streams,
        prompts=options.prompts,
        prompt_len=options.prompt_len,
        interval_s=options.interval,
        lead_s=options.lead,
        stream_tokens=options.stream_tokens,
    )
    core = prepared(options, load)
    manifest = read_manifest(core)
    rows: dict[tuple[str, bool], list[Seen]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            for preset in PRESETS:
                for mixed in (False, True):
                    trace = Path(directory) / f"{number}-{preset}-{mixed}.jsonl"
                    rows[preset, mixed].append(asyncio.run(_measure(core, load, preset, mixed, trace, 10 * number)))
                    print(preset, mixed, *rows[preset, mixed][-1].row(), flush=True)
        plain = Catalog(tuple(s for s in manifest.catalog if s.proposal_source is ProposalSource.NONE))
        durations = measured(iter(sorted(Path(directory).glob("*.jsonl"))), plain)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| policy | mixed | largest gap ms | p99 | p50 | first token p50 | max | stream tokens/s | programs |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (preset, mixed), found in rows.items():
        _print_row(preset, "yes" if mixed else "no", merged(found))
    for name in BASELINES:
        seen = simulated(name, durations, load, manifest.options.max_slots, options.prefill_chunk)
        _print_row(f"{name} (simulated)", "yes" if name == "fcfs-chunked" else "no", seen)


def _print_row(policy: str, mixed: str, seen: Seen) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in seen.kinds.items() if count)
    print("|", " | ".join([policy, mixed, *seen.row(), kinds]), "|")


if __name__ == "__main__":
    main()
