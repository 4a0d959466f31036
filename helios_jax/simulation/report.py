"""What a run amounts to: the report, and the series that the page plots.

Report keys (times in ms, all plain JSON; null where nothing was observed):

    policy             its name
    requests           arrived, completed, refused
    ttft_ms, gap_ms    p50, p90, p99, max: arrival to first visible output; between visible outputs
    output_tokens_per_s  tokens produced while requests still arrived, over that time
    goodput            share of the arrived requests that completed within both objectives
    preemptions        how often a request gave up its pages to others
    programs           executions by kind
    padding_ratio      computed token rows that no request used, over all that were computed
    ledgers            timing_refresh, acceptance_learning: spent, ordinary, bound (ms)

A request is good when its time to first token is at most the objective and so is the 99th percentile of
its own gaps. A visible burst of several tokens is one output: gaps are between bursts.
Nothing here reads a clock: the same run gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import numpy as np

from helios_jax.scheduler.refresh import Ledger
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.simulation.driver import Ran, Served

NS_PER_MS, NS_PER_S = 1e6, 1e9
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
MIX_BUCKETS = 60
MAX_PRICE_POINTS = 50_000
_DIGITS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objectives:
    """Service level objectives, ms."""

    ttft_ms: float = 1000.0
    gap_ms: float = 100.0


class Recorder:
    """Watches a run: device time by kind over time, and the prices of one request.

    Args:
        seconds: Length of the arrival window; the mix has `MIX_BUCKETS` buckets in it.
        tracked: Number of the request whose prices are recorded, -1 for none.
    """

    def __init__(self, scheduler: Scheduler, seconds: float, tracked: int) -> None:
        self._scheduler, self._width_ns = scheduler, seconds * NS_PER_S / MIX_BUCKETS
        self.tracked = tracked
        self.mix: dict[str, Counter[int]] = {}
        self.prices: list[tuple[float, float, float]] = []  # (s, token price, delivery price)
        self.frames = 0

    def __call__(self, ran: Ran) -> None:
        self.frames += 1
        self._add(self.mix.setdefault(ran.plan.shape.kind, Counter()), ran.start_ns, ran.device_ns)
        handle = ran.handles.get(self.tracked)
        if handle is not None and len(self.prices) < MAX_PRICE_POINTS:
            self.prices.append(_prices(self._scheduler, handle.slot))

    def _add(self, buckets: Counter[int], start_ns: int, device_ns: int) -> None:
        """A frame counts in every interval that it touches, by its time there."""
        first, left = int(start_ns // self._width_ns), float(device_ns)
        while left > 0:
            part = min(left, (first + 1) * self._width_ns - start_ns)
            buckets[first] += round(part)
            first, left, start_ns = first + 1, left - part, round((first + 1) * self._width_ns)

    @property
    def bucket_s(self) -> float:
        return self._width_ns / NS_PER_S


def _prices(scheduler: Scheduler, slot: int) -> tuple[float, float, float]:
    """Now, and the value of this request's next token and delivery; NaN before it has a history."""
    state, policy = scheduler.state, scheduler.state.policy
    requests = state.requests
    worth = policy.output_token_value if requests.consumed_len[slot] == requests.prompt_len[slot] else 1.0
    token = worth + policy.token_fairness * float(requests.token_r[slot])
    return state.now_ns / NS_PER_S, token, policy.delivery_fairness * float(requests.delivery_r[slot])


def first_outputs_ms(requests: list[Served]) -> np.ndarray:
    """float64 [n] of the requests that had an output."""
    return np.array([(r.first_ns - r.arrival_ns) / NS_PER_MS for r in requests if r.first_ns], np.float64)


def gaps_ms(requests: list[Served]) -> np.ndarray:
    """float64 [n], every gap of every request."""
    parts = [np.frombuffer(r.gaps_ns, np.int64) for r in requests if len(r.gaps_ns)]
    return np.concatenate(parts) / NS_PER_MS if parts else np.zeros(0)


def is_good(request: Served, objectives: Objectives) -> bool:
    """Whether a request completed within both objectives."""
    if request.reason not in ("length", "stop") or not request.first_ns:
        return False
    if (request.first_ns - request.arrival_ns) / NS_PER_MS > objectives.ttft_ms:
        return False
    gaps = np.frombuffer(request.gaps_ns, np.int64) if len(request.gaps_ns) else np.zeros(1)
    return bool(np.percentile(gaps, 99.0) / NS_PER_MS <= objectives.gap_ms)


def make_report(
    policy: str,
    requests: list[Served],
    scheduler: Scheduler,
    objectives: Objectives,
    window_tokens: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """The report of a finished run.

    Args:
        policy: Name to report.
        requests: What every arrived request experienced.
        scheduler: Its counters and ledgers.
        objectives: Of goodput.
        window_tokens: Output tokens visible while requests still arrived.
        seconds: How long they arrived.
    """
    reasons = Counter(request.reason for request in requests)
    counters = scheduler.snapshot_counters()
    padded, used = (_total(counters[name]) for name in ("padded_tokens_by_kind", "used_tokens_by_kind"))
    ledgers = scheduler.state.ledgers
    return {
        "policy": policy,
        "requests": {
            "arrived": len(requests),
            "completed": reasons["length"] + reasons["stop"],
            "refused": reasons["refused"],
        },
        "ttft_ms": percentiles(first_outputs_ms(requests)),
        "gap_ms": percentiles(gaps_ms(requests)),
        "output_tokens_per_s": round(window_tokens / seconds, _DIGITS),
        "goodput": goodput(requests, objectives),
        "preemptions": counters["requests_preempted"],
        "programs": counters["programs_by_kind"],
        "padding_ratio": round(padded / (padded + used), _DIGITS) if padded + used else 0.0,
        "ledgers": {"timing_refresh": _ledger(ledgers.refresh), "acceptance_learning": _ledger(ledgers.learning)},
    }


def goodput(requests: list[Served], objectives: Objectives) -> float | None:
    """Share of the arrived requests that are good; refused ones are not. None without requests."""
    good = sum(is_good(request, objectives) for request in requests)
    return round(good / len(requests), _DIGITS) if requests else None


def percentiles(values: np.ndarray) -> dict[str, float | None]:
    """p50, p90, p99 and max, None without values."""
    if not len(values):
        return dict.fromkeys(PERCENTILES)
    found = np.percentile(values, list(PERCENTILES.values()))
    return {name: round(float(value), _DIGITS) for name, value in zip(PERCENTILES, found, strict=True)}


def _total(counts: int | dict[str, int]) -> int:
    return sum(counts.values()) if isinstance(counts, dict) else counts


def _ledger(ledger: Ledger) -> dict[str, float]:
    """Spent <= bound holds in every run: bound = ordinary / divisor + the last episode's duration."""
    bound_ns = ledger.ordinary_ns / ledger.divisor + ledger.last_episode_ns
    values = {"spent": ledger.spent_ns, "ordinary": ledger.ordinary_ns, "bound": bound_ns}
    return {name: round(value / NS_PER_MS, _DIGITS) for name, value in values.items()}


def as_json(report: dict[str, Any]) -> str:
    """The report's file: the same run gives the same bytes."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"
