"""Random states of decoders and prompts, and a slow, obvious twin of their selection in exact fractions.

The twin enumerates every cohort of every decode, speculative and mixed program. It reads prices and
reference intervals from `current_rates` (which have tests of their own), the stored acceptance means,
and nothing else of the policy: lane lengths, expected output and restrictions are its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from helios_jax.scheduler import Catalog, Constraint, PolicyConfig, ProgramKind, ProgramShape, State, new_state
from helios_jax.scheduler.catalog import Allocation, ProposalSource
from helios_jax.scheduler.service import current_rates
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import admitted, measured, request, small_limits

NS = 3_600_000_000_000
LEARNED, COPY, NONE = ProposalSource.LEARNED, ProposalSource.COPY, ProposalSource.NONE
HOST, DEVICE = Allocation.QUERY_LENGTH, Allocation.PREFIX_LIMIT
KINDS = (ProgramKind.DECODE, ProgramKind.SPECULATIVE, ProgramKind.MIXED)


def exact(value: float) -> Fraction:
    return Fraction(0) if np.isnan(value) else Fraction(float(value))


# ---- states


def speculative(
    b: int, w: int, d: int, p: int | None = None, source: ProposalSource = LEARNED, allocation: Allocation = HOST
) -> ProgramShape:
    packed = b * w if p is None else p
    return ProgramShape(ProgramKind.SPECULATIVE, b, w, d, packed, 0, source, allocation)


def mixed(b: int, w: int, prompt: int, source: ProposalSource = LEARNED) -> ProgramShape:
    return ProgramShape(ProgramKind.MIXED, b, w, w - 1, prompt + (b - 1) * w, prompt, source)


def rectangular(rng: random.Random, source: ProposalSource, batches: Iterable[int]) -> list[ProgramShape]:
    """Width one at every batch, a few wider programs, a deeper one than its width among them."""
    shapes = [speculative(b, 1, 0, source=source) for b in batches]
    for b in batches:
        shapes += [speculative(b, w, w - 1, source=source) for w in rng.sample((2, 3, 4), 2)]
    return [*shapes, speculative(2, 3, rng.choice([1, 4]), source=source)]


def ragged(
    rng: random.Random, source: ProposalSource, batches: Iterable[int], allocation: Allocation = HOST
) -> list[ProgramShape]:
    """Programs of width four whose aggregate rows are fewer than B x W."""
    return [speculative(b, 4, 3, rng.randint(b, 4 * b - 1), source, allocation) for b in batches]


def round_state(
    rng: random.Random, shapes: list[ProgramShape], *, num: int = 6, prompts: float = 0.0, unmeasured: float = 0.0,
    policy: PolicyConfig,
) -> State:  # fmt: skip
    """Decoders (and prompts) with prices, acceptance and limits over many decades."""
    needed = [ProgramShape(ProgramKind.INITIALIZE, 1, 0), ProgramShape(ProgramKind.PREFILL, 1, 64)]
    state = new_state(
        Catalog((*shapes, *needed), aligned=False), small_limits(slots=8, pages=400, max_context=200), policy
    )
    state = dataclasses.replace(state, now_ns=NS)
    flags = [Constraint.NONE] * 4 + [Constraint.NO_LEARNED, Constraint.NO_COPY, Constraint.GRAMMAR]
    specs = [
        request(rng.randint(1, 90), rng.choice([2, 3, 4, 40]), constraints=rng.choice(flags))
        for _ in range(rng.randint(1, num))
    ]
    state, handles = admitted(state, *specs)
    requests = state.requests.draft()
    for (slot, _), spec in zip(handles, specs, strict=True):
        if rng.random() < prompts:
            requests.phase[slot] = Phase.PROMPT
            requests.consumed_len[slot] = requests.committed_len[slot] = rng.randint(0, len(spec.prompt) - 1)
        else:
            requests.phase[slot], requests.consumed_len[slot] = Phase.DECODE, len(spec.prompt)
            requests.output_len[slot] = rng.randint(1, spec.max_tokens - 1)
            requests.committed_len[slot] = len(spec.prompt) + requests.output_len[slot] - 1
            requests.delivery_r[slot] = rng.choice([np.nan, 10 ** rng.uniform(-3, 6)])
            requests.proposals[slot] = rng.choice([0, 1, 2, 9])
            requests.visible_ns[slot] = NS - rng.randint(0, 2 * 10**9)
        requests.token_r[slot] = np.nan if slot == 0 and rng.random() < 0.3 else 10 ** rng.uniform(-3, 6)
        requests.last_use_ns[slot] = rng.randint(0, NS)
    state = dataclasses.replace(state, requests=requests.sealed(), acceptance=random_acceptance(rng, state))
    return measured(state, lambda _: 0 if rng.random() < unmeasured else rng.randint(10**5, 10**8))


def random_acceptance(rng: random.Random, state: State) -> object:
    known = state.acceptance

    def draw(shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        return np.array([rng.uniform(low, high) for _ in range(int(np.prod(shape)))]).reshape(shape)

    columns = {
        "accept_mean": np.sort(draw(known.accept_mean.shape, 0, 1), axis=-1)[..., ::-1].copy(),
        "accept_weight": draw(known.accept_weight.shape, 0.1, 128),
        "forecast_mean": np.sort(draw(known.forecast_mean.shape, 0, 1), axis=-1)[..., ::-1].copy(),
    }
    if rng.random() < 0.3:  # censoring can leave means that rise along the depth
        columns["accept_mean"][rng.randrange(8)] = draw(known.accept_mean.shape[1:], 0, 1)
    for column in columns.values():
        column.setflags(write=False)
    return dataclasses.replace(known, **columns)


def random_policy(rng: random.Random, speculation: str, alpha: float | None = None) -> PolicyConfig:
    return PolicyConfig(
        output_token_value=rng.choice([1.0, 64.0]),
        token_fairness=rng.choice([0.25, 16.0]),
        delivery_fairness=rng.choice([0.0, 4.0]),
        decode_age_price=rng.choice([0.0, 0.1, 3.0]),
        adaptive_verification_alpha=rng.choice([1.0, 2.0, 1.5]) if alpha is None else alpha,
        speculation=speculation,
    )


# ---- the twin


@dataclasses.dataclass(frozen=True)
class Choice:
    """A program with its optimal cohort: target rows (or prompt tokens) by slot, the prompt's slot, the score."""

    shape: ProgramShape
    rows: tuple[tuple[int, int], ...]
    prompt: int | None
    score: Fraction


