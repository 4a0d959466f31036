"""Exploration budgets: what timing refresh and acceptance learning may cost, to the nanosecond.

Two ledgers, one an exploration purpose. The life of an episode:

1. Every valid ordinary completion earns both ledgers their share of its measured time, up to
   the cap. Discovery earns and spends nothing; its cost is counted apart.
2. A ledger at exactly its cap, with no episode open in either ledger, may fund one probe.
   When both may, timing refresh goes first.
3. Committing the probe opens the episode. The device cannot be interrupted, so what it costs
   is known at completion only: the charge may leave a debt, and the next episode waits until
   the balance is at the cap again.
4. An idle device discards positive credit (saved-up exploration must not meet the next
   request) and keeps debt.

The bound that follows, and that an invariant recounts: with ordinary time O, probe time P and
the duration D of the current or last episode, P <= share / (1 - share) * O + D. An episode opens
only when O / divisor - (P so far) is at least the cap, so P before it is below O / divisor.

Money is integers: one ordinary nanosecond earns 1 / divisor ns, so a balance is held in units of
1 / divisor ns and nothing is ever rounded.

Knows no requests and no programs.

Source: specification, "Funded timing refresh" and "Funded acceptance learning".
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from helios_jax.errors import InvariantError
from helios_jax.scheduler.types import Fence, SelectionReason

CAP_NS = 5_000_000  # specification: "capped at 5 ms"
REFRESH_DIVISOR = 499  # 0.998 / 0.002: the first episode takes 5 ms * 499 = 2,495 ms of ordinary time
LEARNING_DIVISOR = 99  # 0.99 / 0.01: the first episode takes 5 ms * 99 = 495 ms
NO_EPISODE = 0  # fences start at 1

# The reasons of selection that a ledger pays for.
PROBES = (SelectionReason.TIMING_REFRESH, SelectionReason.ACCEPTANCE_LEARNING)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The budget of one purpose.

    Attributes:
        divisor: Ordinary time that earns one unit of credit: (1 - share) / share.
        balance: Credit, negative for debt, in units of 1 / divisor ns.
        ordinary_ns: O, ordinary execution time that has been credited (also beyond the cap).
        spent_ns: P, execution time of closed episodes.
        episode: Fence of the open episode, `NO_EPISODE` without one.
        last_episode_ns: D, duration of the last closed episode.
    """

    divisor: int
    balance: int = 0
    ordinary_ns: int = 0
    spent_ns: int = 0
    episode: Fence = NO_EPISODE
    last_episode_ns: int = 0

    @property
    def share(self) -> Fraction:
        """Part of all execution time that exploration may take: 0.002 or 0.01."""
        return Fraction(1, self.divisor + 1)

    @property
    def cap(self) -> int:
        """Full credit in units of `balance`."""
        return CAP_NS * self.divisor

    @property
    def balance_ns(self) -> Fraction:
        """Credit in ns, exactly."""
        return Fraction(self.balance, self.divisor)


@dataclasses.dataclass(frozen=True)
class Ledgers:
    """Both budgets.

    Attributes:
        refresh: Of timing refresh, 0.002 of the time.
        learning: Of acceptance learning, 0.01 of the time.
        was_empty: The last `advance_to` found nothing outstanding and nothing runnable.
    """

    refresh: Ledger = Ledger(REFRESH_DIVISOR)
    learning: Ledger = Ledger(LEARNING_DIVISOR)
    was_empty: bool = False

    def of(self, reason: SelectionReason) -> Ledger:
        """The ledger that pays for a probe of this reason."""
        return self.refresh if reason is SelectionReason.TIMING_REFRESH else self.learning


def is_funded(ledgers: Ledgers, reason: SelectionReason) -> bool:
    """Whether a probe of this reason may be selected now: full credit, and no probe under way."""
    active = ledgers.refresh.episode or ledgers.learning.episode
    ledger = ledgers.of(reason)
    return not active and ledger.balance == ledger.cap


