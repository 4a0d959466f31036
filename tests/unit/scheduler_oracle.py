"""The slow, obvious twin of selection: every cohort, every split, exact fractions.

Works on states of few requests. Reads prices and reference intervals from `current_rates`
(which have tests of their own) and nothing else of the policy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from helios_jax.scheduler import ProgramShape, State
from helios_jax.scheduler.service import current_rates
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import DECODE, INITIALIZE, PREFILL, SCORED


@dataclasses.dataclass(frozen=True)
class Choice:
    """One candidate: programs, work of each request, and its exact score."""

    shapes: tuple[ProgramShape, ...]
    work: tuple[tuple[int, int], ...]  # (slot, tokens) of the token-producing stage
    members: frozenset[int]  # rows of the submitted program
    known: bool
    score: Fraction


def exact(value: float) -> Fraction:
    return Fraction(0) if np.isnan(value) else Fraction(float(value))


class Oracle:
    """Enumerates one decision."""

    def __init__(self, state: State) -> None:
        self.state, self.rates, self.policy = state, current_rates(state), state.policy
        requests = state.requests
        self.remaining = (requests.prompt_len - requests.consumed_len).tolist()
        self.decoders = np.flatnonzero(requests.phase == Phase.DECODE).tolist()
        self.ready = np.flatnonzero(requests.phase == Phase.PROMPT).tolist()
        self.fresh = np.flatnonzero(requests.phase == Phase.INITIALIZE).tolist()
        self.waiting = Fraction(self.policy.decode_age_price) * len(self.decoders)
        estimate = state.costs.estimate_ns.tolist()
        self.duration = {shape: Fraction(estimate[i], 10**6) for i, shape in enumerate(state.catalog)}

    def decode_value(self, slot: int, duration: Fraction) -> Fraction:
        p = self.policy
        service = Fraction(p.output_token_value) + Fraction(p.token_fairness) * exact(self.rates.token_r[slot])
        service += Fraction(p.delivery_fairness) * exact(self.rates.delivery_r[slot])
        age = Fraction(self.state.now_ns - int(self.state.requests.visible_ns[slot]), 10**6)
        return service + Fraction(p.decode_age_price) * exact(self.rates.sigma[slot]) * (age + duration)

    def prompt_value(self, slot: int, tokens: int) -> Fraction:
        fairness = Fraction(self.policy.token_fairness) * exact(self.rates.token_r[slot])
        value = tokens * (1 + fairness)
        if tokens == self.remaining[slot] and self.state.requests.max_tokens[slot] > 0:
            value += Fraction(self.policy.output_token_value) + fairness
        return value

    def score(self, value: Fraction, duration: Fraction, known: bool) -> Fraction:
        return value / duration - duration * self.waiting / 2 if known else value

    def decode_choices(self) -> list[Choice]:
        found = []
        for shape in self.state.catalog.of_kind(DECODE):
            duration = self.duration[shape]
            size = min(shape.batch_capacity, len(self.decoders))
            options = []
            for cohort in itertools.combinations(self.decoders, size) if size else ():
                value = sum(self.decode_value(slot, duration) for slot in cohort)
                score = self.score(value, duration, duration > 0)
                work = tuple((slot, 1) for slot in cohort)
                options.append(Choice((shape,), work, frozenset(cohort), duration > 0, score))
            found += [max(options, key=lambda c: c.score)] if options else []
        return found

    def prompt_choices(self, scored: bool) -> list[Choice]:
        """Every prefill alone, and after every initialise program, with its optimal cohort."""
        kind = SCORED if scored else PREFILL
        mine = [s for s in self.ready + self.fresh if bool(self.state.requests.scored[s]) == scored]
        found = []
        for shape in self.state.catalog.of_kind(kind):
            found += self._best(None, shape, [s for s in mine if s in self.ready])
            for first in self.state.catalog.of_kind(INITIALIZE):
                found += self._best(first, shape, mine)
        return found

    def _best(self, first: ProgramShape | None, shape: ProgramShape, slots: list[int]) -> list[Choice]:
        shapes = (shape,) if first is None else (first, shape)
        duration, known = sum(self.duration[s] for s in shapes), all(self.duration[s] > 0 for s in shapes)
        best: Choice | None = None
        for work in splits(slots, [self.remaining[s] for s in slots], shape.batch_capacity, shape.token_capacity):
            new = [slot for slot, _ in work if slot in self.fresh]
            if first is not None and not 1 <= len(new) <= first.batch_capacity:
                continue
            score = self.score(sum(self.prompt_value(*item) for item in work), duration, known)
            if best is None or score > best.score:
                best = Choice(shapes, tuple(sorted(work)), self._members(first, work, new), known, score)
        return [best] if best else []

    def _members(self, first: ProgramShape | None, work: list, new: list[int]) -> frozenset[int]:
        if first is None:
            return frozenset(slot for slot, _ in work)
        idle = sorted(
            (slot for slot in self.fresh if slot not in new), key=lambda s: (self.state.requests.last_use_ns[s], s)
        )
        return frozenset(new + idle[: first.batch_capacity - len(new)])

    def best(self) -> Fraction:
        """Score of the winner after dominance, exclusion and 'indeterminate wins'."""
        choices = self.undominated(self.decode_choices() + self.prompt_choices(False) + self.prompt_choices(True))
        choices = [choice for choice in choices if not self.excluded(choice)]
        if any(not choice.known for choice in choices):
            choices = [choice for choice in choices if not choice.known]
        return max(choice.score for choice in choices)

    def undominated(self, choices: list[Choice]) -> list[Choice]:
        def extents(choice: Choice) -> list[int]:
            return [v for s in choice.shapes for v in (s.batch_capacity, s.token_capacity)]

        def same(a: Choice, b: Choice) -> bool:
            kinds = [s.kind for s in a.shapes] == [s.kind for s in b.shapes]
            return kinds and a.work == b.work and a.members == b.members

        def loses(a: Choice) -> bool:
            return any(
                same(a, b) and extents(a) != extents(b) and all(x >= y for x, y in zip(extents(a), extents(b)))  # noqa: B905
                for b in choices
            )

        return [choice for choice in choices if not loses(choice)]

    def excluded(self, choice: Choice) -> bool:
        shape = choice.shapes[-1]
        if shape.kind is DECODE or self.duration[shape] > 0:
            return False
        requests = self.state.requests
        demand = sum(min(n, int(requests.endpoint[s] - requests.consumed_len[s])) for s, n in choice.work)
        return any(
            other.token_capacity < shape.token_capacity
            and len(choice.work) <= other.batch_capacity <= shape.batch_capacity
            and other.token_capacity >= demand
            for other in self.state.catalog.of_kind(shape.kind)
        )


def splits(slots: list[int], remaining: list[int], rows: int, tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to give at most `rows` of the slots some of `tokens` tokens, at least one in all."""

    def extend(index: int, rows: int, tokens: int) -> Iterator[list[tuple[int, int]]]:
        if index == len(slots):
            yield []
            return
        yield from extend(index + 1, rows, tokens)
        if rows:
            for length in range(1, min(remaining[index], tokens) + 1):
                for rest in extend(index + 1, rows - 1, tokens - length):
                    yield [(slots[index], length), *rest]

    return (work for work in extend(0, rows, tokens) if work)