class RoundOracle:
    """Enumerates the decision of one state; `hopeful` prices proposals by the optimistic estimate."""

    def __init__(self, state: State, *, hopeful: bool = False) -> None:
        self.state, self.rates, self.policy = state, current_rates(state), state.policy
        requests = state.requests
        self.decoders = np.flatnonzero(requests.phase == Phase.DECODE).tolist()
        self.prompts = np.flatnonzero(requests.phase == Phase.PROMPT).tolist()
        self.waiting = Fraction(self.policy.decode_age_price) * len(self.decoders)
        self.duration = {
            shape: Fraction(int(ns), 10**6) for shape, ns in zip(state.catalog, state.costs.estimate_ns, strict=True)
        }
        self.survival = {
            (slot, source): self._survival(slot, row, hopeful)
            for slot in self.decoders
            for row, source in enumerate((LEARNED, COPY))
        }

    def _survival(self, slot: int, row: int, hopeful: bool) -> list[Fraction]:
        means = self.state.acceptance.accept_mean[slot, row].tolist()
        weights = self.state.acceptance.accept_weight[slot, row].tolist()
        used, lowest = [], 1.0
        for mean, weight in zip(means, weights, strict=True):
            if hopeful:
                mean = min(1.0, mean + (np.log(20.0) / (2.0 * weight)) ** 0.5)
            lowest = min(lowest, mean)
            used.append(Fraction(float(lowest**self.policy.adaptive_verification_alpha)))
        return used

    def length(self, shape: ProgramShape, slot: int) -> int:
        """The complete prefix of a lane, 0 where restrictions or the mode forbid the program."""
        rows = self._possible(shape, slot)
        mode, drafts = self.policy.speculation, shape.proposal_depth > 0
        if not rows or mode == "adaptive":
            return rows
        if mode == "off":
            return 0 if drafts else rows
        rivals = [other for other in self.state.catalog if other.kind in KINDS and other.proposal_depth > 0]
        rivals = [other for other in rivals if other.allocation is HOST]
        if not drafts:
            return 0 if any(self._possible(other, slot) > 1 for other in rivals) else rows
        if shape.allocation is DEVICE:
            return 0
        mine = [self._possible(other, slot) for other in rivals if other.proposal_source is shape.proposal_source]
        return rows if rows == max(mine) else 0

    def _possible(self, shape: ProgramShape, slot: int) -> int:
        r, flags = self.state.requests, Constraint(int(self.state.requests.constraints[slot]))
        if shape.kind is ProgramKind.DECODE:
            return 1
        source, depth = shape.proposal_source, shape.proposal_depth
        if depth and source is LEARNED and flags & Constraint.NO_LEARNED:
            return 0
        if depth and source is COPY and flags & Constraint.NO_COPY:
            return 0
        output = int(r.max_tokens[slot] - r.output_len[slot])
        context = int(self.state.limits.max_context - r.committed_len[slot])
        limits = [depth + 1, shape.token_capacity, output, context]
        return min([*limits, 1 + int(r.proposals[slot])] if source is COPY else limits)

    def token_value(self, slot: int) -> Fraction:
        fairness = Fraction(self.policy.token_fairness) * exact(self.rates.token_r[slot])
        return Fraction(self.policy.output_token_value) + fairness

    def lane_value(self, shape: ProgramShape, slot: int, rows: int) -> Fraction:
        expected = 1 + sum(self.survival[slot, shape.proposal_source][: rows - 1]) if rows > 1 else Fraction(1)
        value = expected * self.token_value(slot)
        value += Fraction(self.policy.delivery_fairness) * exact(self.rates.delivery_r[slot])
        age = Fraction(self.state.now_ns - int(self.state.requests.visible_ns[slot]), 10**6) + self.duration[shape]
        return value + Fraction(self.policy.decode_age_price) * exact(self.rates.sigma[slot]) * age

    def prompt_value(self, slot: int, tokens: int) -> Fraction:
        fairness = Fraction(self.policy.token_fairness) * exact(self.rates.token_r[slot])
        remaining = int(self.state.requests.prompt_len[slot] - self.state.requests.consumed_len[slot])
        return tokens * (1 + fairness) + (self.token_value(slot) if tokens == remaining else 0)

    def prompt_tokens(self, shape: ProgramShape, slot: int) -> int:
        room = shape.token_capacity if shape.kind is ProgramKind.PREFILL else shape.prefill_capacity
        return min(room, int(self.state.requests.prompt_len[slot] - self.state.requests.consumed_len[slot]))

    def score(self, value: Fraction, shape: ProgramShape) -> Fraction:
        duration = self.duration[shape]
        return value / duration - duration * self.waiting / 2 if duration else value

    def cohorts(self, shape: ProgramShape) -> Iterator[tuple[dict[int, int], int | None]]:
        """Every legal (work by slot, prompt slot): complete prefixes only, P respected."""
        if shape.kind is ProgramKind.PREFILL:
            for slot in self.prompts:
                yield {slot: self.prompt_tokens(shape, slot)}, slot
            return
        lanes = {slot: self.length(shape, slot) for slot in self.decoders}
        lanes = {slot: rows for slot, rows in lanes.items() if rows}
        prompts = [None, *self.prompts] if shape.kind is ProgramKind.MIXED else [None]
        for prompt in prompts:
            room = shape.batch_capacity - (prompt is not None)
            for size in range(min(room, len(lanes)) + 1):
                for cohort in itertools.combinations(lanes, size):
                    work = {slot: lanes[slot] for slot in cohort}
                    fits = shape.kind is not ProgramKind.SPECULATIVE or sum(work.values()) <= shape.packed_capacity
                    if fits and (cohort or prompt is not None):
                        extra = {} if prompt is None else {prompt: self.prompt_tokens(shape, prompt)}
                        yield {**work, **extra}, prompt

    def value(self, shape: ProgramShape, work: dict[int, int], prompt: int | None) -> Fraction:
        decoding = (self.lane_value(shape, slot, rows) for slot, rows in work.items() if slot != prompt)
        return sum(decoding, Fraction(0)) + (self.prompt_value(prompt, work[prompt]) if prompt is not None else 0)

    def choices(self) -> list[Choice]:
        """The best cohort of every shape."""
        found = []
        for shape in self.state.catalog:
            if shape.kind not in (*KINDS, ProgramKind.PREFILL):
                continue
            options = [
                Choice(shape, tuple(sorted(work.items())), prompt, self.score(self.value(shape, work, prompt), shape))
                for work, prompt in self.cohorts(shape)
            ]
            if options:
                found.append(max(options, key=lambda choice: (choice.score, len(choice.rows))))
        return found

    def best(self) -> Fraction:
        """Score of the winner: redundant padding dropped, unmeasured choices first."""
        choices = self.choices()
        choices = [one for one in choices if not any(self.dominates(other, one) for other in choices)]
        choices = [one for one in choices if not self.excluded(one)]
        unknown = [one for one in choices if not self.duration[one.shape]]
        return max(one.score for one in unknown or choices)

    def dominates(self, small: Choice, large: Choice) -> bool:
        a, b = small.shape, large.shape
        if a.kind is not b.kind or small.rows != large.rows or small.prompt != large.prompt:
            return False
        if self.proposals(small) != self.proposals(large):
            return False
        pairs = [(a.batch_capacity, b.batch_capacity), (a.token_capacity, b.token_capacity)]
        pairs += [(a.prefill_capacity, b.prefill_capacity)]
        if a.kind is ProgramKind.SPECULATIVE:
            copies = a.proposal_source is COPY and b.proposal_source is COPY
            pairs += [(a.packed_capacity, b.packed_capacity)]
            pairs += [(a.proposal_depth, b.proposal_depth)] if copies else []
        return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    @staticmethod
    def proposals(choice: Choice) -> tuple:
        """What is really proposed: nothing by width one, everything by a learned program, the supply by a copy one."""
        shape, lanes = choice.shape, [rows for slot, rows in choice.rows if slot != choice.prompt]
        if not lanes or not shape.proposal_depth:
            return (0,)
        if shape.kind is ProgramKind.SPECULATIVE and shape.proposal_source is COPY:
            supplied = max(lanes) - 1
            return (supplied, COPY, shape.allocation) if supplied else (0,)
        return (shape.proposal_depth, shape.proposal_source, shape.allocation)

    def excluded(self, choice: Choice) -> bool:
        """A larger unmeasured mixed program whose prompt row a smaller one consumes up to its endpoint."""
        shape, prompt = choice.shape, choice.prompt
        if shape.kind is not ProgramKind.MIXED or prompt is None or self.duration[shape]:
            return False
        end = int(self.state.requests.endpoint[prompt] - self.state.requests.consumed_len[prompt])
        demand = min(end, dict(choice.rows)[prompt])
        for other in self.state.catalog.of_kind(ProgramKind.MIXED):
            same = (other.token_capacity, other.proposal_depth, other.proposal_source) == (
                shape.token_capacity, shape.proposal_depth, shape.proposal_source)  # fmt: skip
            rows = len(choice.rows) <= other.batch_capacity <= shape.batch_capacity
            if same and rows and demand <= other.prefill_capacity < shape.prefill_capacity:
                return True
        return False
