"""Policies to compare with: first come first served twice, and the virtual token counter.

Each is a `Scheduler` whose `plan` is its own; admission, commit, completion, pages and counters
are the production functions. They know every program's capacity and no durations, so nothing is
discovered; each step takes the smallest program that holds its work, and waits for the
completion of the step before.

    fcfs-prefill   prompts first, in order of admission, as many whole ones as fit one program;
                   decode otherwise (Orca; vLLM before chunked prefill)
    fcfs-chunked   every decoder in every step, and prompt tokens for the rest of a token budget, in
                   order of admission (Sarathi-Serve, OSDI 2024; vLLM with chunked prefill). A mixed
                   program holds one prompt row, so a step serves one prompt
    vtc            as fcfs-prefill, but the next prompt and the next admission belong to the client
                   with the smallest virtual token counter (Sheng et al., "Fairness in Serving
                   Large Language Models", OSDI 2024, algorithms 2 and 4)

With speculation every decode step is a rectangular round of the whole depth, as fixed-k engines do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import Allocation, Catalog, ProgramKind, ProgramShape, lane_width, packed_rows
from helios_jax.scheduler.programs import index_of
from helios_jax.scheduler.reservation import page_room
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.state import DECODE, INITIALIZE, PROMPT, Requests
from helios_jax.scheduler.types import (
    CompletionRecord,
    Event,
    ExecutionTiming,
    Fence,
    GeneratedToken,
    Lane,
    LaneRole,
    Limits,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
    SelectionReason,
)

BASELINES = ("fcfs-prefill", "fcfs-chunked", "vtc")
INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # VTC's w_p and w_q, as in its evaluation


class BaselineScheduler(Scheduler):
    """Prompts first, first come first served."""

    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        super().__init__(catalog, limits)
        self._order = np.zeros(limits.slots, np.int64)  # of admission
        self._admitted = 0

    def admit(self, spec: RequestSpec, now_ns: int) -> RequestHandle:
        handle = super().admit(spec, now_ns)
        self._admitted += 1
        self._order[handle.slot] = self._admitted
        return handle

    def plan(self) -> ScheduledPlan | None:
        """The policy's next step; None while a frame is in flight or nobody is ready."""
        state = self.state
        if state.frames:
            return None
        phase = state.requests.phase
        fresh = np.flatnonzero(phase == INITIALIZE)
        if len(fresh):
            return self._state_step(fresh)
        prompts, decoders = (np.flatnonzero(phase == wanted) for wanted in (PROMPT, DECODE))
        pages = page_room(state)
        if pages is not None:
            decoders = decoders[pages.end[decoders] > 0]
        return self._step(prompts[np.argsort(self._rank(prompts), kind="stable")], decoders)

    def _rank(self, slots: np.ndarray) -> np.ndarray:
        """What orders prompts; the smallest goes first."""
        return self._order[slots]

    def _step(self, prompts: np.ndarray, decoders: np.ndarray) -> ScheduledPlan | None:
        if len(prompts):
            return self._prefill(prompts, max(shape.token_capacity for shape in self._shapes(ProgramKind.PREFILL)))
        return self._decode(decoders) if len(decoders) else None

    def _shapes(self, kind: ProgramKind) -> tuple[ProgramShape, ...]:
        return self.state.catalog.of_kind(kind)

    def _state_step(self, slots: np.ndarray) -> ScheduledPlan:
        shapes = self._shapes(ProgramKind.INITIALIZE)
        shape = min(shapes, key=lambda s: (s.batch_capacity < len(slots), abs(s.batch_capacity - len(slots))))
        lanes = [self._lane(slot, LaneRole.INITIALIZE, 0) for slot in slots[: shape.batch_capacity].tolist()]
        return self._made(shape, lanes)

    def _prefill(self, prompts: np.ndarray, budget: int) -> ScheduledPlan:
        """As many prompts in order as rows and tokens allow; a prompt is cut only when it is alone.

        A whole prompt that does not fit behind the first waits for the next step.
        """
        requests, shapes = self.state.requests, self._shapes(ProgramKind.PREFILL)
        rows = max(shape.batch_capacity for shape in shapes)
        lengths: list[int] = []
        for slot in prompts[:rows].tolist():
            left = int(requests.boundary[slot] - requests.consumed_len[slot])
            if lengths and sum(lengths) + left > budget:
                break
            lengths.append(min(left, budget - sum(lengths)))
        fitting = [s for s in shapes if s.batch_capacity >= len(lengths) and s.token_capacity >= sum(lengths)]
        shape = min(fitting, key=lambda s: (s.token_capacity, s.batch_capacity))
        slots = prompts[: len(lengths)].tolist()
        return self._made(shape, [self._lane(*pair) for pair in _prompt_rows(slots, lengths)])

    def _decode(self, decoders: np.ndarray) -> ScheduledPlan:
        """Everyone who decodes, or those least recently served when the widest program is smaller."""
        shapes = self._rounds()
        shape = _smallest(shapes, len(decoders))
        chosen = self._served_next(decoders, shape.batch_capacity)
        return self._made(shape, [self._lane(slot, LaneRole.DECODE, lane_width(shape)) for slot in chosen])

    def _rounds(self) -> tuple[ProgramShape, ...]:
        """Decode programs, or rectangular rounds of the whole depth."""
        rounds = self._shapes(ProgramKind.SPECULATIVE)
        deepest = max((shape.proposal_depth for shape in rounds), default=0)
        rectangular = tuple(
            shape for shape in rounds
            if shape.proposal_depth == deepest and shape.allocation is Allocation.QUERY_LENGTH
            and packed_rows(shape) == shape.batch_capacity * shape.token_capacity
        )  # fmt: skip
        return rectangular or self._shapes(ProgramKind.DECODE)

    def _served_next(self, slots: np.ndarray, count: int) -> list[int]:
        if len(slots) <= count:
            return slots.tolist()
        requests = self.state.requests
        order = np.lexsort((self._order[slots], requests.output_len[slots], requests.last_use_ns[slots]))
        return sorted(slots[order[:count]].tolist())

    def _lane(self, slot: int, role: LaneRole, length: int) -> Lane:
        """The lane of a slot; a round's length is cut to the output and the pages that are left."""
        requests: Requests = self.state.requests
        start = int(requests.committed_len[slot])
        emits = role is LaneRole.DECODE
        if emits:
            length = min(length, int(requests.max_tokens[slot] - requests.output_len[slot]))
            pages = page_room(self.state)
            if pages is not None:
                length = min(length, int(pages.end[slot]) - start - self.state.limits.draft_extent)
        elif role is LaneRole.PROMPT:
            emits = start + length == requests.prompt_len[slot] and bool(requests.max_tokens[slot] > 0)
        return Lane(RequestHandle(slot, int(requests.generation[slot])), role, start, length, bool(emits))

    def _made(self, shape: ProgramShape, lanes: list[Lane], prompt_row: int = -1) -> ScheduledPlan:
        state = self.state
        return ScheduledPlan(
            shape=shape,
            lanes=tuple(lanes),
            epochs=tuple(state.requests.epoch[[lane.handle.slot for lane in lanes]].tolist()),
            estimated_duration_ns=int(state.costs.estimate_ns[index_of(state.catalog, shape)]),
            value_rate=0.0,
            log_scale=0.0,
            reason=SelectionReason.ORDINARY,
            required_empty_queue=True,
            prompt_row=prompt_row,
        )


