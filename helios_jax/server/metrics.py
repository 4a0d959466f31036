"""Prometheus metrics of one server: HTTP outcomes and latencies, and the engine's own counts.

A registry per server, so that two servers in one process do not share counters. The counts of
requests reconcile at every scrape, because all of them change on the event loop that serves it:

    helios_requests_arrived_total = sum(helios_requests_total{outcome}) + helios_requests_in_flight
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from helios_jax.engine.stats import CheckpointStats, HostTierStats
from helios_jax.server.record import Outcome, RequestRecord

if TYPE_CHECKING:
    from helios_jax.server.context import ServerContext

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SCHEDULER_PREFIX = "flare_scheduler_"
# What can go down, or is a size, although some end in _total; all else that the scheduler counts only grows.
SCHEDULER_GAUGES = frozenset(
    ("frames_in_flight", "slots_total", "slots_used", "pages_total", "pages_free", "pages_used", "pages_reserved",
     "programs_measured", "programs_total", "checkpoints_published", "state_rows_total", "state_rows_free",
     "exploration_credit_nanoseconds")
)  # fmt: skip
BY_KIND = "_by_kind"
NS_PER_S = 1e9


class ServerMetrics:
    """Counters and histograms that the server itself keeps, and the exposition of everything."""

    def __init__(self, context: ServerContext) -> None:
        self.registry = registry = CollectorRegistry()
        self._http = Counter(
            "helios_http_requests", "HTTP requests by method and status.", ("method", "status"), registry=registry
        )
        self._arrived = Counter(
            "helios_requests_arrived", "Generation requests whose headers arrived.", registry=registry
        )
        self._outcomes = Counter(
            "helios_requests", "Generation requests that ended, by outcome.", ("outcome",), registry=registry
        )
        for outcome in Outcome:
            self._outcomes.labels(outcome.value)
        self._choices = Counter(
            "helios_choices", "Outputs that ended, by reason.", ("finish_reason",), registry=registry
        )
        in_flight = Gauge("helios_requests_in_flight", "Generation requests arrived and not ended.", registry=registry)
        in_flight.set_function(lambda: context.in_flight)
        self._ttft = Histogram(
            "helios_time_to_first_token_seconds",
            "HTTP arrival to first token.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._inter_token = Histogram(
            "helios_inter_token_seconds",
            "Time between two deliveries of tokens of one streamed output.",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._per_token = Histogram(
            "helios_time_per_output_token_seconds",
            "Mean time per token after the first, one observation a request.",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._queue = Histogram(
            "helios_queue_seconds", "HTTP arrival to first scheduling.", buckets=TTFT_BUCKETS, registry=registry
        )
        self._request = Histogram(
            "helios_request_seconds", "HTTP arrival to the end.", buckets=REQUEST_BUCKETS, registry=registry
        )
        registry.register(EngineCollector(context))

    def arrived(self) -> None:
        self._arrived.inc()

    def closed(self, record: RequestRecord) -> None:
        """A generation request has ended, in whatever way."""
        assert record.outcome is not None
        self._outcomes.labels(record.outcome.value).inc()
        for reason in record.finish_reasons:
            self._choices.labels(reason).inc()
        if record.outcome is not Outcome.REFUSED:
            self._request.observe(record.seconds)

    def answered(self, record: RequestRecord) -> None:
        """Any HTTP request has ended."""
        method = record.method if record.method in ("GET", "POST", "HEAD") else "other"  # bounded label values
        self._http.labels(method, str(record.status)).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def delivered(self, gap_seconds: float) -> None:
        self._inter_token.observe(gap_seconds)

    def per_token(self, seconds: float) -> None:
        self._per_token.observe(seconds)

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The engine's snapshot at each scrape; before there is an engine, only that it is not ready."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def describe(self) -> Iterable[Metric]:
        return ()  # what there is depends on the engine; without this the registry would scrape it at once

    def collect(self) -> Iterator[Metric]:
        engine = self._context.engine_or_none
        ready = not self._context.unready_reason()
        yield GaugeMetricFamily("helios_ready", "1 if work is accepted.", value=float(ready))
        if engine is None:
            return
        stats = engine.stats()
        yield from engine_families(stats)
        yield from checkpoint_families(stats.checkpoints)
        if stats.host_tier.bytes_total:
            yield from host_tier_families(stats.host_tier)
        yield from scheduler_families(stats.scheduler)
        yield from round_families(getattr(stats, "rounds", {}))


def plain(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily], named: Mapping[str, tuple[str, float]]
) -> Iterator[Metric]:
    """Families without labels: help text and value by name."""
    for name, (text, value) in named.items():
        yield family(name, text, value=value)


def engine_families(stats: Any) -> Iterator[Metric]:
    """Queue, slots, pages, tokens, frames and request counts of `EngineStats`."""
    gauges = {
        "helios_engine_sequences_running": ("Sequences in slots.", stats.running),
        "helios_engine_queue": ("Sequences that wait for a slot.", stats.waiting),
        "helios_slots_total": ("Slots.", stats.slots_total),
        "helios_pages_total": ("Cache pages.", stats.pages_total),
        "helios_pages_used": ("Cache pages assigned.", stats.pages_used),
        "helios_pages_free": ("Cache pages free.", stats.pages_free),
        "helios_compiles_after_ready": ("Programs compiled since ready; must stay 0.", stats.compiles_after_ready),
    }
    yield from plain(GaugeMetricFamily, gauges)
    totals = stats.requests
    counters = {
        "helios_prompt_tokens": ("Prompt tokens of accepted requests.", totals.prompt_tokens),
        "helios_generation_tokens": ("Tokens generated.", totals.generation_tokens),
        "helios_preemptions": (
            "Sequences that gave up their pages to others and were queued again.",
            (stats.scheduler or {}).get("requests_preempted", 0),
        ),
        "helios_frames": ("Frames completed on the device.", totals.frames),
        "helios_device_errors": ("Executions that failed and lost the device state.", totals.device_errors),
        "helios_host_seconds": ("Host time of the engine thread between frames.", totals.host_ns / NS_PER_S),
        "helios_device_seconds": ("Device time of the frames.", totals.device_ns / NS_PER_S),
    }
    yield from plain(CounterMetricFamily, counters)
    outcomes = CounterMetricFamily("helios_engine_requests", "Engine requests by outcome.", labels=("outcome",))
    for outcome, count in stats.requests_total.items():
        if outcome != "active":
            outcomes.add_metric((outcome,), count)
    yield outcomes
    yield GaugeMetricFamily("helios_engine_requests_active", "Engine requests not ended.", value=totals.active)


def checkpoint_families(stats: CheckpointStats) -> Iterator[Metric]:
    """Reuse of prefixes: `helios_prefix_cache_*` in tokens, as vLLM counts them, and what becomes of checkpoints."""
    counters = {
        "helios_prefix_cache_queries": ("Prompt tokens that were looked up.", stats.queried_tokens),
        "helios_prefix_cache_hits": ("Prompt tokens restored instead of computed.", stats.hit_tokens),
        "helios_checkpoint_snapshots": ("Complete states that were copied into state rows.", stats.snapshots),
        "helios_checkpoint_restores": ("Complete states that were copied into slots.", stats.restores),
        "helios_checkpoint_evictions": ("Checkpoints that gave way or were lost.", stats.evictions),
    }
    yield from plain(CounterMetricFamily, counters)
    results = {"hit": stats.hits, "miss": stats.misses}
    labelled = {
        "requests": ("result", "Sequences admitted, by whether a checkpoint was restored.", results),
        "cuts": ("reason", "Sequences that shared more with earlier prompts than was restored.", stats.cuts),
        "cut_tokens": ("reason", "Shared prompt tokens that were computed again.", stats.cut_tokens),
    }
    for name, (label, text, values) in labelled.items():
        family = CounterMetricFamily(f"helios_prefix_cache_{name}", text, labels=(label,))
        for of, count in values.items():
            family.add_metric((of,), count)
        yield family
    gauges = {
        "helios_state_rows_total": ("Rows of the device for complete states.", stats.rows_total),
        "helios_state_rows_used": ("State rows that hold a checkpoint or wait for one.", stats.rows_used),
        "helios_checkpoints": ("Checkpoints that could be restored.", stats.published),
        "helios_checkpoint_pages": ("Cache pages that only checkpoints keep.", stats.pages_held),
    }
    yield from plain(GaugeMetricFamily, gauges)


def host_tier_families(stats: HostTierStats) -> Iterator[Metric]:
    """Checkpoints in host memory, of an engine that keeps some there."""
    counters = {
        "saved": ("Checkpoints that were copied to the host.", stats.saved),
        "lost": ("Checkpoints that could not be kept on the host.", stats.lost),
        "evicted": ("Checkpoints that gave way on the host.", stats.evicted),
        "restored": ("Checkpoints that were copied back to the device.", stats.restored),
        "restored_tokens": ("Prompt tokens that these covered beyond what the device had.", stats.restored_tokens),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"helios_host_checkpoints_{name}", text, value=value)
    gauges = {
        "helios_host_checkpoints": ("Checkpoints on the host.", stats.checkpoints),
        "helios_host_checkpoint_bytes": ("Host memory that checkpoints take.", stats.bytes_used),
        "helios_host_checkpoint_bytes_limit": ("Host memory that checkpoints may take.", stats.bytes_total),
    }
    yield from plain(GaugeMetricFamily, gauges)


def scheduler_families(counters: Any) -> Iterator[Metric]:
    """The scheduler's counters under the specification's names, `flare_scheduler_*`.

    Args:
        counters: A record or mapping; a value is a number, or numbers by reason (by program kind in `..._by_kind`).
    """
    if counters is None:
        return
    if dataclasses.is_dataclass(counters) and not isinstance(counters, type):
        counters = {field.name: getattr(counters, field.name) for field in dataclasses.fields(counters)}
    elif hasattr(counters, "_asdict"):
        counters = counters._asdict()
    text = "Scheduler counter; see the scheduling specification."
    for key, value in counters.items():
        plain = key.removeprefix(SCHEDULER_PREFIX)
        is_gauge = plain in SCHEDULER_GAUGES
        name = SCHEDULER_PREFIX + (plain if is_gauge else plain.removesuffix("_total"))
        family = GaugeMetricFamily if is_gauge else CounterMetricFamily  # the latter adds _total
        if isinstance(value, Mapping):
            metric = family(name, text, labels=("kind" if plain.endswith(BY_KIND) else "reason",))
            for label, count in value.items():
                metric.add_metric((str(label),), float(count))
            yield metric
        elif isinstance(value, (int, float)):
            yield family(name, text, value=value)


def round_families(rounds: Mapping[tuple[str, int], Any]) -> Iterator[Metric]:
    """`flare_speculative_*`: complete speculative programs by source and lane width.

    Args:
        rounds: Totals (rounds, lanes, proposed, offered, accepted, emitted) by (source, width).
    """
    texts = {
        "rounds": "Complete speculative programs.",
        "lanes": "Requests in them.",
        "proposed": "Proposals made or supplied.",
        "offered": "Proposals that the target judged.",
        "accepted": "Proposals that the target accepted.",
        "emitted": "Output tokens of the lanes.",
    }
    for name, text in texts.items():
        family = CounterMetricFamily(f"flare_speculative_{name}", text, labels=("source", "width"))
        for (source, width), counts in rounds.items():
            family.add_metric((source, str(width)), getattr(counts, name))
        yield family
