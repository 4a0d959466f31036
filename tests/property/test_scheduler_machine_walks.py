"""Random walks of the state machine with fixed seeds: together they reach everything that it can meet."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from helios_jax.scheduler import FinishReason, LaneRole, SelectionReason, state_digest
from tests.property.machine_jobs import CANCELLED, PREEMPTED
from tests.property.test_scheduler_machine import SchedulerMachine
from tests.unit.every_kind_toy import every_kind

WALKS, STEPS = 60, 30


def walk(seed: int) -> tuple[Counter[str], str]:
    """One walk to its end; returns what happened, and the digest of the last state."""
    rng, machine = random.Random(seed), SchedulerMachine()
    machine.start(
        seed=rng.randrange(2**32), warm=rng.choice([0, 1, 2, 2]), mixed=rng.random() < 0.4, plain=rng.random() < 0.6
    )
    for _ in range(STEPS):
        step(rng, machine)
        machine.holds()
    machine.teardown()
    return machine.model.seen, state_digest(machine.state)


def step(rng: random.Random, machine: SchedulerMachine) -> None:
    seed, pick = rng.randrange(2**32), rng.randrange(100)
    once = (
        "admits",
        "plans",
        "commits",
        "completes",
        "ends",
        "publishes",
        "hears",
        "waits",
        "makes_room",
        "serves_wildly",
        "misuses",
    )
    rule = rng.choice([*once, *["identifies", "serves_many"] * 2, *["serves"] * 4])
    ready = {"commits": machine.saved, "completes": machine.model.flights, "ends": machine.handles,
             "hears": machine.handles, "publishes": machine.published,
             "identifies": len(machine.state.retention.checkpoints)}  # fmt: skip
    if not ready.get(rule, True):
        return
    arguments = {
        "admits": {"seed": seed, "number": rng.randint(1, 4)},
        "plans": {},
        "commits": {"age": rng.choice([1, 1, 3]), "skip": rng.choice([1, 1, 1, 0])},
        "completes": {"seed": seed, "calm": rng.random() < 0.5, "spoil": rng.random() < 0.7},
        "ends": {"pick": pick, "how": rng.choice([CANCELLED, PREEMPTED, *FinishReason]), "old": rng.random() < 0.2},
        "publishes": {"pick": pick, "again": rng.random() < 0.5},
        "hears": {"pick": pick, "proposals": rng.randint(-1, 4)},
        "makes_room": {},
        "waits": {"duration": rng.choice([0, 3, 10**5, 10**7, 40 * 10**9])},
        "identifies": {"pick": pick, "prefix": 0},
        "serves": {"times": rng.randint(2, 12), "seed": seed, "visible": rng.random() < 0.8},
        "serves_many": {"times": rng.randint(4, 12), "seed": seed},
        "serves_wildly": {"times": rng.randint(1, 5), "seed": seed},
        "misuses": {"fence": rng.randint(-1, 100)},
    }[rule]
    getattr(machine, rule)(**arguments)


EVERYTHING = {
    *(str(reason) for reason in SelectionReason),
    *(str(reason) for reason in FinishReason), CANCELLED, PREEMPTED,
    *(f"{role} of {stage}" for role, stage in [
        (LaneRole.INITIALIZE, "initialize"), (LaneRole.RESTORE, "restore"), (LaneRole.VISION, "vision"),
        (LaneRole.SNAPSHOT, "snapshot"), (LaneRole.SNAPSHOT, "terminal"), (LaneRole.PROMPT, "prompt"),
        (LaneRole.DECODE, "decode")]),
    *(f"ended in {stage}" for stage in ("initialize", "restore", "vision", "snapshot", "prompt", "decode", "external")),
    "1 frames", "2 frames", "1 lanes", "2 lanes", "3 lanes", "4 lanes", "ended in flight", "ended between frames",
    "rebound", "published a first burst", "published a burst", "published late", "identified", "aliases", "no room",
    "gave way", "admitted again",
    "stale plan", "fence that does not grow", "malformed",
}  # fmt: skip


@pytest.mark.slow
def test_walks_reach_every_program_and_every_turn_of_a_life() -> None:
    seen: Counter[str] = Counter()
    for seed in range(WALKS):
        seen += walk(seed)[0]
    expected = EVERYTHING | {shape.name for shape in every_kind()}
    assert not expected - set(seen), sorted(seen.items())


def test_a_walk_repeats_itself() -> None:
    """The same events give the same history and the same state."""
    assert walk(0) == walk(0)
