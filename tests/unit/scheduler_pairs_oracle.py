"""The slow, obvious twin of prerequisite selection: every pair, every joint cohort, exact fractions.

For states of up to eight requests. A candidate is a prerequisite program, the inference that
follows it, what the prompt row of a following mixed program is (absent, ready already, enabled
by the prerequisite), and the most valuable cohort of all that exist. Reads prices and
reference intervals from `current_rates` (which have tests of their own) and nothing else of
the policy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from helios_jax.scheduler import Constraint, ProgramKind, ProgramShape, State
from helios_jax.scheduler.catalog import Allocation
from helios_jax.scheduler.service import current_rates
from helios_jax.scheduler.state import Phase

Work = tuple[tuple[int, int], ...]  # (slot, tokens) of the program that follows
PREREQUISITES = {
    ProgramKind.INITIALIZE: Phase.INITIALIZE,
    ProgramKind.RESTORE: Phase.RESTORE,
    ProgramKind.VISION: Phase.VISION,
    ProgramKind.SNAPSHOT: Phase.SNAPSHOT,
}
FOLLOWING = (
    ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL, ProgramKind.DECODE, ProgramKind.SPECULATIVE, ProgramKind.MIXED,
)  # fmt: skip
PROMPT, DECODE, LATER = "prompt", "decode", "later"  # what a request can do after its present stage


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best cohort of one pair of programs (or of a prerequisite alone), and its exact score."""

    shapes: tuple[ProgramShape, ...]
    case: str  # of the prompt row of a following mixed program; empty for other kinds
    work: Work
    members: frozenset[int]  # rows of the prerequisite
    known: bool
    score: Fraction


@dataclasses.dataclass(frozen=True)
class Times:
    """Durations of a pair, ms; `known` if both are measured."""

    first: Fraction
    follow: Fraction
    known: bool

    @property
    def total(self) -> Fraction:
        return self.first + self.follow


def exact(value: float) -> Fraction:
    return Fraction(0) if np.isnan(value) else Fraction(float(value))


