"""Reuse of prefixes: which checkpoint a prompt begins with, and what is known of those that are gone.

A checkpoint is known by the tokens that it covers, not by a hash of them, and by all else that its state
depends on (`Scope`). The scheduler keeps the published ones with these keys, so there is no second book that could
differ from it: whatever is evicted there is not found here.

Life of a checkpoint for the engine: 1. `published` names it when its snapshot is complete; 2. `matched` finds the
longest one that a waiting sequence may be restored from, each time before it is admitted; 3. `admitted` counts.

All of it runs in the engine thread.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from helios_jax.engine.request import Sequence
from helios_jax.engine.stats import CheckpointStats
from helios_jax.errors import RequestError
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.state_rows import RowUse
from helios_jax.scheduler.types import CheckpointPublished, RequestSpec, ScheduledPlan

GHOSTS_A_ROW = 2  # keys of evicted checkpoints that are remembered, to say why a match was cut


class Scope(NamedTuple):
    """What the state of a prefix depends on besides its tokens."""

    model: str
    adapter: str = ""
    images: str = ""


class PrefixKey(NamedTuple):
    """A prefix: its scope, and its tokens as int32 bytes. Equal keys are equal prefixes."""

    scope: Scope
    tokens: bytes

    def covers(self, scope: Scope, prompt: np.ndarray) -> bool:
        """Whether a prompt, int32 [n], begins with this prefix."""
        mine = self.array
        return self.scope == scope and len(mine) <= len(prompt) and bool((prompt[: len(mine)] == mine).all())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.tokens, np.int32)


def key_of(scope: Scope, tokens: np.ndarray) -> PrefixKey:
    """The key of a prefix, int32 [n]."""
    return PrefixKey(scope, np.ascontiguousarray(tokens, np.int32).tobytes())


def cut_points(prompt_len: int, interval: int) -> tuple[int, ...]:
    """Where a prompt without messages is worth a checkpoint besides its end.

    The last whole `interval`, so that the same prompt finds it again, and before it the doubled intervals: what
    two prompts share is then reused by half at least, with few rows however long they are. An interval is the
    largest prefill, which stops there anyway.
    """
    if interval < 1 or prompt_len <= interval:
        return ()
    last, points, end = (prompt_len - 1) // interval * interval, [], interval
    while end < last:
        points.append(end)
        end *= 2
    return (*points, last)


class Host(Protocol):
    """The part of `host_checkpoints.HostCheckpoints` that matches need."""

    def fetch(self, prompt: np.ndarray, most: int, checkpoint: int, endpoint: int) -> bool: ...


class Prefixes:
    """Matches and counts for one engine.

    Args:
        scheduler: Keeps the checkpoints; without state rows nothing is ever found.
        scope: Of all requests of the engine.
        host: Has checkpoints that gave way here, or None.
    """

    def __init__(self, scheduler: Scheduler, scope: Scope, host: Host | None = None) -> None:
        self._scheduler, self.scope, self._host = scheduler, scope, host
        state = scheduler.state
        self.enabled, self._shares_parts = state.limits.state_rows > 0, state.limits.shares_parts
        self.counts = CheckpointStats(rows_total=state.limits.state_rows)
        prefills = state.catalog.of_kind(ProgramKind.PREFILL)
        self._interval = max((shape.token_capacity for shape in prefills), default=0)
        self._known: dict[PrefixKey, None] = {}
        self._ghosts: collections.OrderedDict[PrefixKey, None] = collections.OrderedDict()
        self._seen_keys: object = None
        self._asked: tuple[int, np.ndarray, object, tuple[int, int]] | None = (
            None  # who was matched last, and with what
        )

    # ---- before an admission

    def accept(self, sequence: Sequence) -> None:
        """Say where the prompt of a new sequence may be cut, if its caller did not."""
        spec = sequence.spec
        if self.enabled and not self._shares_parts and not spec.message_ends:
            sequence.spec = dataclasses.replace(spec, message_ends=cut_points(len(spec.prompt), self._interval))

    def matched(self, sequence: Sequence) -> RequestSpec:
        """The spec of a waiting sequence with the longest checkpoint that its prompt begins with, if there is one."""
        spec = sequence.spec
        if not self.enabled:
            return spec
        checkpoint, endpoint = self._found(sequence)
        if self._fetched(spec, most_restored(sequence), checkpoint, endpoint):
            checkpoint, endpoint = self._found(sequence)
        if (checkpoint, endpoint) == (spec.restore_from, spec.restored_len):
            return spec
        return dataclasses.replace(spec, restore_from=checkpoint, restored_len=endpoint)

    def _found(self, sequence: Sequence) -> tuple[int, int]:
        """What `find` says; the head of a queue asks at every step, so it is found once for these checkpoints."""
        keys, spec = self._scheduler.state.retention.checkpoints.keys, sequence.spec
        asked = self._asked
        if asked is None or asked[0] != sequence.number or asked[1] is not spec.prompt or asked[2] is not keys:
            found = self.find(spec.prompt, most_restored(sequence), parts=may_share_parts(sequence))
            self._asked = asked = (sequence.number, spec.prompt, keys, found)
        return asked[3]

    def _fetched(self, spec: RequestSpec, most: int, checkpoint: int, endpoint: int) -> bool:
        """Whether a longer checkpoint came from the host; one that has to wait for a slot fetches nothing yet."""
        if self._host is None or most <= endpoint:
            return False
        source = dataclasses.replace(spec, restore_from=checkpoint, restored_len=endpoint)
        try:
            has_place = self._scheduler.can_admit(source)
        except RequestError:
            return False
        return has_place and self._host.fetch(spec.prompt, most, checkpoint, endpoint)

    def find(self, prompt: np.ndarray, most: int, *, parts: bool = False) -> tuple[int, int]:
        """Id of the published checkpoint to begin with, and how many of at most `most` tokens it saves.

        The longest that `prompt` begins with; with `parts`, where pages are all that a state is, whole pages of a
        longer one if they are more.
        """
        known = self._scheduler.state.retention.checkpoints
        ends, size, best = known.endpoints, self._scheduler.state.limits.page_size, (0, 0)
        parts = parts and self._shares_parts
        for place in np.argsort(-ends, kind="stable").tolist():
            key, end = known.keys[place], int(ends[place])
            if end <= best[1]:
                break
            if not isinstance(key, PrefixKey) or key.scope != self.scope or (end > most and not parts):
                continue
            common = _common(prompt[:most], key.array)
            usable = end if common == end else common // size * size if parts else 0
            if usable > best[1]:
                best = int(known.ids[place]), usable
        return best

    # ---- after it

    def admitted(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Count the first admission of a sequence; `others` are those that run beside it."""
        request, spec = sequence.request, sequence.spec
        if not self.enabled or spec.preemptions:
            return
        if sequence.index == 0 and request.num_cached_tokens is None:
            request.num_cached_tokens = spec.restored_len
        if spec.scored:
            return  # its log-probabilities need every position computed
        counts = self.counts
        counts.hits += spec.restored_len > 0
        counts.misses += spec.restored_len == 0
        counts.queried_tokens += len(spec.prompt)
        counts.hit_tokens += spec.restored_len
        self._demand_whole(spec.prompt)
        reason, tokens = self._cut(spec, [other.spec.prompt for other in others if other is not sequence])
        if reason:
            counts.cuts[reason] += 1
            counts.cut_tokens[reason] += tokens

    def _demand_whole(self, prompt: np.ndarray) -> None:
        """A state of the whole prompt cannot be restored, for its last token is computed; but it was asked for."""
        known, key = self._scheduler.state.retention.checkpoints, key_of(self.scope, prompt)
        for place in np.flatnonzero(known.endpoints == len(prompt)).tolist():
            if known.keys[place] == key:
                self._scheduler.demand_checkpoint(int(known.ids[place]))

    def _cut(self, spec: RequestSpec, running: list[np.ndarray]) -> tuple[str, int]:
        """Why less was restored than the prompt shares with what is or was known, and how much less."""
        self._remember()
        prompt, restored, most = spec.prompt, spec.restored_len, len(spec.prompt) - 1
        gone = [len(key.array) for key in self._ghosts if key.covers(self.scope, prompt)]
        evicted = max((end for end in gone if end <= most), default=0)
        if evicted > restored:
            return "evicted", evicted - restored
        present = [*(key.array for key in self._known), *running]
        shared = max((_common(prompt[:most], other) for other in present), default=0)
        if shared <= restored:
            return "", 0
        page = self._scheduler.state.limits.page_size
        return ("no_state" if shared - restored >= page else "too_short"), shared - restored

    # ---- as copies complete

    def published(self, event: CheckpointPublished, tokens: np.ndarray) -> None:
        """Name a checkpoint that was just announced by the tokens that it covers.

        Args:
            tokens: int32, at least the first `event.endpoint` tokens of its request.
        """
        self._scheduler.identify_checkpoint(event.checkpoint, key_of(self.scope, tokens[: event.endpoint]))
        self._remember()

    def ran(self, plan: ScheduledPlan) -> None:
        """Count copies."""
        self.counts.snapshots += len(plan.lanes) * (plan.shape.kind is ProgramKind.SNAPSHOT)
        self.counts.restores += len(plan.lanes) * (plan.shape.kind is ProgramKind.RESTORE)

    def snapshot(self) -> CheckpointStats:
        """A copy of the counts, with the gauges of now."""
        state = self._scheduler.state
        uses = state.retention.rows.use
        return dataclasses.replace(
            self.counts,
            cuts=dict(self.counts.cuts),
            cut_tokens=dict(self.counts.cut_tokens),
            evictions=state.retention.counts.evicted,
            rows_used=int(np.count_nonzero(uses != RowUse.FREE)),
            published=len(state.retention.checkpoints),
            pages_held=state.pool.num_kept,
        )

    def _remember(self) -> None:
        """Keep the keys of checkpoints that have gone since the last call; the oldest are forgotten."""
        keys = self._scheduler.state.retention.checkpoints.keys
        if keys is self._seen_keys:
            return
        present = dict.fromkeys(key for key in keys if isinstance(key, PrefixKey))
        for key in self._known:
            if key not in present:
                self._ghosts[key] = None
                self._ghosts.move_to_end(key)
        for key in present:
            self._ghosts.pop(key, None)
        while len(self._ghosts) > GHOSTS_A_ROW * self.counts.rows_total:
            self._ghosts.popitem(last=False)
        self._known, self._seen_keys = present, keys


def most_restored(sequence: Sequence) -> int:
    """Most tokens of its prompt that a sequence may be restored with: the last is always computed.

    None where the prompt is scored. Where tokens of the output count for penalties, output of before a preemption
    is computed again: a restore knows which tokens occurred, not how often.
    """
    spec, params = sequence.spec, sequence.params
    if spec.scored:
        return 0
    most = len(spec.prompt) - 1
    counted = bool(params.presence_penalty or params.frequency_penalty)
    return min(most, len(sequence.prompt)) if counted else most


def may_share_parts(sequence: Sequence) -> bool:
    """Whether pages alone are enough: which tokens occurred comes with a state, and penalties of repetition ask."""
    return sequence.params.repetition_penalty == 1


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the prefix that two texts, int32 [n] and [m], share."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
