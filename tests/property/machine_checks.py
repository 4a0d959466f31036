"""What the model says of plans and of whole states: asserted, never computed by the scheduler's code."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest

from helios_jax.scheduler import LaneRole, ProgramKind, ScheduledPlan, SelectionReason, State, snapshot_counters
from helios_jax.scheduler.catalog import Allocation, ProposalSource
from helios_jax.scheduler.retirement import awaits_capture
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.types import FinishReason, Lane
from tests.property import machine_books as books
from tests.property import machine_pages as pages
from tests.property.machine_jobs import (
    CANCELLED,
    FEEDBACK,
    PREEMPTED,
    QUEUEABLE,
    Flight,
    Job,
    ceil_div,
    lane_rows,
    prompt_tokens,
    target_rows,
)
from tests.property.machine_model import Model

STAGES = {
    "initialize": Phase.INITIALIZE, "restore": Phase.RESTORE, "vision": Phase.VISION, "snapshot": Phase.SNAPSHOT,
    "prompt": Phase.PROMPT, "decode": Phase.DECODE, "terminal": Phase.TERMINAL, "external": Phase.EXTERNAL,
    "retiring": Phase.RETIRING,
}  # fmt: skip
ROLES = {
    ProgramKind.INITIALIZE: LaneRole.INITIALIZE, ProgramKind.RESTORE: LaneRole.RESTORE,
    ProgramKind.VISION: LaneRole.VISION, ProgramKind.SNAPSHOT: LaneRole.SNAPSHOT, ProgramKind.PREFILL: LaneRole.PROMPT,
    ProgramKind.SCORED_PREFILL: LaneRole.PROMPT, ProgramKind.DECODE: LaneRole.DECODE,
    ProgramKind.SPECULATIVE: LaneRole.DECODE,
}  # fmt: skip


_FIXED = ("catalog", "programs", "limits", "policy")
_MOVING = tuple(field.name for field in dataclasses.fields(State) if field.name not in _FIXED)


def fingerprint(state: State) -> bytes:
    """Bytes of everything in a state that can change: cheaper than `state_digest`, for one and the same state."""
    return pickle.dumps([getattr(state, name) for name in _MOVING])


def check_plan(model: Model, plan: ScheduledPlan | None, state: State) -> None:
    """A plan is in the catalogue, fits its program and names requests that are ready for it; none is justified."""
    if plan is None:
        check_no_plan(model, state)
        return
    shape, estimate = plan.shape, model.costs[plan.shape].estimate_ns
    assert not model.closed()
    assert shape in model.catalog.shapes
    assert 1 <= len(plan.lanes) <= shape.batch_capacity
    assert len({lane.handle.slot for lane in plan.lanes}) == len(plan.lanes) == len(plan.epochs)
    assert plan.estimated_duration_ns == estimate
    assert plan.required_empty_queue == model.needs_feedback(plan, model.planning_ns())
    assert not model.flights or not plan.required_empty_queue
    assert math.isfinite(plan.value_rate)
    assert pages.beyond_promises(model, plan) <= pages.spare(model)
    assert not model.flights or pages.victim(model, state, drained=False) is None
    check_reason(model, plan)
    for row, lane in enumerate(plan.lanes):
        job = model.job_of(lane.handle)
        assert job is not None
        assert job in model.runnable()
        assert plan.epochs[row] == model.epochs[lane.handle.slot]
        prompting = row == plan.prompt_row if shape.kind is ProgramKind.MIXED else shape.kind in PREFILLS
        assert lane.role is (LaneRole.PROMPT if prompting else ROLES.get(shape.kind, LaneRole.DECODE))
        CHECKS[lane.role](model, plan, lane, job, state)
    check_capacity(plan)


PREFILLS = (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL)


def check_no_plan(model: Model, state: State) -> None:
    """None: the window takes nothing more, nobody can run, or what may win needs an empty window."""
    gives_way = pages.victim(model, state, drained=False)
    if model.closed() or not model.runnable() or (model.flights and gives_way):
        return
    short = pages.lacking(model)
    if all(job.key in short for job in model.runnable()):
        assert model.flights or gives_way or any(job.stage == "external" for job in model.jobs), "nobody goes on"
        return  # every page is promised
    assert model.flights, f"{[job.stage for job in model.runnable()]} wait for a plan"
    at_ns, ttl_ns = model.planning_ns(), model.policy.estimate_ttl_ns
    others = [shape for shape in model.catalog if shape.kind in books.GENERATING]
    unready = any(shape.kind not in QUEUEABLE or not model.costs[shape].is_fresh(at_ns, ttl_ns) for shape in others)
    fed = [job for job in model.runnable() if job.key not in short]
    left = [job for job in fed if len(job.out) + model.queued(job)[0] < job.spec.max_tokens]
    other_work = any(job.stage != "decode" for job in model.runnable())
    copying = [shape for shape in others if shape.proposal_depth and shape.proposal_source is ProposalSource.COPY]
    # A copy program may win without an offer as well, as the cheapest that runs one row.
    copies = any(books.serves(shape, job.spec.constraints) for job in left for shape in copying)
    dependent = copies or any(job.spec.constraints & FEEDBACK or model.unsure(job) for job in left)
    assert unready or other_work or not left or dependent


def check_reason(model: Model, plan: ScheduledPlan) -> None:
    known, reason = model.costs[plan.shape], plan.reason
    assert (reason is SelectionReason.DISCOVERY) == (known.estimate_ns == 0)
    if known.estimate_ns:
        assert plan.observation_age_ns == model.planning_ns() - known.observed_ns
    if reason is SelectionReason.TIMING_REFRESH:
        assert not known.is_fresh(model.planning_ns(), model.policy.estimate_ttl_ns)
    if reason is SelectionReason.ACCEPTANCE_LEARNING:
        assert model.policy.speculation == "adaptive"
        assert plan.shape.proposal_depth
    if reason in model.budgets:
        assert model.funded(reason)
        assert plan.exploration_credit_ns == books.CAP_NS


def check_capacity(plan: ScheduledPlan) -> None:
    shape = plan.shape
    prompts = sum(lane.length for lane in plan.lanes if lane.role is LaneRole.PROMPT)
    assert prompts <= prompt_tokens(shape)
    rows = sum(lane.length for lane in plan.lanes if lane.role is LaneRole.DECODE)
    if rows and shape.allocation is Allocation.QUERY_LENGTH:
        assert rows <= target_rows(shape)
    if shape.kind is not ProgramKind.MIXED:
        assert plan.prompt_row == -1


def check_decode(model: Model, plan: ScheduledPlan, lane: Lane, job: Job, state: State) -> None:
    shape, ahead = plan.shape, model.ahead(job)
    assert job.stage == "decode"
    assert lane.emits
    assert not model.unsure(job)
    assert job.key not in pages.lacking(model)
    assert lane.start == job.committed + ahead
    assert 1 <= lane.length <= lane_rows(shape)
    assert len(job.out) + ahead + lane.length <= job.spec.max_tokens
    assert lane.start + lane.length <= model.limits.max_context
    assert books.serves(shape, job.spec.constraints)
    if shape.proposal_source is ProposalSource.COPY:
        assert lane.length <= 1 + job.copies
        assert not ahead or not shape.proposal_depth  # copies continue the output that the host has seen
    if model.policy.speculation == "off":
        assert shape.proposal_depth == 0
    if model.policy.speculation == "fixed":
        assert not shape.proposal_depth or shape.allocation is Allocation.QUERY_LENGTH


def check_prompt(model: Model, plan: ScheduledPlan, lane: Lane, job: Job, state: State) -> None:
    end, spec = lane.start + lane.length, job.spec
    assert job.stage == "prompt"
    assert lane.start == job.consumed == job.committed
    assert job.consumed < end <= job.stop()
    assert spec.scored == (plan.shape.kind is ProgramKind.SCORED_PREFILL)
    assert lane.emits == (end == len(spec.prompt) and spec.max_tokens > 0)
    for number, span in enumerate(spec.image_spans):
        assert not span.start < end < span.end
        assert span.end <= lane.start or span.start >= end or number < job.images


def check_vision(model: Model, plan: ScheduledPlan, lane: Lane, job: Job, state: State) -> None:
    assert job.stage == "vision"
    assert not lane.emits
    assert lane.row == job.images < job.window
    span = job.spec.image_spans[lane.row]
    assert lane.length == span.end - span.start <= plan.shape.token_capacity


def check_copy(model: Model, plan: ScheduledPlan, lane: Lane, job: Job, state: State) -> None:
    """A snapshot writes a row that nothing else uses; not one that somebody is about to restore."""
    assert job.stage in ("snapshot", "terminal")
    assert lane.length == 0
    assert lane.start == job.committed
    assert 1 <= lane.row <= model.limits.state_rows
    sources = {model.checkpoints[j.spec.restore_from] for j in model.jobs if j.waits_for_pin}
    assert model.rows.get(lane.row) not in sources or lane.row not in pinned_rows(model, state)


def check_restore(model: Model, plan: ScheduledPlan, lane: Lane, job: Job, state: State) -> None:
    """The row holds what the request needs: its own window, or a checkpoint's prefix."""
    assert job.stage == "restore"
    assert lane.start == job.committed
    if job.window_restore:
        assert model.rows[lane.row] == (frozenset({job.key}), job.committed)
    elif job.spec.restore_from:
        origins, endpoint = model.checkpoints[job.spec.restore_from]
        content = model.rows[lane.row]
        assert content is not None
        assert content[0] <= origins
        assert content[1] == endpoint == job.committed
    else:
        assert lane.row == 0


