"""Naive arithmetic beside the scheduler's: durations, budgets, prices, acceptance, one number at a time.

Plain lists, dictionaries, floats and fractions; formulas are those of scheduling-utility.md and the
specification, written down once more. `None` stands for "unknown" where the scheduler has 0 or NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from helios_jax.scheduler import ExecutionTiming, ProgramKind, ProgramShape, SelectionReason
from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.types import Constraint

CAP_NS = 5_000_000
GENERATING = (ProgramKind.DECODE, ProgramKind.SPECULATIVE, ProgramKind.MIXED)
FAMILY = (Constraint.GRAMMAR | Constraint.HOST_STOPS | Constraint.HOST_FED | Constraint.HISTORY
          | Constraint.NO_LEARNED | Constraint.NO_COPY)  # fmt: skip


@dataclasses.dataclass
class Duration:
    """What is known of one program."""

    samples: list[int] = dataclasses.field(default_factory=list)
    observed_ns: int = 0
    attempted_ns: int = 0

    @property
    def estimate_ns(self) -> int:
        """Median, the middle pair averaged; 0 = unknown."""
        if not self.samples:
            return 0
        ordered, half = sorted(self.samples), len(self.samples) // 2
        return ordered[half] if len(ordered) % 2 else max(1, (ordered[half - 1] + ordered[half]) // 2)

    def is_fresh(self, now_ns: int, ttl_ns: int) -> bool:
        return bool(self.samples) and now_ns - self.observed_ns <= ttl_ns

    def observe(self, timing: ExecutionTiming, now_ns: int, ttl_ns: int) -> None:
        raw = raw_ns(timing)
        if raw - timing.embedding_delay_ns <= 0 or raw <= 0:
            return
        kept = self.samples if self.is_fresh(now_ns, ttl_ns) else []
        self.samples, self.observed_ns = [*kept, raw - timing.embedding_delay_ns][-9:], now_ns


def raw_ns(timing: ExecutionTiming) -> int:
    return max([0, *timing.device_ns])


def charged_ns(timing: ExecutionTiming) -> int:
    """Device time of a queued frame, the larger of device and wall time of an isolated one."""
    raw = raw_ns(timing)
    return raw if timing.queued and raw > 0 else max(raw, timing.wall_ns)


@dataclasses.dataclass
class Budget:
    """One exploration ledger: `share` of all time, in exact nanoseconds."""

    share: Fraction
    balance: Fraction = Fraction(0)
    ordinary_ns: int = 0
    spent_ns: int = 0
    last_ns: int = 0
    episode: int = 0

    def earn(self, ordinary_ns: int) -> None:
        self.ordinary_ns += ordinary_ns
        self.balance = min(Fraction(CAP_NS), self.balance + ordinary_ns * self.share / (1 - self.share))

    def pay(self, spent_ns: int) -> None:
        self.spent_ns, self.last_ns, self.episode = self.spent_ns + spent_ns, spent_ns, 0
        self.balance -= spent_ns

    def idle(self) -> None:
        self.balance = min(Fraction(0), self.balance)

    def within_bound(self) -> bool:
        """P <= share / (1 - share) O + D."""
        return self.spent_ns <= self.share / (1 - self.share) * self.ordinary_ns + self.last_ns


def budgets() -> dict[SelectionReason, Budget]:
    return {
        SelectionReason.TIMING_REFRESH: Budget(Fraction(2, 1000)),
        SelectionReason.ACCEPTANCE_LEARNING: Budget(Fraction(1, 100)),
    }


def served_r(r: float, duration_ms: float, service: float, n: float, tau_ms: float) -> float:
    """r' = r e^-a + (D / s)(1 - e^-a) with a = s / (n tau); r + D / (n tau) without service."""
    if service == 0:
        after = r + duration_ms / (n * tau_ms)
    else:
        a = service / (n * tau_ms)
        after = r * math.exp(-a) + duration_ms / service * -math.expm1(-a)
    return min(max(after, 1e-300), 1e300)


