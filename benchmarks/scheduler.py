"""Cost of one decision: plan + commit + complete at 64 requests and about 120 programs, by mix.

    python -m benchmarks.scheduler [decode mixed prompts]

CPU time of one core (other processes do not count), medians and 99th percentiles. Every
program has a measured duration, as in steady state; `publish` is the report of visible output.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np

from helios_jax.scheduler import Catalog, Limits, RequestSpec, Scheduler, cost
from helios_jax.scheduler import catalog as shapes
from helios_jax.scheduler.types import GeneratedToken
from helios_jax.simulation import FakeDevice, LinearCosts

SLOTS, STEPS = 64, 400
DECODERS = {"decode": 64, "mixed": 32, "prompts": 0}


def large_catalog() -> Catalog:
    """Every decode and prompt bucket with every power of two of rows."""
    rows = shapes.powers_of_two(SLOTS)
    kinds, shape = shapes.ProgramKind, shapes.ProgramShape
    programs = [shape(kinds.DECODE, b, 1) for b in rows] + [shape(kinds.INITIALIZE, b, 0) for b in (1, 8, SLOTS)]
    for tokens in shapes.PROMPT_BUCKETS:
        programs += [shape(kinds.PREFILL, b, tokens) for b in rows]
        programs += [shape(kinds.SCORED_PREFILL, b, tokens) for b in rows[::2]]
    return Catalog(tuple(programs))


def loaded_scheduler(mix: str, costs: LinearCosts) -> Scheduler:
    """64 admitted requests; the first ones have short prompts and soon decode."""
    catalog = large_catalog()
    scheduler = Scheduler(catalog, Limits(slots=SLOTS, pages=SLOTS * 520, page_size=16, max_context=8192))
    table = scheduler.state.costs
    for index, shape in enumerate(catalog):
        table = cost.observe(table, index, costs(shape), 0, 10**12)
    scheduler = Scheduler.from_state(dataclasses.replace(scheduler.state, costs=table))
    rng = np.random.default_rng(0)
    for number in range(SLOTS):
        length = int(rng.integers(1, 30) if number < DECODERS[mix] else rng.integers(500, 7000))
        scheduler.admit(RequestSpec(prompt=np.zeros(length, np.int32), max_tokens=1000), 0)
    return scheduler


def step(scheduler: Scheduler, device: FakeDevice, fence: int, now: int) -> tuple[list[float], int]:
    """One decision; CPU seconds of (plan, commit, complete, publish) and the time after it."""
    marks = [time.process_time()]
    plan = scheduler.plan()
    marks.append(time.process_time())
    assert plan is not None
    scheduler.commit(plan, fence)
    marks.append(time.process_time())
    records, timing = device.run(plan, {lane.handle: scheduler.page_table(lane.handle) for lane in plan.lanes})
    now += timing.wall_ns
    scheduler.advance_to(now)
    begun = time.process_time()
    events = scheduler.complete(fence, records, timing)
    completed = time.process_time()
    visible = tuple(event.handle for event in events if isinstance(event, GeneratedToken))
    scheduler.published_outputs(visible, fence)
    published = time.process_time()
    return [marks[1] - marks[0], marks[2] - marks[1], completed - begun, published - completed], now


def measure(mix: str) -> np.ndarray:
    """CPU milliseconds [steps, (plan, commit, complete, publish)]."""
    costs = LinearCosts()
    scheduler, device, now = loaded_scheduler(mix, costs), FakeDevice(costs, 16), 0
    times = []
    for fence in range(1, STEPS + 1):
        scheduler.advance_to(now)
        taken, now = step(scheduler, device, fence, now)
        times.append(taken)
    return np.array(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixes", nargs="*", default=list(DECODERS), help=", ".join(DECODERS))
    print("| mix | plan | commit | complete | publish | plan + commit + complete | its p99 |")
    print("|---|---|---|---|---|---|---|")
    for mix in parser.parse_args().mixes:
        times = measure(mix)
        total = times[:, :3].sum(axis=1)
        cells = [*np.median(times, axis=0), np.median(total), np.percentile(total, 99)]
        print(f"| {mix} | " + " | ".join(f"{cell:.2f} ms" for cell in cells) + " |")


if __name__ == "__main__":
    main()