def credit_ns(ledgers: Ledgers, reason: SelectionReason) -> int:
    """Exploration credit behind a selection, whole ns; 0 for what no ledger pays."""
    return int(ledgers.of(reason).balance_ns) if reason in PROBES else 0


def open_episode(ledgers: Ledgers, reason: SelectionReason, fence: Fence) -> Ledgers:
    """A probe was committed.

    Raises:
        InvariantError: It is not funded; `commit` refuses such a plan before.
    """
    if not is_funded(ledgers, reason):
        raise InvariantError(f"a {reason} probe is not funded: {ledgers}")
    return _with(ledgers, reason, dataclasses.replace(ledgers.of(reason), episode=fence))


def dispatched(ledgers: Ledgers, reason: SelectionReason, fence: Fence) -> Ledgers:
    """A plan was committed: a probe opens its episode, and the state is not empty any more."""
    if reason in PROBES:
        ledgers = open_episode(ledgers, reason, fence)
    return dataclasses.replace(ledgers, was_empty=False) if ledgers.was_empty else ledgers


def settle(ledgers: Ledgers, reason: SelectionReason, fence: Fence, execution_ns: int, *, valid: bool) -> Ledgers:
    """Account for a completed execution: a probe pays, valid ordinary work earns, discovery does neither.

    Args:
        execution_ns: Raw physical time, readiness stalls included; an attempt with an invalid
            timing pays its wall time.
        valid: The device interval was positive.
    """
    if reason in PROBES:
        return charge(ledgers, reason, fence, execution_ns)
    if reason is SelectionReason.ORDINARY and valid:
        return credit(ledgers, execution_ns)
    return ledgers


def credit(ledgers: Ledgers, ordinary_ns: int) -> Ledgers:
    """Earn both shares of an ordinary execution; beyond the cap it is lost."""

    def earn(ledger: Ledger) -> Ledger:
        balance = min(ledger.cap, ledger.balance + ordinary_ns)
        return dataclasses.replace(ledger, balance=balance, ordinary_ns=ledger.ordinary_ns + ordinary_ns)

    return dataclasses.replace(ledgers, refresh=earn(ledgers.refresh), learning=earn(ledgers.learning))


def charge(ledgers: Ledgers, reason: SelectionReason, fence: Fence, execution_ns: int) -> Ledgers:
    """Close the open episode and pay for it.

    Raises:
        InvariantError: The fence is not the open episode.
    """
    ledger = ledgers.of(reason)
    if ledger.episode != fence:
        raise InvariantError(f"fence {fence} is no open {reason} episode: {ledgers}")
    paid = dataclasses.replace(
        ledger,
        balance=ledger.balance - execution_ns * ledger.divisor,
        spent_ns=ledger.spent_ns + execution_ns,
        episode=NO_EPISODE,
        last_episode_ns=execution_ns,
    )
    return _with(ledgers, reason, paid)


def watch_idle(ledgers: Ledgers, *, is_empty: bool) -> Ledgers:
    """Note at every `advance_to` whether anything is outstanding or runnable; the second time without is idle.

    The first `advance_to` after the last completion finds an empty state even when requests
    wait for a slot: they are admitted right after it, and the device is not idle.
    """
    if is_empty and ledgers.was_empty:
        return idle(ledgers)
    return ledgers if ledgers.was_empty == is_empty else dataclasses.replace(ledgers, was_empty=is_empty)


def idle(ledgers: Ledgers) -> Ledgers:
    """Discard positive credit and preserve debt."""

    def discard(ledger: Ledger) -> Ledger:
        return dataclasses.replace(ledger, balance=min(0, ledger.balance))

    if max(ledgers.refresh.balance, ledgers.learning.balance) <= 0:
        return ledgers
    return dataclasses.replace(ledgers, refresh=discard(ledgers.refresh), learning=discard(ledgers.learning))


def _with(ledgers: Ledgers, reason: SelectionReason, ledger: Ledger) -> Ledgers:
    if reason is SelectionReason.TIMING_REFRESH:
        return dataclasses.replace(ledgers, refresh=ledger)
    return dataclasses.replace(ledgers, learning=ledger)
