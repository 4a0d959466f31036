"""The scheduler's state: one frozen value, read-only columns with a row a slot.

It deliberately knows no clock, device, queue of waiting requests or token text. The life of
a slot:

1. FREE. `admit` gives it a new generation and promises it pages: INITIALIZE, RESTORE when
   saved state is to come back, EXTERNAL while that state is still on its way.
2. The program of that stage completes: VISION while images of the active window are not
   encoded, then PROMPT. Prefills complete until the prompt is consumed; each stops at the
   next `boundary`.
3. At a boundary with an armed state row: SNAPSHOT, and on from there. Between two windows of
   images: SNAPSHOT into a private row, RESTORE from it under a fresh generation, VISION.
4. The last prefill samples the first token: DECODE, one pending token on the device.
5. The request ends (stop token, length, error, host stop, cancel, preempt). TERMINAL if its
   state is worth a snapshot. With a frame in flight that names it, it is RETIRING until that
   fence completes; then FREE.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import operator
from typing import Any

import numpy as np

from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import MAX_SLOTS, Catalog
from helios_jax.scheduler.cost import CostTable, new_costs
from helios_jax.scheduler.preferences import PolicyConfig
from helios_jax.scheduler.programs import KINDS, ProgramTable, tabulate
from helios_jax.scheduler.refresh import Ledgers
from helios_jax.scheduler.resources import PagePool, new_pool
from helios_jax.scheduler.retention import Retention, new_retention
from helios_jax.scheduler.serviceable import check_mode
from helios_jax.scheduler.speculation import Acceptance, new_acceptance
from helios_jax.scheduler.types import Fence, FinishReason, Limits, RequestSpec, ScheduledPlan, SelectionReason

REASONS = tuple(SelectionReason)
FINISHES = tuple(FinishReason)


class Phase(enum.IntEnum):
    """Where the occupant of a slot is; ordered so that a range of phases is a comparison."""

    FREE = 0
    INITIALIZE = 1
    RESTORE = 2
    VISION = 3
    SNAPSHOT = 4  # blocked until its state is copied; the request goes on afterwards
    PROMPT = 5
    DECODE = 6
    TERMINAL = 7  # the response is complete, its state waits to be copied
    EXTERNAL = 8
    RETIRING = 9


# Plain integers for comparisons with columns: an enum member costs a lookup each time.
(FREE, INITIALIZE, RESTORE, VISION, SNAPSHOT, PROMPT, DECODE, TERMINAL, EXTERNAL, RETIRING) = (int(p) for p in Phase)


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """Columns of the request slots; int64 [slots] unless stated.

    Attributes:
        phase: A `Phase`.
        generation: Of the current or last occupant; 0 before the first.
        epoch: Grows with every change that makes a saved plan for the slot obsolete.
        prompt_len, max_tokens: From the spec.
        scored: bool, the prompt goes through scored-prefill programs.
        consumed_len: Prompt tokens that have been through a prefill.
        committed_len: Tokens whose keys and values are in the cache.
        output_len: Tokens sampled since admission.
        written_len: Positions that the submitted programs may have written; pages cover them.
        constraints: A `Constraint`.
        proposals: Copy proposals that the host offers for the next round.
        boundary: Position after `consumed_len` where the next prefill must stop at the latest.
        endpoint: Next message or prompt endpoint after `consumed_len`.
        images_done: Images whose features are prepared or consumed.
        window_images: Images up to the end of the active window.
        state_row: Row that the snapshot due at this position writes, 0 if none is due.
        private_row: Row of a request that spans several image windows, 0 if none.
        restore_row: Row that the next restore reads, 0 if the caller knows it.
        terminal_ns: When a TERMINAL request was known to be at its end.
        admission: Number of the admission, from 1; orders residents by age.
        reserved_pages: Pages promised, at least those that it holds (`reservation`).
        worst_pages: Pages of its prompt and all of its output; no promise is larger.
        last_fence: Last fence that names the slot, 0 if none.
        last_use_ns: Last dispatch, or arrival before the first.
        visible_ns: Last visible output, or the end of the prompt before the first.
        token_r: float64, reciprocal token rate in ms/token, NaN without history.
        delivery_r: float64, reciprocal delivery rate in ms/delivery, NaN without history.
    """

    phase: np.ndarray
    generation: np.ndarray
    epoch: np.ndarray
    prompt_len: np.ndarray
    max_tokens: np.ndarray
    scored: np.ndarray
    consumed_len: np.ndarray
    committed_len: np.ndarray
    output_len: np.ndarray
    written_len: np.ndarray
    constraints: np.ndarray
    proposals: np.ndarray
    boundary: np.ndarray
    endpoint: np.ndarray
    images_done: np.ndarray
    window_images: np.ndarray
    state_row: np.ndarray
    private_row: np.ndarray
    restore_row: np.ndarray
    terminal_ns: np.ndarray
    admission: np.ndarray
    reserved_pages: np.ndarray
    worst_pages: np.ndarray
    last_fence: np.ndarray
    last_use_ns: np.ndarray
    visible_ns: np.ndarray
    token_r: np.ndarray
    delivery_r: np.ndarray

    def draft(self) -> Requests:
        """A writable copy; `sealed` makes it a value again."""
        return Requests(*[column.copy() for column in _COLUMN_VALUES(self)])

    def sealed(self) -> Requests:
        for column in _COLUMN_VALUES(self):
            column.setflags(False)
        return self

    @property
    def runnable(self) -> np.ndarray:
        """bool [slots], the residents that a plan may name."""
        return (self.phase >= INITIALIZE) & (self.phase <= TERMINAL)

    @property
    def active(self) -> np.ndarray:
        """bool [slots], the residents that still consume or produce tokens: the participants of service."""
        return (self.phase >= INITIALIZE) & (self.phase <= DECODE)

    @property
    def waits_outside(self) -> np.ndarray:
        """bool [slots], residents whose state is still on its way: admitted, but not runnable."""
        return self.phase == EXTERNAL

    @property
    def streams(self) -> np.ndarray:
        """bool [slots], active decoders, those that wait for a snapshot included."""
        blocked = (self.phase == SNAPSHOT) & (self.consumed_len == self.prompt_len)
        return (self.phase == DECODE) | blocked


_COLUMN_VALUES = operator.attrgetter(*(field.name for field in dataclasses.fields(Requests)))
REQUEST_COLUMNS = tuple(field.name for field in dataclasses.fields(Requests))
# What belongs to the occupant of a slot and goes with it.
OWNED_COLUMNS = tuple(name for name in REQUEST_COLUMNS if name not in ("generation", "epoch", "token_r", "delivery_r"))


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A submitted plan and what `commit` froze for its accounting.

    Attributes:
        fence: Its fence.
        plan: What runs.
        dispatched_ns: When it was committed.
        participants: int64 [slots] generation of each resident runnable request, else 0.
        token_n, delivery_n: float64 [slots] normalisers, units/ms, NaN where unknown.
        first_token_r: float64 [slots] the r that an unmeasured participant starts from.
        expected_tokens, expected_deliveries: float64 [slots] output that the frame is expected
            to serve, 0 outside the lanes that decode; projection applies it.
        most_tokens: int64 [slots] the most that it can serve, min(ceiling, P) of each such lane.
        alone: It needs completion feedback: nothing may be submitted behind it.
    """

    fence: Fence
    plan: ScheduledPlan
    dispatched_ns: int
    participants: np.ndarray
    token_n: np.ndarray
    delivery_n: np.ndarray
    first_token_r: np.ndarray
    expected_tokens: np.ndarray
    expected_deliveries: np.ndarray
    most_tokens: np.ndarray
    alone: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Interval:
    """The last completed frame, as far as a publication may still correct it.

    Attributes:
        fence: Its fence.
        duration_ms: Measured interval, 0 when the timing was invalid.
        served: int64 [slots] generation of each request that got tokens, else 0.
        delivery_n: float64 [slots] normalisers frozen at commit.
        delivery_r: float64 [slots] r before the interval.
        published: bool [slots], corrected already.
        completed_ns: When the completion was observed; the next frame has had the device since.
    """

    fence: Fence
    duration_ms: float
    served: np.ndarray
    delivery_n: np.ndarray
    delivery_r: np.ndarray
    published: np.ndarray
    completed_ns: int


