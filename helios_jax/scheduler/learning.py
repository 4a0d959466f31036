"""Funded acceptance probes: offering a deeper prefix than the ordinary choice, to learn what becomes of it.

An estimate of a deep prefix that is never offered is never corrected. The life of a probe:

1. The ordinary winner is determinate and the learning ledger is full (`policy`, `refresh`).
2. All rounds and mixed programs are priced once more with the bounded optimistic survival.
3. Eligible are those that offer some request at least one depth beyond the ordinary choice, beat
   the ordinary score that way, and leave the request output in which the new depth can be used.
4. The largest optimistic improvement per physical execution time wins; equal ones prefer the
   least-informed added prefix, then the shorter execution, then the smaller geometry.

Fixed-width execution does not probe: a width that is not chosen needs no estimate.

Source: specification, "Funded acceptance learning".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.candidates import Candidates, Decision, scores
from helios_jax.scheduler.lanes import class_sources, lane_tokens, prefix_survival
from helios_jax.scheduler.mixed import mixed_candidates
from helios_jax.scheduler.rounds import round_candidates
from helios_jax.scheduler.state import DECODE


class Probe(NamedTuple):
    """An acceptance probe: row `row` of `candidates`, whose optimistic scores are `rates`."""

    candidates: Candidates
    rates: np.ndarray
    row: int


def hopeful_candidates(decision: Decision) -> list[Candidates]:
    """Every round and mixed program with its best cohort under optimistic survival."""
    state = decision.state
    prefixes = prefix_survival(state, state.policy.adaptive_verification_alpha, hopeful=True)
    hopeful = decision._replace(prefixes=prefixes, tokens=lane_tokens(state, decision.rows, prefixes))
    mixed = mixed_candidates(hopeful)
    return round_candidates(hopeful) + ([mixed] if mixed is not None else [])


def acceptance_probe(decision: Decision, ordinary: Candidates, winner: int, rate: float) -> Probe | None:
    """The best probe, or None when nothing is worth learning.

    Args:
        ordinary: The candidates of the decision, all determinate.
        winner: Row of the ordinary choice.
        rate: Its score.
    """
    state = decision.state
    if state.policy.speculation != "adaptive" or not state.acceptance.depth:
        return None
    blocks = hopeful_candidates(decision)
    if not blocks:
        return None
    hopeful = Candidates(*[np.concatenate(column) for column in zip(*blocks, strict=True)])
    rates = scores(hopeful, decision.values.waiting)
    added = added_prefixes(decision, hopeful, offered_depth(decision, ordinary)[winner])
    eligible = hopeful.known & (rates > rate) & (added > 0).any(axis=1)
    if not eligible.any():
        return None
    rows = np.flatnonzero(eligible)
    gain = (rates[rows] - rate) / hopeful.duration_ms[rows]
    programs, first = state.programs, hopeful.first[rows]
    weight = _least_weight(decision, hopeful, added)[rows]
    geometry = (programs.prompt[first], programs.depth[first], programs.tokens[first], programs.batch[first],
                programs.packed[first])  # fmt: skip
    best = np.lexsort((first, *geometry, hopeful.duration_ms[rows], weight, -gain))[0]
    return Probe(hopeful, rates, int(rows[best]))


def offered_depth(decision: Decision, candidates: Candidates) -> np.ndarray:
    """Proposals that each candidate offers to each decoder, int64 [C, slots]: its target rows less the pending one.

    A device-allocated program counts with its forecast allocation, not with its ceilings.
    """
    alone = (candidates.follow < 0)[:, None] & (decision.state.requests.phase == DECODE)
    return np.where(alone, np.maximum(candidates.work - 1, 0), 0)


def added_prefixes(decision: Decision, candidates: Candidates, ordinary: np.ndarray) -> np.ndarray:
    """The shallowest depth that each candidate offers beyond the ordinary choice, 0 without one; int64 [C, slots].

    It counts only if the output that is left after the whole round is accepted can use that depth
    again, which takes one target row more than the depth.

    Args:
        ordinary: int64 [slots] depths of the ordinary choice.
    """
    requests, offered = decision.state.requests, offered_depth(decision, candidates)
    left = requests.max_tokens - requests.output_len - (offered + 1)
    first = ordinary + 1
    return np.where((offered >= first) & (left >= first + 1), first, 0)


def _least_weight(decision: Decision, candidates: Candidates, added: np.ndarray) -> np.ndarray:
    """Weight of the least-informed prefix that a candidate adds; float64 [C], inf where it adds none."""
    state = decision.state
    source = class_sources(state)[state.programs.lane_class[candidates.first]]
    weight = state.acceptance.accept_weight.transpose(1, 0, 2)[source]  # [C, slots, depth]
    depth, offered = np.arange(1, weight.shape[-1] + 1), offered_depth(decision, candidates)[..., None]
    new = (added[..., None] > 0) & (depth >= added[..., None]) & (depth <= offered)
    return np.where(new, weight, np.inf).min(axis=(1, 2))
