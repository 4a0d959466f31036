"""Exploration ledgers against a naive model in rationals, on random sequences of events."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.errors import InvariantError
from helios_jax.scheduler import SelectionReason
from helios_jax.scheduler.refresh import Ledgers, charge, credit, is_funded, open_episode, settle, watch_idle

REFRESH, LEARNING = SelectionReason.TIMING_REFRESH, SelectionReason.ACCEPTANCE_LEARNING
CAP = Fraction(5_000_000)
SHARES = {REFRESH: Fraction(2, 1000), LEARNING: Fraction(1, 100)}


class Naive:
    """The specification's sentences, one after another, in rationals."""

    def __init__(self) -> None:
        self.balance = dict.fromkeys(SHARES, Fraction(0))
        self.ordinary = Fraction(0)
        self.spent = dict.fromkeys(SHARES, Fraction(0))
        self.last = dict.fromkeys(SHARES, Fraction(0))
        self.open: SelectionReason | None = None

    def earn(self, duration: int) -> None:
        self.ordinary += duration
        for reason, share in SHARES.items():
            self.balance[reason] = min(CAP, self.balance[reason] + share / (1 - share) * duration)

    def pay(self, duration: int) -> None:
        assert self.open is not None
        self.balance[self.open] -= duration
        self.spent[self.open] += duration
        self.last[self.open] = Fraction(duration)
        self.open = None

    def rest(self) -> None:
        for reason in SHARES:
            self.balance[reason] = min(Fraction(0), self.balance[reason])

    def may_probe(self, reason: SelectionReason) -> bool:
        return self.open is None and self.balance[reason] == CAP


durations = st.one_of(st.integers(1, 10**7), st.integers(10**8, 4 * 10**9), st.sampled_from([495_000_000]))
events = st.lists(
    st.one_of(
        st.tuples(st.just("ordinary"), durations),
        st.tuples(st.just("unmeasured"), durations),
        st.tuples(st.just("discovery"), durations),
        st.tuples(st.just("probe"), st.one_of(st.integers(0, 10**7), durations)),
        st.tuples(st.just("idle"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(events)
def test_random_sequences_agree_with_the_naive_model(events: list[tuple[str, int]]) -> None:
    ledgers, naive = Ledgers(), Naive()
    for fence, (what, duration) in enumerate(events, start=1):
        if what == "ordinary":
            ledgers = settle(ledgers, SelectionReason.ORDINARY, fence, duration, valid=True)
            naive.earn(duration)
        elif what == "unmeasured":
            ledgers = settle(ledgers, SelectionReason.ORDINARY, fence, duration, valid=False)
        elif what == "discovery":
            ledgers = settle(ledgers, SelectionReason.DISCOVERY, fence, duration, valid=True)
        elif what == "idle":
            ledgers = watch_idle(watch_idle(ledgers, is_empty=True), is_empty=True)
            ledgers = watch_idle(ledgers, is_empty=False)
            naive.rest()
        else:
            ledgers = probe(ledgers, naive, fence, duration)
        agree(ledgers, naive)


def probe(ledgers: Ledgers, naive: Naive, fence: int, duration: int) -> Ledgers:
    """The first purpose that is funded runs; ordinary frames queued before it complete meanwhile."""
    for reason in SHARES:
        if not is_funded(ledgers, reason):
            with pytest.raises(InvariantError):
                open_episode(ledgers, reason, fence)
            continue
        ledgers = open_episode(ledgers, reason, fence)
        naive.open = reason
        assert not any(is_funded(ledgers, other) for other in SHARES)
        ledgers = credit(ledgers, 1000)
        naive.earn(1000)
        with pytest.raises(InvariantError):
            charge(ledgers, reason, fence + 1, duration)
        ledgers = settle(ledgers, reason, fence, duration, valid=bool(duration % 2))
        naive.pay(duration)
        break
    return ledgers


def agree(ledgers: Ledgers, naive: Naive) -> None:
    for reason, share in SHARES.items():
        ledger = ledgers.of(reason)
        assert ledger.share == share
        assert ledger.balance_ns == naive.balance[reason] <= CAP
        assert ledger.ordinary_ns == naive.ordinary
        assert (ledger.spent_ns, ledger.last_episode_ns) == (naive.spent[reason], naive.last[reason])
        assert is_funded(ledgers, reason) == naive.may_probe(reason)
        bound = share / (1 - share) * ledger.ordinary_ns + ledger.last_episode_ns
        assert ledger.spent_ns <= bound


@pytest.mark.parametrize(("reason", "milliseconds"), [(REFRESH, 2495), (LEARNING, 495)])
def test_the_first_episode_takes_exactly_this_much_ordinary_time(reason: SelectionReason, milliseconds: int) -> None:
    ledgers = Ledgers()
    for _ in range(milliseconds - 1):
        ledgers = credit(ledgers, 1_000_000)
    ledgers = credit(ledgers, 999_999)
    assert not is_funded(ledgers, reason)
    assert is_funded(credit(ledgers, 1), reason)


def test_debt_is_worked_off_before_the_next_episode() -> None:
    ledgers = credit(Ledgers(), 10**12)
    ledgers = charge(open_episode(ledgers, REFRESH, 1), REFRESH, 1, 45_000_000)
    assert ledgers.refresh.balance_ns == -40_000_000
    assert ledgers.learning.balance_ns == 5_000_000  # no execution is charged to both
    again = (45_000_000) * 499
    assert not is_funded(credit(ledgers, again - 1), REFRESH)
    assert is_funded(credit(ledgers, again), REFRESH)


def test_idle_discards_credit_and_keeps_debt() -> None:
    ledgers = credit(Ledgers(), 10**12)
    ledgers = charge(open_episode(ledgers, REFRESH, 1), REFRESH, 1, 7_000_000)
    once = watch_idle(ledgers, is_empty=True)
    assert dataclasses.replace(once, was_empty=False) == ledgers  # requests may be about to be admitted
    assert watch_idle(watch_idle(once, is_empty=False), is_empty=True).learning.balance_ns == 5_000_000
    twice = watch_idle(once, is_empty=True)
    assert (twice.refresh.balance_ns, twice.learning.balance_ns) == (-2_000_000, 0)


def test_short_busy_periods_never_fund_a_refresh() -> None:
    """Specification: repeated shorter busy periods separated by idle can leave estimates stale for ever."""
    ledgers = Ledgers()
    for _ in range(100):
        ledgers = credit(ledgers, 2_494_000_000)
        assert not is_funded(ledgers, REFRESH)
        ledgers = watch_idle(watch_idle(ledgers, is_empty=True), is_empty=True)
    assert ledgers.refresh.spent_ns == 0