def check_initialize(model: Model, plan: ScheduledPlan, lane: Lane, job: Job, state: State) -> None:
    assert job.stage == "initialize"
    assert (lane.start, lane.length) == (0, 0)


CHECKS = {
    LaneRole.DECODE: check_decode, LaneRole.PROMPT: check_prompt, LaneRole.VISION: check_vision,
    LaneRole.SNAPSHOT: check_copy, LaneRole.RESTORE: check_restore, LaneRole.INITIALIZE: check_initialize,
}  # fmt: skip


def pinned_rows(model: Model, state: State) -> set[int]:
    known = state.retention.checkpoints
    wanted = {job.spec.restore_from for job in model.jobs if job.waits_for_pin}
    return {int(row) for number, row in zip(known.ids, known.rows, strict=True) if int(number) in wanted}


def check_frozen(model: Model, flight: Flight, state: State) -> None:
    """Participants and normalisers that a commit froze; the numbers are then taken for the interval."""
    frame = state.frames[-1]
    members = {job.handle.slot: job for job in flight.members}
    streams = [job.spec.constraints for job in model.jobs if job.streams]
    for slot in range(model.limits.slots):
        job = members.get(slot)
        assert frame.participants[slot] == (job.handle.generation if job else 0)
        if job is None:
            continue
        token_n, delivery_n, first = map(
            known, (frame.token_n[slot], frame.delivery_n[slot], frame.first_token_r[slot])
        )
        flight.token_n[job.key], flight.delivery_n[job.key], flight.first_r[job.key] = token_n, delivery_n, first
        if job.token_r is not None:
            assert first == pytest.approx(job.token_r, rel=1e-9)
        elif token_n is not None:
            assert first == pytest.approx(len(members) / token_n, rel=1e-9)
        if job.streams:
            check_stream(model, job, streams, token_n, delivery_n)
        else:
            usable = int(state.requests.boundary[slot]) - job.consumed
            assert delivery_n is None
            assert close(token_n, prompt_rate(model, job, usable, len(members)))


