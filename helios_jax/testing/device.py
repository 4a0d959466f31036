"""A device that is a few numpy arrays: same control and completion vectors, no compilation.

The fake keeps what a real device keeps, in its plainest form: pages of token ids (where a
model keeps keys and values) and the slot table. The next token is a pure function of the
tokens *read back through the page table*, so a wrong page, slot, length or order changes
the output, and a test that knows the function knows the right answer.

Life of a frame: 1. `submit` queues it; 2. `wait` runs it, in order of submission, after
passing the gate; the virtual duration of its shape moves a `FakeClock`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from helios_jax.aot.abi import TOP_LOGPROBS, Dims, completion_layout, control_layout
from helios_jax.errors import DeviceError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from helios_jax.scheduler.types import ExecutionTiming
from helios_jax.testing.clock import FakeClock

# (all tokens [n], prompt length, seed or None when greedy) -> next token id
NextToken = Callable[[np.ndarray, int, int | None], int]
FORCING_BIAS = 50.0  # a logit bias from here up forces its token, as it would in a model
PRINTABLE = b"abcdefghijklmnopqrstuvwxyz     "


def hashed_text(tokens: np.ndarray, prompt_len: int, seed: int | None) -> int:
    """The default model: a printable byte drawn by a hash of the whole history (and the seed)."""
    key = np.asarray(tokens, np.int32).tobytes() + str(seed).encode()
    return PRINTABLE[zlib.crc32(key) % len(PRINTABLE)]


def scripted(text: str | bytes, then: int = 257) -> NextToken:
    """A model that says `text` byte by byte, then token `then` (ByteTokenizer's EOS) for ever."""
    script = text.encode() if isinstance(text, str) else text

    def next_token(tokens: np.ndarray, prompt_len: int, seed: int | None) -> int:
        index = len(tokens) - prompt_len
        return script[index] if index < len(script) else then

    return next_token


def default_duration_ns(shape: ProgramShape) -> int:
    """Virtual device time: 1 ms, 0.1 ms a row, 0.02 ms a token."""
    return 1_000_000 + 100_000 * shape.batch_capacity + 20_000 * shape.token_capacity


class Gate:
    """Lets frames finish freely, not at all, or one at a time, under a test's control."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._permits: int | None = None  # None = open
        self.waiting = 0

    def close(self) -> None:
        """Hold every frame that reaches the gate."""
        with self._condition:
            self._permits = 0

    def open(self) -> None:
        """Let everything through."""
        with self._condition:
            self._permits = None
            self._condition.notify_all()

    def step(self, frames: int = 1) -> None:
        """Let `frames` more through a closed gate."""
        with self._condition:
            self._permits = (self._permits or 0) + frames
            self._condition.notify_all()

    def pass_through(self) -> None:
        """Called by the device: return when one frame may finish."""
        with self._condition:
            self.waiting += 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._permits is None or self._permits > 0)
            self.waiting -= 1
            if self._permits is not None:
                self._permits -= 1

    def wait_for_frame(self, timeout_s: float = 10.0) -> bool:
        """Return once a frame is held at the gate; False when none came in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self.waiting > 0 and self._permits == 0, timeout_s)


@dataclasses.dataclass
class FakeFrame:
    """One submitted frame; `parts` are the named control fields."""

    index: int
    shape: ProgramShape
    parts: dict[str, np.ndarray]


class FakeInFlight:
    """A frame on its way; `wait` may be called once."""

    def __init__(self, runner: FakeRunner, frame: FakeFrame) -> None:
        self._runner = runner
        self._frame = frame

    def wait(self, timeout: float | None = None) -> tuple[np.ndarray, np.ndarray, ExecutionTiming]:
        """Completion vectors and times of the frame; the gate knows no timeout."""
        return self._runner.finish(self._frame)


