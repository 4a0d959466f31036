"""Prerequisites judged by what they enable: hand-made states whose scores can be computed on paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from helios_jax.scheduler import (
    Catalog,
    Constraint,
    ImageSpan,
    LaneRole,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    ScheduledPlan,
    SelectionReason,
    State,
    new_state,
    plan_next,
    policy_preset,
)
from helios_jax.scheduler.candidates import new_decision
from helios_jax.scheduler.packed import PromptRows, enabled_cohorts
from helios_jax.scheduler.prerequisites import prerequisite_candidates
from helios_jax.scheduler.service import current_rates
from helios_jax.scheduler.state import Phase, Requests
from tests.unit.scheduler_toy import MS, admitted, measured, request, small_catalog, small_limits

SNAPSHOT, RESTORE, VISION, INITIALIZE = (
    ProgramKind.SNAPSHOT, ProgramKind.RESTORE, ProgramKind.VISION, ProgramKind.INITIALIZE,
)  # fmt: skip
PREFILL, DECODE = ProgramKind.PREFILL, ProgramKind.DECODE
NOW_NS = 10**12
PROMPT_LEN = 12


def staged_catalog(**kinds: Iterable[int]) -> Catalog:
    """Decode 1, 2, 4; prefill (1, 16); and rows of the state operations, by name."""
    base = small_catalog(decode=kinds.pop("decode", (1, 2, 4)), prefill=((1, 16),), scored=(), initialize=(1, 4))
    shapes = [
        ProgramShape(ProgramKind(name), b, 4 if name == "vision" else 0) for name, rows in kinds.items() for b in rows
    ]
    return Catalog((*base, *shapes), aligned=False)


def scene(
    phases: Iterable[tuple[Phase, float]], times_ms: dict[ProgramKind, float | Callable[[ProgramShape], float]],
    catalog: Catalog, policy: PolicyConfig | None = None, spec: object = None,
) -> State:  # fmt: skip
    """One request a (phase, age in ms); streams and ended requests have consumed their prompt, others nothing."""
    state = new_state(catalog, dataclasses.replace(small_limits(slots=8), feature_tokens=8, state_rows=8), policy)
    state = dataclasses.replace(state, now_ns=NOW_NS)
    phases = list(phases)
    state, _ = admitted(state, *[spec or request(PROMPT_LEN, 6)] * len(phases))  # type: ignore[list-item]
    requests = state.requests.draft()
    for slot, (phase, age_ms) in enumerate(phases):
        _dress(requests, slot, phase, int(age_ms * MS))
    state = dataclasses.replace(state, requests=requests.sealed())

    def duration(shape: ProgramShape) -> int:
        ms = times_ms.get(shape.kind, 1.0)
        return int((ms(shape) if callable(ms) else ms) * MS)

    return measured(state, duration)


def _dress(requests: Requests, slot: int, phase: Phase, age_ns: int) -> None:
    requests.phase[slot] = phase
    requests.token_r[slot] = requests.delivery_r[slot] = np.nan
    if phase in (Phase.DECODE, Phase.SNAPSHOT, Phase.TERMINAL):
        requests.consumed_len[slot] = requests.boundary[slot] = requests.committed_len[slot] = PROMPT_LEN
        requests.output_len[slot], requests.state_row[slot] = 1, 0 if phase == Phase.DECODE else slot + 1
    if phase in (Phase.DECODE, Phase.SNAPSHOT):
        requests.visible_ns[slot] = NOW_NS - age_ns
        requests.token_r[slot], requests.delivery_r[slot] = 2.0, 3.0
    if phase == Phase.TERMINAL:
        requests.terminal_ns[slot] = NOW_NS - age_ns


def planned(state: State) -> ScheduledPlan:
    plan = plan_next(state)
    assert plan is not None
    return plan


def score(plan: ScheduledPlan) -> float:
    return plan.value_rate * math.exp(plan.log_scale)


def stream_worth(state: State, slot: int, end_ms: float) -> float:
    """One output token, one delivery and the age credit of a stream that is served after `end_ms`."""
    p, rates = state.policy, current_rates(state)
    age_ms = (NOW_NS - int(state.requests.visible_ns[slot])) / MS
    service = (
        p.output_token_value + p.token_fairness * rates.token_r[slot] + p.delivery_fairness * rates.delivery_r[slot]
    )
    return float(service + p.decode_age_price * rates.sigma[slot] * (age_ms + end_ms))


# ---- pairs


def test_a_pair_is_scored_over_both_programs_and_submits_the_first_alone() -> None:
    state = scene([(Phase.SNAPSHOT, 50), (Phase.DECODE, 20)], {SNAPSHOT: 3, DECODE: 4}, staged_catalog(snapshot=(2,)))
    plan = planned(state)
    assert plan.shape.kind is SNAPSHOT
    worth = stream_worth(state, 0, 7) + stream_worth(state, 1, 7)
    assert score(plan) == pytest.approx(worth / 7 - 7 / 2 * 2 * state.policy.decode_age_price)
    assert plan.estimated_duration_ns == 3 * MS
    assert [(lane.role, lane.length, lane.emits) for lane in plan.lanes] == [(LaneRole.SNAPSHOT, 0, False)]


def test_an_indeterminate_pair_counts_no_time_at_all() -> None:
    """Its score is the value with T = 0, the terminal row's included, although the snapshot is measured."""
    phases = [(Phase.SNAPSHOT, 50), (Phase.TERMINAL, 30)]
    state = scene(phases, {SNAPSHOT: 3, DECODE: 0}, staged_catalog(snapshot=(2,)))
    sigma = 2 * 3 / 2
    assert np.isnan(current_rates(state).sigma[0])  # no measured program decodes: no age credit
    wanted = stream_worth(scene(phases, {SNAPSHOT: 3, DECODE: 1}, staged_catalog(snapshot=(2,))), 0, 0)
    plan = planned(state)
    p = state.policy
    service = p.output_token_value + 2 * p.token_fairness + 3 * p.delivery_fairness
    assert wanted > service
    assert score(plan) == pytest.approx(service + p.terminal_value + p.terminal_age_price * sigma * 30)
    assert plan.reason is SelectionReason.ORDINARY  # the snapshot itself is measured


