"""Prerequisites: a state operation judged by the inference that it enables.

1. `enabled_phases` says what each waiting request can do right after its stage.
2. Every pair of a prerequisite program and a following inference program competes, with both
   cohorts chosen together (`pairs`). At least one newly ready row takes part in what follows.
3. The productive part of a first stage alone, the retirements of terminal requests, competes too.
4. Chains of several stages are ranked by an individual continuation (`multistage`).

The pair's score is its useful value over T + F; the submitted plan keeps the prerequisite and
its T, and what follows is planned anew. Source: specification, "Prerequisites and completion".
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import Candidates, Decision
from helios_jax.scheduler.multistage import continuation_candidates, terminal_candidates
from helios_jax.scheduler.pairs import best_prompts, delivery_pairs, prefill_pairs, same_age_prices
from helios_jax.scheduler.race import Race
from helios_jax.scheduler.sequences import Stage
from helios_jax.scheduler.stages import at_window_end, next_features
from helios_jax.scheduler.state import DECODE, INITIALIZE, PROMPT, RESTORE, SNAPSHOT, TERMINAL, VISION, State

__all__ = ["best_prompts", "enabled_phases", "prerequisite_candidates"]


def prerequisite_candidates(decision: Decision, race: Race | None = None) -> list[Candidates]:
    """Every prerequisite program with everything that it may enable.

    Args:
        race: What the other candidates have reached: pairs that cannot win are left out.
    """
    found: list[Candidates] = []
    for stage in _stages(decision):
        blocks: list[Candidates] = []
        if stage.after.any():
            for scored in (False, True):
                blocks += prefill_pairs(decision, stage, race, scored=scored)
            if race is not None:
                race.saw(blocks)
            blocks += delivery_pairs(decision, stage, race)
        blocks += continuation_candidates(decision, stage)
        found += blocks + terminal_candidates(decision, stage)
    return [block for block in found if len(block.first)]


def enabled_phases(state: State) -> np.ndarray:
    """What each request can do once its present stage is over: PROMPT, DECODE or 0; int64 [slots].

    0 stands for one that needs a further stage, or that needs none.
    """
    requests, phase = state.requests, state.requests.phase
    images = requests.window_images - requests.images_done
    windowed = (requests.private_row > 0) & (requests.restore_row == requests.private_row)
    fresh = ((phase == INITIALIZE) & (images == 0)) | ((phase == VISION) & (images == 1))
    fresh |= (phase == RESTORE) & (images == 0) & ~windowed
    saved = phase == SNAPSHOT
    for slot in np.flatnonzero(saved & (requests.private_row > 0)).tolist():
        spec = state.specs[slot]
        saved[slot] = spec is not None and not at_window_end(requests, slot, spec)
    decoding = saved & (requests.consumed_len == requests.prompt_len)
    return np.where(decoding, DECODE, np.where(fresh | saved, PROMPT, 0))


def _stages(decision: Decision) -> list[Stage]:
    """The prerequisites that somebody waits for."""
    state, phase = decision.state, decision.state.requests.phase
    programs = state.programs
    ending = phase == TERMINAL
    kinds = ((INITIALIZE, programs.initialize), (RESTORE, programs.restore), (VISION, programs.vision),
             (SNAPSHOT, programs.snapshot))  # fmt: skip
    enabled, stages = None, []
    for number, rows in kinds:
        mine = phase == number
        retires = number == SNAPSHOT and bool(ending.any())
        if not (retires or mine.any()) or not len(rows):
            continue
        enabled = enabled_phases(state) if enabled is None else enabled
        waiting = decision.slots(mine)
        terminal = _by_age(decision, decision.slots(ending)) if retires else np.zeros(0, np.int64)
        if number == VISION:
            fits = next_features(state, waiting) <= programs.tokens[rows, None]
            rows, fits = rows[fits.any(axis=1)], fits[fits.any(axis=1)]
        else:
            rows = _worth_a_look(decision, rows, len(waiting) + len(terminal))
            fits = np.ones((len(rows), len(waiting)), np.bool_)
        if len(rows):
            stages.append(Stage(rows, waiting, enabled[waiting], fits, terminal))
    return stages


def _by_age(decision: Decision, terminal: np.ndarray) -> np.ndarray:
    """Terminal slots by worth, which is by age: the order holds for every duration."""
    return terminal[np.argsort(-decision.values.age_ms[terminal], kind="stable")]


def _worth_a_look(decision: Decision, rows: np.ndarray, demand: int) -> np.ndarray:
    """The programs whose cohorts cannot all be a smaller one's: the filter of padding, before the search.

    Programs with room for all of the `demand` requests agree in every cohort, so the smallest
    makes the others redundant, unless streams of different age prices rank differently at
    different durations; then the filter after the search decides.
    """
    if not same_age_prices(decision):
        return rows
    capacity = decision.state.programs.batch[rows]
    roomy = capacity[capacity >= demand]
    return rows[capacity <= roomy.min()] if len(roomy) else rows