class FakeRunner:
    """Runs control vectors as a device would.

    Args:
        dims: Extents of the core.
        next_token: The model.
        clock: Moved by every frame's virtual duration when given.
        duration_ns: Virtual duration of a shape.
        gate: Holds frames back.
        on_submit: Called with each frame when submitted; what it raises becomes a DeviceError.
        on_complete: Called with frame and completion fields, which it may change; raising as above.
    """

    def __init__(
        self,
        dims: Dims,
        *,
        next_token: NextToken = hashed_text,
        clock: FakeClock | None = None,
        duration_ns: Callable[[ProgramShape], int] = default_duration_ns,
        gate: Gate | None = None,
        on_submit: Callable[[FakeFrame], None] | None = None,
        on_complete: Callable[[FakeFrame, dict[str, np.ndarray]], None] | None = None,
    ) -> None:
        self.dims, self.next_token, self.clock, self.duration_ns = dims, next_token, clock, duration_ns
        self.gate = gate or Gate()
        self.on_submit, self.on_complete = on_submit, on_complete
        self.frames: list[FakeFrame] = []
        self.resets = -1
        self.reset()

    def reset(self) -> None:
        """New device state: empty pages and slots."""
        dims = self.dims
        self.resets += 1
        self.broken = False
        self.pages = np.full((dims.num_pages, dims.page_size), -1, np.int32)
        self.committed = np.zeros(dims.slots + 1, np.int32)
        self.pending = np.full(dims.slots + 1, -1, np.int32)
        self.settings: list[dict[str, Any]] = [{} for _ in range(dims.slots + 1)]

    def submit(self, shape: ProgramShape, ints: np.ndarray, floats: np.ndarray) -> FakeInFlight:
        """Queue a frame; vectors are copied, as a transfer to a device would."""
        layout = control_layout(shape, self.dims)
        if ints.shape != (layout.int_size,) or floats.shape != (layout.float_size,):
            raise ValueError(f"{shape.name}: control vectors {ints.shape}, {floats.shape} do not match the layout")
        frame = FakeFrame(len(self.frames), shape, layout.split(ints.copy(), floats.copy()))
        if self.broken:
            raise DeviceError("the device state was lost; reset the runner")
        if self.on_submit:
            self._guarded(functools.partial(self.on_submit, frame))
        self.frames.append(frame)
        return FakeInFlight(self, frame)

    def finish(self, frame: FakeFrame) -> tuple[np.ndarray, np.ndarray, ExecutionTiming]:
        """Run the frame once the gate lets it through."""
        self.gate.pass_through()
        ints, floats, out = completion_layout(frame.shape, self.dims).new()
        out["slot"][:] = frame.parts["slot"]
        match frame.shape.kind:
            case ProgramKind.INITIALIZE:
                self._initialize(frame.parts)
            case ProgramKind.DECODE:
                self._decode(frame.parts, out)
            case ProgramKind.PREFILL | ProgramKind.SCORED_PREFILL:
                self._prefill(frame.parts, out)
            case kind:
                raise ValueError(f"the fake device has no {kind} program")
        if self.on_complete:
            self._guarded(functools.partial(self.on_complete, frame, out))
        duration = self.duration_ns(frame.shape)
        if self.clock:
            self.clock.advance(duration)
        return ints, floats, ExecutionTiming(device_ns=(duration,), wall_ns=duration)

    def _guarded(self, hook: Callable[[], object]) -> None:
        """A failed execution loses the donated state, as on a real device."""
        try:
            hook()
        except Exception as error:
            self.broken = True
            raise DeviceError(f"the fake device failed: {error}") from error

    def close(self) -> None:
        """Nothing to free; later frames are refused."""
        self.broken = True

    def _initialize(self, parts: dict[str, np.ndarray]) -> None:
        for row, slot in enumerate(parts["slot"]):
            self.settings[slot] = {name: parts[name][row].copy() for name in parts if name != "slot"}
            self.committed[slot], self.pending[slot] = 0, -1

    def _decode(self, parts: dict[str, np.ndarray], out: dict[str, np.ndarray]) -> None:
        for row, slot in enumerate(parts["slot"]):
            out["token"][row] = -1
            if slot == self.dims.slots:
                continue
            table, position = parts["page_table"][row], self.committed[slot]
            self._write(table, position, self.pending[slot : slot + 1])
            self.committed[slot] = position + 1
            self._sample(row, slot, table, bool(parts["want_logprobs"][0]), out)

    def _prefill(self, parts: dict[str, np.ndarray], out: dict[str, np.ndarray]) -> None:
        offset = 0
        for row, slot in enumerate(parts["slot"]):
            out["token"][row] = -1
            length, start, table = parts["query_len"][row], parts["start"][row], parts["page_table"][row]
            if length == 0:
                continue
            self._write(table, start, parts["tokens"][offset : offset + length])
            if "target" in parts:
                self._score(parts["target"], offset, length, out)
            offset += length
            self.committed[slot] = start + length
            out["committed_len"][row] = start + length
            if parts["sample"][row]:
                self._sample(row, slot, table, bool(parts["want_logprobs"][0]), out)

    def _write(self, table: np.ndarray, start: int, tokens: np.ndarray) -> None:
        positions = np.arange(start, start + len(tokens))
        self.pages[table[positions // self.dims.page_size], positions % self.dims.page_size] = tokens

    def _sample(self, row: int, slot: int, table: np.ndarray, scored: bool, out: dict[str, np.ndarray]) -> None:
        length = self.committed[slot]
        positions = np.arange(length)
        history = self.pages[table[positions // self.dims.page_size], positions % self.dims.page_size]
        settings = self.settings[slot]
        words = settings["seed"].view(np.uint32)
        seed = int(words[0]) << 32 | int(words[1]) if settings["temperature"] > 0 else None
        token = self.next_token(history, int(settings["prompt_len"]), seed)
        best = int(np.argmax(settings["bias_values"]))
        if settings["bias_ids"][best] >= 0 and settings["bias_values"][best] >= FORCING_BIAS:
            token = int(settings["bias_ids"][best])
        self.pending[slot] = token
        out["token"][row], out["committed_len"][row] = token, length
        if scored:
            fake_logprobs(token, out["top_ids"][row], out["top_logprobs"][row], self.dims.vocab_size)
            out["logprob"][row], out["rank"][row] = out["top_logprobs"][row][0], 1

    def _score(self, targets: np.ndarray, offset: int, length: int, out: dict[str, np.ndarray]) -> None:
        for i in range(offset, offset + length):
            if targets[i] >= 0:
                ids, values = out["target_top_ids"][i], out["target_top_logprobs"][i]
                fake_logprobs(int(targets[i]), ids, values, self.dims.vocab_size)
                out["target_logprob"][i], out["target_rank"][i] = values[0], 1


def fake_logprobs(token: int, ids: np.ndarray, values: np.ndarray, vocab_size: int) -> None:
    """Fill one row: the token has half the mass, its successors by id a half of what is left, each."""
    ids[:] = (token + np.arange(TOP_LOGPROBS)) % vocab_size
    values[:] = -np.log(2.0) * np.arange(1, TOP_LOGPROBS + 1)
