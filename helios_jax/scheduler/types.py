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
        state_rows: Rows for snapshots of complete state, numbered 1..state_rows.
        feature_tokens: Image features that a slot stores at once; bounds a window of images.
        draft_extent: Cache positions that a draft may write past a lane's ceiling.
        frames: Frames in flight, 1 or 2.
        stops_on_device: Programs know stop tokens and leave the state of a row alone once its output
            has ended. Without it, a program queued behind a stop token moves the state past it; but for
            a single plain step, which consumes that token, nothing exact is left to capture.
        shares_parts: A request may begin with the whole pages of any part of a checkpoint: what tokens leave behind
            is in their pages alone. Models with recurrent state, and those with a draft's context, whose last
            row depends on the token behind it, are restored from whole checkpoints only.
    """

    slots: int
    pages: int
    page_size: int
    max_context: int
    state_rows: int = 0
    feature_tokens: int = 0
    draft_extent: int = 0
    frames: int = 2
    stops_on_device: bool = False
    shares_parts: bool = False


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(enum.IntFlag):
    """What restricts the programs or the queueing of a request.

    The first four need completion feedback before the request's next program; a target-only
    constraint (penalties, bias, allowed tokens) acts where drafts cannot see it, so such a
    request teaches nothing to the whole population.
    """

    NONE = 0
    GRAMMAR = 1
    HOST_STOPS = 2
    HOST_FED = 4  # pending tokens or committed cursors come from the host
    HISTORY = 8  # inputs made of the output so far
    TARGET_ONLY = 16
    NO_LEARNED = 32  # learned proposals are not allowed
    NO_COPY = 64  # copied proposals are not allowed


FEEDBACK = Constraint.GRAMMAR | Constraint.HOST_STOPS | Constraint.HOST_FED | Constraint.HISTORY
# Grammars and target-only constraints make the target refuse what the draft cannot know.
UNTYPICAL = Constraint.GRAMMAR | Constraint.TARGET_ONLY


class ImageSpan(NamedTuple):
    """Prompt positions [start, end) of one image; never split between prefills."""

    start: int
    end: int


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
        constraints: What restricts its programs.
        image_spans: Images of the prompt, in order, disjoint.
        system_end: End of the system part of the prompt; a prefill stops there. 0 = none.
        restored_len: Prompt tokens that a restore brings back instead of prefill.
            Fewer than `restore_from` covers are whole pages, which are shared and need no restore
            (`Limits.shares_parts`).
        restore_from: Id of the checkpoint that holds them, 0 if none is named.
        external: The state to restore is still on its way from outside the device.
        preemptions: How often it gave up its pages to others before; it is promised more each time.
    """

    prompt: np.ndarray
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    scored: bool = False
    message_ends: tuple[int, ...] = ()
    output_len: int = 0
    constraints: Constraint = Constraint.NONE
    image_spans: tuple[ImageSpan, ...] = ()
    system_end: int = 0
    restored_len: int = 0
    restore_from: int = 0
    external: bool = False
    preemptions: int = 0


class LaneRole(enum.StrEnum):
    INITIALIZE = "initialize"
    RESTORE = "restore"
    VISION = "vision"
    SNAPSHOT = "snapshot"
    PROMPT = "prompt"
    DECODE = "decode"


class Lane(NamedTuple):
    """The logical work of one request in a plan.

    `start` is the position of the first token, `length` the tokens that go in: 1 for decode,
    the ceiling of target rows in a speculative round, the features of an image, 0 for state
    operations. `emits` says whether the program samples tokens for it. `row` is the state row
    of a snapshot or restore, or the index of the image that a vision program encodes.
    """

    handle: RequestHandle
    role: LaneRole
    start: int
    length: int
    emits: bool
    row: int = 0


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
        offered: Proposals of a speculative lane that the target judged.
        accepted: How many of them it accepted.
    """

    handle: RequestHandle
    consumed: int
    tokens: tuple[int, ...]
    committed_len: int
    valid: bool = True
    offered: int = 0
    accepted: int = 0


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


class GeneratedToken(NamedTuple):
    """One committed output token. `index` counts the request's output from 0.

    A tuple, because a frame makes hundreds: a frozen dataclass takes four times as long to make.
    """

    handle: RequestHandle
    token: int
    index: int  # type: ignore[assignment]  # hides the method of tuples, which nobody calls


@dataclasses.dataclass(frozen=True)
class RequestFinished:
    """A request ended; its slot and pages return once its last fence is complete.

    While `awaits_capture` holds for it, the host keeps back the visible completion of its
    response: a continuation sent on seeing it shall find the terminal checkpoint.
    """

    handle: RequestHandle
    reason: FinishReason
    stop_token: int | None = None


@dataclasses.dataclass(frozen=True)
class RequestRebound:
    """A restore between two image windows bound the request to a fresh generation of its slot."""

    handle: RequestHandle
    fresh: RequestHandle


class CheckpointRole(enum.IntEnum):
    """Why a checkpoint was taken; of equal demand the smaller one is evicted first."""

    EXTRA = 0
    PROMPT_END = 1
    TERMINAL = 2
    ANCHOR = 3


@dataclasses.dataclass(frozen=True)
class CheckpointPublished:
    """The state after the first `endpoint` tokens of a request may be restored from `checkpoint`.

    The host knows the tokens: `identify_checkpoint` tells the scheduler their key.
    """

    handle: RequestHandle
    checkpoint: int
    endpoint: int
    role: CheckpointRole


Event = GeneratedToken | RequestFinished | RequestRebound | CheckpointPublished


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
        prompt_row: Index in `lanes` of the prompt row of a mixed program, -1 without one.
        exploration_credit_ns: Balance of the ledger that paid for an exploration, else 0.
        expected_tokens: Output tokens expected of each lane, in lane order; empty means one each.
        observation_age_ns: Age of the program's last valid observation, None if it has none.
    """

    shape: ProgramShape
    lanes: tuple[Lane, ...]
    epochs: tuple[int, ...]
    estimated_duration_ns: int
    value_rate: float
    log_scale: float
    reason: SelectionReason
    required_empty_queue: bool
    prompt_row: int = -1
    exploration_credit_ns: int = 0
    expected_tokens: tuple[float, ...] = ()
    observation_age_ns: int | None = None

    def selection_value_rate(self) -> float:
        """The scaled score of the winner, value/ms over the decision's common scale."""
        return self.value_rate

    def selection_log_scale(self) -> float:
        """Natural logarithm of the factor that every value was divided by."""
        return self.log_scale