def serves(shape: ProgramShape, constraints: Constraint) -> bool:
    """Whether a generating program may serve a stream; without proposals the source makes no difference."""
    if shape.kind not in GENERATING:
        return False
    if shape.proposal_depth == 0:
        return True
    barred = {ProposalSource.LEARNED: Constraint.NO_LEARNED, ProposalSource.COPY: Constraint.NO_COPY}
    return not constraints & barred.get(shape.proposal_source, Constraint.NONE)


def reference_ms(
    streams: Sequence[Constraint], mine: Constraint, costs: dict[ProgramShape, Duration], usable: Iterable[ProgramShape]
) -> float | None:
    """sigma of a stream: K min T / min(B, k) over the measured programs that serve its family."""
    k = sum(other & FAMILY == mine & FAMILY for other in streams)
    shares = [
        costs[shape].estimate_ns / 1e6 / min(shape.batch_capacity, k)
        for shape in usable
        if serves(shape, mine) and costs[shape].estimate_ns
    ]
    return len(streams) * min(shares) if shares else None


class Learned:
    """Acceptance and forecast estimates of one request: [mean, weight] of each depth."""

    def __init__(self, prior: Sequence[float], population: dict[str, list[list[float]]]) -> None:
        self.accept = {
            source: [[m, min(weight, 8.0)] if m > 0.5**d else [0.5**d, 2.0] for d, (m, weight) in enumerate(shown, 1)]
            for source, shown in population.items()
        }
        self.forecast = [[mean, 2.0] for mean in prior]

    def judged(
        self, source: str, offered: int, accepted: int, *, censored: bool, survival: Sequence[float] | None
    ) -> list[float]:
        """1 for accepted prefixes, 0 for rejected ones, nothing behind an end; survival rows replace both.

        Returns what was seen of depth 1 and on.
        """
        lessons = []
        for d in range(1, offered + 1):
            if d > accepted and censored:
                break
            seen = 1.0 if d <= accepted else 0.0
            if survival is not None and not math.isnan(survival[d - 1]):
                seen = survival[d - 1]
            _average(self.accept[source][d - 1], seen)
            lessons.append(seen)
        return lessons

    def drafted(self, joint: Sequence[float], ceiling: int, depth: int) -> list[float]:
        """Forecasts of the prefixes below a lane's ceiling; returns what was seen."""
        seen = [joint[d - 1] for d in range(1, min(ceiling - 1, depth) + 1)]
        for entry, value in zip(self.forecast, seen, strict=False):
            _average(entry, value)
        return seen

    def age(self, tokens: int) -> None:
        for entry in (*self.accept["learned"], *self.accept["copy"], *self.forecast):
            entry[1] *= 2.0 ** (-tokens / 128.0)


def _average(entry: list[float], seen: float) -> None:
    mean, weight = entry
    entry[:] = (mean * weight + seen) / (weight + 1.0), min(weight + 1.0, 128.0)


def new_population(depth: int) -> dict[str, list[list[float]]]:
    """[mean, weight] of each depth and source over all requests."""
    return {source: [[0.5**d, 2.0] for d in range(1, depth + 1)] for source in ("learned", "copy")}


def teach_population(shown: list[list[float]], lessons: Sequence[Sequence[float]]) -> None:
    """All lessons of a frame at once: their mean and the mean before it, each by its weight."""
    for d, entry in enumerate(shown):
        seen = [row[d] for row in lessons if d < len(row)]
        mean, weight = entry
        entry[:] = (mean * weight + sum(seen)) / (weight + len(seen)), min(weight + len(seen), 128.0)


def taught(prior: Sequence[float], lessons: Iterable[Sequence[float]]) -> list[float]:
    """p <- p + (y - p) / 64 for every lesson of every depth, the small ones first."""
    after, rows = list(prior), list(lessons)
    for d in range(len(after)):
        for seen in sorted(row[d] for row in rows if d < len(row)):
            after[d] += (seen - after[d]) / 64.0
    return after
