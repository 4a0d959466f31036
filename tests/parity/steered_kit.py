"""A real core whose frames take as long as the test says, and an engine over it that the test steps.

Selection follows measured durations, so prices decide which programs run; the clock moves by them.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from helios_jax import SamplingParams
from helios_jax.config import EngineConfig
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.engine.request import Request
from helios_jax.engine.setup import Assembly, assemble
from helios_jax.scheduler.catalog import ProgramShape
from helios_jax.scheduler.types import ExecutionTiming
from helios_jax.testing import FakeClock

Price = Callable[[ProgramShape], int]  # ns of one execution
Completion = tuple[np.ndarray, np.ndarray, ExecutionTiming]


class SteeredFrame:
    """A frame of the device with another duration."""

    def __init__(self, in_flight: Any, duration_ns: int, clock: FakeClock) -> None:
        self._in_flight, self._duration_ns, self._clock = in_flight, duration_ns, clock

    def wait(self, timeout: float | None = None) -> Completion:
        ints, floats, timing = self._in_flight.wait(timeout)
        self._clock.advance(self._duration_ns)
        duration = (self._duration_ns,)
        return ints, floats, ExecutionTiming(device_ns=duration, wall_ns=duration[0], queued=timing.queued)


class SteeredCore:
    """A core, and its runner, that keep all of their names but `submit`; shapes that ran are kept in `ran`."""

    def __init__(self, core: Any, price: Price) -> None:
        self._core, self._price, self.clock = core, price, FakeClock()
        self.ran: list[ProgramShape] = []
        self.runner = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core if hasattr(self._core, name) else self._core.runner, name)

    def submit(self, shape: ProgramShape, *control: Any) -> SteeredFrame:
        self.ran.append(shape)
        return SteeredFrame(self._core.runner.submit(shape, *control), self._price(shape), self.clock)

    def kinds(self) -> collections.Counter[str]:
        return collections.Counter(str(shape.kind) for shape in self.ran)


class Session:
    """Requests through an engine that is stepped by hand.

    Args:
        price: See the module.
        step: Called with the session and the number of each step before it; it may abort requests.
    """

    def __init__(self, core: Any, price: Price, step: Callable[[Session, int], None] | None = None) -> None:
        core.reset()
        self.core = SteeredCore(core, price)
        self.outputs: dict[str, RequestOutput] = {}
        self.assembly: Assembly = assemble(self.core, EngineConfig(max_queue=256), clock=self.core.clock)
        self._step = step

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        """The engine's sink."""
        for request, item in batch:
            assert isinstance(item, RequestOutput), item
            self.outputs[request.request_id] = item

    def submit(self, prompt: list[int], name: str, **settings: Any) -> None:
        params = SamplingParams(ignore_eos=True, output_kind=OutputKind.FINAL_ONLY, **settings)
        request = self.assembly.intake.request(prompt, params, request_id=name, sink=self, arrival_ns=0)
        self.assembly.engine.board.submit(request)

    def run(self) -> None:
        """Until nothing is left to do; the ledgers are idle then."""
        engine, number = self.assembly.engine, 0
        while True:
            if self._step is not None:
                self._step(self, number)
            if not engine.step():
                break
            number += 1
        stats = engine.stats()
        assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
        assert stats.requests.reconciles()
        assert stats.compiles_after_ready == 0

    def tokens(self) -> dict[str, tuple[list[int], str | None]]:
        """Tokens and finish reason by request."""
        return {name: (o.outputs[0].token_ids, o.outputs[0].finish_reason) for name, o in self.outputs.items()}


def cheap(*kinds: str, otherwise_ns: int = 50_000_000) -> Price:
    """These kinds of programs take a millisecond, all others `otherwise_ns`."""
    return lambda shape: 1_000_000 if str(shape.kind) in kinds else otherwise_ns


def drawn(seed: int) -> Price:
    """Every execution takes a random time, so that every program is the best one now and then."""
    rng = random.Random(seed)
    return lambda shape: rng.randrange(1_000_000, 30_000_000)


def same_logprobs(mine: Mapping[str, RequestOutput], theirs: Mapping[str, RequestOutput]) -> int:
    """Compares all log-probabilities of two runs; how many there were."""
    count = 0
    for name, output in mine.items():
        left, right = output.outputs[0].logprobs or [], theirs[name].outputs[0].logprobs or []
        for a, b in zip(left, right, strict=True):
            assert list(a) == list(b)
            np.testing.assert_allclose([x.logprob for x in a.values()], [x.logprob for x in b.values()], atol=1e-4)
            assert [x.rank for x in a.values()] == [x.rank for x in b.values()]
            count += 1
    return count