class PairOracle:
    """Enumerates the prerequisites of one decision."""

    def __init__(self, state: State) -> None:
        self.state, self.rates, self.policy, self.requests = state, current_rates(state), state.policy, state.requests
        phase = self.requests.phase
        order = sorted(range(len(phase)), key=lambda s: (int(self.requests.last_use_ns[s]), s))
        self.in_phase = {p: [s for s in order if phase[s] == p] for p in Phase}
        self.terminals = sorted(self.in_phase[Phase.TERMINAL], key=lambda s: int(self.requests.terminal_ns[s]))
        estimate = state.costs.estimate_ns.tolist()
        self.duration = {shape: Fraction(estimate[i], 10**6) for i, shape in enumerate(state.catalog)}
        saved = [
            s for s in self.in_phase[Phase.SNAPSHOT] if self.requests.consumed_len[s] == self.requests.prompt_len[s]
        ]
        streams = len(self.in_phase[Phase.DECODE]) + len(saved)
        self.waiting = Fraction(self.policy.decode_age_price) * streams
        self.waiting += Fraction(self.policy.terminal_age_price) * len(self.terminals)

    # ---- what a request is, and what it is worth

    def images(self, slot: int) -> list[int]:
        """Features of the images of its window that are still to be encoded."""
        spec, requests = self.state.specs[slot], self.requests
        assert spec is not None
        window = range(int(requests.images_done[slot]), int(requests.window_images[slot]))
        return [spec.image_spans[i].end - spec.image_spans[i].start for i in window]

    def at_window_end(self, slot: int) -> bool:
        spec, last = self.state.specs[slot], int(self.requests.window_images[slot])
        assert spec is not None
        return last < len(spec.image_spans) and spec.image_spans[last].start == self.requests.consumed_len[slot]

    def enables(self, slot: int) -> str:
        """What the request can do when its present stage is over."""
        requests, phase = self.requests, self.requests.phase[slot]
        if phase == Phase.VISION:
            return PROMPT if len(self.images(slot)) == 1 else LATER
        if phase == Phase.SNAPSHOT:
            if requests.consumed_len[slot] == requests.prompt_len[slot]:
                return DECODE
            return LATER if self.at_window_end(slot) else PROMPT
        between = requests.private_row[slot] and requests.restore_row[slot] == requests.private_row[slot]
        return LATER if self.images(slot) or (phase == Phase.RESTORE and between) else PROMPT

    def fits(self, first: ProgramShape, slot: int) -> bool:
        return first.kind is not ProgramKind.VISION or self.images(slot)[0] <= first.token_capacity

    def target_rows(self, slot: int, shape: ProgramShape) -> int:
        """Rows of one decoding lane: its pending token, and proposals as far as program, output and context allow."""
        if shape.kind is ProgramKind.DECODE:
            return 1
        requests, limits = self.requests, self.state.limits
        left = min(int(requests.max_tokens[slot] - requests.output_len[slot]),
                   int(limits.max_context - requests.committed_len[slot]))  # fmt: skip
        refuses = requests.constraints[slot] & int(Constraint.NO_LEARNED)
        return 0 if shape.proposal_depth and refuses else min(shape.proposal_depth + 1, shape.token_capacity, left)

    def decode_value(self, slot: int, shape: ProgramShape, times: Times) -> Fraction:
        """Expected output 1 + s_1 + s_2 + ..., one delivery, and the age credit."""
        p, survival = self.policy, self.state.acceptance.accept_mean[slot, 0]
        expected = 1 + sum((exact(survival[d]) for d in range(self.target_rows(slot, shape) - 1)), Fraction(0))
        value = expected * self.token_price(slot)
        value += Fraction(p.delivery_fairness) * exact(self.rates.delivery_r[slot])
        age = Fraction(self.state.now_ns - int(self.requests.visible_ns[slot]), 10**6)
        age += times.total if times.known else 0
        return value + Fraction(p.decode_age_price) * exact(self.rates.sigma[slot]) * age

    def token_price(self, slot: int) -> Fraction:
        p = self.policy
        return Fraction(p.output_token_value) + Fraction(p.token_fairness) * exact(self.rates.token_r[slot])

    def prompt_value(self, slot: int, tokens: int) -> Fraction:
        fairness = Fraction(self.policy.token_fairness) * exact(self.rates.token_r[slot])
        value = tokens * (1 + fairness)
        done = self.requests.consumed_len[slot] + tokens == self.requests.prompt_len[slot]
        if done and self.requests.max_tokens[slot] > 0:
            value += Fraction(self.policy.output_token_value) + fairness
        return value

    @functools.cached_property
    def terminal_sigma(self) -> Fraction:
        """K = k = the terminal requests: the fastest measured snapshot program for them; 0 if none is measured."""
        number = len(self.terminals)
        shapes = [s for s in self.state.catalog.of_kind(ProgramKind.SNAPSHOT) if self.duration[s] > 0]
        return min((number * self.duration[s] / min(s.batch_capacity, number) for s in shapes), default=Fraction(0))

    def terminal_value(self, slot: int, times: Times) -> Fraction:
        """Retirement, its urgency at its end T, and the waiting from T to T + F that it no longer costs."""
        price = Fraction(self.policy.terminal_age_price)
        age = Fraction(self.state.now_ns - int(self.requests.terminal_ns[slot]), 10**6)
        first, rest = (times.first, times.follow) if times.known else (Fraction(0), Fraction(0))
        value = Fraction(self.policy.terminal_value) + price * self.terminal_sigma * (age + first)
        return value + price * rest * (age + first + rest / 2)

    def lengths(self, slot: int, most: int, boundary: int | None = None) -> list[int]:
        """Tokens that one prefill may take: up to the boundary, and to no place inside an image."""
        spec, consumed = self.state.specs[slot], int(self.requests.consumed_len[slot])
        assert spec is not None
        end = int(self.requests.boundary[slot]) if boundary is None else boundary
        stops = [at for at in range(consumed + 1, min(end, consumed + most) + 1)
                 if not any(span.start < at < span.end for span in spec.image_spans)]  # fmt: skip
        return [at - consumed for at in stops]

    # ---- cohorts of what follows

    def cases(self, shape: ProgramShape) -> tuple[str, ...]:
        return ("absent", "ready", "enabled") if shape.kind is ProgramKind.MIXED else ("",)

    def cohorts(self, shape: ProgramShape, case: str, new: list[int], room: int) -> Iterator[Work]:
        """Every work of the following program in which 1 to `room` newly ready rows take part."""
        unscored = [s for s in new if self.enables(s) == PROMPT and not self.requests.scored[s]]
        decoders = self.in_phase[Phase.DECODE] + [s for s in new if self.enables(s) == DECODE]
        decoders = [s for s in decoders if self.target_rows(s, shape)]
        rows, lanes = shape.batch_capacity, {s: self.target_rows(s, shape) for s in decoders}
        if shape.kind in (ProgramKind.DECODE, ProgramKind.SPECULATIVE) or case == "absent":
            every = (self.allocated(shape, {s: lanes[s] for s in some}) for some in subsets(decoders, rows))
            every = (work for work in every if work is not None)
        elif shape.kind is ProgramKind.MIXED:
            ready = [s for s in self.in_phase[Phase.PROMPT] if not self.requests.scored[s]]
            prompts = unscored if case == "enabled" else ready
            every = (
                (*((s, lanes[s]) for s in some), (prompt, tokens))
                for prompt in prompts
                for tokens in self.lengths(prompt, shape.prefill_capacity)
                for some in subsets(decoders, rows - 1)
            )
        else:
            scored = shape.kind is ProgramKind.SCORED_PREFILL
            mine = self.in_phase[Phase.PROMPT] + [s for s in new if self.enables(s) == PROMPT]
            every = self.splits([s for s in mine if self.requests.scored[s] == scored], rows, shape.token_capacity)
        return (work for work in every if 1 <= sum(slot in new for slot, _ in work) <= room)

    def allocated(self, shape: ProgramShape, lanes: dict[int, int]) -> Work | None:
        """Target rows of a cohort that shares P: the best next proposal is admitted until the rows are used up.

        The host's order is expected value, the device's its forecast; fixed selection never cuts a prefix.
        None: the cohort does not fit.
        """
        packed = shape.packed_capacity if shape.kind is ProgramKind.SPECULATIVE else sum(lanes.values())
        if sum(lanes.values()) <= packed:
            return tuple(lanes.items())
        if self.policy.speculation != "adaptive" or len(lanes) > packed:
            return None
        rows, acceptance = dict.fromkeys(lanes, 1), self.state.acceptance

        def priority(slot: int) -> tuple[Fraction, int, int]:
            depth = rows[slot]
            if shape.allocation is Allocation.PREFIX_LIMIT:
                forecast = exact(acceptance.forecast_mean[slot, :depth].min())
                return -forecast, depth, slot
            return -exact(acceptance.accept_mean[slot, 0, depth - 1]) * self.token_price(slot), depth, slot

        for _ in range(packed - len(lanes)):
            rows[min((s for s in lanes if rows[s] < lanes[s]), key=priority)] += 1
        return tuple(rows.items())

    def splits(self, slots: list[int], rows: int, tokens: int) -> Iterator[Work]:
        """Every way to give at most `rows` of the slots some of `tokens` tokens."""
        if not slots or not rows:
            yield ()
            return
        yield from self.splits(slots[1:], rows, tokens)
        for length in self.lengths(slots[0], tokens):
            for rest in self.splits(slots[1:], rows - 1, tokens - length):
                yield ((slots[0], length), *rest)

    # ---- choices

    def times(self, first: ProgramShape, follow: ProgramShape) -> Times:
        both = self.duration[first], self.duration[follow]
        return Times(*both, known=min(both) > 0)

    def score(self, value: Fraction, duration: Fraction, known: bool) -> Fraction:
        return value / duration - duration * self.waiting / 2 if known else value

    def pair_choices(self) -> list[Choice]:
        """The best cohort of every prerequisite, program that follows and case of its prompt row."""
        found = []
        for kind, phase in PREREQUISITES.items():
            for first, following in itertools.product(self.state.catalog.of_kind(kind), FOLLOWING):
                new = [s for s in self.in_phase[phase] if self.enables(s) != LATER and self.fits(first, s)]
                for follow in self.state.catalog.of_kind(following) if new else ():
                    best = [self.best_pair(first, follow, case, new) for case in self.cases(follow)]
                    found += [choice for choice in best if choice]
        return found

    def best_pair(self, first: ProgramShape, follow: ProgramShape, case: str, new: list[int]) -> Choice | None:
        times = self.times(first, follow)
        worth = {s: self.terminal_value(s, times) for s in self.ending(first)}
        decode = {s: self.decode_value(s, follow, times) for s in self.in_phase[Phase.DECODE] + new}
        endings = [best_subset(worth, size) for size in range(first.batch_capacity + 1)]
        best: tuple[Fraction, int, Work, tuple[int, ...]] | None = None
        for work in self.cohorts(follow, case, new, first.batch_capacity):
            value = sum((self.lane_value(slot, tokens, decode, follow) for slot, tokens in work), Fraction(0))
            value_end, ending = endings[first.batch_capacity - sum(slot in new for slot, _ in work)]
            if best is None or (value + value_end, len(work) + len(ending)) > best[:2]:
                best = value + value_end, len(work) + len(ending), work, ending
        if best is None:
            return None
        value, _, work, ending = best
        members = self.filled(first, {slot for slot, _ in work if slot in new} | set(ending))
        score = self.score(value, times.total, times.known)
        return Choice((first, follow), case, tuple(sorted(work)), members, times.known, score)

    def lane_value(self, slot: int, tokens: int, decode: dict[int, Fraction], follow: ProgramShape) -> Fraction:
        """Worth of a lane; `decode` has that of the complete prefix of a stream, from which a cut one lacks its end."""
        if self.requests.consumed_len[slot] != self.requests.prompt_len[slot]:
            return self.prompt_value(slot, tokens)
        cut = self.state.acceptance.accept_mean[slot, 0][tokens - 1 : self.target_rows(slot, follow) - 1]
        return decode[slot] - self.token_price(slot) * sum(map(exact, cut.tolist()), Fraction(0))

    def ending(self, first: ProgramShape) -> list[int]:
        return self.terminals if first.kind is ProgramKind.SNAPSHOT else []

    def filled(self, first: ProgramShape, needed: set[int]) -> frozenset[int]:
        """Unused rows of the prerequisite advance more requests, least recently used first."""
        waiting = [s for s in self.in_phase[PREREQUISITES[first.kind]] if s not in needed and self.fits(first, s)]
        return frozenset([*needed, *waiting[: first.batch_capacity - len(needed)]])

    def prefix_choices(self) -> list[Choice]:
        """The productive part of a first stage alone: retirements by each snapshot program."""
        found = []
        for first in self.state.catalog.of_kind(ProgramKind.SNAPSHOT) if self.terminals else ():
            times = Times(self.duration[first], Fraction(0), self.duration[first] > 0)
            worth = {s: self.terminal_value(s, times) for s in self.terminals}
            value, ending = best_subset(worth, first.batch_capacity)
            score = self.score(value, times.total, times.known)
            found.append(Choice((first,), "", (), self.filled(first, set(ending)), times.known, score))
        return found

    # ---- chains

    def window_from(self, slot: int, first: int) -> int:
        """Images up to the end of the window that begins with image `first`: as many as the storage holds."""
        spec, room = self.state.specs[slot], self.state.limits.feature_tokens
        assert spec is not None
        sizes = [span.end - span.start for span in spec.image_spans]
        return max(last for last in range(first, len(sizes) + 1) if sum(sizes[first:last]) <= room)

    def stages_ahead(self, slot: int) -> tuple[list[list[ProgramShape]], int]:
        """Programs that can serve each stage between the present one and inference, and where that must stop."""
        spec, requests, catalog = self.state.specs[slot], self.requests, self.state.catalog
        assert spec is not None
        images, boundary, ahead = self.images(slot), int(requests.boundary[slot]), []
        if requests.phase[slot] == Phase.VISION:
            images = images[1:]
        elif self.at_window_end(slot):
            first = int(requests.window_images[slot])
            last = self.window_from(slot, first)
            images = [span.end - span.start for span in spec.image_spans[first:last]]
            boundary = spec.image_spans[last].start if last < len(spec.image_spans) else len(spec.prompt)
            if requests.phase[slot] == Phase.SNAPSHOT:
                copies = 1 if requests.state_row[slot] else 0
                ahead = [catalog.of_kind(ProgramKind.SNAPSHOT)] * copies + [catalog.of_kind(ProgramKind.RESTORE)]
        vision = catalog.of_kind(ProgramKind.VISION)
        ahead += [tuple(shape for shape in vision if shape.token_capacity >= size) for size in images]
        return [list(shapes) for shapes in ahead], boundary

    def continuations(self, slot: int) -> list[tuple[Fraction, Fraction | None]]:
        """(V, F) of each program that could run the first inference; F is None if a stage is not measured."""
        ahead, boundary = self.stages_ahead(slot)
        measured = [[self.duration[shape] for shape in shapes if self.duration[shape] > 0] for shapes in ahead]
        stages = sum((min(some) for some in measured), Fraction(0)) if all(measured) else None
        scored, found = bool(self.requests.scored[slot]), []
        for kind in (ProgramKind.SCORED_PREFILL,) if scored else (ProgramKind.PREFILL, ProgramKind.MIXED):
            for shape in self.state.catalog.of_kind(kind):
                room = shape.prefill_capacity or shape.token_capacity
                values = [self.prompt_value(slot, tokens) for tokens in self.lengths(slot, room, boundary)]
                if values:
                    last = self.duration[shape]
                    found.append((max(values), stages + last if stages is not None and last > 0 else None))
        return found

    def chain_choices(self) -> list[Choice]:
        """Requests that need more stages, by V T / (T + F); those that are not measured make a choice of their own."""
        found = []
        for kind, phase in PREREQUISITES.items():
            blocked = [slot for slot in self.in_phase[phase] if self.enables(slot) == LATER]
            for first in self.state.catalog.of_kind(kind) if blocked else ():
                found += self.best_chains(first, [slot for slot in blocked if self.fits(first, slot)])
        return found

    def best_chains(self, first: ProgramShape, blocked: list[int]) -> list[Choice]:
        time, index = self.duration[first], {}
        futures = {slot: self.continuations(slot) for slot in blocked}
        if time > 0:
            for slot, future in futures.items():
                rated = [value * time / (time + rest) for value, rest in future if rest is not None]
                index.update({slot: max(rated)} if rated else {})
        unknown = [slot for slot in blocked if slot not in index]
        late = {slot: max(value for value, _ in future) for slot, future in futures.items()}
        found = []
        for known, worth, needed in ((True, index, list(index)), (False, late, unknown)):
            times = Times(time, Fraction(0), known)
            every = {**worth, **{slot: self.terminal_value(slot, times) for slot in self.ending(first)}}
            cohorts = [some for some in subsets(list(every), first.batch_capacity) if known or set(some) & set(needed)]
            best = max(cohorts, key=lambda some: (sum(every[s] for s in some), len(some)), default=())
            if set(best) & set(needed):
                score = self.score(sum((every[s] for s in best), Fraction(0)), time, known)
                found.append(Choice((first,), "", (), self.filled(first, set(best)), known, score))
        return found

    def undominated(self, choices: list[Choice]) -> list[Choice]:
        """Without redundant padding: same kinds, rows and work, no extent smaller and one larger."""

        def extents(choice: Choice) -> list[int]:
            capacities = "batch_capacity", "token_capacity", "prefill_capacity", "packed_capacity"
            return [getattr(shape, name) for shape in choice.shapes for name in capacities]

        def depth(choice: Choice) -> int:
            decodes = any(self.requests.consumed_len[s] == self.requests.prompt_len[s] for s, _ in choice.work)
            return choice.shapes[-1].proposal_depth if decodes else 0

        def same(a: Choice, b: Choice) -> bool:
            kinds = [s.kind for s in a.shapes] == [s.kind for s in b.shapes]
            return kinds and (a.case, a.work, a.members, depth(a)) == (b.case, b.work, b.members, depth(b))

        def loses(a: Choice) -> bool:
            return any(
                same(a, b) and extents(a) != extents(b) and all(x >= y for x, y in zip(extents(a), extents(b)))  # noqa: B905
                for b in choices
            )

        return [choice for choice in choices if not loses(choice)]

    def excluded(self, choice: Choice) -> bool:
        """A larger unmeasured program where a smaller prepared one consumes the same up to the next endpoints."""
        shape, work = choice.shapes[-1], choice.work
        if shape.kind is ProgramKind.MIXED:
            work = tuple((s, n) for s, n in work if self.requests.consumed_len[s] < self.requests.prompt_len[s])
        elif shape.kind not in (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL):
            return False
        if self.duration[shape] > 0 or not work:
            return False
        demand = sum(min(n, int(self.requests.endpoint[s] - self.requests.consumed_len[s])) for s, n in work)

        def room(program: ProgramShape) -> int:
            return program.prefill_capacity or program.token_capacity

        def alike(other: ProgramShape) -> bool:
            """Whether a decoding lane is the same in a mixed program."""
            extents = [(s.proposal_depth, min(s.proposal_depth + 1, s.token_capacity)) for s in (shape, other)]
            return shape.kind is not ProgramKind.MIXED or extents[0] == extents[1]

        return any(
            demand <= room(other) < room(shape)
            and len(choice.work) <= other.batch_capacity <= shape.batch_capacity
            and alike(other)
            for other in self.state.catalog.of_kind(shape.kind)
        )

    def choices(self) -> list[Choice]:
        """What may win, of pairs, productive prefixes and chains."""
        kinds = self.pair_choices(), self.prefix_choices(), self.chain_choices()
        kept = [choice for every in kinds for choice in self.undominated(every)]
        return [choice for choice in kept if not self.excluded(choice)]


def subsets(slots: list[int], most: int) -> Iterator[tuple[int, ...]]:
    for size in range(min(most, len(slots)) + 1):
        yield from itertools.combinations(slots, size)


def best_subset(worth: dict[int, Fraction], most: int) -> tuple[Fraction, tuple[int, ...]]:
    """The most valuable subset of at most `most`; of equal ones the larger, then the one that comes first."""
    every = subsets(list(worth), most)
    return max(((sum((worth[s] for s in some), Fraction(0)), some) for some in every), key=lambda c: (c[0], len(c[1])))