def test_terminal_rows_of_the_first_stage_save_their_waiting_for_the_rest() -> None:
    """Their age stops at T: the saving is the waiting cost integrated from T to T + F."""
    phases = [(Phase.SNAPSHOT, 5_000), (Phase.TERMINAL, 30)]
    state = scene(phases, {SNAPSHOT: 3, DECODE: 4}, staged_catalog(snapshot=(2,)))
    p, sigma = state.policy, 1 * 3 / 1
    moments = np.linspace(3, 7, 100_001)
    saved = np.trapezoid(p.terminal_age_price * (30 + moments), moments)
    retired = p.terminal_value + p.terminal_age_price * sigma * (30 + 3)
    waiting = p.decode_age_price + p.terminal_age_price
    plan = planned(state)
    assert len(plan.lanes) == 2
    assert score(plan) == pytest.approx((stream_worth(state, 0, 7) + retired + saved) / 7 - 7 / 2 * waiting)


def test_the_productive_prefix_competes_with_the_whole_sequence() -> None:
    """A slow inference behind a fast retirement: the retirement alone is worth more per time; and the reverse."""
    phases = [(Phase.SNAPSHOT, 5), (Phase.TERMINAL, 30)]
    for decode_ms, prefix in ((50, True), (0.5, False)):
        times = {SNAPSHOT: 3, DECODE: decode_ms}
        state = scene(phases, times, staged_catalog(snapshot=(2,)), policy_preset("throughput"))
        p = state.policy
        waiting = p.decode_age_price + p.terminal_age_price
        alone = (p.terminal_value + p.terminal_age_price * 3 * 33) / 3 - 3 / 2 * waiting
        plan = planned(state)
        assert len(plan.lanes) == 2  # the stream advances in the row that is left
        assert (score(plan) == pytest.approx(alone)) == prefix
        assert score(plan) >= alone * (1 - 1e-12)


