"""What happens to the scheduler in the state machine: requests, reports of a device, damage to them."""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import numpy as np

from helios_jax.scheduler import (
    Catalog,
    CompletionRecord,
    Constraint,
    ExecutionTiming,
    ImageSpan,
    Lane,
    LaneRole,
    Limits,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    RequestSpec,
    State,
)
from helios_jax.scheduler.catalog import Allocation
from tests.property import machine_pages as pages
from tests.property.machine_jobs import Flight, Job, target_rows
from tests.property.machine_model import Model
from tests.unit.every_kind_toy import every_kind
from tests.unit.scheduler_toy import request

STOP = 5
_RESTRICTIONS = [Constraint.NONE] * 4 + list(Constraint) + [Constraint.NO_LEARNED | Constraint.NO_COPY]
LARGEST_IMAGE, LARGEST_PREFILL = 4, 8  # of the catalogue


def catalogue(*, mixed: bool, plain: bool) -> Catalog:
    """Every kind of program; without mixed ones a decode can more often queue, without plain ones rounds win."""
    kept = [shape for shape in every_kind() if mixed or shape.kind is not ProgramKind.MIXED]
    return Catalog(tuple(shape for shape in kept if plain or shape.kind is not ProgramKind.DECODE), aligned=False)


def draw_limits(rng: random.Random) -> Limits:
    return Limits(
        slots=rng.choice([4, 5]), pages=rng.choice([13, 16, 20, 48, 80]), page_size=4, max_context=44,
        state_rows=rng.choice([0, 1, 2, 3, 4, 6]), feature_tokens=rng.choice([0, 4, 5]),
        draft_extent=rng.choice([0, 2]), frames=rng.choice([1, 2, 2]),
    )  # fmt: skip


def draw_policy(rng: random.Random) -> PolicyConfig:
    return PolicyConfig(
        output_token_value=rng.choice([0.5, 64.0]),  # small: prompts go first, and many streams are served together
        token_fairness=rng.choice([0.0, 16.0]),
        delivery_fairness=rng.choice([0.0, 4.0]),
        decode_age_price=rng.choice([0.0, 0.1]),
        terminal_value=rng.choice([0.0, 256.0]),
        adaptation_ms=rng.choice([10.0, 100.0]),
        estimate_ttl_ns=rng.choice([50_000_000, *[30_000_000_000] * 3]),
        speculation=rng.choice(["adaptive"] * 4 + ["fixed", "off"]),
        checkpoint_extra_work_fraction=rng.choice([0.0, 0.5, 2.0]),
    )


def draw_durations(rng: random.Random, catalog: Catalog) -> dict[ProgramShape, int]:
    """Measured durations, ns: of each program by itself, or of each kind, so that wide programs are worth it."""
    base = {kind: 10 ** rng.uniform(5.5, 6.7) for kind in ProgramKind}
    together = rng.random() < 0.6
    return {shape: int(base[shape.kind] * (rng.uniform(1.0, 1.1) if together else 10 ** rng.uniform(-0.5, 0.5)))
            for shape in catalog}  # fmt: skip


