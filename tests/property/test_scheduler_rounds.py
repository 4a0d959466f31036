"""Speculative and mixed selection against the exhaustive twin, on random catalogues, prices and limits."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from helios_jax.scheduler import LaneRole, ProgramKind, ProgramShape, ScheduledPlan, State, plan_next
from helios_jax.scheduler.candidates import delivery_lanes, new_decision
from helios_jax.scheduler.catalog import Allocation, lane_width
from helios_jax.scheduler.rounds import round_candidates
from helios_jax.scheduler.service import current_rates
from helios_jax.scheduler.state import REQUEST_COLUMNS, Requests
from tests.unit.scheduler_rounds_oracle import (
    COPY,
    DEVICE,
    HOST,
    LEARNED,
    NONE,
    RoundOracle,
    mixed,
    ragged,
    random_policy,
    rectangular,
    round_state,
)


def shortfall(plan: ScheduledPlan, optimum: Fraction) -> float:
    """Relative gap of a plan's score to the optimum; negative if it claims more than there is."""
    scored = Fraction(plan.selection_value_rate()) * Fraction(math.exp(plan.selection_log_scale()))
    return float((optimum - scored) / max(abs(optimum), Fraction(1, 10**12)))


def check_winner(seeds: range, *, mode: str, kinds: str, unmeasured: float = 0.0, prompts: float = 0.0) -> None:
    checked = 0
    for seed in seeds:
        rng = random.Random(seed)
        batches, shapes = sorted(rng.sample((1, 2, 3, 4, 6), 2)), []
        source = rng.choice([LEARNED, COPY])
        if "r" in kinds:
            shapes += rectangular(rng, source, batches)
        if "h" in kinds:
            shapes += ragged(rng, source, batches)
        if "m" in kinds:
            shapes += [
                mixed(b, w, p, source)
                for b in (2, 4)
                for w, p in ((1, 64), (1, 128), (2, 64), (rng.choice([2, 3]), 128))
            ]
            shapes += [mixed(2, 1, 64, NONE)]
        if rng.random() < 0.3 and not any(shape.kind is ProgramKind.DECODE for shape in shapes):
            shapes.append(ProgramShape(ProgramKind.DECODE, rng.choice([1, 4]), 1))
        if mode == "fixed":  # a catalogue whose widest rounds hold no whole prefix is refused
            shapes = [s for s in shapes if s.kind is not ProgramKind.SPECULATIVE or s.packed_capacity >= lane_width(s)]
        state = round_state(
            rng, shapes, unmeasured=unmeasured, prompts=prompts, policy=random_policy(rng, mode)
        )  # fmt: skip
        plan, oracle = plan_next(state), RoundOracle(state)
        assert plan is not None
        check_plan(plan, oracle)
        assert abs(shortfall(plan, oracle.best())) < 1e-9, seed
        checked += plan.shape.kind in (ProgramKind.SPECULATIVE, ProgramKind.MIXED)
    assert checked > len(seeds) // 3


def check_plan(plan: ScheduledPlan, oracle: RoundOracle) -> None:
    """The lanes are what the twin allows, and the score is what they are worth."""
    rows = {lane.handle.slot: lane.length for lane in plan.lanes}
    prompt = plan.lanes[plan.prompt_row].handle.slot if plan.prompt_row >= 0 else None
    if plan.shape.kind is ProgramKind.PREFILL:
        prompt = plan.lanes[0].handle.slot
    for lane in plan.lanes:
        slot = lane.handle.slot
        assert lane.role is (LaneRole.PROMPT if slot == prompt else LaneRole.DECODE)
        expected = oracle.prompt_tokens(plan.shape, slot) if slot == prompt else oracle.length(plan.shape, slot)
        assert lane.length == expected
    score = oracle.score(oracle.value(plan.shape, rows, prompt), plan.shape)
    assert abs(shortfall(plan, score)) < 1e-9


@pytest.mark.parametrize("mode", ["adaptive", "fixed", "off"])
def test_rectangular_rounds_are_exact(mode: str) -> None:
    check_winner(range(70), mode=mode, kinds="r")


def test_fixed_host_ragged_rounds_are_exact() -> None:
    check_winner(range(1000, 1090), mode="fixed", kinds="rh")