def test_unused_rows_of_the_prerequisite_advance_more_requests() -> None:
    """One prompt can follow, three are initialised: the least recently used take the rows that are left."""
    state = scene([(Phase.INITIALIZE, 0)] * 5, {INITIALIZE: 2, PREFILL: 3}, staged_catalog())
    requests = state.requests.draft()
    requests.last_use_ns[:5] = [5, 4, 3, 2, 1]
    requests.token_r[:5] = [9.0, 1.0, 1.0, 1.0, 1.0]
    plan = planned(dataclasses.replace(state, requests=requests.sealed()))
    assert [lane.handle.slot for lane in plan.lanes] == [0, 2, 3, 4]


def test_equal_value_rates_prefer_advancing_more_requests() -> None:
    """One row costs as much as four: the same pair, but four requests advance."""
    state = scene([(Phase.INITIALIZE, 0)] * 4, {INITIALIZE: 2, PREFILL: 3}, staged_catalog())
    plan = planned(state)
    assert plan.shape.batch_capacity == 4
    assert len(plan.lanes) == 4


def test_worthless_terminal_rows_still_fill_the_rows_that_are_left() -> None:
    policy = PolicyConfig(terminal_value=0.0, terminal_age_price=0.0)
    phases = [(Phase.SNAPSHOT, 50), *[(Phase.TERMINAL, 9.0)] * 2]
    state = scene(phases, {SNAPSHOT: 3, DECODE: 4}, staged_catalog(snapshot=(4,)), policy)
    assert {lane.handle.slot for lane in planned(state).lanes} == {0, 1, 2}


@pytest.mark.parametrize("rows", [1, 2])
def test_the_newly_ready_displace_terminal_rows_only_by_value(rows: int) -> None:
    """With one row for a stream or an ended request, the more valuable one takes it."""
    for age_ms, streams in ((1, True), (10**6, False)):
        phases = [(Phase.SNAPSHOT, 5_000), (Phase.SNAPSHOT, 5_000), (Phase.TERMINAL, age_ms), (Phase.TERMINAL, age_ms)]
        state = scene(phases, {SNAPSHOT: 3, DECODE: 4}, staged_catalog(snapshot=(rows,), decode=(2,)))
        slots = {lane.handle.slot for lane in planned(state).lanes}
        assert (slots <= {0, 1}) == streams
        assert (slots <= {2, 3}) == (not streams)


# ---- snapshots


def snapshot_sweep(policy: PolicyConfig | None = None) -> list[tuple[float, bool, bool]]:
    """(snapshot ms, whether it was chosen, whether the formula says so) for rising costs.

    A ready stream can decode alone at 4 ms; behind a snapshot both can share a batch of 5 ms.
    """
    found = []
    for tenths in (*range(1, 60), *range(60, 2000, 20)):
        snapshot_ms = tenths / 10
        times = {SNAPSHOT: snapshot_ms, DECODE: lambda shape: 4.0 if shape.batch_capacity == 1 else 5.0}
        state = scene(
            [(Phase.SNAPSHOT, 40), (Phase.DECODE, 40)], times, staged_catalog(snapshot=(1,), decode=(1, 2)), policy
        )
        waiting = 2 * state.policy.decode_age_price
        alone = stream_worth(state, 1, 4) / 4 - 4 / 2 * waiting
        total = snapshot_ms + 5
        shared = (stream_worth(state, 0, total) + stream_worth(state, 1, total)) / total - total / 2 * waiting
        plan = planned(state)
        assert score(plan) == pytest.approx(max(alone, shared))
        found.append((snapshot_ms, plan.shape.kind is SNAPSHOT, shared > alone))
    return found


@pytest.mark.parametrize("policy", [PolicyConfig(), policy_preset("throughput"), PolicyConfig(token_fairness=0.0)])
def test_enabling_a_shared_batch_wins_only_while_the_sequence_is_worth_its_time(policy: PolicyConfig) -> None:
    """One switch point, where the formula puts it: cheap snapshots are taken, dear ones are not."""
    sweep = snapshot_sweep(policy)
    chosen = [taken for _, taken, _ in sweep]
    assert chosen == [wanted for _, _, wanted in sweep]
    assert chosen[0]
    assert not chosen[-1]
    assert chosen == sorted(chosen, reverse=True)


