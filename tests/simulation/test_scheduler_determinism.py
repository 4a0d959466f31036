"""Decisions are a function of the events and of nothing else.

Not of the process and its hash seed, not of slot numbers, not of the scale of the preferences. The
last rule of every tie is the slot number, so the permutation tests use workloads without exact
ties: all prompts and arrivals differ.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax.scheduler import (
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    ScheduledPlan,
    State,
    cancel,
    plan_next,
    state_digest,
)
from helios_jax.scheduler.service import current_rates
from helios_jax.simulation.profiles import Work
from tests.simulation.scenario_kit import MS, World, catalog, decode, decoding, initialize, prefill, spec

SHAPES = catalog(initialize(1, 8), decode(1, 2, 4, 8), prefill((1, 64), (1, 256), (4, 256)))
SLOTS = 7  # equal to no other extent of a state, so that `permuted` recognises the axes of slots
HOUR_NS = 3_600_000 * MS
COEFFICIENTS = ("output_token_value", "token_fairness", "delivery_fairness", "decode_age_price")


def durations(shape: ProgramShape, work: Work) -> float:
    """ms; the share of the work is odd on purpose, so that equal values are rare."""
    if shape.kind is ProgramKind.DECODE:
        return 3.1 + 0.37 * shape.batch_capacity + 0.00013 * sum(work.contexts)
    if shape.kind is ProgramKind.PREFILL:
        return 2.3 + 0.043 * shape.token_capacity + 0.11 * shape.batch_capacity
    return 0.21 + 0.01 * shape.batch_capacity


def workload(seed: int, *, frames: int = 2) -> list[str]:
    """Digests after every frame of a random run: arrivals, cancellations, pauses, endings.

    Requests come in equal pairs and there are fewer rows than streams, so that ties have to be broken.
    """
    rng = random.Random(seed)
    shapes = catalog(initialize(1, 8), decode(1, 2), prefill((1, 64), (1, 256), (4, 256)))
    world = World(shapes, durations, slots=SLOTS, frames=frames, known=lambda s: s.batch_capacity != 2)
    digests = []
    for _ in range(70):
        free = int((world.state.requests.phase == 0).sum())
        if free > 1 and rng.random() < 0.3:
            stops, length, output = frozenset({9, 11, 10**6}), rng.randint(1, 400), rng.randint(1, 60)
            ends = tuple(end for end in (20, 90) if end <= length)
            world.arrive(*[spec(length, output, message_ends=ends, stop_token_ids=stops)] * 2)
        if rng.random() < 0.03 and world.streams:
            world.state = cancel(world.state, rng.choice(sorted(world.streams)))
        if world.step() is None:
            world.idle_until(world.state.now_ns + 40_000 * MS)  # everything is stale afterwards
        digests.append(state_digest(world.state))
    return digests


def test_the_same_events_give_the_same_states_in_every_process() -> None:
    """Hash seeds order sets and dicts of strings; no such order may reach a decision."""
    root = Path(__file__).parents[2]
    code = "from tests.simulation.test_scheduler_determinism import workload; print(*workload(3))"
    outputs = []
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(run.stdout.split())
    here = workload(3)
    assert outputs == [here] * 2
    assert len(set(here)) == 70


def test_the_digest_sees_every_column() -> None:
    """Equal digests are worth something: one unit in any column of a request changes it."""
    world = World(SHAPES, durations, slots=SLOTS)
    world.arrive(spec(100), spec(200))
    world.run_frames(4)
    digest = state_digest(world.state)
    for field in dataclasses.fields(world.state.requests):
        column = getattr(world.state.requests, field.name).copy()
        column[0] = not column[0] if column.dtype == np.bool_ else 1.0 if np.isnan(column[0]) else column[0] + 1
        changed = dataclasses.replace(world.state.requests, **{field.name: column})
        assert state_digest(dataclasses.replace(world.state, requests=changed)) != digest, field.name


# ---- slots


def permuted(value: Any, order: np.ndarray) -> Any:
    """A state with its slots renumbered: new slot j holds what slot order[j] held.

    Every array and tuple with `SLOTS` entries along its first axis is one entry a slot.
    """
    if isinstance(value, np.ndarray) and value.ndim and value.shape[0] == SLOTS:
        moved = value[order]
        moved.setflags(write=False)
        return moved
    if isinstance(value, tuple) and type(value) is tuple and len(value) == SLOTS:
        return tuple(value[slot] for slot in order)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: permuted(getattr(value, f.name), order) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def moved_back(plan: ScheduledPlan | None, order: np.ndarray) -> tuple | None:
    """What a plan does, in the slot numbers before the permutation."""
    if plan is None:
        return None
    lanes = sorted((int(order[lane.handle.slot]), *lane[1:]) for lane in plan.lanes)
    return plan.shape, lanes, plan.reason, plan.required_empty_queue


@pytest.mark.parametrize("seed", range(6))
def test_permuted_slots_give_permuted_plans_for_a_whole_run(seed: int) -> None:
    """Two worlds with renumbered slots from some moment on: every later plan and price agrees.

    Requests that arrive later take the lowest free slot, so the worlds are full when they part.
    """
    rng = random.Random(seed)
    world = World(SHAPES, durations, slots=SLOTS)
    for _ in range(SLOTS):
        world.arrive(spec(rng.randint(1, 2000), rng.randint(300, 900)))
        world.run_frames(rng.randint(1, 9))
    order = np.random.default_rng(seed).permutation(SLOTS)
    twin = World(SHAPES, durations, slots=SLOTS)
    twin.state = permuted(world.state, order)
    back = {int(slot): place for place, slot in enumerate(order)}
    for name in ("streams", "_positions"):
        moved = {handle._replace(slot=back[handle.slot]): value for handle, value in getattr(world, name).items()}
        setattr(twin, name, {handle: dataclasses.replace(v) if name == "streams" else v for handle, v in moved.items()})
    twin._free_ns = world._free_ns
    for _ in range(150):
        first, second = world.step(), twin.step()
        assert first is not None
        assert second is not None
        assert moved_back(first.plan, np.arange(SLOTS)) == moved_back(second.plan, order)
        assert second.plan.value_rate == pytest.approx(first.plan.value_rate, rel=1e-12)
    for name in ("token_r", "delivery_r", "committed_len", "visible_ns", "phase"):
        mine, other = getattr(world.state.requests, name)[order], getattr(twin.state.requests, name)
        assert np.array_equal(mine, other, equal_nan=True), name


# ---- scale


def decoders_under(factor: float, seed: int, starved_ns: int) -> World:
    """Five decoders with unequal histories, their preferences multiplied, then nothing for a while."""
    rng = random.Random(seed)
    world = World(SHAPES, durations, slots=SLOTS)
    for _ in range(5):
        world.arrive(spec(rng.randint(1, 500)))
        world.run_frames(rng.randint(4, 12))
    world.run(until=decoding)
    scaled = {name: getattr(PolicyConfig(), name) * factor for name in COEFFICIENTS}
    world.state = dataclasses.replace(world.state, policy=dataclasses.replace(world.state.policy, **scaled))
    world.idle_until(world.state.now_ns + starved_ns)
    return world


@pytest.mark.parametrize("starved_ns", [0, 5 * HOUR_NS])
@pytest.mark.parametrize("factor", [1e-300, 1e300])
def test_the_scale_of_the_preferences_changes_no_run_of_decoders(factor: float, starved_ns: int) -> None:
    """Without prompts every term has one coefficient: sixty frames are the same, and ln m says the scale."""
    world, scaled = decoders_under(1.0, 1, starved_ns), decoders_under(factor, 1, starved_ns)
    for _ in range(60):
        first, second = world.step(), scaled.step()
        assert first is not None
        assert second is not None
        assert (first.plan.shape, first.plan.lanes) == (second.plan.shape, second.plan.lanes)
        assert second.plan.selection_value_rate() == pytest.approx(first.plan.selection_value_rate(), rel=1e-9)
        shift = second.plan.selection_log_scale() - first.plan.selection_log_scale()
        assert shift == pytest.approx(math.log(factor), rel=1e-12)


def true_score(state: State, plan: ScheduledPlan) -> float:
    """The unscaled score of a decode plan, term by term in plain floating point."""
    rates, policy, duration = current_rates(state), state.policy, plan.estimated_duration_ns / MS
    value = 0.0
    for lane in plan.lanes:
        slot = lane.handle.slot
        value += policy.output_token_value + policy.token_fairness * rates.token_r[slot]
        value += policy.delivery_fairness * rates.delivery_r[slot]
        age = (state.now_ns - int(state.requests.visible_ns[slot])) / MS
        value += policy.decode_age_price * rates.sigma[slot] * (age + duration)
    waiting = policy.decode_age_price * int(np.count_nonzero(state.requests.streams))
    return value / duration - duration / 2 * waiting


@pytest.mark.parametrize("starved_ns", [0, 5 * HOUR_NS])
def test_the_reported_score_times_its_scale_is_the_score(starved_ns: int) -> None:
    for seed in range(4):
        state = decoders_under(1.0, seed, starved_ns).state
        plan = plan_next(state)
        assert plan is not None
        reported = plan.selection_value_rate() * math.exp(plan.selection_log_scale())
        assert reported == pytest.approx(true_score(state, plan), rel=1e-12)
        assert abs(plan.selection_value_rate()) <= 10.0 * len(plan.lanes)  # divided by its largest term


def test_a_stream_starved_for_hours_catches_up_and_lets_the_others_back_in() -> None:
    """One of five was left out for five hours and there is one row: it takes it, but not for ever.

    Its reciprocal rate falls by exp(-a) a frame, a = K T / tau = 0.17: measured, the others are back after 71
    frames (245 ms), and the next hundred frames serve all five, nobody less than half the fair share.
    """
    shapes = catalog(initialize(8), decode(1), prefill((1, 64)))
    world = World(shapes, durations, slots=SLOTS)
    handles = world.arrive(*[spec(50)] * 5)
    world.run(until=decoding)
    world.run_frames(50)
    requests, now_ns = world.state.requests.draft(), world.state.now_ns + 5 * HOUR_NS
    requests.token_r[3], requests.delivery_r[3] = 1.8e7, 1.8e7  # what five hours without service leave
    requests.visible_ns[[0, 1, 2, 4]] += 5 * HOUR_NS
    costs = dataclasses.replace(world.state.costs, observed_ns=world.state.costs.observed_ns + 5 * HOUR_NS)
    world.state = dataclasses.replace(world.state, requests=requests.sealed(), costs=costs, now_ns=now_ns)

    def served(frames: int) -> list[int]:
        return [frame.plan.lanes[0].handle.slot for frame in world.run_frames(frames)]

    alone = next(number for number, slot in enumerate(served(200)) if slot != 3)
    print(f"the starved stream takes {alone} frames in a row")
    assert 1 <= alone < 90
    counts = [served(100).count(handle.slot) for handle in handles]
    assert min(counts) >= 10