@pytest.mark.parametrize("mode", ["adaptive", "fixed"])
def test_mixed_programs_are_exact(mode: str) -> None:
    check_winner(range(2000, 2050), mode=mode, kinds="rm", prompts=0.3)


def test_unmeasured_programs_are_exact_too() -> None:
    check_winner(range(3000, 3080), mode="adaptive", kinds="rm", prompts=0.3, unmeasured=0.3)


@pytest.mark.slow
def test_rounds_and_mixed_programs_are_exact_in_thousands_of_cases() -> None:
    check_winner(range(10_000, 10_700), mode="adaptive", kinds="r")
    check_winner(range(11_000, 11_700), mode="fixed", kinds="rh")
    check_winner(range(12_000, 12_450), mode="adaptive", kinds="rm", prompts=0.3)
    check_winner(range(13_000, 13_450), mode="fixed", kinds="rhm", prompts=0.3, unmeasured=0.2)


@pytest.mark.parametrize("allocation", [HOST, DEVICE])
def test_adaptive_ragged_candidates_are_priced_by_their_allocation(allocation: Allocation) -> None:
    """Rows within P, handed out causally; host order by marginal value, device order by forecasts; ceilings frozen."""
    cut = 0
    for seed in range(90):
        rng = random.Random(seed)
        source = rng.choice([LEARNED, COPY])
        shapes = [*rectangular(rng, source, (1, 4)), *ragged(rng, source, (2, 4, 6), allocation)]
        state = round_state(rng, shapes, num=8, policy=random_policy(rng, "adaptive"))
        decision, oracle = new_decision(state), RoundOracle(state)
        for block in round_candidates(decision):
            for row, index in enumerate(block.first.tolist()):
                shape = state.catalog.shapes[index]
                work = {slot: int(n) for slot, n in enumerate(block.work[row]) if n}
                ceilings = {slot: int(n) for slot, n in enumerate(block.lengths[row]) if n}
                assert sum(work.values()) <= shape.packed_capacity
                unused = shape.packed_capacity - sum(work.values()) + shape.batch_capacity - len(work)
                assert block.padding[row] == unused
                value = float(oracle.value(shape, work, None)) * math.exp(-decision.values.log_scale)
                assert math.isclose(block.value[row], value, rel_tol=1e-9)
                complete = {slot: oracle.length(shape, slot) for slot in work}
                if shape.allocation is DEVICE:
                    assert ceilings == complete
                else:
                    assert ceilings == work
                assert work == allocate(shape, complete, oracle)
                cut += work != complete
    assert cut > 30


def allocate(shape: ProgramShape, complete: dict[int, int], oracle: RoundOracle) -> dict[int, int]:
    """Give rows one at a time to the best frontier; ties by shorter prefix, then lower slot."""
    rows = dict.fromkeys(complete, 1)

    def priority(slot: int) -> float:
        depth = rows[slot] - 1
        if shape.allocation is DEVICE:
            return min(oracle.state.acceptance.forecast_mean[slot, : depth + 1].tolist())
        return float(oracle.survival[slot, shape.proposal_source][depth] * oracle.token_value(slot))

    for _ in range(shape.packed_capacity - len(rows)):
        open_lanes = [slot for slot in rows if rows[slot] < complete[slot]]
        if not open_lanes:
            break
        rows[min(open_lanes, key=lambda slot: (-priority(slot), rows[slot], slot))] += 1
    return rows


def test_expected_tokens_of_a_plan_are_physical() -> None:
    """alpha changes scores, not what a queued round is expected to serve."""
    for seed in range(60):
        rng = random.Random(seed)
        shapes = rectangular(rng, LEARNED, (2, 4))
        state = round_state(rng, shapes, policy=random_policy(rng, "adaptive", alpha=2.0))
        plan = plan_next(state)
        assert plan is not None
        if not plan.shape.proposal_depth:
            assert plan.expected_tokens == ()
            continue
        for lane, expected in zip(plan.lanes, plan.expected_tokens, strict=True):
            means = np.minimum.accumulate(state.acceptance.accept_mean[lane.handle.slot, 0])
            assert math.isclose(expected, 1 + means[: lane.length - 1].sum(), rel_tol=1e-12)