@dataclasses.dataclass(frozen=True)
class Counters:
    """Totals since the start; tuples follow `REASONS`, `KINDS` and `FINISHES`."""

    executions: tuple[int, ...] = (0,) * len(REASONS)
    execution_ns: tuple[int, ...] = (0,) * len(REASONS)
    programs: tuple[int, ...] = (0,) * len(KINDS)
    used_tokens: tuple[int, ...] = (0,) * len(KINDS)
    padded_tokens: tuple[int, ...] = (0,) * len(KINDS)
    admitted: int = 0
    finished: tuple[int, ...] = (0,) * len(FINISHES)
    cancelled: int = 0
    preempted: int = 0
    rebound: int = 0
    ignored_completions: int = 0
    unmeasured_frames: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Everything that the scheduler knows. Comparable by value, picklable, hashable."""

    catalog: Catalog
    programs: ProgramTable
    limits: Limits
    policy: PolicyConfig
    now_ns: int
    requests: Requests
    specs: tuple[RequestSpec | None, ...]
    costs: CostTable
    pool: PagePool
    frames: tuple[Frame, ...]
    interval: Interval | None
    last_fence: Fence
    counters: Counters
    ledgers: Ledgers
    acceptance: Acceptance
    retention: Retention

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and state_digest(self) == state_digest(other)

    def __hash__(self) -> int:
        return hash(state_digest(self))

    def __getstate__(self) -> dict[str, object]:
        """The fields alone: what is computed once and kept beside them (`service`, `queue`) is no part of the value."""
        return {name: vars(self)[name] for name in _STATE_FIELDS}


_STATE_FIELDS = tuple(field.name for field in dataclasses.fields(State))


def new_state(catalog: Catalog, limits: Limits, policy: PolicyConfig | None = None) -> State:
    """A state without requests and without measurements.

    Raises:
        ConfigError: A limit out of range, or a catalogue that cannot serve a request in the policy's mode.
    """
    if not 1 <= limits.slots <= MAX_SLOTS:
        raise ConfigError(f"slots must be 1 to {MAX_SLOTS}, got {limits.slots}")
    for name, least in (("pages", 1), ("page_size", 1), ("max_context", 1), ("frames", 1), ("state_rows", 0),
                        ("feature_tokens", 0), ("draft_extent", 0)):  # fmt: skip
        if getattr(limits, name) < least:
            raise ConfigError(f"{name} must be at least {least}, got {getattr(limits, name)}")
    if limits.frames > 2:
        raise ConfigError(f"frames must be 1 or 2, got {limits.frames}")
    if limits.shares_parts and limits.draft_extent:
        raise ConfigError("pages with a draft's context cannot be shared in parts; leave shares_parts out")
    programs, policy = tabulate(catalog), policy or PolicyConfig()
    check_mode(programs, policy.speculation)
    columns = {name: np.zeros(limits.slots, np.int64) for name in REQUEST_COLUMNS}
    columns["scored"] = np.zeros(limits.slots, np.bool_)
    for name in ("token_r", "delivery_r"):
        columns[name] = np.full(limits.slots, np.nan)
    return State(
        catalog=catalog,
        programs=programs,
        limits=limits,
        policy=policy,
        now_ns=0,
        requests=Requests(**columns).sealed(),
        specs=(None,) * limits.slots,
        costs=new_costs(len(catalog)),
        pool=new_pool(limits.pages, limits.slots, limits.state_rows),
        frames=(),
        interval=None,
        last_fence=0,
        counters=Counters(),
        ledgers=Ledgers(),
        acceptance=new_acceptance(limits.slots, max(shape.proposal_depth for shape in catalog)),
        retention=new_retention(limits.state_rows, limits.slots),
    )


def configure_policy(state: State, policy: PolicyConfig) -> State:
    """Replace the preferences, before the first admission only.

    Raises:
        ConfigError: A request has been admitted already, or the catalogue has no program for the mode.
    """
    if state.counters.admitted:
        raise ConfigError("configure_policy must be called before the first admission")
    check_mode(state.programs, policy.speculation)
    return dataclasses.replace(state, policy=policy)


def state_digest(value: Any) -> str:
    """A hash of a state's value: equal events give equal digests, on every run."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(f"a{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif dataclasses.is_dataclass(value):
        digest.update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, tuple):
        digest.update(f"t{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, frozenset):
        _feed(digest, tuple(sorted(value)))
    else:
        digest.update(f"{type(value).__name__}:{value!r};".encode())