def draw_spec(rng: random.Random, model: Model, state: State) -> RequestSpec:
    """A request of any kind; now and then one that can never be served."""
    length, scored = rng.choice([1, 3, 4, 6, 9, 12, 16]), rng.random() < 0.1
    spans = _draw_images(rng, length) if rng.random() < 0.4 and model.limits.feature_tokens else ()
    free = [end for end in range(length + 1) if not any(span.start < end < span.end for span in spans)]
    rest: dict[str, object] = {
        "scored": scored,
        "stop_token_ids": frozenset({STOP}) if rng.random() < 0.4 else frozenset(),
        "constraints": rng.choice(_RESTRICTIONS),
        "image_spans": spans,
        "system_end": rng.choice(free) if rng.random() < 0.3 else 0,
        "message_ends": tuple(sorted({rng.randint(0, length) for _ in range(rng.randint(0, 3))})),
        "output_len": rng.randint(0, length - 1) if rng.random() < 0.2 else 0,
        "preemptions": rng.choice([0, 0, 0, 1, 2, 3]),
    }
    known, kind = state.retention.checkpoints, rng.random()
    if kind < 0.4 and len(known) and not spans:
        place = rng.randrange(len(known))
        endpoint = int(known.endpoints[place])
        length = endpoint + rng.randint(1, 6)
        rest["message_ends"] = tuple(sorted({rng.randint(0, length) for _ in range(rng.randint(0, 3))}))
        rest |= {"restore_from": int(known.ids[place]), "restored_len": endpoint, "external": rng.random() < 0.3}
        rest |= {"system_end": 0, "output_len": 0}
        if rng.random() < 0.1:  # one that is gone, or another length than it has
            rest |= rng.choice([{"restore_from": known.last_id + 1}, {"restored_len": max(1, endpoint - 1)}])
    elif kind < 0.5 and length > 1:
        at = rng.choice(free[1:-1] or [0])
        rest |= {"restored_len": at, "external": bool(at) and rng.random() < 0.3}
    output = rng.choice([0, 1, 3]) if scored else rng.choice([1, 2, 6, 12, 24])
    return request(length, output, **rest)


def _draw_images(rng: random.Random, length: int) -> tuple[ImageSpan, ...]:
    spans, at = [], rng.randint(0, 3)
    while at < length and len(spans) < 4:
        end = at + rng.randint(1, LARGEST_IMAGE)
        if end > length:
            break
        spans.append(ImageSpan(at, end))
        at = end + rng.choice([0, 0, 1, 3])
    return tuple(spans)


def possible(model: Model, spec: RequestSpec, state: State) -> bool:
    """Whether a request can be served at some time, and its source is what it says."""
    limits, known = model.limits, state.retention.checkpoints
    sources = {0: spec.restored_len, **dict(zip(known.ids.tolist(), known.endpoints.tolist(), strict=True))}
    largest = min(limits.feature_tokens, LARGEST_PREFILL, LARGEST_IMAGE)
    return (
        len(spec.prompt) + spec.max_tokens <= limits.max_context
        and pages.worst(model, spec) <= limits.pages
        and all(span.end - span.start <= largest for span in spec.image_spans)
        and sources.get(spec.restore_from) == spec.restored_len
        and (bool(limits.state_rows) or not model.needs_private(spec))
    )


class Report(NamedTuple):
    """What a device says of a frame."""

    records: list[CompletionRecord]
    timing: ExecutionTiming
    confidence: np.ndarray | None
    survival: np.ndarray | None


def draw_report(rng: random.Random, model: Model, flight: Flight, *, calm: bool) -> Report:
    """Any well-formed report; a calm one has valid lanes and its time."""
    shape = flight.plan.shape
    budget = target_rows(shape) - sum(lane.role is LaneRole.DECODE for lane in flight.plan.lanes)
    records = []
    for lane, job in zip(flight.plan.lanes, flight.jobs, strict=True):
        most = min(lane.length - 1, budget if shape.allocation is Allocation.PREFIX_LIMIT else lane.length)
        record = _draw_record(rng, lane, job, max(0, most), calm=calm)
        budget -= record.offered
        records.append(record)
    rng.shuffle(records)
    confidence = survival = None
    if shape.proposal_depth:
        slots, depth = model.limits.slots, shape.proposal_depth + rng.choice([0, 0, 2])
        if shape.allocation is Allocation.PREFIX_LIMIT or rng.random() < 0.3:
            each = np.array([[rng.random() for _ in range(depth)] for _ in range(slots)], np.float32)
            confidence = np.stack([each, np.cumprod(each, axis=1)])
        if rng.random() < 0.4:
            rates = np.array([[rng.random() for _ in range(depth)] for _ in range(slots)])
            survival = np.where(rng.random() < 0.5, np.cumprod(rates, axis=1), np.nan)
    return Report(records, _draw_timing(rng, flight, calm=calm), confidence, survival)