@pytest.mark.parametrize("allocation", [HOST, DEVICE])
@pytest.mark.parametrize("mode", ["adaptive", "fixed"])
def test_slot_numbers_do_not_choose(mode: str, allocation: Allocation) -> None:
    """A permutation of the slots gives the permuted plan: the same program, the same work for the same requests."""
    for seed in range(30):
        rng = random.Random(seed)
        shapes = [*rectangular(rng, LEARNED, (1, 4)), *ragged(rng, LEARNED, (2, 4), allocation)]
        shapes += [mixed(2, 1, 64), mixed(4, 3, 64)]
        state = round_state(rng, shapes, num=8, prompts=0.2, policy=random_policy(rng, mode))
        requests = state.requests.draft()
        requests.token_r[:] = [10 ** rng.uniform(-1, 2) for _ in requests.token_r]  # no two alike
        state = dataclasses.replace(state, requests=requests.sealed())
        order = rng.sample(range(8), 8)
        plan, other = plan_next(state), plan_next(permuted(state, order))
        assert plan is not None
        assert other is not None
        assert plan.shape == other.shape
        assert math.isclose(plan.value_rate, other.value_rate, rel_tol=1e-12)
        work = {order[lane.handle.slot]: (lane.role, lane.start, lane.length) for lane in other.lanes}
        assert work == {lane.handle.slot: (lane.role, lane.start, lane.length) for lane in plan.lanes}


def permuted(state: State, order: list[int]) -> State:
    """The same requests in other slots: slot i gets the request of slot order[i]."""
    requests = Requests(*[getattr(state.requests, name)[order] for name in REQUEST_COLUMNS]).sealed()
    known = state.acceptance
    columns = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    moved = {name: column if "prior" in name else column[order] for name, column in columns.items()}
    specs = tuple(state.specs[slot] for slot in order)
    return dataclasses.replace(state, requests=requests, specs=specs, acceptance=dataclasses.replace(known, **moved))


def test_token_normalisers_count_the_expected_output_of_the_reference_program() -> None:
    """n = E / sigma, E being physical (alpha = 1) and of the program behind sigma."""
    wide = 0
    for seed in range(60):
        rng = random.Random(seed)
        state = round_state(rng, rectangular(rng, LEARNED, (1, 4)), policy=random_policy(rng, "adaptive", alpha=3.0))
        rates, oracle = current_rates(state), RoundOracle(state)
        for slot in oracle.decoders:
            shape = state.catalog.shapes[int(rates.reference[slot])]
            rows = oracle.length(shape, slot)
            means = np.minimum.accumulate(state.acceptance.accept_mean[slot, 0])
            expected = 1 + means[: rows - 1].sum() if rows else 1
            assert math.isclose(rates.token_n[slot], expected / rates.sigma[slot], rel_tol=1e-12)
            wide += rows > 1
    assert wide > 20


@pytest.mark.parametrize("allocation", [HOST, DEVICE])
def test_lookahead_lanes_are_additive_within_the_aggregate_rows(allocation: Allocation) -> None:
    """Whatever cohort of at most B lanes a pair chooses fits P, and each lane is worth what its rows are."""
    tight = 0
    for seed in range(60):
        rng = random.Random(seed)
        source = rng.choice([LEARNED, COPY])
        shapes = [*rectangular(rng, source, (1, 4)), *ragged(rng, source, (2, 3, 6), allocation)]
        state = round_state(rng, shapes, num=8, policy=random_policy(rng, "adaptive"))
        decision, oracle, slots = new_decision(state), RoundOracle(state), np.arange(8)
        programs = state.programs.speculative
        values, rows = delivery_lanes(decision, programs, slots, decision.duration_ms[programs])
        for number, program in enumerate(programs.tolist()):
            shape = state.catalog.shapes[program]
            assert sum(sorted(rows[number].tolist())[-shape.batch_capacity :]) <= shape.packed_capacity
            for slot in range(8):
                complete = oracle.length(shape, slot) if slot in oracle.decoders else 0
                assert (rows[number, slot] > 0) == (complete > 0)
                assert rows[number, slot] <= complete
                tight += rows[number, slot] < complete
                value = oracle.lane_value(shape, slot, int(rows[number, slot])) if complete else Fraction(0)
                scaled = float(value) * math.exp(-decision.values.log_scale)
                assert math.isclose(values[number, slot], scaled, rel_tol=1e-9)
    assert tight > 100
