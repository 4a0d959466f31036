"""Selection: useful value per time decides which program runs next, and for whom.

The life of a decision:

1. Prices, ages and durations are frozen (`new_decision`).
2. Every loaded program gets its best cohort (`candidates`, `prerequisites`); redundant padding
   and larger unmeasured prefills drop out there.
3. An indeterminate candidate wins over a determinate one and then competes by value;
   determinate ones compete by value per time less the waiting that they impose. A full
   exploration ledger lets one probe displace a determinate winner (`refresh`).
4. Scores that are equal but for rounding (`candidates.nearly_best`) fall by shorter known time,
   more served requests, less recently used requests, smaller padding, mean time of last use, slot number.
5. The winner becomes a `ScheduledPlan`. Nothing is changed: `lifecycle.commit` does that.
   Behind outstanding frames all of this happens on their projection, and a winner that needs
   an empty window makes the window drain instead of giving way (`queue`).

Per-chunk lateness, duration ceilings, smallest-fitting filters and forced oldest requests do
not exist: efficiency and age are already in the score.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from helios_jax.scheduler.candidates import (
    NS_PER_MS,
    Candidates,
    Decision,
    nearly_best,
    new_decision,
    prefill_candidates,
    scores,
)
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.cost import stale
from helios_jax.scheduler.lanes import program_tokens
from helios_jax.scheduler.learning import acceptance_probe
from helios_jax.scheduler.mixed import mixed_candidates
from helios_jax.scheduler.preemption import must_drain
from helios_jax.scheduler.preferences import POLICY_PRESETS, PolicyConfig, policy_preset
from helios_jax.scheduler.prerequisites import prerequisite_candidates
from helios_jax.scheduler.queue import closed, may_be_over, needs_feedback, project
from helios_jax.scheduler.race import Race
from helios_jax.scheduler.refresh import credit_ns, is_funded
from helios_jax.scheduler.rounds import round_candidates
from helios_jax.scheduler.stages import next_features
from helios_jax.scheduler.stale import stale_alternatives
from helios_jax.scheduler.state import Requests, State
from helios_jax.scheduler.types import Lane, LaneRole, RequestHandle, ScheduledPlan, SelectionReason

__all__ = ["POLICY_PRESETS", "PolicyConfig", "plan_next", "policy_preset", "scores"]

_LEARNING = SelectionReason.ACCEPTANCE_LEARNING
_NEVER = np.iinfo(np.int64).max
# What `_make` of a named tuple does, without a call of Python for each of 64 lanes.
_HANDLE, _LANE = partial(tuple.__new__, RequestHandle), partial(tuple.__new__, Lane)
_ROLES = {
    ProgramKind.INITIALIZE: LaneRole.INITIALIZE,
    ProgramKind.RESTORE: LaneRole.RESTORE,
    ProgramKind.VISION: LaneRole.VISION,
    ProgramKind.SNAPSHOT: LaneRole.SNAPSHOT,
    ProgramKind.SPECULATIVE: LaneRole.DECODE,
    ProgramKind.PREFILL: LaneRole.PROMPT,
    ProgramKind.SCORED_PREFILL: LaneRole.PROMPT,
    ProgramKind.DECODE: LaneRole.DECODE,
    ProgramKind.MIXED: LaneRole.DECODE,  # but for its prompt row
}


def plan_next(state: State) -> ScheduledPlan | None:
    """The best next program; None when nothing is runnable, or nothing may be submitted before a completion.

    Without outstanding frames the host asks `preemption.victim` first: streams without pages are left out.

    Cost: O(programs x slots) array work, no loop over their product.
    """
    if closed(state) or not state.requests.runnable.any():
        return None
    projected = project(state)
    if state.frames and must_drain(projected):
        return None
    plan = _select(projected)
    if plan is None or not state.frames:
        return plan
    unsure = may_be_over(state)[[lane.handle.slot for lane in plan.lanes]]
    return None if plan.required_empty_queue or unsure.any() else plan


def _select(state: State) -> ScheduledPlan | None:
    """The winner of all candidates, whatever it needs."""
    decision, refreshing = new_decision(state), _may_refresh(state)
    candidates = _all_candidates(decision, winner_only=not refreshing)
    if candidates is None or not len(candidates.first):
        return None  # every stream may be out of pages until an outstanding frame gives some back
    rates = scores(candidates, decision.values.waiting)
    known, reason = candidates.known, SelectionReason.ORDINARY
    winner = _best(decision, candidates, rates, known if known.all() else ~known)
    if known.all() and refreshing:
        alternatives = stale_alternatives(decision, candidates, winner)
        if alternatives.any():
            winner, reason = _best(decision, candidates, rates, alternatives), SelectionReason.TIMING_REFRESH
    if reason is SelectionReason.ORDINARY and known.all() and is_funded(state.ledgers, _LEARNING):
        probe = acceptance_probe(decision, candidates, winner, float(rates[winner]))
        if probe is not None:
            return _plan(decision, probe.candidates, probe.row, probe.rates, _LEARNING)
    return _plan(decision, candidates, winner, rates, reason)


def _may_refresh(state: State) -> bool:
    """Whether a program that loses may run instead of the winner, because its estimate is stale."""
    if not is_funded(state.ledgers, SelectionReason.TIMING_REFRESH):
        return False
    return bool(stale(state.costs, state.now_ns, state.policy.estimate_ttl_ns).any())


def _all_candidates(decision: Decision, *, winner_only: bool) -> Candidates | None:
    blocks = [prefill_candidates(decision, scored=scored) for scored in (False, True)]
    found = [*round_candidates(decision, winner_only=winner_only), *(block for block in blocks if block is not None)]
    race, least = Race(decision), -np.inf
    race.saw(found)
    if winner_only and len(decision.state.programs.mixed):
        least = race.least
    mixed = mixed_candidates(decision, least=least)
    if mixed is not None:
        found.append(mixed)
        race.saw([mixed])
    found += prerequisite_candidates(decision, race if winner_only else None)
    if len(found) < 2:
        return found[0] if found else None
    return Candidates(*[np.concatenate(column) for column in zip(*found, strict=True)])


def _best(decision: Decision, candidates: Candidates, rates: np.ndarray, eligible: np.ndarray) -> int:
    """Row of the best of the `eligible` candidates (bool [C], one at least): by score, then the tie order.

    Every key is whole nanoseconds, counts or slots, so none of them is decided by rounding.
    """
    tied = nearly_best(candidates, rates, decision.values.waiting, eligible)
    if len(tied) == 1:
        return int(tied[0])
    served = candidates.members[tied] | (candidates.work[tied] > 0)
    used_ns = np.where(served, decision.state.requests.last_use_ns, _NEVER)
    count = served.sum(axis=1)
    # Only cohorts of as many requests get this far down the keys: their sums have the order of their means.
    mean_use = np.where(served, used_ns - used_ns.min(), 0).sum(axis=1)
    keys = (
        candidates.first[tied],
        served.argmax(axis=1),
        mean_use,
        candidates.padding[tied],
        used_ns.min(axis=1),
        -count,
        np.rint(candidates.duration_ms[tied] * NS_PER_MS),
    )
    return int(tied[np.lexsort(keys)[0]])


def _plan(
    decision: Decision, candidates: Candidates, row: int, rates: np.ndarray, reason: SelectionReason
) -> ScheduledPlan:
    state, index = decision.state, int(candidates.first[row])
    shape = state.catalog.shapes[index]
    slots = np.flatnonzero(candidates.members[row])
    prompt = int(candidates.prompt[row])
    estimate = int(state.costs.estimate_ns[index])
    if not estimate:  # an unmeasured program that only follows leaves the submitted one ordinary
        reason = SelectionReason.DISCOVERY
    return ScheduledPlan(
        shape=shape,
        lanes=_lanes(state, shape.kind, slots, candidates.lengths[row], prompt),
        epochs=tuple(state.requests.epoch[slots].tolist()),
        estimated_duration_ns=estimate,
        value_rate=float(rates[row]),
        log_scale=decision.values.log_scale,
        reason=reason,
        required_empty_queue=needs_feedback(state, index, slots),
        expected_tokens=_expected(state, index, candidates.work[row], slots) if candidates.follow[row] < 0 else (),
        prompt_row=int(np.searchsorted(slots, prompt)) if prompt >= 0 else -1,
        exploration_credit_ns=credit_ns(state.ledgers, reason),
        observation_age_ns=int(state.now_ns - state.costs.observed_ns[index]) if estimate else None,
    )


def _expected(state: State, index: int, work: np.ndarray, slots: np.ndarray) -> tuple[float, ...]:
    """Output expected of each lane of a program with proposals; empty stands for one token each."""
    if not state.programs.depth[index]:
        return ()
    return tuple(program_tokens(state, index, work)[slots].tolist())


def _lanes(state: State, kind: ProgramKind, slots: np.ndarray, lengths: np.ndarray, prompt: int) -> tuple[Lane, ...]:
    requests, role = state.requests, _ROLES[kind]
    roles, emits = [role] * len(slots), [role is LaneRole.DECODE] * len(slots)
    starts, lengths = requests.committed_len[slots], lengths[slots]
    if role is LaneRole.PROMPT or prompt >= 0:
        ends = (starts + lengths == requests.prompt_len[slots]) & (requests.max_tokens[slots] > 0)
        for row in range(len(slots)) if role is LaneRole.PROMPT else np.flatnonzero(slots == prompt).tolist():
            roles[row], emits[row] = LaneRole.PROMPT, bool(ends[row])
    handles = map(_HANDLE, zip(slots.tolist(), requests.generation[slots].tolist(), strict=True))
    if kind is ProgramKind.VISION:
        lengths = next_features(state, slots)
    columns = roles, starts.tolist(), lengths.tolist(), emits, _rows(requests, kind, slots)
    return tuple(map(_LANE, zip(handles, *columns, strict=True)))


def _rows(requests: Requests, kind: ProgramKind, slots: np.ndarray) -> list[int]:
    """State row or image of each lane, 0 where there is none."""
    if kind is ProgramKind.SNAPSHOT:
        armed = requests.state_row[slots]
        return np.where(armed > 0, armed, requests.private_row[slots]).tolist()
    if kind is ProgramKind.RESTORE:
        return requests.restore_row[slots].tolist()
    return requests.images_done[slots].tolist() if kind is ProgramKind.VISION else [0] * len(slots)