def _draw_record(rng: random.Random, lane: Lane, job: Job, most: int, *, calm: bool) -> CompletionRecord:
    valid = calm or rng.random() < 0.9
    if lane.role is not LaneRole.DECODE:
        length = lane.length if lane.role is LaneRole.PROMPT else 0
        tokens = (rng.choice([1, 2, 3, STOP]),) if lane.emits and (valid or rng.random() < 0.5) else ()
        return CompletionRecord(lane.handle, length, tokens, lane.start + length, valid)
    offered = most if rng.random() < 0.7 else rng.randint(0, most)
    accepted = rng.randint(0, offered)
    tokens = tuple(STOP if rng.random() < 0.08 else rng.randint(0, 4) for _ in range(accepted + 1)) if valid else ()
    if valid and rng.random() < 0.5:  # a device that looks for the end itself
        room = max(1, job.spec.max_tokens - len(job.out))
        ends = [i + 1 for i, token in enumerate(tokens) if token in job.spec.stop_token_ids or i + 1 == room]
        tokens = tokens[: ends[0]] if ends else tokens
    count = len(tokens)
    return CompletionRecord(lane.handle, count, tokens, job.committed + count, valid, offered, accepted)


def _draw_timing(rng: random.Random, flight: Flight, *, calm: bool) -> ExecutionTiming:
    estimate = flight.plan.estimated_duration_ns or rng.randint(200_000, 3_000_000)
    usual = max(1, int(estimate * rng.uniform(0.8, 1.2)))
    if calm:
        return ExecutionTiming((usual,), usual + rng.choice([0, 100_000]), queued=rng.random() < 0.5)
    device = rng.choice([(), (0,), (-5,), (usual,), (usual // 2, usual), (10**9,), (1,)])
    return ExecutionTiming(device, rng.choice([0, usual, 10**8]), rng.random() < 0.5, rng.choice([0, 0, 1000, 10**10]))


def damage(rng: random.Random, report: Report, flight: Flight) -> Report:
    """The report with one fault of any kind."""
    records, row = list(report.records), rng.randrange(len(report.records))
    record = records[row]
    lane = next(lane for lane in flight.plan.lanes if lane.handle == record.handle)
    fault = rng.choice(["missing", "twice", "foreign", "consumed", "token", "accepted", "offered", "wall", "sidecar"])
    if fault == "consumed" and not record.valid:
        fault = "token"  # nobody asks what a failed lane consumed
    if fault == "missing":
        return report._replace(records=records[1:])
    if fault == "twice":
        return report._replace(records=[*records, record])
    if fault == "wall":
        wrong = rng.choice([-1, 2**62, 1.5, True])
        return report._replace(timing=dataclasses.replace(report.timing, wall_ns=wrong))
    if fault == "sidecar":
        return _spoil_sidecars(rng, report, flight)
    slot, generation = record.handle
    records[row] = dataclasses.replace(
        record,
        **{
            "foreign": {"handle": type(record.handle)(slot, generation + 1)},
            "consumed": {"consumed": record.consumed + rng.choice([-1, 1])},
            "token": {"tokens": (2**31,), "valid": True},
            "accepted": {"accepted": record.offered + 1},
            "offered": {"offered": max(lane.length, 1)},
        }[fault],
    )
    return report._replace(records=records)


def _spoil_sidecars(rng: random.Random, report: Report, flight: Flight) -> Report:
    shape, slots = flight.plan.shape, 1 + max(lane.handle.slot for lane in flight.plan.lanes)
    if not shape.proposal_depth:
        return report._replace(survival=np.full((slots, 1), 0.5))
    if report.confidence is not None:
        valid = {record.handle.slot for record in report.records if record.valid}
        lanes = [lane for lane in flight.plan.lanes if lane.role is LaneRole.DECODE and lane.handle.slot in valid]
        if lanes and rng.random() < 0.7:
            planes = report.confidence.copy()
            planes[rng.randint(0, 1), rng.choice(lanes).handle.slot, rng.randrange(shape.proposal_depth)] = rng.choice(
                [np.nan, 1.5, -0.5]
            )
            return report._replace(confidence=planes)
        return report._replace(confidence=report.confidence[:1])
    return report._replace(confidence=np.full((2, 1, 1), 0.5))
