"""Requests played again by rounds of random programs, and where they leave plain decode.

`plain_decode` says what is wanted; `Sweep` plays the same requests by any rounds of a core (any B, W, P
and allocation, some decode steps between) with random lanes, while requests join, end and are cancelled.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterable, Sequence

from benchmarks.lanes import Lanes, Offer, Said, limits_of
from helios_jax.aot.prepared import PreparedCore
from helios_jax.engine.copy_index import CopyIndex
from helios_jax.scheduler.catalog import ProgramShape, ProposalSource

TIE = 1e-4  # logits that are closer may swap by rounding; float32 sums of SmolLM2 differ by about 1e-5
JOIN, CANCEL, DECODE, FEWER, SPOIL = 0.3, 0.004, 0.05, 0.2, 0.15  # probabilities of a step


@dataclasses.dataclass
class Task:
    """A request: prompt tokens, and what plain decode says to it."""

    name: str
    prompt: list[int]
    wanted: list[Said] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A round said another token than plain decode, whose two best logits are `gap` apart."""

    at: int
    said: int
    wanted: int
    second: int
    gap: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= TIE and self.said == self.second


@dataclasses.dataclass
class Played:
    """One request by rounds: `shapes` counts the lanes and the tokens that each program gave it."""

    name: str
    tokens: int
    cancelled: bool
    shapes: dict[str, tuple[int, int]]
    differences: list[Difference]


class _Run:
    """A request in a slot."""

    def __init__(self, task: Task, first: Said) -> None:
        self.task, self.said = task, [first.token]
        self.index = CopyIndex(task.prompt)
        self.index.extend(self.said)
        self.shapes: dict[str, tuple[int, int]] = {}

    def extend(self, shape: ProgramShape, said: Iterable[Said]) -> None:
        tokens = [one.token for one in said]
        lanes, emitted = self.shapes.get(shape.name, (0, 0))
        self.shapes[shape.name] = (lanes + 1, emitted + len(tokens))
        self.said += tokens
        self.index.extend(tokens)


