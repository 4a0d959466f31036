"""What goes wrong in a simulated world: on the device, in its completions, and with the clock.

- Rows without a lane come back full of rubbish, always: nobody may read them.
- A frame fails, when submitted or when run; a lane has no finite logits; a time is missing.
- A completion is malformed: a bug of the device program. The engine must stop and answer everybody.
- A completion comes for a frame that nobody waits for: counted and ignored.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from helios_jax.scheduler.types import ExecutionTiming
from helios_jax.testing import FakeFrame
from helios_jax.testing.device import default_duration_ns

Out = dict[str, np.ndarray]


@dataclasses.dataclass
class Rates:
    """Chance of each fault, a frame; from frame `lie_from` on the completion that can be a `lie` is one."""

    device_error: float = 0.0
    submit_error: float = 0.0
    not_finite: float = 0.0
    no_time: float = 0.0
    stall: float = 0.0
    lie: str = ""
    lie_from: int = 0


class Faults:
    """The device's hooks for one world; every decision comes from the world's generator."""

    def __init__(self, rng: random.Random, rates: Rates, world: Any) -> None:
        self._rng, self.rates, self._world = rng, rates, world
        self.counts: collections.Counter[str] = collections.Counter()
        self.lied_to: list[Any] = []  # clients whose lanes a malformed completion named

    def duration_ns(self, shape: ProgramShape) -> int:
        """The shape's own time, give or take; none at all, or a stall, now and then."""
        die = self._rng.random()
        if die < self.rates.no_time:
            self.counts["no time"] += 1
            return 0
        if die < self.rates.no_time + self.rates.stall:
            self.counts["stall"] += 1
            return 40 * default_duration_ns(shape)
        return int(default_duration_ns(shape) * self._rng.uniform(0.8, 1.3))

    def on_submit(self, frame: FakeFrame) -> None:
        self._world.check_frame(frame)
        if self._rng.random() < self.rates.submit_error:
            self.counts["submit error"] += 1
            self._world.hurt_all()
            raise RuntimeError("the device does not take the frame")

    def on_complete(self, frame: FakeFrame, out: Out) -> None:
        if self._rng.random() < self.rates.device_error:
            self.counts["device error"] += 1
            self._world.hurt_all()
            raise RuntimeError("the frame failed on the device")
        lanes = self._lanes(frame)
        self._poison(frame, out, lanes)
        if frame.shape.kind is ProgramKind.SNAPSHOT and lanes and self._rng.random() < self.rates.not_finite * 8:
            self.counts["failed copy"] += 1
            out["committed_len"][self._rng.choice(lanes)] += 1
        if "status" in out and lanes and self._rng.random() < self.rates.not_finite:
            self._break_lane(frame, out, self._rng.choice(lanes))
        if self.rates.lie and frame.index >= self.rates.lie_from and not self.lied_to:
            self._lie(frame, out, lanes)

    def _lanes(self, frame: FakeFrame) -> list[int]:
        return [row for row, slot in enumerate(frame.parts["slot"]) if slot < self._world.slots]

    def _poison(self, frame: FakeFrame, out: Out, lanes: list[int]) -> None:
        """Rubbish in the rows of nobody."""
        empty = [row for row in range(len(frame.parts["slot"])) if row not in lanes]
        for name, values in out.items():
            if name not in ("confidence", "survival") and not name.startswith("target_") and empty:
                values[empty] = np.nan if values.dtype == np.float32 else self._rng.choice([-7, 3, 2**30])

    def _break_lane(self, frame: FakeFrame, out: Out, row: int) -> None:
        """A lane's logits were not finite: the program says so, and samples nothing."""
        self.counts["not finite"] += 1
        slot = int(frame.parts["slot"][row])
        self._world.hurt(slot)
        out["status"][row] = 1
        if "num_tokens" in out and row != int(frame.parts.get("prefill_row", [-1])[0]):
            out["committed_len"][row] -= out["num_tokens"][row]  # a prompt stays consumed
        for name in ("num_tokens", "offered", "accepted"):
            if name in out:
                out[name][row] = 0
        if "token" in out:
            out["token"][row] = -1
        if "tokens" in out:
            out["tokens"][row] = -1
        for name in ("confidence", "survival"):
            if name in out:
                out[name][..., slot, :] = 0

    def _lie(self, frame: FakeFrame, out: Out, lanes: list[int]) -> None:
        """The first lane that the lie fits: a frame of its kind, a request that still runs."""
        for row in lanes:
            clients = self._world.clients_of(int(frame.parts["slot"][row]))
            if clients and LIES[self.rates.lie](frame, out, row, self._world.slots):
                self.lied_to = clients
                return

    def foreign_completion(self) -> None:
        """A completion that nobody waits for, old or from the future."""
        scheduler = self._world.rig.engine.scheduler
        state = scheduler.state
        outstanding = {frame.fence for frame in state.frames}
        fence = self._rng.choice([0, -1, state.last_fence, state.last_fence - 1, state.last_fence + 7])
        if fence in outstanding:
            return
        self.counts["foreign completion"] += 1
        before = state.counters.ignored_completions
        events = scheduler.complete(fence, (), ExecutionTiming((1,), 1))
        if events or scheduler.state.counters.ignored_completions != before + 1:
            raise AssertionError(f"a completion of fence {fence} was not ignored")


def _other_slot(frame: FakeFrame, out: Out, row: int, slots: int) -> bool:
    out["slot"][row] = (out["slot"][row] + 1) % (slots + 1)
    return True


def _no_such_token(frame: FakeFrame, out: Out, row: int, slots: int) -> bool:
    if "token" in out and out["token"][row] >= 0 and out["status"][row] == 0:
        out["token"][row] = 1_000_000
        return True
    if "tokens" in out and out["num_tokens"][row] > 0:
        out["tokens"][row, 0] = -5
        return True
    return False


def _wrong_length(frame: FakeFrame, out: Out, row: int, slots: int) -> bool:
    if frame.shape.kind in (ProgramKind.INITIALIZE, ProgramKind.SNAPSHOT):  # a copy of another length is a failed one
        return False
    out["committed_len"][row] += 1
    return True


def _too_many(frame: FakeFrame, out: Out, row: int, slots: int) -> bool:
    if "accepted" not in out or not out["num_tokens"][row]:
        return False
    out["accepted"][row] = out["offered"][row] + 1
    return True


def _nothing_sampled(frame: FakeFrame, out: Out, row: int, slots: int) -> bool:
    if frame.shape.kind is not ProgramKind.SPECULATIVE or out["status"][row]:
        return False
    out["num_tokens"][row] = 0
    return True


def _impossible_confidence(frame: FakeFrame, out: Out, row: int, slots: int) -> bool:
    if not frame.shape.proposal_depth or frame.shape.kind is not ProgramKind.SPECULATIVE or out["status"][row]:
        return False
    out["confidence"][1, frame.parts["slot"][row], 0] = np.nan
    return True


LIES: dict[str, Callable[[FakeFrame, Out, int, int], bool]] = {
    "slot": _other_slot,
    "token": _no_such_token,
    "length": _wrong_length,
    "accepted": _too_many,
    "nothing": _nothing_sampled,
    "confidence": _impossible_confidence,
}