@pytest.mark.parametrize("preset", ["balanced", "throughput"])
def test_terminal_value_and_urgency_count_in_both_presets(preset: str) -> None:
    """The lane is worth terminal_value + p sigma (A + T), sigma being the time of all ended requests in one program."""
    policy = policy_preset(preset)
    phases = [(Phase.TERMINAL, 30), (Phase.TERMINAL, 10), (Phase.TERMINAL, 20)]
    state = scene(phases, {SNAPSHOT: lambda shape: 2.0 + shape.batch_capacity}, staged_catalog(snapshot=(1, 2)), policy)
    sigma = 3 * min(3.0 / 1, 4.0 / 2)
    best = max(
        (2 * 256 + sigma * (30 + 4) + sigma * (20 + 4)) / 4 - 4 / 2 * 3, (256 + sigma * (30 + 3)) / 3 - 3 / 2 * 3
    )
    plan = planned(state)
    assert score(plan) == pytest.approx(best)
    assert [lane.handle.slot for lane in plan.lanes] == [0, 2]  # the oldest end first, not the first admitted


@pytest.mark.parametrize("preset", ["balanced", "throughput"])
def test_terminal_work_has_no_priority(preset: str) -> None:
    """A valuable decode comes first; an end that has waited long enough comes before it."""
    kinds = []
    for age_ms in (0, 10_000):
        times = {SNAPSHOT: 50, DECODE: 2}
        state = scene(
            [(Phase.TERMINAL, age_ms), (Phase.DECODE, 50)], times, staged_catalog(snapshot=(1,)), policy_preset(preset)
        )
        kinds.append(planned(state).shape.kind)
    assert kinds == [DECODE, SNAPSHOT]


def test_without_both_coefficients_ended_requests_wait_for_nobody() -> None:
    """Under throughput with both at zero a retirement is worth nothing: it runs when nothing else can."""
    policy = policy_preset("throughput", terminal_value=0.0, terminal_age_price=0.0)
    times, catalog = {SNAPSHOT: 0.01, DECODE: 500}, staged_catalog(snapshot=(1,))
    state = scene([(Phase.TERMINAL, 10**6), (Phase.DECODE, 0)], times, catalog, policy)
    assert planned(state).shape.kind is DECODE
    alone = planned(scene([(Phase.TERMINAL, 10**6)], times, catalog, policy))
    assert alone.shape.kind is SNAPSHOT
    assert score(alone) == 0.0


@pytest.mark.parametrize(("name", "worth"), [("terminal_value", 1 * 3 * 13), ("terminal_age_price", 256)])
def test_one_coefficient_at_zero_removes_its_preference_only(name: str, worth: float) -> None:
    policy = dataclasses.replace(policy_preset("throughput"), **{name: 0.0})
    state = scene([(Phase.TERMINAL, 10)], {SNAPSHOT: 3}, staged_catalog(snapshot=(1,)), policy)
    waiting = policy.terminal_age_price * 3 / 2
    assert score(planned(state)) == pytest.approx(worth / 3 - waiting)


def test_an_unmeasured_snapshot_is_discovered_and_nothing_is_invented() -> None:
    """No duration, no reference interval: terminal_value alone, and the discovery rules."""
    state = scene([(Phase.TERMINAL, 10), (Phase.DECODE, 10)], {SNAPSHOT: 0}, staged_catalog(snapshot=(1, 2)))
    plan = planned(state)
    assert plan.shape.kind is SNAPSHOT
    assert plan.reason is SelectionReason.DISCOVERY
    assert plan.required_empty_queue
    assert score(plan) == pytest.approx(256.0)
    assert plan.shape.batch_capacity == 1  # the larger one would be padding


def test_ended_requests_delay_everybody_elses_candidates() -> None:
    """Their age coefficient enters the waiting of a decode as well."""
    scores = []
    for ended in (0, 3):
        phases = [(Phase.DECODE, 10), *[(Phase.TERMINAL, 0.0)] * ended]
        state = scene(phases, {SNAPSHOT: 3, DECODE: 0.5}, staged_catalog(snapshot=(1,)))
        plan = planned(state)
        assert plan.shape.kind is DECODE
        scores.append(score(plan))
    assert scores[0] - scores[1] == pytest.approx(0.5 / 2 * 3 * 1.0)