def check_stream(model: Model, job: Job, streams: list, token_n: float | None, delivery_n: float | None) -> None:
    """n of deliveries is 1 / sigma; that of tokens between it and what the widest lane could get."""
    if model.policy.speculation == "fixed":
        return
    usable = [shape for shape in model.catalog if model.policy.speculation != "off" or not shape.proposal_depth]
    sigma = books.reference_ms(streams, job.spec.constraints, model.costs, usable)
    assert (sigma is None) == (delivery_n is None) == (token_n is None)
    if sigma is not None and delivery_n is not None and token_n is not None:
        assert delivery_n == pytest.approx(1 / sigma, rel=1e-9)
        assert delivery_n <= token_n <= delivery_n * (model.depth + 1) * (1 + 1e-9)


def prompt_rate(model: Model, job: Job, usable: int, participants: int) -> float | None:
    """max over measured prompt programs of (tokens usable now / T), shared among the participants."""
    kinds = (ProgramKind.SCORED_PREFILL,) if job.spec.scored else (ProgramKind.PREFILL, ProgramKind.MIXED)
    rates = [
        min(prompt_tokens(shape), usable) / (model.costs[shape].estimate_ns / 1e6)
        for shape in model.catalog
        if shape.kind in kinds and model.costs[shape].estimate_ns
    ]
    return max(rates) / participants if rates and usable > 0 else None


