"""Equal scores: what is equal, and each key of the tie order against the ones after it.

The order (specification, "equal values prefer", and reading 13): shorter known time, more served
requests, less recently used requests, smaller physical padding, mean time of last use, slot number.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from helios_jax.scheduler import Catalog, PolicyConfig, ProgramKind, ProgramShape, State, new_state, plan_next
from helios_jax.scheduler.candidates import Candidates, nearly_best, new_decision
from helios_jax.scheduler.catalog import physical_tokens
from helios_jax.scheduler.joint import best_option
from helios_jax.scheduler.mixed import mixed_candidates
from helios_jax.scheduler.policy import _all_candidates, _best
from helios_jax.scheduler.prerequisites import prerequisite_candidates
from helios_jax.scheduler.rounds import round_candidates
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_pairs_states import FRESH, LONGER, READY, random_catalog, random_state
from tests.unit.scheduler_toy import DECODE, INITIALIZE, MS, PREFILL, admitted, measured, request, small_limits

MIXED, VISION = ProgramKind.MIXED, ProgramKind.VISION
NEEDED = (ProgramShape(INITIALIZE, 1, 0), ProgramShape(PREFILL, 1, 8))
# Last uses of the streams 0 to 5, ns. 3 and 4 have the sum of 2 and 5.
USED = (700, 600, 100, 200, 300, 400)
BASE: dict[str, Any] = {"served": (2, 3), "ms": 4.0, "padding": 5, "value": 1.0, "first": 2}


def streams(*programs: ProgramShape, policy: PolicyConfig | None = None, num: int = 6, **columns: object) -> State:
    """Decoders whose tokens and deliveries are worth the same, unless columns say otherwise."""
    state = new_state(Catalog((*NEEDED, *programs), aligned=False), small_limits(slots=8), policy)
    state, _ = admitted(state, *[request(5, 20)] * num)
    requests = state.requests.draft()
    requests.phase[:num] = Phase.DECODE
    requests.consumed_len[:num] = requests.boundary[:num] = requests.committed_len[:num] = 5
    requests.output_len[:num] = 1
    requests.token_r[:num], requests.delivery_r[:num], requests.last_use_ns[:num] = 1.7, 2.3, USED[:num]
    for name, column in columns.items():
        getattr(requests, name)[:num] = column
    return dataclasses.replace(state, requests=requests.sealed())


def table(*rows: dict[str, Any], known: bool = True) -> Candidates:
    """Candidates that differ from `BASE` in what each row names."""
    full = [BASE | row for row in rows]
    work = np.zeros((len(full), 8), np.int64)
    for line, row in zip(work, full, strict=True):
        line[list(row["served"])] = 1
    nobody = np.full(len(full), -1)
    return Candidates(
        first=np.array([row["first"] for row in full]),
        follow=nobody,
        members=work > 0,
        lengths=work,
        work=work,
        prompt=nobody,
        value=np.array([row["value"] for row in full]),
        duration_ms=np.array([row["ms"] for row in full]),
        known=np.full(len(full), known),
        padding=np.array([row["padding"] for row in full]),
    )


def best_of(candidates: Candidates, rates: np.ndarray | None = None) -> int:
    decision = new_decision(streams(ProgramShape(DECODE, 8, 1)))
    equal = np.ones(len(candidates.first)) if rates is None else rates
    return _best(decision, candidates, equal, np.ones(len(equal), np.bool_))


# What wins by one key loses by all of the later ones; the first of two candidates is the loser.
KEYS = {
    "shorter known time": ({"ms": 4.0, "served": (2, 3, 4), "padding": 0, "first": 1}, {"ms": 3.9, "served": (0, 1)}),
    "more served requests": ({"served": (2,), "padding": 0, "first": 1}, {"served": (0, 1)}),
    "less recently used": ({"served": (3, 4), "padding": 0, "first": 1}, {"served": (0, 2)}),
    "smaller padding": ({"served": (2, 3), "padding": 6, "first": 1}, {"served": (0, 2), "padding": 5}),
    "mean time of last use": ({"served": (0, 2), "first": 1}, {"served": (2, 5)}),
    "slot number": ({"served": (3, 5), "first": 1}, {"served": (1, 3)}),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("known", [True, False])
def test_each_key_decides_before_the_later_ones(key: str, known: bool) -> None:
    loser, winner = KEYS[key]
    if key == "slot number":
        # 1 and 5 were used at the same time, so the cohorts differ by their slots alone.
        decision = new_decision(streams(ProgramShape(DECODE, 8, 1), last_use_ns=(700, 400, 100, 200, 300, 400)))
        assert _best(decision, table(loser, winner, known=known), np.ones(2), np.ones(2, np.bool_)) == 1
        return
    assert best_of(table(loser, winner, known=known)) == 1
    assert best_of(table(winner, loser, known=known)) == 0


def test_a_score_goes_before_all_keys() -> None:
    loser, winner = KEYS["shorter known time"]
    assert best_of(table(loser, winner), np.array([1.0 + 1e-9, 1.0])) == 0


def test_times_are_compared_in_whole_nanoseconds() -> None:
    """0.1 + 0.7 and 0.8 ms are the same time, whatever the sum is in float64."""
    one, other = 0.1 + 0.7, 0.8
    assert one != other
    assert best_of(table({"ms": one, "served": (2, 3)}, {"ms": other, "served": (2, 3, 4)})) == 1
    assert best_of(table({"ms": other, "served": (2, 3)}, {"ms": one, "served": (2, 3, 4)})) == 1
    assert best_of(table({"ms": 0.8, "served": (2, 3, 4)}, {"ms": 0.799999, "served": (2,)})) == 1  # one nanosecond


def test_mean_times_of_last_use_are_exact() -> None:
    """A nanosecond decides after years of uptime, where float64 has no room for it."""
    late = 2**57
    used = (late + 2, late + 1, 5, late + 2, late + 1, late + 2)
    decision = new_decision(dataclasses.replace(streams(ProgramShape(DECODE, 8, 1), last_use_ns=used), now_ns=late + 9))
    found = table({"served": (2, 3)}, {"served": (2, 4)})
    assert _best(decision, found, np.ones(2), np.ones(2, np.bool_)) == 1


# ---- what is equal


def test_rounding_of_the_parts_is_no_difference() -> None:
    """1e-12 of value / T + T / 2 * sum c, also where the two nearly cancel; not more."""
    found, every = table({}, {}), np.ones(2, np.bool_)
    for waiting, rate in ((0.0, 1e6), (0.5, 1e-3), (1e6, 0.0), (3.0, -2.0)):
        parts = abs(rate + BASE["ms"] * waiting)
        near, far = np.array([rate - 0.9e-12 * parts, rate]), np.array([rate - 1.5e-12 * parts, rate])
        assert nearly_best(found, near, waiting, every).tolist() == [0, 1]
        assert nearly_best(found, far, waiting, every).tolist() == [1]
    unknown = table({}, {}, known=False)  # whose score is the value alone
    assert nearly_best(unknown, np.array([1.0 - 0.9e-12, 1.0]), 1e9, every).tolist() == [0, 1]
    assert nearly_best(unknown, np.array([1.0 - 1.5e-12, 1.0]), 1e9, every).tolist() == [1]
    assert nearly_best(found, np.array([2.0, 1.0]), 0.0, np.array([False, True])).tolist() == [1]


def test_of_equal_rates_the_shorter_time_wins_whatever_the_sums_round_to() -> None:
    """k equal lanes in k d: the last bit of the totals preferred a longer one in 443 of 2,000 cases."""
    programs = [ProgramShape(DECODE, b, 1) for b in (1, 2, 3)]
    for seed in range(300):
        rng = random.Random(seed)
        policy = PolicyConfig(decode_age_price=0.0, delivery_fairness=0.0, token_fairness=rng.uniform(0.1, 20))
        state, each = streams(*programs, policy=policy), rng.randint(10**6, 10**7)
        rng.shuffle(programs)
        plan = plan_next(measured(state, lambda s, d=each: d * s.batch_capacity if s.kind is DECODE else MS))  # type: ignore[misc]
        assert plan is not None
        assert plan.shape.batch_capacity == 1, seed


def test_the_same_streams_go_into_the_program_with_less_padding() -> None:
    """Neither is measured: the mixed one, summed in another order, won 197 of 1,000 by its last bit."""
    programs = ProgramShape(DECODE, 8, 1), ProgramShape(MIXED, 8, 1, prefill_capacity=64)
    for seed in range(300):
        rng = random.Random(seed)
        rates = {name: [10 ** rng.uniform(-1, 2) for _ in range(6)] for name in ("token_r", "delivery_r")}
        plan = plan_next(streams(*programs, **rates))
        assert plan is not None
        assert (plan.shape.kind, len(plan.lanes)) == (DECODE, 6), seed


def test_of_equal_scores_the_tie_order_is_the_naive_one() -> None:
    """Random tables with few distinct entries, against a comparison of tuples in whole numbers."""
    rng, used = random.Random(8), np.array([*USED, 0, 0])
    decision = new_decision(streams(ProgramShape(DECODE, 8, 1)))
    for _ in range(400):
        rows = [
            {"served": tuple(rng.sample(range(6), rng.randint(1, 3))), "ms": rng.choice([3.0, 4.0]),
             "padding": rng.randint(0, 1), "first": number}
            for number in range(8)
        ]  # fmt: skip

        def key(row: dict[str, Any]) -> tuple[object, ...]:
            times = [int(used[slot]) for slot in row["served"]]
            mean = sum(times) / len(times)
            return row["ms"], -len(times), min(times), row["padding"], mean, min(row["served"]), row["first"]

        best = _best(decision, table(*rows), np.ones(8), np.ones(8, np.bool_))
        assert best == min(range(8), key=lambda number: key(rows[number]))


# ---- the unit of padding


def test_padding_is_unused_token_rows_and_request_rows_in_every_kind() -> None:
    """Six streams in eight rows of one token; a prompt of 5 in 64 tokens beside them; prefill of 5 in (4, 8)."""
    programs = (
        ProgramShape(DECODE, 8, 1),
        ProgramShape(ProgramKind.SPECULATIVE, 8, 1, 0, 8),
        ProgramShape(MIXED, 8, 1, prefill_capacity=64),
        ProgramShape(PREFILL, 4, 8),
    )
    state = streams(*programs)
    decision = new_decision(state)
    decode, speculative = round_candidates(decision)
    assert decode.padding.tolist() == speculative.padding.tolist() == [2 + 2]
    alone = mixed_candidates(decision)
    assert alone is not None
    assert alone.padding.tolist() == [64 + 7 - 6 + 2]
    state, _ = admitted(state, request(5, 20))
    requests = state.requests.draft()
    requests.phase[6] = Phase.PROMPT
    decision = new_decision(dataclasses.replace(state, requests=requests.sealed()))
    beside = mixed_candidates(decision)
    assert beside is not None
    assert beside.padding.tolist() == [64 - 5 + 7 - 6 + 1]
    found = _all_candidates(decision, winner_only=False)
    assert found is not None
    kinds = [state.catalog.shapes[row] for row in found.first.tolist()]
    padding = dict(zip(kinds, found.padding.tolist(), strict=True))
    assert padding[NEEDED[1]] == 3
    assert ProgramShape(PREFILL, 4, 8) not in padding  # redundant


def test_padding_of_sequences_counts_both_stages() -> None:
    """Against a sum over the stages of what each program computes, from the specifications of the requests."""
    seen: set[ProgramKind] = set()
    for seed in range(60):
        rng = random.Random(seed)
        kinds = rng.choice(FRESH), "vision", "terminal", *LONGER, *READY
        state = random_state(rng, kinds, catalog=random_catalog(rng, prefill_rows=(1, 2), rounds=seed % 2 == 0))
        for block in prerequisite_candidates(new_decision(state)):
            for row, padding in enumerate(block.padding.tolist()):
                first = state.catalog.shapes[block.first[row]]
                members = np.flatnonzero(block.members[row]).tolist()
                wanted = first.batch_capacity - len(members)
                if first.kind is VISION:
                    wanted += first.batch_capacity * first.token_capacity - sum(features(state, s) for s in members)
                if block.follow[row] >= 0:
                    follow, work = state.catalog.shapes[block.follow[row]], block.work[row][block.work[row] > 0]
                    wanted += physical_tokens(follow) - int(work.sum()) + follow.batch_capacity - len(work)
                assert padding == wanted, (seed, first)
                seen.add(first.kind)
    assert seen == {INITIALIZE, VISION, ProgramKind.RESTORE, ProgramKind.SNAPSHOT}


def features(state: State, slot: int) -> int:
    """Length of the next image."""
    spec = state.specs[slot]
    assert spec is not None
    span = spec.image_spans[int(state.requests.images_done[slot])]
    return span.end - span.start


def test_joint_cohorts_that_are_equal_but_for_rounding_advance_more_requests() -> None:
    values = np.array([[1.0, 3.0, -np.inf, 1.0], [1.0 - 1e-15, 3.0 - 1e-9, -np.inf, 1.0 + 1e-15]])
    counts = np.array([[1, 1, 1, 2], [2, 2, 2, 1]])
    assert best_option(values, counts).tolist() == [1, 0, 1, 0]
