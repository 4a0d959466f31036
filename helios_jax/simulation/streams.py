"""Streams that always decode: how many output tokens a second a way of speculating makes, in virtual time.

1. So many requests as there are slots run at any moment; the next one starts where one ends.
2. A `Drafter` says which proposals are right, and how many copies the host finds.
3. The scheduler and the device are those of every simulation; durations come from a profile.
4. Tokens are counted from the start, discovery and learning included, and after a warm-up.

Everything follows from the `Streams` value and the drafter's seed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from helios_jax.scheduler.catalog import Catalog
from helios_jax.scheduler.preferences import policy_preset
from helios_jax.scheduler.resources import pages_for
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.types import Constraint, Limits, RequestSpec
from helios_jax.simulation.acceptance import AcceptanceSampler, AcceptanceTable, uniform
from helios_jax.simulation.device import FakeDevice
from helios_jax.simulation.driver import Arrival, Ran, Simulation
from helios_jax.simulation.profiles import CostProfile, ProfileCosts

NS_PER_S, NS_PER_MS = 1e9, 1e6
PAGE_SIZE = 64
JITTER = 0.02  # of durations, uniform
STRETCH = 48  # output tokens of one kind, where a request alternates
Kinds = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (requests, output positions) -> rows of the tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter:
    """Proposals of every request: rates that depend on the request and on where its output is.

    Attributes:
        tables: Rates by depth, one table a kind of text.
        kinds: Which table holds where; the first everywhere by default.
        found: Of each kind, the share of positions at which the host finds a copy (copy programs only).
        shown: Rates that the draft's confidence tells, one a kind; the true ones by default.
        seed: Of the draws.
    """

    tables: tuple[AcceptanceTable, ...]
    kinds: Kinds = lambda requests, outputs: np.zeros(len(requests), np.int64)
    found: tuple[float, ...] = ()
    shown: tuple[AcceptanceTable, ...] = ()
    seed: int = 0

    @property
    def depth(self) -> int:
        return max(table.depth for table in self.tables)

    def copies(self, request: int, outputs: int) -> int:
        """Copied tokens that the host finds after so many output tokens: all that a program takes, or none."""
        at = np.array([request], np.int64), np.array([outputs], np.int64)
        kind = int(self.kinds(*at)[0])
        return self.depth if uniform(*at, self.seed + 1)[0] < self.found[kind] else 0


class Draws:
    """A drafter as the device asks it (`AcceptanceSampler.draw`); positions begin with the prompt."""

    def __init__(self, drafter: Drafter, prompt_len: int) -> None:
        self._drafter, self._prompt_len = drafter, prompt_len
        self._right = [AcceptanceSampler(table, drafter.seed) for table in drafter.tables]
        self._shown = [AcceptanceSampler(table, drafter.seed) for table in drafter.shown or drafter.tables]

    def draw(self, requests: np.ndarray, positions: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        kinds = self._drafter.kinds(requests, positions - self._prompt_len)
        confidence, accepted = np.zeros((len(requests), depth)), np.zeros((len(requests), depth), np.bool_)
        for kind in np.unique(kinds).tolist():
            rows = kinds == kind
            some = requests[rows], positions[rows], depth
            accepted[rows] = self._right[kind].draw(*some)[1]
            confidence[rows] = self._shown[kind].draw(*some)[0]
        return confidence, accepted


def constant(rate: float, depth: int, method: str = "eagle3") -> AcceptanceTable:
    """Every proposal is right with the same probability if those before it were; 0 and 1 are possible."""
    return AcceptanceTable(f"constant {rate:g}", tuple(rate**d for d in range(1, depth + 1)), method)


def by_request(count: int) -> Kinds:
    """Kinds take turns over the requests."""
    return lambda requests, outputs: requests % count


def after(outputs_before: int) -> Kinds:
    """The second kind from that output position on."""
    return lambda requests, outputs: (outputs >= outputs_before).astype(np.int64)


def alternating(share: float, seed: int = 0) -> Kinds:
    """Stretches of `STRETCH` output tokens; each is of the first kind with probability `share`, else the second."""
    return lambda requests, outputs: (uniform(requests, outputs // STRETCH, seed + 2) >= share).astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """One run.

    Attributes:
        profile: Step times.
        catalog: Programs of the core.
        mode: `PolicyConfig.speculation`.
        streams: Requests at any moment, 1 to 64.
        seconds: Of the run.
        warm_seconds: Of these the first ones, which the warm number leaves out.
        method: Whose draft costs apply.
        outputs: Fewest and most output tokens of a request, uniform.
        prompt_len: Tokens of every prompt.
        policy: A preset.
        frames, host_ms: As in an experiment.
        constraints: Of each request by its number; none by default.
        seed: Of lengths and jitter.
    """

    profile: CostProfile
    catalog: Catalog
    mode: str
    streams: int
    seconds: float
    warm_seconds: float
    method: str = "eagle3"
    outputs: tuple[int, int] = (128, 384)
    prompt_len: int = 64
    policy: str = "balanced"
    frames: int = 2
    host_ms: float = 0.2
    constraints: Callable[[int], Constraint] = lambda number: Constraint.NONE
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yield:
    """What a run made.

    Attributes:
        cold, warm: Output tokens a second, from the start and after the warm-up.
        programs: Executions by name.
        spent_ms: Device time by reason of selection.
        tokens: Output tokens of each request, in order of arrival.
    """

    cold: float
    warm: float
    programs: Counter[str]
    spent_ms: Counter[str]
    tokens: tuple[int, ...]


def run_streams(run: Streams, drafter: Drafter) -> Yield:
    """Run for `seconds` of virtual time."""
    depth = max(shape.proposal_depth for shape in run.catalog)
    longest = run.prompt_len + run.outputs[1]
    limits = Limits(
        slots=run.streams, pages=run.streams * pages_for(longest + depth, PAGE_SIZE), page_size=PAGE_SIZE,
        max_context=longest, draft_extent=depth, frames=run.frames,
    )  # fmt: skip
    device = FakeDevice(
        ProfileCosts(run.profile, run.method), PAGE_SIZE, jitter=JITTER, host_ns=round(run.host_ms * NS_PER_MS),
        slots=run.streams, seed=run.seed, sampler=Draws(drafter, run.prompt_len), check_pages=False,
    )  # fmt: skip
    programs: Counter[str] = Counter()
    spent: Counter[str] = Counter()

    def observe(ran: Ran) -> None:
        programs[ran.plan.shape.name] += 1
        spent[str(ran.plan.reason)] += round(ran.device_ns / 1e3)

    simulation = Simulation(
        Scheduler(run.catalog, limits, policy_preset(run.policy, speculation=run.mode)), device,
        _arrivals(run, depth), check=False, keep=False, copies=drafter.copies if drafter.found else None,
        observe=observe,
    )  # fmt: skip
    counted = [(0.0, 0)]
    for until in (run.warm_seconds, run.seconds):
        simulation.run(until_ns=round(until * NS_PER_S))
        made = sum(request.num_tokens for request in simulation.requests)
        counted.append((simulation.clock.now_ns / NS_PER_S, made))
    (_, _), (warm_s, warm), (end_s, made) = counted
    return Yield(
        cold=made / end_s, warm=(made - warm) / (end_s - warm_s), programs=programs,
        spent_ms=Counter({reason: us // 1000 for reason, us in spent.items()}),
        tokens=tuple(request.num_tokens for request in simulation.requests),
    )  # fmt: skip


def _arrivals(run: Streams, depth: int) -> Sequence[Arrival]:
    """As many requests as could ever be used, all waiting from the start."""
    fastest_ms = 1.0  # no step of any profile is that fast
    count = run.streams + int(run.seconds * 1e3 / fastest_ms * (depth + 1) * run.streams / run.outputs[0])
    lengths = np.random.default_rng(run.seed).integers(
        run.outputs[0], run.outputs[1], min(count, 200_000), endpoint=True
    )
    prompt = np.zeros(run.prompt_len, np.int32)
    specs = [
        RequestSpec(prompt=prompt, max_tokens=length, constraints=run.constraints(number))
        for number, length in enumerate(lengths.tolist())
    ]
    return [Arrival(at_ns=0, spec=spec) for spec in specs]
