"""Funded acceptance probes: offering a deeper prefix than the ordinary choice, to learn what becomes of it.

An estimate of a deep prefix that is never offered is never corrected. The life of a probe:

1. The ordinary winner is determinate and the learning ledger is full (`policy`, `refresh`).
2. The rounds and mixed programs that may qualify are priced once more, with optimistic survival.
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

from helios_jax.scheduler.candidates import Candidates, Decision, decode_values, scores
from helios_jax.scheduler.lanes import COPY_SOURCE, class_sources, lane_tokens, prefix_survival
from helios_jax.scheduler.mixed import mixed_candidates
from helios_jax.scheduler.programs import SOURCES
from helios_jax.scheduler.rounds import round_candidates
from helios_jax.scheduler.state import DECODE


class Probe(NamedTuple):
    """An acceptance probe: row `row` of `candidates`, whose optimistic scores are `rates`."""

    candidates: Candidates
    rates: np.ndarray
    row: int


def hopeful_candidates(decision: Decision, rate: float, ordinary: np.ndarray) -> Candidates | None:
    """Rounds and mixed programs that may be probes, with their best cohorts under optimistic survival.

    A program is left out when it offers nobody a deeper prefix, a mixed one when it does not reach the
    ordinary score (unless it makes one redundant that does), and a round when the most valuable
    complete prefixes, more than P or not, would beat the ordinary score in no program of its depth
    and source (those are kept or left together, because a smaller one can make a larger redundant).

    Args:
        rate: Score of the ordinary choice.
        ordinary: int64 [slots] depth that the ordinary choice offers each decoder.
    """
    state, programs = decision.state, decision.state.programs
    prefixes = prefix_survival(state, state.policy.adaptive_verification_alpha, hopeful=True)
    hopeful = decision._replace(prefixes=prefixes, tokens=lane_tokens(state, decision.rows, prefixes))
    slots = decision.slots(state.requests.phase == DECODE)
    deeper = (decision.rows[:, slots] > 1 + ordinary[slots]).any(axis=1)[programs.lane_class]
    wanted = deeper & (programs.depth > 0)
    rounds = np.flatnonzero(wanted & (programs.prompt == 0))
    depth = np.where(programs.source == COPY_SOURCE, 0, programs.depth)
    kinds = ((depth * len(SOURCES) + programs.source) * 2 + programs.device_allocates)[rounds]
    wanted[rounds] = np.isin(kinds, kinds[_best_rate(hopeful, rounds, slots) > rate])
    if not wanted.any():
        return None
    mixed = mixed_candidates(hopeful, wanted, least=rate)
    blocks = round_candidates(hopeful, wanted, least=rate) + ([mixed] if mixed is not None else [])
    return Candidates(*[np.concatenate(column) for column in zip(*blocks, strict=True)]) if blocks else None


def _best_rate(hopeful: Decision, rounds: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """An upper bound of each round's score, infinite if it is not measured; float64 [C]."""
    duration, classes = hopeful.duration_ms[rounds], hopeful.state.programs.lane_class[rounds]
    worth = decode_values(hopeful, slots, duration)
    worth += hopeful.values.output_token[slots] * (hopeful.tokens[classes][:, slots] - 1.0)
    worth = -np.sort(-np.where(hopeful.rows[classes][:, slots] > 0, worth, 0.0), axis=1)
    served = np.arange(len(slots)) < hopeful.state.programs.batch[rounds, None]
    measured, known = duration > 0, np.where(duration > 0, duration, 1.0)
    return np.where(measured, (worth * served).sum(axis=1) / known - 0.5 * known * hopeful.values.waiting, np.inf)


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
    depth = offered_depth(decision, ordinary)[winner]
    hopeful = hopeful_candidates(decision, rate, depth)
    if hopeful is None:
        return None
    rates = scores(hopeful, decision.values.waiting)
    added = added_prefixes(decision, hopeful, depth)
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
