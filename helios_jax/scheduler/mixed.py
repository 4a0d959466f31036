"""Candidates of mixed programs: at most one prompt row beside decoding rows, in one execution.

For each shape the best decode-only cohort is compared with the best prompt row plus the most
valuable decoders in the rows that are left. A prompt alone is legal. The packed extent holds
every such cohort, so lanes are additive and both choices are exact.

Source: specification, "Mixed execution contract".
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import (
    Candidates,
    Decision,
    delivery_lanes,
    prompt_slots,
    redundant_mixed,
    scatter,
    single_stage,
    unused_rows,
)
from helios_jax.scheduler.joint import prefix_sums
from helios_jax.scheduler.prerequisites import best_prompts
from helios_jax.scheduler.pruning import may_matter
from helios_jax.scheduler.state import DECODE, PROMPT
from helios_jax.scheduler.utility import undominated


def mixed_candidates(decision: Decision, wanted: np.ndarray | None = None, least: float = -np.inf) -> Candidates | None:
    """One candidate a mixed program that serves anybody, redundant ones removed.

    Args:
        wanted: bool [programs] those that are looked at; all without it.
        least: Score below which a measured candidate does not matter.
    """
    state, programs = decision.state, decision.state.programs
    kind = programs.mixed if wanted is None else programs.mixed[wanted[programs.mixed]]
    prompts = prompt_slots(decision, PROMPT, scored=False)
    decoders = decision.slots(state.requests.phase == DECODE)
    if not len(kind) or not (len(prompts) or len(decoders)):
        return None
    num_slots, duration = state.limits.slots, decision.duration_ms[kind]
    values, rows = delivery_lanes(decision, kind, decoders, duration)
    prompt, prompt_value, prompt_work = best_prompts(decision, kind, prompts)
    order, sums = _ranked(values, rows)
    most, which = (rows > 0).sum(axis=1), np.arange(len(kind))
    num_alone, num_beside = np.minimum(programs.batch[kind], most), np.minimum(programs.batch[kind] - 1, most)
    alone_value, beside_value = sums[which, num_alone], sums[which, num_beside] + prompt_value
    more = num_alone < 1 + num_beside
    with_prompt = (prompt_work > 0) & ((beside_value > alone_value) | ((beside_value == alone_value) & more))
    taken = np.where(with_prompt, num_beside, num_alone)
    totals = np.where(with_prompt, beside_value, alone_value)
    matter = may_matter(decision, kind, totals, least)
    if not matter.all():
        if not matter.any():
            return None
        kind, rows, order, taken, totals, duration, prompt, prompt_work, with_prompt = (
            column[matter] for column in (kind, rows, order, taken, totals, duration, prompt, prompt_work, with_prompt)
        )
    chosen, which = np.zeros(rows.shape, np.bool_), np.arange(len(kind))
    chosen[which[:, None], order] = np.arange(rows.shape[1]) < taken[:, None]
    work = scatter(np.where(chosen, rows, 0), decoders, num_slots)
    here = np.flatnonzero(with_prompt)
    work[here, prompt[here]] = prompt_work[here]
    prompt_slot = np.where(with_prompt, prompt, -1)
    keep = work.any(axis=1) & _undominated(decision, kind, work, prompt_slot, taken > 0)
    keep &= ~redundant_mixed(decision, kind, work, prompt_slot)
    if not keep.any():
        return None
    kind, work = kind[keep], work[keep]
    return single_stage(kind, work, totals[keep], duration[keep], unused_rows(programs, kind, work), prompt_slot[keep])


def _ranked(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lanes by value, those that cannot take part last: int64 [C, n] order and float64 [C, n + 1] sums."""
    order = np.where(rows > 0, -values, 1.0).argsort(axis=1, kind="stable")
    return order, prefix_sums(values[np.arange(len(order))[:, None], order])


def _undominated(
    decision: Decision, kind: np.ndarray, work: np.ndarray, prompt_slot: np.ndarray, decodes: np.ndarray
) -> np.ndarray:
    """bool [C]: no mixed program with the same lanes, prompt row and proposal depth is smaller.

    Args:
        decodes: bool [C]; a prompt alone has no proposals, whatever the program could make.
    """
    programs = decision.state.programs
    identity = np.array([prompt_slot, programs.depth[kind] * decodes, programs.source[kind] * decodes]).T
    return undominated(np.concatenate([work, identity], axis=1), programs.extents[kind, :3])
