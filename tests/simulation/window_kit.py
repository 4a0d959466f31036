"""An engine that a test drives step by step, over the fake device in virtual time, with a record of its window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from helios_jax.engine.request import Request
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.scheduler.types import Constraint, Fence
from helios_jax.testing import EngineRig, FakeClock, FakeFrame

MAX_STEPS = 5000
GENERATION = (ProgramKind.DECODE, ProgramKind.SPECULATIVE)


@dataclasses.dataclass(frozen=True)
class Submission:
    """A frame at its submission; `ahead` were outstanding then."""

    fence: Fence
    kind: ProgramKind
    shape: str
    ahead: int


class Stepped:
    """`EngineRig` without its thread.

    Args:
        on_submit, on_complete: Called with the number of the frame, from 0, at the two ends of its life on the
            device; what they raise is a device error.
        check: Check the invariants after every step.
        options: Of `EngineRig`.
    """

    def __init__(
        self,
        *,
        on_submit: Callable[[int], None] = lambda _: None,
        on_complete: Callable[[int], None] = lambda _: None,
        check: bool = True,
        **options: Any,
    ) -> None:
        self.submissions: list[Submission] = []
        self.syncs, self._check = 0, check
        self._on_submit, self._on_complete = on_submit, on_complete
        self.clock = FakeClock()
        self.rig = EngineRig(
            start=False, clock=self.clock, on_submit=self._submitted, on_complete=self._completed, **options
        )
        self.engine = self.rig.engine
        self._count_syncs()

    def _count_syncs(self) -> None:
        submit = self.rig.core.runner.submit

        def counted(*args: Any, **kwargs: Any) -> Any:
            in_flight = submit(*args, **kwargs)
            wait = in_flight.wait

            def waited(timeout: float | None = None) -> Any:
                self.syncs += 1
                return wait(timeout)

            in_flight.wait = waited
            return in_flight

        self.rig.core.runner.submit = counted

    def _submitted(self, frame: FakeFrame) -> None:
        fence = self.engine.scheduler.state.last_fence
        self.submissions.append(Submission(fence, frame.shape.kind, frame.shape.name, len(self.engine.window)))
        self._on_submit(len(self.submissions) - 1)

    def _completed(self, frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        self._on_complete(frame.index)

    def submit(self, prompt: str, constraints: Constraint = Constraint.NONE, **params: Any) -> str:
        """As `EngineRig.submit`, with constraints that only the scheduler sees."""
        board = self.engine.board
        submit = board.submit

        def constrained(request: Request) -> None:
            for sequence in request.sequences:
                sequence.spec = dataclasses.replace(sequence.spec, constraints=sequence.spec.constraints | constraints)
            submit(request)

        board.submit = constrained  # type: ignore[method-assign]
        try:
            return self.rig.submit(prompt, **params)
        finally:
            board.submit = submit  # type: ignore[method-assign]

    def step(self) -> bool:
        """One step, after which every invariant of the scheduler holds and the window agrees with it."""
        did = self.engine.step()
        state = self.engine.scheduler.state
        if self._check:
            check_invariants(state)
        assert [frame.fence for frame in state.frames] == [frame.fence for frame in self.engine.window]
        return did

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        raise AssertionError(f"the engine is not idle after {MAX_STEPS} steps")

    def generation(self) -> list[Submission]:
        return [submission for submission in self.submissions if submission.kind in GENERATION]

    def queued(self) -> int:
        """Decode frames that were submitted while another frame was outstanding."""
        return sum(submission.ahead > 0 for submission in self.submissions)

    def close(self) -> None:
        self.rig.close()