class Sweep:
    """Plays `tasks` to `length` tokens each; `play` gives each as soon as it ends."""

    def __init__(self, core: PreparedCore, tasks: Sequence[Task], length: int, seed: int) -> None:
        self.lanes, self.length, self.rng = Lanes(core, seed), length, random.Random(seed)
        self.queue = collections.deque(tasks)
        self.running: dict[int, _Run] = {}
        self.cancelled: set[str] = set()

    def play(self) -> Iterable[Played]:
        while self.queue or self.running:
            self._join()
            self._step()
            for slot, run in list(self.running.items()):
                over = len(run.said) == self.length
                cancel = not over and run.task.name not in self.cancelled and self._is_cancelled(run)
                if over or cancel:
                    self.lanes.leave(slot)
                    del self.running[slot]
                    yield self._ended(slot, run, cancel)

    def _is_cancelled(self, run: _Run) -> bool:
        """At random; the first request that gets half way is, so that every sweep has one."""
        first = not self.cancelled and 2 * len(run.said) > self.length
        return first or self.rng.random() < CANCEL

    def _join(self) -> None:
        for slot in range(self.lanes.dims.slots):
            if self.queue and slot not in self.running and (not self.running or self.rng.random() < JOIN):
                task = self.queue.popleft()
                first = self.lanes.join(slot, task.prompt, len(task.prompt) + self.length)
                self.running[slot] = _Run(task, first)

    def _step(self) -> None:
        rng = self.rng
        shape = rng.choice(self.lanes.rounds)
        decode = rng.random() < DECODE
        if decode:
            shape = rng.choice(list(self.lanes.decodes.values()))
        unfinished = [slot for slot, run in self.running.items() if len(run.said) < self.length]
        count = min(shape.batch_capacity, len(unfinished))
        if rng.random() < FEWER and count > 1:
            count = rng.randrange(1, count)
        slots = rng.sample(unfinished, count)
        if not slots:
            return
        if decode:
            said = {slot: [one] for slot, one in self.lanes.decode(shape, slots, rng.random() < 0.5).items()}
        else:
            said = self.lanes.round(shape, self._offers(shape, slots), rng.random() < 0.5)
        for slot, tokens in said.items():
            self.running[slot].extend(shape, tokens)

    def _offers(self, shape: ProgramShape, slots: Sequence[int]) -> list[Offer]:
        copies: dict[int, Sequence[int]] = dict.fromkeys(slots, ())
        rows = dict.fromkeys(slots, shape.token_capacity)
        if shape.proposal_source is ProposalSource.COPY:
            copies = {slot: self._copy(self.running[slot], shape.proposal_depth) for slot in slots}
            rows = {slot: 1 + len(copies[slot]) for slot in slots}
        for slot in slots:
            most = min(rows[slot], shape.token_capacity, self.length - len(self.running[slot].said))
            rows[slot] = self.rng.randint(1, most) if self.rng.random() < FEWER else most
        limits = limits_of(shape, [rows[slot] for slot in slots])
        return [Offer(slot, limit, copies[slot]) for slot, limit in zip(slots, limits, strict=True)]

    def _copy(self, run: _Run, depth: int) -> list[int]:
        at = len(run.said)
        found = run.index.propose(depth).tokens
        if self.rng.random() < 0.5:
            found = tuple(one.token for one in run.task.wanted[at : at + depth])
        copy = list(found)
        if copy and self.rng.random() < SPOIL:
            copy[self.rng.randrange(len(copy))] = self.rng.randrange(self.lanes.dims.vocab_size)
        return copy

    def _ended(self, slot: int, run: _Run, cancel: bool) -> Played:
        if cancel:
            self.cancelled.add(run.task.name)
            self.queue.append(run.task)
        return Played(run.task.name, len(run.said), cancel, run.shapes, self._differences(slot, run))

    def _differences(self, slot: int, run: _Run) -> list[Difference]:
        """Where `run` leaves plain decode; after each such place plain decode goes on from what was said."""
        found, wanted, start = [], run.task.wanted, 0
        while (at := first_difference(run.said, wanted, start)) is not None:
            one = wanted[at]
            assert one.gap is not None
            found.append(Difference(at, run.said[at], one.token, one.second, one.gap))
            start = at + 1
            if start == len(run.said):
                break
            rest = continuation(self.lanes, slot, run.task.prompt + run.said[:start], len(run.said) - start)
            wanted = [*wanted[:start], *rest]
        return found


def first_difference(said: Sequence[int], wanted: Sequence[Said], start: int) -> int | None:
    """The first index from `start` on at which the tokens differ."""
    return next((i for i in range(start, len(said)) if said[i] != wanted[i].token), None)


def continuation(lanes: Lanes, slot: int, tokens: Sequence[int], count: int) -> list[Said]:
    """What plain decode, one lane, says after `tokens`; `slot` is free before and after."""
    said = [lanes.join(slot, tokens, len(tokens) + count)]
    while len(said) < count:
        said.append(lanes.decode(lanes.decodes[1], [slot])[slot])
    lanes.leave(slot)
    return said


def plain_decode(core: PreparedCore, tasks: Sequence[Task], length: int) -> None:
    """Fills `wanted` of each task, with as many lanes at a time as the core has slots."""
    lanes, slots = Lanes(core), core.dims.slots
    shape = lanes.decodes[max(lanes.decodes)]
    for first in range(0, len(tasks), slots):
        group = tasks[first : first + slots]
        for slot, task in enumerate(group):
            task.wanted = [lanes.join(slot, task.prompt, len(task.prompt) + length)]
        while len(group[0].wanted) < length:
            for slot, one in lanes.decode(shape, range(len(group))).items():
                group[slot].wanted.append(one)
        for slot in range(len(group)):
            lanes.leave(slot)
