"""The common scale of a decision: the logarithm of its largest absolute term, waiting included.

Source: scheduling-utility.md section 7. Terms are what a score adds up, times its duration: tokens,
deliveries, age credit c sigma (A + T) and the waiting cost T^2 sum c, T being the longest sequence
that there may be (a prerequisite and an inference, both as long as the longest program).
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from helios_jax.scheduler import Catalog, PolicyConfig, ProgramKind, ProgramShape, State, new_state
from helios_jax.scheduler.candidates import new_decision
from helios_jax.scheduler.policy import _all_candidates
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import DECODE, INITIALIZE, MS, PREFILL, admitted, measured, request, small_limits

SNAPSHOT = ProgramKind.SNAPSHOT
LONGEST_MS, SEQUENCE_MS, AGE_MS, TOKEN_R, DELIVERY_R = 10.0, 20.0, 3.0, 2.0, 5.0
ZERO = PolicyConfig(output_token_value=0.0, token_fairness=0.0, delivery_fairness=0.0, decode_age_price=0.0,
                    terminal_value=0.0, terminal_age_price=0.0)  # fmt: skip


def scene(policy: PolicyConfig, streams: int = 3, ended: int = 0, longest: ProgramKind = INITIALIZE) -> State:
    """Streams, requests at their end, and a newcomer; the programs of one kind take 10 ms, others 4."""
    shapes = [ProgramShape(INITIALIZE, 1, 0), ProgramShape(SNAPSHOT, 4, 0), ProgramShape(PREFILL, 1, 8)]
    catalog = Catalog((*shapes, ProgramShape(DECODE, 4, 1)))
    limits = dataclasses.replace(small_limits(slots=8), state_rows=8)
    state = dataclasses.replace(new_state(catalog, limits, policy), now_ns=1000 * MS)
    state, _ = admitted(state, *[request(5, 20)] * (streams + ended + 1))
    requests, since_ns = state.requests.draft(), state.now_ns - int(AGE_MS * MS)
    for slot in range(streams + ended):
        requests.phase[slot] = Phase.DECODE if slot < streams else Phase.TERMINAL
        requests.consumed_len[slot] = requests.boundary[slot] = requests.committed_len[slot] = 5
        requests.output_len[slot] = 1
        requests.visible_ns[slot] = requests.terminal_ns[slot] = since_ns
        requests.state_row[slot] = 0 if slot < streams else slot + 1
    requests.token_r[: streams + ended + 1], requests.delivery_r[:streams] = TOKEN_R, DELIVERY_R
    state = dataclasses.replace(state, requests=requests.sealed())
    return measured(state, lambda shape: int((LONGEST_MS if shape.kind is longest else 4.0) * MS))


def log_scale(policy: PolicyConfig, **kinds: object) -> float:
    return new_decision(scene(policy, **kinds)).values.log_scale  # type: ignore[arg-type]


HUGE = 1e9
SIGMA_MS, ENDING_MS = 4.0, 4.0  # three streams in four rows of 4 ms; two retirements in four rows of 4 ms
TERMS = {
    "output_token_value": (0, HUGE),
    "token_fairness": (0, HUGE * TOKEN_R),
    "delivery_fairness": (0, HUGE * DELIVERY_R),
    "decode_age_price": (0, HUGE * 3 * SEQUENCE_MS**2),
    "terminal_value": (2, HUGE),
    "terminal_age_price": (2, HUGE * 2 * SEQUENCE_MS**2),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_scale_is_the_largest_term_whichever_it_is(name: str) -> None:
    ended, largest = TERMS[name]
    policy = dataclasses.replace(ZERO, **{name: HUGE})
    assert log_scale(policy, ended=ended) == pytest.approx(math.log(largest), rel=1e-12)


def test_the_age_credit_counts_to_the_end_of_the_longest_sequence() -> None:
    """One stream whose interval is longer than the sequence: c sigma (A + T) exceeds c T^2."""
    policy = dataclasses.replace(ZERO, decode_age_price=HUGE)
    state = scene(policy, streams=1)
    requests = state.requests.draft()
    requests.visible_ns[0] = state.now_ns - 500 * MS
    values = new_decision(dataclasses.replace(state, requests=requests.sealed())).values
    assert values.log_scale == pytest.approx(math.log(HUGE * SIGMA_MS * (500 + SEQUENCE_MS)), rel=1e-12)


def test_a_prompt_token_is_the_scale_where_nothing_else_is_worth_more() -> None:
    assert log_scale(ZERO) == 0.0
    assert log_scale(ZERO, ended=2) == 0.0


def test_the_longest_program_of_any_kind_counts() -> None:
    policy = dataclasses.replace(ZERO, decode_age_price=HUGE)
    for kind in (INITIALIZE, SNAPSHOT, PREFILL, DECODE):
        sigma = LONGEST_MS if kind is DECODE else SIGMA_MS
        waiting, credit = 3 * SEQUENCE_MS**2, sigma * (AGE_MS + SEQUENCE_MS)
        assert log_scale(policy, longest=kind) == pytest.approx(math.log(HUGE * max(waiting, credit)), rel=1e-12)


def test_no_term_of_any_candidate_exceeds_the_scale() -> None:
    """Every price, credit and waiting cost that a candidate can have is at most one, over random preferences."""
    names, nearest = ("output_token_value", "token_fairness", "delivery_fairness", "decode_age_price",
                      "terminal_value", "terminal_age_price"), 0.0  # fmt: skip
    for seed in range(120):
        rng = random.Random(seed)
        policy = PolicyConfig(**{name: 10 ** rng.uniform(-12, 12) for name in names})
        longest = rng.choice([INITIALIZE, SNAPSHOT, PREFILL, DECODE])
        state = scene(policy, streams=rng.randint(0, 4), ended=rng.randint(0, 3), longest=longest)
        decision = new_decision(state)
        values, found = decision.values, _all_candidates(decision, winner_only=False)
        assert found is not None
        last_ms = float(found.duration_ms.max())
        assert last_ms <= SEQUENCE_MS
        ages = (values.age_price + values.terminal_price) * (values.age_ms + last_ms)
        prices = [values.prompt_token, values.output_token, values.delivery, ages]
        terms = [*(float(column.max()) for column in prices), values.terminal, values.waiting * last_ms**2]
        assert max(terms) <= 2.0 + 1e-9  # a price may be the sum of two terms
        assert np.isfinite(found.value).all()
        nearest = max(nearest, max(terms))
    assert nearest > 0.5
