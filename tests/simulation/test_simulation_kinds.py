"""Whole runs over every program kind, two frames in flight, invariants and the device's books at each step.

The device's books are independent of the scheduler: a lane that starts elsewhere than the device
stands, reads an image that was not encoded, restores a row that holds nothing, or writes a page of
another request stops the run.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from helios_jax.scheduler import Catalog, Limits, ProgramKind, ProgramShape, RequestSpec, Scheduler, policy_preset
from helios_jax.scheduler.catalog import Allocation, ProposalSource, mixed_shapes, speculative_shapes
from helios_jax.scheduler.types import Constraint, ImageSpan
from helios_jax.simulation import Arrival, FakeDevice, LinearCosts, Simulation
from helios_jax.simulation.acceptance import AcceptanceSampler, AcceptanceTable

MS = 1_000_000
K = ProgramKind
TABLE = AcceptanceTable("toy", (0.8, 0.6, 0.4), "eagle3")
SLOTS = 8


def catalog(*, draft: int = 3, source: ProposalSource = ProposalSource.LEARNED) -> Catalog:
    """Every kind, small."""
    shapes = [ProgramShape(K.INITIALIZE, b, 0) for b in (1, 8)] + [ProgramShape(K.SCORED_PREFILL, 1, 64)]
    shapes += [ProgramShape(K.PREFILL, b, t) for b in (1, 4) for t in (64, 128)]
    shapes += [ProgramShape(K.VISION, b, 32) for b in (1, 2)]
    shapes += [ProgramShape(kind, b, 0) for kind in (K.SNAPSHOT, K.RESTORE) for b in (1, 4)]
    shapes += [ProgramShape(K.DECODE, b, 1) for b in (1, 2, 4, 8)] if not draft else []
    for allocation in Allocation:
        options = {"max_slots": SLOTS, "draft_tokens": draft, "token_capacity": 32, "source": source}
        shapes += speculative_shapes(**options, ragged=allocation) if draft else ()
    shapes += mixed_shapes(
        max_slots=SLOTS, buckets=(64, 128), draft_tokens=draft, token_capacity=32 if draft else 0, source=source
    )
    return Catalog(tuple(shapes))


def limits(**changes: Any) -> Limits:
    sizes = {"slots": SLOTS, "pages": 200, "page_size": 16, "max_context": 400, "state_rows": 6,
             "feature_tokens": 48, "draft_extent": 3}  # fmt: skip
    return Limits(**{**sizes, **changes})


def spec(rng: random.Random) -> RequestSpec:
    """Text, scored prompts, one or several windows of images, messages, external state, constraints."""
    kind, prompt_len = rng.random(), rng.randint(1, 250)
    options: dict[str, Any] = {}
    if kind < 0.15:
        options["scored"] = True
    elif kind < 0.45 and prompt_len > 40:
        spans, start = [], rng.randint(0, 10)
        while start + 30 < prompt_len and len(spans) < 5:
            size = rng.randint(8, 30)
            spans.append(ImageSpan(start, start + size))
            start += size + rng.randint(0, 20)
        options["image_spans"] = tuple(spans)
    elif kind < 0.6 and prompt_len > 10:
        options.update(restored_len=rng.randint(1, prompt_len - 1), external=rng.random() < 0.5)
    elif kind < 0.8:
        options["message_ends"] = tuple(sorted({rng.randint(1, prompt_len) for _ in range(3)}))
    if rng.random() < 0.2:
        options["constraints"] = Constraint(rng.choice([1, 2, 4, 8, 16, 32, 64]))
    return RequestSpec(
        prompt=np.arange(prompt_len, dtype=np.int32), max_tokens=rng.randint(1, 40),
        stop_token_ids=frozenset({1, 2}), **options,
    )  # fmt: skip


def workload(seed: int, count: int) -> list[Arrival]:
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(50.0) * 1e9
        cancel = int(now + rng.expovariate(5.0) * 1e9) if rng.random() < 0.2 else None
        arrivals.append(Arrival(at_ns=int(now), spec=spec(rng), cancel_ns=cancel, ready_ns=int(now) + 20 * MS))
    return arrivals


def simulate(arrivals: list[Arrival], *, source: ProposalSource = ProposalSource.LEARNED, **options: Any) -> Simulation:
    draft, preset = options.get("draft", 3), options.get("preset", "balanced")
    scheduler = Scheduler(catalog(draft=draft, source=source), limits(), policy_preset(preset))
    device = FakeDevice(
        LinearCosts(), 16, jitter=0.2, seed=1, slots=SLOTS, survival=options.get("survival", False),
        sampler=AcceptanceSampler(TABLE, 5),
    )  # fmt: skip
    copies = (lambda number, tokens: (number + tokens) % 4) if source is ProposalSource.COPY else None
    simulation = Simulation(scheduler, device, arrivals, copies=copies, check=options.get("check", True))
    simulation.run()
    return simulation


def assert_settled(simulation: Simulation, arrivals: list[Arrival]) -> None:
    """Everybody ended as they should, nothing is left, the budgets held."""
    for arrival, served in zip(arrivals, simulation.requests, strict=True):
        assert served.reason in ("stop", "length", "cancelled")
        if served.reason == "length":
            assert len(served.tokens) == arrival.spec.max_tokens
        assert not set(served.tokens[:-1]) & arrival.spec.stop_token_ids
    state = simulation.scheduler.state
    assert state.pool.num_free + state.pool.num_kept == state.limits.pages
    assert not state.frames
    for ledger in (state.ledgers.refresh, state.ledgers.learning):
        assert ledger.spent_ns <= ledger.ordinary_ns / ledger.divisor + ledger.last_episode_ns


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {K.PREFILL, K.SPECULATIVE, K.MIXED, K.VISION, K.INITIALIZE, K.SNAPSHOT, K.RESTORE, K.SCORED_PREFILL}),
        ({"survival": True, "preset": "throughput"}, {K.SPECULATIVE}),
        ({"draft": 0}, {K.PREFILL, K.DECODE, K.MIXED, K.VISION, K.INITIALIZE, K.SNAPSHOT, K.RESTORE}),
        ({"source": ProposalSource.COPY}, {K.SPECULATIVE, K.MIXED}),
    ],
)
@pytest.mark.parametrize(
    ("seed", "count"), [(1, 24), *(pytest.param(seed, 60, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_every_kind_runs_and_settles(options: dict[str, Any], kinds: set[ProgramKind], seed: int, count: int) -> None:
    arrivals = workload(seed, count)
    simulation = simulate(arrivals, **options)
    assert_settled(simulation, arrivals)
    ran = Counter(plan.shape.kind for plan in simulation.plans)
    assert kinds <= set(ran)


def test_two_frames_are_in_flight_and_the_device_is_serial() -> None:
    """Decoders alone: later frames are queued, and never overlap on the device."""
    arrivals = [Arrival(at_ns=0, spec=RequestSpec(prompt=np.zeros(20, np.int32), max_tokens=120)) for _ in range(4)]
    seen: list[tuple[int, int]] = []
    scheduler = Scheduler(catalog(), limits())
    device = FakeDevice(LinearCosts(), 16, slots=SLOTS, sampler=AcceptanceSampler(TABLE, 5))
    simulation = Simulation(
        scheduler, device, arrivals, observe=lambda ran: seen.append((ran.start_ns, ran.start_ns + ran.device_ns))
    )
    simulation.run()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(seen))
    later = seen[len(seen) // 2 :]  # every duration is known by then
    back_to_back = sum(end == start for (_, end), (start, _) in itertools.pairwise(later))
    assert back_to_back > 0.7 * len(later)


def test_speculation_changes_when_tokens_come_and_not_which() -> None:
    """The same requests with and without drafts produce the same tokens, in fewer rounds with them."""
    arrivals = [
        Arrival(at_ns=i * 10 * MS, spec=RequestSpec(prompt=np.zeros(20 + i, np.int32), max_tokens=60)) for i in range(6)
    ]
    plain, drafted = (simulate(arrivals, draft=draft) for draft in (0, 3))
    assert [served.tokens for served in plain.requests] == [served.tokens for served in drafted.requests]
    rounds = [sum(len(served.gaps_ns) for served in run.requests) for run in (plain, drafted)]
    assert rounds[1] < 0.7 * rounds[0]


def test_device_allocation_uses_its_rows_and_no_more() -> None:
    """Rounds that allocate their own rows: in sum at most P, and never past a lane's ceiling."""
    shapes = [shape for shape in catalog() if shape.kind is not K.MIXED]
    ragged = [s for s in shapes if s.allocation is Allocation.PREFIX_LIMIT]
    assert ragged
    keep = [s for s in shapes if s.kind is not K.SPECULATIVE] + ragged + [
        s for s in shapes if s.kind is K.SPECULATIVE and s.token_capacity == 1
    ]  # fmt: skip
    arrivals = [Arrival(at_ns=0, spec=RequestSpec(prompt=np.zeros(9, np.int32), max_tokens=80)) for _ in range(8)]
    scheduler = Scheduler(Catalog(tuple(keep)), limits())
    device = FakeDevice(LinearCosts(draft_ns=1000), 16, slots=SLOTS, sampler=AcceptanceSampler(TABLE, 2))
    simulation = Simulation(scheduler, device, arrivals)
    simulation.run()
    assert any(plan.shape in ragged for plan in simulation.plans)
    assert_settled(simulation, arrivals)


def test_the_same_events_give_the_same_state_over_every_kind() -> None:
    first, second = (simulate(workload(4, 25), check=False) for _ in range(2))
    assert first.digest() == second.digest()
    assert first.plans == second.plans
