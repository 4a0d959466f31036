"""Chains of several stages before tokens, and retirements by terminal snapshots.

A request that needs more stages after this one has a continuation: useful value V in a further
F milliseconds. Its contribution to the first program, of duration T, is V T / (T + F). This is
bounded lookahead, not an optimal schedule (specification: "Prerequisites and completion").
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import Candidates, Decision, prompt_rows, scatter
from helios_jax.scheduler.stages import at_window_end
from helios_jax.scheduler.state import RESTORE, SNAPSHOT, VISION
from helios_jax.scheduler.utility import usable_tokens


def terminal_values(decision: Decision, first: int, terminal: np.ndarray, following_ms: np.ndarray) -> np.ndarray:
    """Scaled worth of each terminal row before each following duration F, best first; float64 [C, t].

    terminal_value + p sigma (A + T), and the waiting that its end at T saves over the rest of
    the sequence, p F (A + T + F / 2). An unmeasured snapshot counts with T = 0 and no saving.

    Source: scheduling-utility.md section 9, reading 6.
    """
    values, duration = decision.values, float(decision.duration_ms[first])
    done_ms = values.age_ms[terminal] + duration
    worth = values.terminal + values.terminal_price[terminal] * done_ms
    rest = following_ms[:, None] if duration > 0 else np.zeros((len(following_ms), 1))
    return worth + values.terminal_wait * rest * (done_ms + 0.5 * rest)


def ranked_terminals(decision: Decision, terminal: np.ndarray) -> np.ndarray:
    """Terminal slots by worth, which is by age: the order holds for every duration."""
    return terminal[np.argsort(-decision.values.age_ms[terminal], kind="stable")]


def terminal_candidates(decision: Decision, first: int, waiting: np.ndarray, terminal: np.ndarray) -> list[Candidates]:
    """Retirement alone: the productive part of a first stage, without anything that follows."""
    if not len(terminal):
        return []
    capacity = int(decision.state.programs.batch[first])
    worth = terminal_values(decision, first, terminal, np.zeros(1))[0, :capacity]
    return [_alone(decision, first, waiting, terminal[:capacity], float(worth.sum()), True)]


def continuation_candidates(
    decision: Decision, first: int, waiting: np.ndarray, blocked: np.ndarray, terminal: np.ndarray
) -> list[Candidates]:
    """The requests that need further stages, ranked by their individual continuations.

    Terminal rows take part with their own worth where the program is a snapshot.
    """
    if not len(blocked):
        return []
    state, duration = decision.state, float(decision.duration_ms[first])
    chains = [continuation(decision, slot) for slot in blocked.tolist()]
    values, rest = np.array([v for v, _, _ in chains]), np.array([f for _, f, _ in chains])
    known = np.array([k for _, _, k in chains]) & (duration > 0)
    everything_known = bool(known.all())
    share = duration / (duration + rest) if everything_known else np.ones(len(rest))
    capacity = int(state.programs.batch[first])
    ending = terminal_values(decision, first, terminal, np.zeros(1))[0]
    worth, slots = np.concatenate([values * share, ending]), np.concatenate([blocked, terminal])
    best = np.argsort(-worth, kind="stable")[:capacity]
    if not (best < len(blocked)).any():
        return []  # retirement alone, which competes by itself
    return [_alone(decision, first, waiting, slots[best], float(worth[best].sum()), everything_known)]


def continuation(decision: Decision, slot: int) -> tuple[float, float, bool]:
    """(V, F, known): what the request earns after its remaining stages, and how long they take.

    The first inference is the prompt program with the best V / F; unmeasured stages add no
    time and leave the whole unknown, so that it compares by useful value.
    """
    stages_ms, known = _remaining_stages(decision, slot)
    state, programs = decision.state, decision.state.programs
    rows = prompt_rows(decision, np.array([slot]))
    scored = bool(state.requests.scored[slot])
    following = programs.scored_prefill if scored else np.concatenate([programs.prefill, programs.mixed])
    # The window's images decide where a later chunk stops; up to the boundary is all that is sure.
    usable = usable_tokens(rows.remaining, programs.prompt[following], rows.atoms)[:, 0]
    worth = usable * rows.token_value[0] + np.where(usable == rows.remaining[0], rows.bonus[0], 0.0)
    duration = decision.duration_ms[following]
    if known and (duration > 0).any():
        rate = np.where(duration > 0, worth / np.maximum(stages_ms + duration, 1e-300), -1.0)
        best = int(rate.argmax())
        return float(worth[best]), stages_ms + float(duration[best]), True
    return float(worth.max()), stages_ms, False


def _remaining_stages(decision: Decision, slot: int) -> tuple[float, bool]:
    """Measured time of the stages between the present one and inference, and whether all are measured."""
    state, requests = decision.state, decision.state.requests
    spec, phase = state.specs[slot], requests.phase[slot]
    assert spec is not None  # a waiting request has its spec: invariant 4
    programs, ahead = state.programs, []
    images = range(int(requests.images_done[slot]), int(requests.window_images[slot]))
    private = requests.private_row[slot] > 0
    windowed = phase == RESTORE and private and requests.restore_row[slot] == requests.private_row[slot]
    if phase == SNAPSHOT and at_window_end(requests, slot, spec):
        if requests.state_row[slot]:
            ahead.append(programs.snapshot)
        ahead.append(programs.restore)
        windowed = True
    if windowed:  # the next window opens with the restore
        images = range(images.stop, _window_end(spec.image_spans, images.stop, state.limits.feature_tokens))
    if phase == VISION:
        images = images[1:]
    sizes = [spec.image_spans[number].end - spec.image_spans[number].start for number in images]
    ahead += [programs.vision[programs.tokens[programs.vision] >= size] for size in sizes]
    total, known = 0.0, True
    for rows in ahead:
        measured = decision.duration_ms[rows][decision.duration_ms[rows] > 0]
        known &= len(measured) > 0
        total += float(measured.min()) if len(measured) else 0.0
    return total, known


def _window_end(spans: tuple, first: int, room: int) -> int:
    for number in range(first, len(spans)):
        room -= spans[number].end - spans[number].start
        if room < 0:
            return number
    return len(spans)


def _alone(
    decision: Decision, first: int, waiting: np.ndarray, chosen: np.ndarray, value: float, known: bool
) -> Candidates:
    """A candidate of the prerequisite program by itself; unused rows advance waiting requests."""
    state = decision.state
    num_slots, capacity = state.limits.slots, int(state.programs.batch[first])
    members = scatter(np.ones((1, len(chosen)), np.bool_), chosen, num_slots)
    idle = waiting[~members[0, waiting]][: capacity - len(chosen)]
    members[0, idle] = True
    nothing = np.zeros((1, num_slots), np.int64)
    duration = decision.duration_ms[first : first + 1]
    return Candidates(
        first=np.array([first]),
        follow=np.array([-1]),
        members=members,
        lengths=nothing,
        work=nothing,
        prompt=np.array([-1]),
        value=np.array([value]),
        duration_ms=duration,
        known=(duration > 0) & known,
        padding=capacity - members.sum(axis=1),
    )
