"""The best long-run order of stages: every sequence of programs, for requests that need several images.

A slow twin for the multistage index. The model: no decoders wait, prices stand still, every
prompt is consumed by one execution of the one prefill program. The optimum is the largest ratio
of value to time over all sequences of programs, found by dynamic programming over what is left
of each request and Dinkelbach's iteration over the ratio.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from helios_jax.scheduler import ProgramKind, State
from helios_jax.scheduler.candidates import new_decision
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.types import ScheduledPlan

Left = tuple[int, ...]  # images before each request's prompt; -1 = consumed
_DONE = -1


@dataclasses.dataclass(frozen=True)
class Step:
    """One execution: whom it advances."""

    shape: object
    members: frozenset[int]


class Sequences:
    """Requests in their vision or prompt phase, images of one feature, one prefill program."""

    def __init__(self, state: State) -> None:
        decision, requests = new_decision(state), state.requests
        self.vision = state.catalog.of_kind(ProgramKind.VISION)
        (self.prefill,) = state.catalog.of_kind(ProgramKind.PREFILL)
        self.duration = {shape: float(ms) for shape, ms in zip(state.catalog, decision.duration_ms, strict=True)}
        busy = [slot for slot in range(len(requests.phase)) if requests.phase[slot] in (Phase.VISION, Phase.PROMPT)]
        self.slots = busy
        self.start: Left = tuple(int(requests.window_images[s] - requests.images_done[s]) for s in busy)
        values, tokens = decision.values, requests.boundary - requests.consumed_len
        self.worth = [float(tokens[s] * values.prompt_token[s] + values.output_token[s]) for s in busy]

    def steps(self, left: Left) -> Iterator[tuple[Step, float, float, Left]]:
        """Every execution that does something: (step, value, time, what is left)."""
        waiting = [i for i, images in enumerate(left) if images > 0]
        for shape in self.vision:
            for size in range(1, min(shape.batch_capacity, len(waiting)) + 1):
                for some in itertools.combinations(waiting, size):
                    after = tuple(images - (i in some) for i, images in enumerate(left))
                    members = frozenset(self.slots[i] for i in some)
                    yield Step(shape, members), 0.0, self.duration[shape], after
        for i in (i for i, images in enumerate(left) if images == 0):
            after = tuple(_DONE if j == i else images for j, images in enumerate(left))
            step = Step(self.prefill, frozenset([self.slots[i]]))
            yield step, self.worth[i], self.duration[self.prefill], after

    def best_ratio(self, first: Step | None = None) -> float:
        """Largest value per time of all sequences, those that begin with `first` if one is given."""
        ratio = 0.0
        while True:
            value, time = self._best(ratio, first)
            if value - ratio * time <= 1e-12 * max(1.0, value):
                return ratio
            ratio = value / time

    def _best(self, ratio: float, first: Step | None) -> tuple[float, float]:
        """Value and time of the sequence with the largest value - ratio * time."""

        @functools.cache
        def rest(left: Left) -> tuple[float, float]:
            every = [(v + more[0], t + more[1]) for _, v, t, after in self.steps(left) for more in (rest(after),)]
            return max([(0.0, 0.0), *every], key=lambda total: total[0] - ratio * total[1])

        openings = [
            (v + more[0], t + more[1])
            for step, v, t, after in self.steps(self.start)
            if first is None or step == first
            for more in (rest(after),)
        ]
        return max(openings, key=lambda total: total[0] - ratio * total[1])

    def shortfall(self, plan: ScheduledPlan) -> float:
        """How far the best sequence that begins as planned lies below the best of all, relative."""
        best = self.best_ratio()
        first = Step(plan.shape, frozenset(lane.handle.slot for lane in plan.lanes))
        return max(0.0, 1.0 - self.best_ratio(first) / best)
