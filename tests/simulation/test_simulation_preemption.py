"""Whole runs with pools that are too small: nobody is lost, nothing is delivered twice, and pages balance.

The device's books are independent of the scheduler: a page of another request, or a lane that starts elsewhere
than the device stands, stops the run.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from helios_jax.scheduler import Catalog, Limits, PolicyConfig, ProgramKind, ProgramShape, RequestSpec, Scheduler
from helios_jax.scheduler.reservation import MAX_PREEMPTIONS
from helios_jax.simulation import Arrival, FakeDevice, LinearCosts, Simulation
from helios_jax.simulation.acceptance import AcceptanceSampler
from helios_jax.simulation.baselines import BASELINES, VtcAdmission, baseline
from tests.simulation.test_simulation_kinds import SLOTS, TABLE, catalog, workload

K = ProgramKind


def plain_catalog(slots: int) -> Catalog:
    shapes = [ProgramShape(K.INITIALIZE, b, 0) for b in (1, slots)] + [ProgramShape(K.PREFILL, 1, t) for t in (16, 64)]
    return Catalog(tuple(shapes + [ProgramShape(K.DECODE, b, 1) for b in (1, 2, slots)]))


def equal_arrivals(number: int, prompt: int, output: int) -> list[Arrival]:
    return [Arrival(at_ns=0, spec=RequestSpec(prompt=np.zeros(prompt, np.int32), max_tokens=output))] * number


def run(scheduler: Scheduler, arrivals: list[Arrival], slots: int, **options: Any) -> Simulation:
    device = FakeDevice(LinearCosts(), scheduler.state.limits.page_size, slots=slots, **options.pop("device", {}))
    simulation = Simulation(scheduler, device, arrivals, **options)
    assert not simulation.run()
    state = scheduler.state
    assert (state.pool.num_free + state.pool.num_kept, state.pool.used) == (state.limits.pages, 0)
    assert not state.requests.reserved_pages.any()
    assert sum(served.preemptions for served in simulation.requests) == state.counters.preempted
    assert max(served.preemptions for served in simulation.requests) <= MAX_PREEMPTIONS
    return simulation


VALUES = {
    "balanced": PolicyConfig(),
    "nothing has a value": PolicyConfig(
        output_token_value=0, token_fairness=0, delivery_fairness=0, decode_age_price=0, terminal_value=0
    ),
}


@pytest.mark.parametrize(
    ("values", "pages"),
    [("nothing has a value", 11), ("balanced", 17),
     *(pytest.param(values, pages, marks=pytest.mark.slow) for values in VALUES for pages in (12, 20, 30))],
)  # fmt: skip
def test_equal_requests_do_not_play_ping_pong(values: str, pages: int) -> None:
    """Q2: all slots equal, every output longer than its share of the pool. Each gives way at most twice."""
    slots, number, prompt, output = 4, 8, 16, 26  # 11 pages each at worst
    limits = Limits(slots=slots, pages=pages, page_size=4, max_context=64)
    scheduler = Scheduler(plain_catalog(slots), limits, VALUES[values])
    simulation = run(scheduler, equal_arrivals(number, prompt, output), slots)
    assert [served.tokens for served in simulation.requests] == [run_alone(prompt, output, i) for i in range(number)]
    counters = scheduler.state.counters
    assert 0 < counters.preempted <= number * MAX_PREEMPTIONS
    assert sum(counters.used_tokens) <= number * (1 + MAX_PREEMPTIONS) * (prompt + output)


def run_alone(prompt: int, output: int, number: int) -> list[int]:
    """The tokens of the request of a number, from a device that knows nobody else."""
    device = FakeDevice(LinearCosts(), 4, slots=1)
    scheduler = Scheduler(plain_catalog(2), Limits(slots=1, pages=11, page_size=4, max_context=64))
    handle = scheduler.admit(equal_arrivals(1, prompt, output)[0].spec, 0)
    device.admit(handle, equal_arrivals(1, prompt, output)[0].spec, number)
    return [device.token(handle, position) for position in range(prompt, prompt + output)]


@pytest.mark.parametrize(
    ("draft", "seed", "number"),
    [(3, 1, 12), *(pytest.param(draft, seed, 24, marks=pytest.mark.slow) for draft in (0, 3) for seed in (2, 3))],
)
def test_every_kind_of_request_survives_a_pool_that_is_too_small(draft: int, seed: int, number: int) -> None:
    """Images, scored prompts, restores, snapshots, external state, cancellations; two frames in flight."""
    arrivals = workload(seed, number)
    most = max(len(a.spec.prompt) + a.spec.max_tokens for a in arrivals)
    limits = Limits(slots=SLOTS, pages=-(-(most + 3) // 16) + 12, page_size=16, max_context=400, state_rows=6,
                    feature_tokens=48, draft_extent=3)  # fmt: skip
    scheduler = Scheduler(catalog(draft=draft), limits)
    simulation = run(
        scheduler, arrivals, SLOTS, device={"jitter": 0.2, "seed": 1, "sampler": AcceptanceSampler(TABLE, 5)}
    )
    for arrival, served in zip(arrivals, simulation.requests, strict=True):
        assert served.reason in ("stop", "length", "cancelled")
        if served.reason == "length":
            assert len(served.tokens) == arrival.spec.max_tokens
        assert not set(served.tokens[:-1]) & arrival.spec.stop_token_ids


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("keep", [True, False])
def test_baselines_share_the_rule(name: str, keep: bool) -> None:
    """They plan by themselves, and give pages up in the same way."""
    rng, slots = random.Random(4), 4
    arrivals = [
        Arrival(at_ns=number * 10**6,
                spec=RequestSpec(prompt=np.zeros(rng.randint(1, 30), np.int32), max_tokens=rng.randint(1, 30)))
        for number in range(20)
    ]  # fmt: skip
    vtc = VtcAdmission([number % 3 for number in range(20)], [len(a.spec.prompt) for a in arrivals])
    limits = Limits(slots=slots, pages=20, page_size=4, max_context=64)
    scheduler = baseline(name, plain_catalog(slots), limits, 64, vtc)
    simulation = run(scheduler, arrivals, slots, keep=keep, admission=vtc if name == "vtc" else None)
    assert scheduler.state.counters.preempted > 0
    for arrival, served in zip(arrivals, simulation.requests, strict=True):
        assert (served.reason, served.num_tokens) == ("length", arrival.spec.max_tokens)