@pytest.mark.parametrize("factor", [1e-300, 1e300])
def test_scale_of_all_coefficients_changes_nothing(factor: float) -> None:
    """Streams and ended requests that have waited for hours: every term scales, the plan and the scaled score stay."""
    plans = []
    for scale in (1.0, factor):
        coefficients = {name: getattr(PolicyConfig(), name) * scale for name in COEFFICIENTS}
        phases = [(Phase.SNAPSHOT, 10**7), (Phase.TERMINAL, 3 * 10**7), (Phase.DECODE, 2 * 10**7), (Phase.TERMINAL, 5)]
        state = scene(phases, {SNAPSHOT: 3, DECODE: 4}, staged_catalog(snapshot=(1, 2)), PolicyConfig(**coefficients))
        plan = planned(state)
        assert math.isfinite(plan.value_rate)
        plans.append((plan.shape, plan.lanes, round(plan.value_rate, 9)))
    assert plans[0] == plans[1]


COEFFICIENTS = ("output_token_value", "token_fairness", "delivery_fairness", "decode_age_price", "terminal_value",
                "terminal_age_price")  # fmt: skip

# ---- chains

IMAGES = (ImageSpan(0, 2), ImageSpan(2, 4), ImageSpan(4, 6))


def image_scene(vision_ms: float, prefill_ms: float, rows: tuple[int, ...] = (1,), num: int = 1) -> State:
    spec = request(PROMPT_LEN, 6, image_spans=IMAGES)
    times = {VISION: vision_ms, PREFILL: prefill_ms}
    state = scene([(Phase.VISION, 0)] * num, times, staged_catalog(vision=rows), spec=spec)
    requests = state.requests.draft()
    requests.token_r[:num] = 2.0
    return dataclasses.replace(state, requests=requests.sealed())


def prompt_worth(state: State) -> float:
    """All tokens of the prompt and its first output token."""
    return PROMPT_LEN * (1 + 2 * state.policy.token_fairness) + 64 + 2 * state.policy.token_fairness


@pytest.mark.parametrize("done", [0, 1])
def test_a_chain_counts_its_remaining_images(done: int) -> None:
    """V T / (T + F) over T: one image now, the others and the prefill in F."""
    state = image_scene(4, 6)
    requests = state.requests.draft()
    requests.images_done[0] = done
    state = dataclasses.replace(state, requests=requests.sealed())
    rest = (2 - done) * 4 + 6
    assert score(planned(state)) == pytest.approx(prompt_worth(state) / (4 + rest))


def test_the_last_image_makes_a_pair() -> None:
    state = image_scene(4, 6)
    requests = state.requests.draft()
    requests.images_done[0] = 2
    state = dataclasses.replace(state, requests=requests.sealed())
    assert score(planned(state)) == pytest.approx(prompt_worth(state) / (4 + 6))


def test_chains_share_a_program() -> None:
    """Contributions add up: two requests in a program of two rows are worth twice as much in the same time."""
    state = image_scene(4, 6, rows=(2,), num=3)
    plan = planned(state)
    assert len(plan.lanes) == 2
    assert score(plan) == pytest.approx(2 * prompt_worth(state) / (4 + 8 + 6))


@pytest.mark.parametrize(("vision_ms", "prefill_ms"), [(0, 6), (4, 0)])
def test_a_chain_with_an_unmeasured_stage_compares_by_its_value(vision_ms: float, prefill_ms: float) -> None:
    state = image_scene(vision_ms, prefill_ms)
    plan = planned(state)
    assert score(plan) == pytest.approx(prompt_worth(state))
    assert (plan.reason is SelectionReason.DISCOVERY) == (vision_ms == 0)


