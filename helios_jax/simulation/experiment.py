"""One experiment: a policy on a cost profile under a trace, in virtual time.

1. The trace becomes arrivals; the profile becomes the device's durations.
2. The catalogue has every program that the profile can price: decode, initialise and packed prefill
   programs, mixed ones, and with an acceptance table speculative rounds of its depth.
3. The run goes on until the last request that arrived within the window is over.
4. The report, and the series for the page.

Everything follows from the `Experiment` value: equal ones give equal outcomes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import (
    MAX_MIXED_WIDTH,
    MAX_SLOTS,
    Allocation,
    Catalog,
    ProgramKind,
    ProgramShape,
    mixed_shapes,
    powers_of_two,
    prompt_buckets,
    speculative_shapes,
)
from helios_jax.scheduler.cost import observe
from helios_jax.scheduler.preferences import POLICY_PRESETS, PolicyConfig, policy_preset
from helios_jax.scheduler.resources import pages_for
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.types import Limits, RequestSpec
from helios_jax.simulation.acceptance import AcceptanceSampler, AcceptanceTable
from helios_jax.simulation.baselines import BASELINES, VtcAdmission, baseline
from helios_jax.simulation.device import FakeDevice
from helios_jax.simulation.driver import Admission, Arrival, Served, Simulation
from helios_jax.simulation.prefixes import Prompt, message_ends, prompts_of
from helios_jax.simulation.profiles import DEFAULT_METHOD, CostProfile, ProfileCosts, Work
from helios_jax.simulation.report import NS_PER_S, Objectives, Recorder, make_report
from helios_jax.simulation.reuse import TraceReuse, prefix_report
from helios_jax.simulation.traces import Trace

POLICIES = (*POLICY_PRESETS, *BASELINES)
PAGE_SIZE = 64
PROMPT_ROWS = (1, 8)  # request rows of prefill programs: alone, and packed
WARM_CONTEXT = 1024
GIB = 2**30
MIN_SECONDS, MAX_SECONDS = 1e-3, 1e7  # of arrivals: the mix has intervals of ns within it, times must fit 64 bits
MAX_KV_GIB = 2.0**20
MAX_HOST_MS = 60_000.0
MAX_STATE_ROWS = 65_536
Progress = Callable[[float], None]  # share of the window that has passed, 0 to 1 and beyond


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a run depends on, its trace apart.

    Attributes:
        profile: Step times.
        policy: One of `POLICIES`.
        slots: Requests that run at the same time, 1 to 64.
        seconds: Requests arrive for so long.
        seed: Of the device's draws.
        acceptance: Rates of speculation; None runs without.
        objectives: Of goodput.
        prefill_chunk: Most prompt tokens of one program.
        token_budget: Tokens of one step of `fcfs-chunked`.
        max_context: Tokens of a request, prompt and output; longer ones are refused.
        kv_gib: Cache, GiB.
        state_rows: Rows for checkpoints: prompts begin with what earlier ones left, as far as the trace says what
            they share. With speculation whole checkpoints are reused, else any part. 0 computes every prompt whole.
        host_ms: Host time of a step that a queued frame hides.
        frames: Frames in flight.
        max_queue: Requests that may wait; later ones are refused. None = no bound.
        warm: Every program has a measured duration when the run begins.
        preferences: Fields of `PolicyConfig` in place of the preset's.
        check: Check the numbered invariants and the device's page books after every event.
    """

    profile: CostProfile
    policy: str = "balanced"
    slots: int = 64
    seconds: float = 60.0
    seed: int = 0
    acceptance: AcceptanceTable | None = None
    objectives: Objectives = dataclasses.field(default_factory=Objectives)
    prefill_chunk: int = 2048
    token_budget: int = 512
    max_context: int = 16384
    kv_gib: float = 50.0
    state_rows: int = 0
    host_ms: float = 0.2
    frames: int = 2
    max_queue: int | None = None
    warm: bool = False
    preferences: tuple[tuple[str, float], ...] = ()
    check: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown policy {self.policy!r}; choose one of {', '.join(POLICIES)}")
        for name, low, high in (
            ("slots", 1, MAX_SLOTS), ("prefill_chunk", 64, 65536), ("token_budget", 64, 65536),
            ("max_context", 2, 2**24), ("frames", 1, 2), ("max_queue", 0, 2**31), ("seed", 0, 2**64 - 1),
            ("state_rows", 0, MAX_STATE_ROWS),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} must be in [{low}, {high}], got {value}")
        for name, most in (("seconds", MAX_SECONDS), ("kv_gib", MAX_KV_GIB)):
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ConfigError(f"{name} must be finite and greater than zero, at most {most:g}, got {value}")
        if self.seconds < MIN_SECONDS:
            raise ConfigError(f"seconds must be at least {MIN_SECONDS:g}, got {self.seconds}")
        for name in ("ttft_ms", "gap_ms"):
            value = getattr(self.objectives, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"slo_{name} must be finite and greater than zero, got {value}")
        if not 0 <= self.host_ms <= MAX_HOST_MS:
            raise ConfigError(f"host_ms must be finite and at least 0, at most {MAX_HOST_MS:g}, got {self.host_ms}")
        if self.preferences and self.policy not in POLICY_PRESETS:
            raise ConfigError(f"{self.policy} has no preferences; they belong to {' and '.join(POLICY_PRESETS)}")

        if self.state_rows and self.policy not in POLICY_PRESETS:
            raise ConfigError(f"{self.policy} keeps no checkpoints; they belong to {' and '.join(POLICY_PRESETS)}")

    def policy_config(self) -> PolicyConfig:
        """The preset with its changed fields.

        Raises:
            ConfigError: An unknown field or a value that is not allowed.
        """
        preset, known = (
            policy_preset(self.policy),
            {field.name: field.type for field in dataclasses.fields(PolicyConfig)},
        )
        changes: dict[str, Any] = {}
        for name, value in self.preferences:
            if name not in known:
                raise ConfigError(f"unknown preference {name!r}; choose one of {', '.join(known)}")
            whole = isinstance(getattr(preset, name), int) and float(value).is_integer()
            changes[name] = int(value) if whole else value
        return dataclasses.replace(preset, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a run gave.

    Attributes:
        report: See `report`.
        requests: What every request experienced, in order of arrival.
        recorder: Program mix and prices.
        offered_per_s: Requests that arrived a second.
    """

    report: dict[str, Any]
    requests: list[Served]
    recorder: Recorder
    offered_per_s: float


def run_experiment(experiment: Experiment, trace: Trace, progress: Progress | None = None) -> Outcome:
    """Run to the end of the last request.

    Raises:
        ConfigError: A limit that no request or program can meet.
    """
    scheduler, admission = _scheduler(experiment, trace)
    prompts = prompts_of(trace) if experiment.state_rows else []
    sampler = AcceptanceSampler(experiment.acceptance, experiment.seed) if experiment.acceptance else None
    device = FakeDevice(
        _costs(experiment), PAGE_SIZE, host_ns=round(experiment.host_ms * 1e6),
        slots=experiment.slots, sampler=sampler, check_pages=experiment.check,
    )  # fmt: skip
    arrivals = _arrivals(trace, experiment.max_context, prompts if experiment.acceptance else [])
    recorder = Recorder(scheduler, experiment.seconds, _tracked(trace, experiment))
    simulation = Simulation(
        scheduler, device, arrivals, check=experiment.check, keep=False, refuse=True,
        max_queue=experiment.max_queue, admission=admission, observe=recorder,
        reuse=TraceReuse(scheduler, prompts) if prompts else None,
    )  # fmt: skip
    window_tokens = _run(simulation, experiment.seconds, progress)
    report = make_report(
        experiment.policy, simulation.requests, scheduler, experiment.objectives, window_tokens, experiment.seconds
    )
    if prompts:
        report["prefixes"] = prefix_report(prompts, simulation.requests, scheduler)
    return Outcome(
        report=report, requests=simulation.requests, recorder=recorder, offered_per_s=len(trace) / experiment.seconds
    )


STEPS = 200  # reports of progress over the arrival window


def _run(simulation: Simulation, seconds: float, progress: Progress | None) -> int:
    """Run in steps of virtual time; returns the tokens that were visible at the end of the window."""
    for step in range(1, STEPS + 1):
        simulation.run(until_ns=int(step / STEPS * seconds * NS_PER_S))
        if progress:
            progress(step / STEPS)
    window_tokens = sum(request.num_tokens for request in simulation.requests)
    while simulation.run(until_ns=simulation.clock.now_ns + int(seconds / STEPS * NS_PER_S) + 1):
        if progress:
            progress(simulation.clock.now_ns / NS_PER_S / seconds)
    return window_tokens


def _scheduler(experiment: Experiment, trace: Trace) -> tuple[Scheduler, Admission | None]:
    depth = experiment.acceptance.depth if experiment.acceptance else 0
    catalog = simulation_catalog(experiment.slots, experiment.prefill_chunk, depth)
    if experiment.state_rows:
        catalog = Catalog((*catalog, *_copy_programs(experiment.slots)))
    tokens = int(experiment.kv_gib * GIB / experiment.profile.kv_bytes_per_token)
    pages, most = tokens // PAGE_SIZE, experiment.slots * pages_for(experiment.max_context + depth, PAGE_SIZE)
    if not experiment.state_rows:  # more than all slots can hold is of no use
        pages = min(pages, most)
    if pages < 1:
        raise ConfigError(f"{experiment.kv_gib} GiB of cache hold no page of {PAGE_SIZE} tokens")
    limits = Limits(
        slots=experiment.slots, pages=pages, page_size=PAGE_SIZE, max_context=experiment.max_context,
        draft_extent=depth, frames=experiment.frames, state_rows=experiment.state_rows,
        shares_parts=experiment.state_rows > 0 and not depth,
    )  # fmt: skip
    if experiment.policy in POLICY_PRESETS:
        scheduler = Scheduler(catalog, limits, experiment.policy_config())
        return _warmed(scheduler, experiment) if experiment.warm else scheduler, None
    counters = VtcAdmission(trace.client.tolist(), trace.prompt_len.tolist())
    other = baseline(experiment.policy, catalog, limits, experiment.token_budget, counters)
    return other, counters if experiment.policy == "vtc" else None


def _warmed(scheduler: Scheduler, experiment: Experiment) -> Scheduler:
    """The scheduler with one observation of every program: full rows at a context of `WARM_CONTEXT`."""
    state, costs = scheduler.state, _costs(experiment)
    table, ttl_ns = state.costs, state.policy.estimate_ttl_ns
    for index, shape in enumerate(state.catalog):
        rows, tokens = shape.batch_capacity, shape.prefill_capacity or shape.token_capacity
        if shape.kind is ProgramKind.PREFILL:
            work = Work(prompts=((tokens // rows, 0),) * rows)
        elif shape.kind is ProgramKind.MIXED:
            work = Work(prompts=((tokens, 0),), contexts=(WARM_CONTEXT,) * (rows - 1))
        else:
            work = Work(contexts=(WARM_CONTEXT,) * rows)
        table = observe(table, index, costs(shape, work), 0, ttl_ns)
    return Scheduler.from_state(dataclasses.replace(state, costs=table))


def _costs(experiment: Experiment) -> ProfileCosts:
    method = experiment.acceptance.method if experiment.acceptance else DEFAULT_METHOD
    return ProfileCosts(experiment.profile, method)


def simulation_catalog(slots: int, prefill_chunk: int, depth: int = 0) -> Catalog:
    """Every program that a run may use.

    Without speculation: decode programs of every power of two of rows. With it: width-one rounds in
    their place (they keep the draft's context), rectangular rounds of every width, and ragged
    ones of the whole depth, allocated by the host and by the device. Mixed programs in both.

    Args:
        slots: Most request rows.
        prefill_chunk: Most prompt tokens of one program.
        depth: Proposals of a round, 0 without speculation.
    """
    rows, buckets, kind = powers_of_two(slots), prompt_buckets(prefill_chunk), ProgramKind
    shapes = [ProgramShape(kind.INITIALIZE, b, 0) for b in sorted({rows[0], rows[-1]})]
    shapes += [ProgramShape(kind.PREFILL, b, t) for t in buckets for b in PROMPT_ROWS if b <= rows[-1]]
    envelope = rows[-1] * (depth + 1)
    mixed_depth = min(depth, MAX_MIXED_WIDTH - 1)  # tables may be deeper than the decode width of a mixed program
    shapes += mixed_shapes(max_slots=slots, buckets=buckets, draft_tokens=mixed_depth, token_capacity=envelope)
    if not depth:
        return Catalog((*shapes, *(ProgramShape(kind.DECODE, b, 1) for b in rows)))
    for allocation in Allocation:
        shapes += speculative_shapes(max_slots=slots, draft_tokens=depth, token_capacity=envelope, ragged=allocation)
    return Catalog(tuple(shapes))


def _copy_programs(slots: int) -> list[ProgramShape]:
    """Snapshots and restores, alone and of all slots."""
    rows, kinds = powers_of_two(slots), (ProgramKind.SNAPSHOT, ProgramKind.RESTORE)
    return [ProgramShape(kind, b, 0) for kind in kinds for b in sorted({rows[0], rows[-1]})]


def _arrivals(trace: Trace, max_context: int, prompts: Sequence[Prompt]) -> list[Arrival]:
    """Prompts are views of one array of zeros: their lengths matter, not their tokens.

    One beyond the context is refused however long it is, so the array ends there. The ends of messages are those
    that the blocks of `prompts` tell, if they are given.
    """
    ends = message_ends(prompts) if prompts else [()] * len(trace)
    zeros = np.zeros(min(int(trace.prompt_len.max(initial=1)), max_context + 1), np.int32)
    columns = (trace.at_s, trace.prompt_len, trace.output_len)
    return [
        Arrival(
            at_ns=round(at_s * NS_PER_S),
            spec=RequestSpec(prompt=zeros[:prompt_len], max_tokens=output_len, message_ends=known),
        )
        for at_s, prompt_len, output_len, known in zip(*(column.tolist() for column in columns), ends, strict=True)
    ]


def _tracked(trace: Trace, experiment: Experiment) -> int:
    """The request whose life the page shows: the longest output among those of the middle of the window."""
    fits = trace.prompt_len + trace.output_len <= experiment.max_context
    middle = fits & (trace.at_s >= experiment.seconds / 3) & (trace.at_s <= experiment.seconds * 2 / 3)
    members = np.flatnonzero(middle if middle.any() else fits)
    return int(members[trace.output_len[members].argmax()]) if len(members) else -1
