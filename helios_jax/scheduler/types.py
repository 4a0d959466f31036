"""Records that cross the scheduler's border: what goes in, what comes out.

All are frozen. Times are nanoseconds here, at the edge; the policy itself works in
milliseconds. One vocabulary of lengths: `prompt_len` tokens were given; `consumed_len` of
them have been through a prefill; `committed_len` tokens have their keys and values in the
cache (prompt and output); the pending token is sampled but not yet in the cache.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from helios_jax.scheduler.catalog import ProgramShape

Fence = int  # strictly increasing, first is 1; chosen by the engine, one a submitted frame


class RequestHandle(NamedTuple):
    """A slot and the generation of its occupant; a reused slot has a new generation."""

    slot: int
    generation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes of the resources that the scheduler owns.

    Attributes:
        slots: Request slots, 1 to 64.
        pages: Usable KV pages. Page 0 of the pool is scratch and not counted: pages are 1..pages.
        page_size: Tokens a page.
        max_context: Tokens a request may hold, prompt and output.
    """

    slots: int
    pages: int
    page_size: int
    max_context: int


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """What the scheduler must know of a request.

    Attributes:
        prompt: [prompt_len] int32 token ids, at least one.
        max_tokens: Output tokens allowed; 0 only together with `scored`.
        stop_token_ids: Any of these ends the output (EOS ids included by the caller).
        scored: The prompt goes through scored-prefill programs only.
        message_ends: Token endpoints of complete messages (checkpoint policy).
        output_len: Tokens at the end of `prompt` that are earlier output (a resumed request).
    """

    prompt: np.ndarray
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    scored: bool = False
    message_ends: tuple[int, ...] = ()
    output_len: int = 0


class LaneRole(enum.StrEnum):
    INITIALIZE = "initialize"
    PROMPT = "prompt"
    DECODE = "decode"


class Lane(NamedTuple):
    """The logical work of one request in a plan.

    `start` is the position of the first token, `length` the tokens that go in (1 for
    decode, 0 for initialise), `emits` whether the program samples a token for it.
    """

    handle: RequestHandle
    role: LaneRole
    start: int
    length: int
    emits: bool


class SelectionReason(enum.StrEnum):
    ORDINARY = "ordinary"
    DISCOVERY = "discovery"
    TIMING_REFRESH = "timing_refresh"
    ACCEPTANCE_LEARNING = "acceptance_learning"


@dataclasses.dataclass(frozen=True)
class CompletionRecord:
    """What the device says of one lane, validated by `complete`.

    Attributes:
        handle: The lane's request.
        consumed: Tokens whose keys and values this frame added to the cache.
        tokens: Tokens sampled by this frame, in order (none for an unfinished prompt).
        committed_len: The device's committed length after the frame.
        valid: False when the lane's logits were not finite; the request then fails.
    """

    handle: RequestHandle
    consumed: int
    tokens: tuple[int, ...]
    committed_len: int
    valid: bool = True


@dataclasses.dataclass(frozen=True)
class ExecutionTiming:
    """Measured times of one frame, ns.

    Attributes:
        device_ns: Device interval of each rank; zero or negative values are invalid.
        wall_ns: Host wall time from dispatch to observed completion.
        queued: The frame was submitted while another one ran.
        embedding_delay_ns: Exposed embedding-delivery delay inside the interval.
    """

    device_ns: tuple[int, ...]
    wall_ns: int
    queued: bool = False
    embedding_delay_ns: int = 0


@dataclasses.dataclass(frozen=True)
class GeneratedToken:
    """One committed output token. `index` counts the request's output from 0."""

    handle: RequestHandle
    token: int
    index: int


@dataclasses.dataclass(frozen=True)
class RequestFinished:
    """A request ended; its slot and pages return once its last fence is complete."""

    handle: RequestHandle
    reason: FinishReason
    stop_token: int | None = None


Event = GeneratedToken | RequestFinished


@dataclasses.dataclass(frozen=True)
class ScheduledPlan:
    """One immutable decision: which program runs for whom.

    Attributes:
        shape: The physical program.
        lanes: Logical work, in the order of the program's request rows.
        epochs: Epoch of each lane's request when planned; commit rechecks them.
        estimated_duration_ns: The program's estimate when planned, 0 if indeterminate.
        value_rate: Scaled selection score, value/ms.
        log_scale: Logarithm of the decision's common scale.
        reason: Why it was selected.
        required_empty_queue: The plan needs completion feedback and an empty window.
    """

    shape: ProgramShape
    lanes: tuple[Lane, ...]
    epochs: tuple[int, ...]
    estimated_duration_ns: int
    value_rate: float
    log_scale: float
    reason: SelectionReason
    required_empty_queue: bool

    def selection_value_rate(self) -> float:
        """The scaled score of the winner, value/ms over the decision's common scale."""
        return self.value_rate

    def selection_log_scale(self) -> float:
        """Natural logarithm of the factor that every value was divided by."""
        return self.log_scale