class ChunkedScheduler(BaselineScheduler):
    """Decoders first, chunks of prompts in what is left of a token budget.

    Without mixed programs in the catalogue, chunks and decode steps take turns.
    """

    def __init__(self, catalog: Catalog, limits: Limits, token_budget: int) -> None:
        super().__init__(catalog, limits)
        self._budget, self._prompt_turn = token_budget, False

    def _step(self, prompts: np.ndarray, decoders: np.ndarray) -> ScheduledPlan | None:
        if not len(prompts):
            return self._decode(decoders) if len(decoders) else None
        if not len(decoders):
            return self._chunk(prompts)
        mixed = self._mixed(int(prompts[0]), decoders)
        if mixed is not None:
            return mixed
        self._prompt_turn = not self._prompt_turn
        return self._chunk(prompts) if self._prompt_turn else self._decode(decoders)

    def _chunk(self, prompts: np.ndarray) -> ScheduledPlan:
        return self._prefill(
            prompts, min(self._budget, max(s.token_capacity for s in self._shapes(ProgramKind.PREFILL)))
        )

    def _mixed(self, prompt: int, decoders: np.ndarray) -> ScheduledPlan | None:
        """Every decoder and a chunk of the first prompt in one program; None if there is none that wide."""
        wide = [s for s in self._shapes(ProgramKind.MIXED) if s.batch_capacity > len(decoders)]
        if not wide:
            return None
        requests = self.state.requests
        left = int(requests.boundary[prompt] - requests.consumed_len[prompt])
        deepest = max(lane_width(shape) for shape in wide)
        wide = [shape for shape in wide if lane_width(shape) == deepest]
        rows = min(shape.batch_capacity for shape in wide)
        wide = [shape for shape in wide if shape.batch_capacity == rows]
        largest = max(shape.prefill_capacity for shape in wide)
        chunk = max(1, min(left, self._budget - len(decoders) * deepest, largest))
        shape = min((s for s in wide if s.prefill_capacity >= chunk), key=lambda s: s.prefill_capacity)
        lanes = [self._lane(slot, LaneRole.DECODE, deepest) for slot in decoders.tolist()]
        return self._made(shape, [*lanes, self._lane(prompt, LaneRole.PROMPT, chunk)], prompt_row=len(lanes))