def test_an_unmeasured_chain_does_not_lend_its_certainty_to_others() -> None:
    """A chain whose large image no measured program takes is indeterminate; the known chains keep their own score.

    The program that could serve it at all is tried for it, and not for those who need no discovery.
    """
    base = (*staged_catalog().shapes, ProgramShape(VISION, 1, 2), ProgramShape(VISION, 1, 4))
    spec = request(PROMPT_LEN, 6, image_spans=(ImageSpan(0, 1), ImageSpan(1, 2)))
    times = {VISION: lambda shape: 4.0 if shape.token_capacity == 2 else 0.0, PREFILL: 6}
    state = scene([(Phase.VISION, 0)] * 2, times, Catalog(base, aligned=False), spec=spec)
    requests = state.requests.draft()
    requests.token_r[:2] = [50.0, 1.0]  # the known chain is the more valuable one
    large = dataclasses.replace(spec, image_spans=(ImageSpan(0, 1), ImageSpan(1, 5)))
    state = dataclasses.replace(state, requests=requests.sealed(), specs=(spec, large, *state.specs[2:]))
    plan = planned(state)
    assert plan.shape.token_capacity == 2
    assert [lane.handle.slot for lane in plan.lanes] == [1]


# ---- the search


def test_a_new_row_takes_what_is_left_when_it_is_not_worth_more() -> None:
    """Two rows, four tokens: a valuable one beside the new row, which gets one at first and three in the end."""
    rows = PromptRows(
        remaining=np.array([1, 1, 4]),
        token_value=np.array([10.0, 9.0, 1.0]),
        bonus=np.zeros(3),
        newly_ready=np.array([False, False, True]),
    )
    lengths, value = enabled_cohorts(rows, np.array([4]), np.array([2]), [1])
    assert lengths.tolist() == [[[1, 0, 3]]]
    assert value.tolist() == [[13.0]]


def test_a_new_row_that_begins_with_an_image_takes_all_of_it() -> None:
    rows = PromptRows(
        remaining=np.array([5, 5]),
        token_value=np.array([10.0, 1.0]),
        bonus=np.zeros(2),
        newly_ready=np.array([False, True]),
        atoms=np.array([[[0, 0]], [[0, 3]]]),
    )
    lengths, _ = enabled_cohorts(rows, np.array([6]), np.array([2]), [1])
    assert lengths.tolist() == [[[3, 3]]]


def test_what_is_left_does_not_split_an_image() -> None:
    """Three tokens are left for the new row, the last two would begin an image of three: it takes one more."""
    rows = PromptRows(
        remaining=np.array([1, 1, 6]),
        token_value=np.array([10.0, 9.0, 1.0]),
        bonus=np.zeros(3),
        newly_ready=np.array([False, False, True]),
        atoms=np.array([[[0, 0]], [[0, 0]], [[2, 5]]]),
    )
    lengths, value = enabled_cohorts(rows, np.array([5]), np.array([2]), [1])
    assert lengths.tolist() == [[[1, 0, 2]]]
    assert value.tolist() == [[12.0]]


@pytest.mark.parametrize("alike", [True, False])
def test_a_larger_prerequisite_is_looked_at_when_time_can_change_its_cohort(alike: bool) -> None:
    """Two snapshot programs with room for everybody, then one row of decode.

    Streams of different families gain differently by time, so the slow program may enable another
    one than the fast program does: then it is no redundant padding.
    """
    times = {SNAPSHOT: lambda shape: 1.0 if shape.batch_capacity == 2 else 400.0,
             DECODE: lambda shape: 4.0 if shape.batch_capacity == 1 else 5.0}  # fmt: skip
    phases = [(Phase.SNAPSHOT, 0), (Phase.SNAPSHOT, 0), (Phase.DECODE, 0)]
    state = scene(phases, times, staged_catalog(snapshot=(2, 4), decode=(1, 2)))
    requests = state.requests.draft()
    requests.constraints[1] = 0 if alike else int(Constraint.GRAMMAR)
    requests.token_r[:2] = [3.0, 1.0]
    decision = new_decision(dataclasses.replace(state, requests=requests.sealed()))
    firsts = {int(first) for block in prerequisite_candidates(decision) for first in block.first}
    assert len(firsts) == (1 if alike else 2)