def close(one: float | None, other: float | None) -> bool:
    """Equal to the last digits, or both unknown."""
    if one is None or other is None:
        return one is other
    return one == pytest.approx(other, rel=1e-9)


def known(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


def check_state(model: Model, state: State) -> None:
    """Everything that the model knows of, recounted."""
    owners = {job.handle.slot: job for job in model.jobs}
    requests, tables = state.requests, state.pool.tables
    assert state.now_ns == model.now_ns
    assert state.last_fence == model.last_fence
    assert [frame.fence for frame in state.frames] == [flight.fence for flight in model.flights]
    assert requests.generation.tolist() == model.generations
    assert requests.epoch.tolist() == model.epochs
    for slot in range(model.limits.slots):
        job = owners.get(slot)
        if job is None:
            assert requests.phase[slot] == Phase.FREE
            assert len(tables[slot]) == 0
            continue
        check_job(model, job, state)
    pages.check_identity(model, state)
    check_estimates(model, state)
    check_totals(model, state)
    check_rows(model, state)


def check_job(model: Model, job: Job, state: State) -> None:
    requests, slot = state.requests, job.handle.slot
    assert Phase(int(requests.phase[slot])) is STAGES[job.stage], (job.key, job.stage)
    got = {name: int(getattr(requests, name)[slot]) for name in (
        "generation", "consumed_len", "committed_len", "output_len", "images_done", "window_images",
        "reserved_pages", "worst_pages", "admission", "last_use_ns", "last_fence")}  # fmt: skip
    assert got == {
        "generation": job.handle.generation, "consumed_len": job.consumed, "committed_len": job.committed,
        "output_len": len(job.out), "images_done": job.images, "window_images": job.window,
        "reserved_pages": job.promised, "worst_pages": pages.worst(model, job.spec), "admission": job.key + 1,
        "last_use_ns": job.last_use_ns, "last_fence": job.last_fence,
    }, job  # fmt: skip
    if job.restored or not job.spec.restored_len:  # a restore takes its pages when it is committed
        assert len(state.pool.tables[slot]) == ceil_div(job.written, model.limits.page_size)
    assert len(state.pool.tables[slot]) <= job.promised <= pages.worst(model, job.spec)
    assert awaits_capture(state, job.handle) == (job.stage == "terminal")
    if job.stage == "terminal":
        assert int(requests.terminal_ns[slot]) == job.terminal_ns
    if job.ended is not None:
        return
    assert (int(requests.visible_ns[slot]), int(requests.proposals[slot])) == (job.visible_ns, job.copies)
    for mine, column in ((job.token_r, requests.token_r), (job.delivery_r, requests.delivery_r)):
        assert close(known(column[slot]), mine), (mine, column[slot], job)
    check_learned(job, state)


def check_learned(job: Job, state: State) -> None:
    if not state.acceptance.depth:
        return
    slot, learned, kept = job.handle.slot, job.learned, state.acceptance
    mine = np.array([learned.accept["learned"], learned.accept["copy"], learned.forecast])
    means = [*kept.accept_mean[slot], kept.forecast_mean[slot]]
    weights = [*kept.accept_weight[slot], kept.forecast_weight[slot]]
    assert np.allclose(mine[..., 0], means, rtol=1e-9, atol=0), (job, means)
    assert np.allclose(mine[..., 1], weights, rtol=1e-9, atol=0), (job, weights)


def check_estimates(model: Model, state: State) -> None:
    """Durations, budgets and the population priors."""
    costs, ttl_ns = state.costs, model.policy.estimate_ttl_ns
    mine = [model.costs[shape] for shape in model.catalog]
    assert costs.estimate_ns.tolist() == [entry.estimate_ns for entry in mine]
    assert costs.observed_ns.tolist() == [entry.observed_ns for entry in mine]
    assert costs.attempted_ns.tolist() == [entry.attempted_ns for entry in mine]
    assert ttl_ns == state.policy.estimate_ttl_ns
    for reason, budget in model.budgets.items():
        ledger = state.ledgers.of(reason)
        assert ledger.balance_ns == budget.balance
        assert (ledger.ordinary_ns, ledger.spent_ns, ledger.episode) == (
            budget.ordinary_ns, budget.spent_ns, budget.episode)  # fmt: skip
        assert budget.within_bound()
    if state.acceptance.depth:
        assert np.allclose(state.acceptance.prior, model.prior, rtol=1e-9, atol=0)
        shown = np.array([model.population["learned"], model.population["copy"]])
        assert np.allclose(state.acceptance.accept_prior, shown[..., 0], rtol=1e-9, atol=0)
        assert np.allclose(state.acceptance.accept_prior_weight, shown[..., 1], rtol=1e-9, atol=0)


def check_totals(model: Model, state: State) -> None:
    """Counters: every admitted request runs or has ended once."""
    counted = snapshot_counters(state)
    assert counted["requests_admitted"] == model.admitted
    assert counted["requests_cancelled"] == model.ends[CANCELLED]
    assert counted["requests_preempted"] == model.ends[PREEMPTED]
    assert counted["requests_finished"] == {str(reason): model.ends[reason] for reason in FinishReason}
    assert model.admitted == sum(model.ends.values()) + len(model.running())
    assert state.counters.rebound == model.rebound
    assert counted["completions_ignored"] == model.ignored
    kinds = sorted({shape.kind for shape in model.catalog})
    assert counted["used_tokens_by_kind"] == {str(kind): model.used[kind] for kind in kinds}
    assert counted["padded_tokens_by_kind"] == {str(kind): model.padded[kind] for kind in kinds}
    assert (counted["slots_used"], counted["frames_in_flight"]) == (len(model.jobs), len(model.flights))
    assert counted["flare_scheduler_executions_total"] == {str(r): model.executions[r] for r in SelectionReason}
    assert counted["flare_scheduler_execution_nanoseconds_total"] == {
        str(reason): model.execution_ns[reason] for reason in SelectionReason
    }


def check_rows(model: Model, state: State) -> None:
    """Published checkpoints are those that were announced, with their tokens in their rows; pins hold them."""
    kept = state.retention.checkpoints
    for number, row, endpoint in zip(kept.ids.tolist(), kept.rows.tolist(), kept.endpoints.tolist(), strict=True):
        origins, length = model.checkpoints[number]
        content = model.rows[row]
        assert content is not None
        assert content[0] <= origins
        assert content[1] == length == endpoint
    present = set(kept.ids.tolist())
    waiting = [job.spec.restore_from for job in model.jobs if job.waits_for_pin]
    assert set(waiting) <= present
    assert sum(kept.pins.tolist()) == len(waiting)
    private = sum(job.private for job in model.jobs)
    assert int((state.retention.rows.use == 4).sum()) == private