class VtcAdmission:
    """Virtual token counters: the order of admission, and the ledger of what clients received.

    A client that joins is lifted to the smallest counter among the clients with waiting requests, or to
    that of the client whose request left the queue last when nobody waits: idle time earns nothing.

    Args:
        clients: Client of each request number.
        prompt_lens: Prompt tokens of each request number.
    """

    def __init__(self, clients: Sequence[int], prompt_lens: Sequence[int]) -> None:
        self._clients, self._prompt_lens = clients, prompt_lens
        self.counters = dict.fromkeys(clients, 0.0)
        self._waiting: dict[int, int] = {}  # client -> waiting requests
        self._left_last: int | None = None
        self._by_slot: dict[int, int] = {}

    def arrived(self, number: int) -> None:
        client = self._clients[number]
        if not self._waiting.get(client):
            queued = [self.counters[other] for other, count in self._waiting.items() if count]
            if queued:
                self.counters[client] = max(self.counters[client], min(queued))
            elif self._left_last is not None:
                self.counters[client] = max(self.counters[client], self.counters[self._left_last])
        self._waiting[client] = self._waiting.get(client, 0) + 1

    def choose(self, waiting: Sequence[int]) -> int:
        """The first request of the client with the smallest counter."""
        counters, clients = self.counters, self._clients
        return min(range(len(waiting)), key=lambda index: (counters[clients[waiting[index]]], index))

    def left(self, number: int) -> None:
        """A request left the queue without a slot."""
        self._waiting[self._clients[number]] -= 1

    def admitted(self, number: int, handle: RequestHandle) -> None:
        client = self._clients[number]
        self._waiting[client] -= 1
        self._left_last = client
        self._by_slot[handle.slot] = client
        self.counters[client] += INPUT_WEIGHT * self._prompt_lens[number]

    def returned(self, number: int, handle: RequestHandle) -> None:
        """A request is back in a slot: its client has paid for its prompt already."""
        self._by_slot[handle.slot] = self._clients[number]

    def produced(self, slot: int) -> None:
        """A token of the request in this slot."""
        self.counters[self._by_slot[slot]] += OUTPUT_WEIGHT

    def counter(self, slot: int) -> float:
        """Counter of the client that has a slot."""
        return self.counters[self._by_slot[slot]]


class VtcScheduler(BaselineScheduler):
    """Prompts of the least served client first."""

    def __init__(self, catalog: Catalog, limits: Limits, vtc: VtcAdmission) -> None:
        super().__init__(catalog, limits)
        self._vtc = vtc

    def _rank(self, slots: np.ndarray) -> np.ndarray:
        counters = [self._vtc.counter(slot) for slot in slots.tolist()]
        ranks = np.empty(len(slots), np.int64)
        ranks[np.lexsort((self._order[slots], np.array(counters)))] = np.arange(len(slots))
        return ranks

    def complete(self, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming) -> tuple[Event, ...]:
        events = super().complete(fence, records, timing)
        for event in events:
            if type(event) is GeneratedToken:
                self._vtc.produced(event.handle.slot)
        return events


def baseline(name: str, catalog: Catalog, limits: Limits, token_budget: int, vtc: VtcAdmission) -> BaselineScheduler:
    """The baseline of a name.

    Raises:
        ConfigError: There is none.
    """
    if name == "fcfs-prefill":
        return BaselineScheduler(catalog, limits)
    if name == "fcfs-chunked":
        return ChunkedScheduler(catalog, limits, token_budget)
    if name == "vtc":
        return VtcScheduler(catalog, limits, vtc)
    raise ConfigError(f"unknown baseline {name!r}; choose one of {', '.join(BASELINES)}")


def _smallest(shapes: Sequence[ProgramShape], rows: int) -> ProgramShape:
    """The smallest program with `rows` request rows, or the widest of all."""
    fitting = [shape for shape in shapes if shape.batch_capacity >= rows]
    return min(fitting, key=lambda s: s.batch_capacity) if fitting else max(shapes, key=lambda s: s.batch_capacity)


def _prompt_rows(slots: list[int], lengths: list[int]) -> list[tuple[int, LaneRole, int]]:
    return [(slot, LaneRole.PROMPT, length) for slot, length in zip(slots, lengths, strict=True)]
