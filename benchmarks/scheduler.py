"""Cost of one decision: plan + commit + complete at 64 requests and about 128 programs, by mix.

    python -m benchmarks.scheduler [--steps 400] [decode queued mixed prompts speculative ...]

CPU time of the calling thread (other processes do not count), medians and 99th percentiles. Every
program has a measured duration, as in steady state; `publish` is the report of visible output.
The mixes:

- decode: 64 decoders, ordinary programs; `queued`: the same with a second frame always in flight,
  so that every decision is made on a projection.
- mixed: 32 decoders and 32 long prompts; prompts: 64 long prompts.
- speculative: 64 decoders, learned drafts of depth 7, rectangular, host-ragged and device-ragged
  rounds, adaptive selection.
- mixed-programs: 32 decoders and 32 prompts, rounds and mixed programs of every width.
- prerequisite: short requests end and arrive all the time, so that programs to initialise, restore
  and snapshot compete with everything that they enable.

A shared machine slows down what it measures: the last line is the median time of a fixed piece of
work like a decision's (`reference_work`), taken between the steps. Compare tables by their ratio to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from helios_jax.scheduler import Catalog, Limits, RequestSpec, Scheduler, cost
from helios_jax.scheduler import catalog as shapes
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape
from helios_jax.scheduler.state import FREE
from helios_jax.scheduler.types import GeneratedToken
from helios_jax.simulation import FakeDevice, LinearCosts
from helios_jax.simulation.acceptance import AcceptanceSampler, AcceptanceTable
from helios_jax.simulation.device import Completed

SLOTS, WARM_UP, DRAFTS, STATE_ROWS = 64, 60, 7, 32
ROWS = shapes.powers_of_two(SLOTS)
RATES = (0.8, 0.62, 0.47, 0.35, 0.27, 0.2, 0.15)  # of a typical learned draft, by position
PARTS = ("plan", "commit", "complete", "publish")


def ordinary_catalog() -> Catalog:
    """120 programs: every decode and prompt bucket with every power of two of rows."""
    programs = _state_programs((1, 8, SLOTS), ProgramKind.INITIALIZE) + [
        ProgramShape(ProgramKind.DECODE, b, 1) for b in ROWS
    ]
    for tokens in shapes.PROMPT_BUCKETS:
        programs += [ProgramShape(ProgramKind.PREFILL, b, tokens) for b in ROWS]
        programs += [ProgramShape(ProgramKind.SCORED_PREFILL, b, tokens) for b in ROWS[::2]]
    return Catalog(tuple(programs))


def speculative_catalog() -> Catalog:
    """Rounds of every width, rectangular and ragged with rows given out by host and by device."""
    capacity = SLOTS * (DRAFTS + 1)
    programs = _state_programs((1, 8, SLOTS), ProgramKind.INITIALIZE)
    for ragged in (Allocation.QUERY_LENGTH, Allocation.PREFIX_LIMIT):
        programs += shapes.speculative_shapes(
            max_slots=SLOTS, draft_tokens=DRAFTS, token_capacity=capacity, ragged=ragged
        )
    programs += [ProgramShape(ProgramKind.PREFILL, b, t) for t in shapes.PROMPT_BUCKETS for b in (1, 4, 16, SLOTS)]
    return Catalog(tuple(programs))


def mixed_catalog() -> Catalog:
    """Mixed programs of every prompt bucket and width beside rounds of the two extreme widths."""
    capacity = SLOTS * (DRAFTS + 1)
    rounds = shapes.speculative_shapes(max_slots=SLOTS, draft_tokens=DRAFTS, token_capacity=capacity)
    programs = [shape for shape in rounds if shape.token_capacity in (1, DRAFTS + 1)]
    programs += shapes.mixed_shapes(
        max_slots=SLOTS, buckets=shapes.PROMPT_BUCKETS, draft_tokens=DRAFTS, token_capacity=capacity
    )
    programs += [ProgramShape(ProgramKind.PREFILL, 1, tokens) for tokens in shapes.PROMPT_BUCKETS]
    return Catalog(tuple(programs + _state_programs((1, SLOTS), ProgramKind.INITIALIZE)))


def prerequisite_catalog() -> Catalog:
    """State operations of every row bucket, with packed prefills and a few mixed programs behind them."""
    programs = _state_programs(ROWS, ProgramKind.INITIALIZE, ProgramKind.RESTORE, ProgramKind.SNAPSHOT)
    programs += [ProgramShape(ProgramKind.DECODE, b, 1) for b in ROWS]
    programs += [ProgramShape(ProgramKind.PREFILL, b, t) for t in shapes.PROMPT_BUCKETS for b in ROWS]
    programs += shapes.mixed_shapes(max_slots=SLOTS, buckets=(64, 256, 1024, 2048, 4096))
    return Catalog(tuple(programs))


def _state_programs(rows: tuple[int, ...], *kinds: ProgramKind) -> list[ProgramShape]:
    return [ProgramShape(kind, b, 0) for kind in kinds for b in rows]


def _long(number: int, rng: np.random.Generator) -> RequestSpec:
    return RequestSpec(prompt=np.zeros(int(rng.integers(500, 7000)), np.int32), max_tokens=1000)


def _decoder(number: int, rng: np.random.Generator) -> RequestSpec:
    return RequestSpec(prompt=np.zeros(int(rng.integers(1, 30)), np.int32), max_tokens=7000)


def _half(number: int, rng: np.random.Generator) -> RequestSpec:
    return _decoder(number, rng) if number < SLOTS // 2 else _long(number, rng)


def _short(number: int, rng: np.random.Generator) -> RequestSpec:
    """A conversation turn: some of its prompt is restored in every third request, two message ends."""
    length = int(rng.integers(60, 900))
    return RequestSpec(
        prompt=np.zeros(length, np.int32),
        max_tokens=int(rng.integers(2, 24)),
        restored_len=length // 3 if number % 3 == 0 else 0,
        message_ends=(length // 2, length - 4),
    )


class Mix(NamedTuple):
    """A load: its programs, its requests, and whether a second frame is kept in flight."""

    catalog: Callable[[], Catalog]
    request: Callable[[int, np.random.Generator], RequestSpec]
    queued: bool = False
    state_rows: int = 0


MIXES = {
    "decode": Mix(ordinary_catalog, _decoder),
    "queued": Mix(ordinary_catalog, _decoder, queued=True),
    "mixed": Mix(ordinary_catalog, _half),
    "prompts": Mix(ordinary_catalog, _long),
    "speculative": Mix(speculative_catalog, _decoder),
    "mixed-programs": Mix(mixed_catalog, _half),
    "prerequisite": Mix(prerequisite_catalog, _short, state_rows=STATE_ROWS),
}


class Load:
    """A scheduler under one mix, with a device, and the times that it has taken.

    Attributes:
        times: CPU seconds of each step by `PARTS`.
    """

    def __init__(self, name: str) -> None:
        self.mix, costs = MIXES[name], LinearCosts()
        catalog = self.mix.catalog()
        limits = Limits(
            slots=SLOTS, pages=SLOTS * 520, page_size=16, max_context=8192, state_rows=self.mix.state_rows,
            draft_extent=DRAFTS + 1,
        )  # fmt: skip
        scheduler = Scheduler(catalog, limits)
        table = scheduler.state.costs
        for index, shape in enumerate(catalog):
            table = cost.observe(table, index, costs(shape), 0, 10**12)
        self.scheduler = Scheduler.from_state(dataclasses.replace(scheduler.state, costs=table))
        sampler = AcceptanceSampler(AcceptanceTable("typical", RATES, "eagle3"))
        self.device = FakeDevice(costs, limits.page_size, slots=SLOTS, sampler=sampler, check_pages=False)
        self.rng, self.number, self.now_ns, self.fence = np.random.default_rng(0), 0, 0, 0
        self.times: list[list[float]] = []
        self._flying: list[tuple[int, Completed]] = []

    def step(self) -> None:
        """Admit whom there is room for, then one decision and one completion."""
        while (self.scheduler.state.requests.phase == FREE).any():
            spec = self.mix.request(self.number, self.rng)
            if not self.scheduler.can_admit(spec):
                break
            self.device.admit(self.scheduler.admit(spec, self.now_ns), spec, self.number)
            self.number += 1
        self.scheduler.advance_to(self.now_ns)
        while len(self._flying) < 1 + self.mix.queued:
            begun = time.thread_time()
            plan = self.scheduler.plan()
            planned = committed = time.thread_time()
            if plan is not None:
                self.fence += 1
                self.scheduler.commit(plan, self.fence)
                committed = time.thread_time()
                self._flying.append((self.fence, self.device.submit(plan, {}, self.now_ns)))
            taken = [planned - begun, committed - planned]
            if plan is None:
                break
        self.times.append([*taken, *self._complete()])

    def _complete(self) -> list[float]:
        """CPU seconds of (complete, publish) of the oldest frame."""
        scheduler, (fence, done) = self.scheduler, self._flying.pop(0)
        self.now_ns = max(self.now_ns, done.at_ns)
        scheduler.advance_to(self.now_ns)
        begun = time.thread_time()
        if done.confidence is None:
            events = scheduler.complete(fence, done.records, done.timing)
        else:
            events = scheduler.complete_packed_round(fence, done.records, done.timing, done.confidence)
        completed = time.thread_time()
        visible = dict.fromkeys(event.handle for event in events if isinstance(event, GeneratedToken))
        marked = time.thread_time()
        if visible:
            scheduler.published_outputs(tuple(visible), fence)
        published = time.thread_time()
        return [completed - begun, published - marked]


def reference_work() -> float:
    """CPU seconds of a fixed piece of work with a decision's proportions: small numpy calls and Python."""
    begun = time.thread_time()
    table = np.arange(128 * SLOTS, dtype=np.float64).reshape(128, SLOTS) % 97.0
    total = 0
    for number in range(100):
        columns = table[number : number + 4] * 0.5 + number
        np.where(columns > 8.0, columns, 0.0).sum(axis=1)
        total += sum(value & 3 for value in [number, total, 7])
    np.argsort(-table, axis=1, kind="stable")
    return time.thread_time() - begun


def measure(name: str, steps: int) -> tuple[np.ndarray, float]:
    """CPU milliseconds [steps, parts] of one mix, and of the reference work meanwhile."""
    load, reference = Load(name), []
    for number in range(WARM_UP + steps):
        load.step()
        if number % 8 == 0:
            reference.append(reference_work())
    return np.array(load.times[WARM_UP:]) * 1e3, float(np.median(reference)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixes", nargs="*", default=list(MIXES), help=", ".join(MIXES))
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print("| mix | programs | " + " | ".join(PARTS) + " | plan + commit + complete | its p99 | / reference |")
    print("|---|---|" + "---|" * (len(PARTS) + 3))
    references = []
    for name in args.mixes:
        times, reference = measure(name, args.steps)
        references.append(reference)
        total = times[:, :3].sum(axis=1)
        cells = [*np.median(times, axis=0), np.median(total), np.percentile(total, 99)]
        written = " | ".join(f"{cell:.2f}" for cell in cells)
        print(f"| {name} | {len(MIXES[name].catalog())} | {written} | {cells[-2] / reference:.2f} |", flush=True)
    print(f"\nms of CPU, {args.steps} steps; the reference work takes {np.median(references):.2f} ms")


if __name__ == "__main__":
    main()
