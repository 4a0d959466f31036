"""A whole engine in a world made of one seed: real scheduler, real text, fake device, virtual time.

One thread. The engine's own loop runs until nothing more will happen; the clock does what the world
has in store on the way (`world_clock`), clients come and go (`world_clients`), the device fails
(`world_faults`). Every change of the scheduler's state is an event, after which all numbered
invariants are recounted; whenever the engine goes idle, every ledger must be as it was at the start.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.request import Request
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.scheduler.reservation import MAX_PREEMPTIONS
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.state import Phase, State
from helios_jax.testing import ByteTokenizer, EngineRig, FakeDraft, FakeFrame
from tests.simulation.world_clients import AT_PLACE, MS, Client, new_client
from tests.simulation.world_clock import WorldClock
from tests.simulation.world_faults import Faults, Rates
from tests.simulation.world_grammar import COMPILER
from tests.simulation.world_leaks import held
from tests.simulation.world_model import talk
from tests.simulation.world_talk import ROWS, Talk

TRANSITIONS = (
    "admit", "advance_to", "commit", "complete", "complete_with_survival", "complete_packed_round",
    "complete_packed_round_with_survival", "published_output", "published_outputs", "cancel", "finish", "preempt",
    "offer_copy", "external_ready", "identify_checkpoint", "demand_checkpoint",
    "drop_checkpoints",
)  # fmt: skip
JUMP_NS = 31_000_000_000  # more than an estimate stays fresh
MAX_STEPS = 200_000  # an engine that turns without end is wrong


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a seed makes of a world."""

    options: dict[str, Any]
    rates: Rates
    pause_ms: float  # between two arrivals

    @classmethod
    def drawn(cls, rng: random.Random) -> Setting:
        slots, page_size = rng.choice([1, 2, 3, 4, 6]), rng.choice([4, 8, 16])
        context = rng.choice([40, 96, 131])
        method = rng.choice(["none", "none", "copy", "copy", "draft"])
        depth = 0 if method == "none" else rng.choice([1, 2, 3, 5])
        most = -(-(context + depth) // page_size)
        options: dict[str, Any] = {
            "max_slots": slots,
            "max_context": context,
            "page_size": page_size,
            "num_pages": rng.choice([None, most, most + 3, 2 * most, most // 2 + 1]),
            "max_queue": rng.choice([2, 16, 64]),
            "policy": rng.choice(["balanced", "balanced", "throughput"]),
            "async_scheduling": rng.random() < 0.8,
            "draft": FakeDraft(rng.choice([0.0, 0.6, 0.9, 1.0])),
        }
        if rng.random() < 0.4:
            options["mixed_prefill"] = True
        if method != "none":
            options |= {
                "spec_method": method,
                "num_draft_tokens": depth,
                "spec_width": rng.choice(["adaptive"] * 3 + ["fixed", "off"]),
                "speculative_token_capacity": max(depth + 1, rng.choice([4, 8, 16])),
            }
        rare = rng.random() < 0.4
        rates = Rates(
            device_error=0.004 * rare,
            submit_error=0.002 * rare,
            not_finite=rng.choice([0.0, 0.004]),
            no_time=rng.choice([0.0, 0.01]),
            stall=rng.choice([0.0, 0.01]),
        )
        return cls(options, rates, rng.choice([20.0, 60.0, 120.0]) / slots)


class World:
    """One history.

    Args:
        seed: Everything follows from it.
        events: Changes of the scheduler's state after which nobody new arrives.
        lie: How one completion is malformed (`world_faults.LIES`), if one is: the engine must stop, and answer.
        dumps: Where a stopped engine may write.
        closes_ns: When somebody closes the engine, whatever it is doing; 0 = nobody does.
        rates: Chances of faults that replace what the seed says.
        change: Options that replace what the seed says.
    """

    def __init__(
        self,
        seed: int,
        events: int,
        *,
        dumps: Path,
        lie: str = "",
        closes_ns: int = 0,
        rates: dict[str, float] | None = None,
        **change: Any,
    ) -> None:
        self.rng, self.most_events = random.Random(seed), events
        setting = Setting.drawn(self.rng)
        chances: dict[str, Any] = {"lie": lie, "lie_from": self.rng.randrange(5, 60), **(rates or {})}
        self.clock = WorldClock(self.rng)
        self.faults = Faults(self.rng, dataclasses.replace(setting.rates, **chances), self)
        self.tokenizer, self._pause_ms = ByteTokenizer(), setting.pause_ms
        options = setting.options | change
        rows = random.Random(f"rows of {seed}").choice(ROWS)
        if rows or options.get("state_rows"):
            kind = random.Random(f"kind of {seed}")
            few = {"state_rows": rows, "checkpoint_extra_work_fraction": 0.5, "recurrent": kind.random() < 0.6}
            options = few | options
        self.slots = options["max_slots"]
        self.rig = EngineRig(
            start=False, tokenizer=self.tokenizer, next_token=talk, clock=self.clock, dump_dir=dumps,
            duration_ns=self.faults.duration_ns, on_submit=self.faults.on_submit, on_complete=self.faults.on_complete,
            **options,
        )  # fmt: skip
        self.intake = dataclasses.replace(self.rig.assembly.intake, grammars=COMPILER)
        self.clients: dict[str, Client] = {}
        self.talk = Talk(seed, options["max_context"])
        self.events = self.idles = self._steps = 0
        self.seen: collections.Counter[str] = collections.Counter()
        self._checked: State | None = None
        self._lurking: list[Client] = []
        self._preempts = self.rng.choice([0.0, 0.0, 0.02])  # a step
        self.is_closed = False
        if closes_ns:
            self.clock.after(closes_ns, self._close)
        self._watch()

    # ---- running

    @property
    def is_dead(self) -> bool:
        return self.is_closed or self.rig.engine.failure is not None

    def _close(self) -> None:
        """What `Engine.close` does, but for the thread that is not there."""
        self.is_closed = True
        self.rig.engine.board.refuse("the engine is closed")
        self.rig.engine.board.stop()

    def run(self) -> World:
        """All of it, and the last checks.

        Raises:
            AssertionError, InvariantError: Something that must hold did not.
        """
        engine: Any = self.rig.engine
        self.clock.after(0, self._arrivals)
        self.clock.after(5 * MS, self._mischief)
        engine._run()
        while self.clock.has_deeds:  # slow clients read what they were sent
            self.clock.to_next_deed()
        failure = engine.failure
        lied_to = self.faults.lied_to
        if failure is not None and not lied_to and not self._may_die(failure):
            raise failure
        if lied_to and failure is None and not all(client.has_left for client in lied_to):
            raise AssertionError(f"a malformed completion was believed: {self.faults.rates.lie}")
        self._check_answers()
        return self

    def _may_die(self, failure: BaseException) -> bool:
        """A device whose program fails again and again ends the engine."""
        return "fail" in str(failure) and self.faults.counts["device error"] + self.faults.counts["submit error"] >= 3

    def _watch(self) -> None:
        engine: Any = self.rig.engine
        for name in TRANSITIONS:
            setattr(
                engine.scheduler, name, functools.partial(self._transition, getattr(Scheduler, name), engine.scheduler)
            )
        engine.board.wait = self._idle
        step = engine.step

        def counted() -> bool:
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise AssertionError(f"{MAX_STEPS} steps and no end")
            if self.rng.random() < self._preempts:
                self._preempt_somebody()
            return step()

        engine.step = counted

    def _transition(self, method: Any, scheduler: Scheduler, *arguments: Any) -> Any:
        self.clock.tick()  # anything may happen between two of the scheduler's actions
        result = method(scheduler, *arguments)
        state = scheduler.state
        if state is not self._checked:
            check_invariants(state)
            self._checked, self.events = state, self.events + 1
        self._let_leave()
        return result

    def _let_leave(self) -> None:
        """Clients who wait for their request to be at a certain place."""
        for client in list(self._lurking):
            if client.has_left or client.ends or client.refused is not None:
                self._lurking.remove(client)
            elif any(self.place(sequence).startswith(client.leave_place) for sequence in client.request.sequences):
                client.leave(self)

    def _idle(self, *_: Any) -> None:
        """In place of the engine's sleep: check that all is given back, and go to where something happens."""
        board: Any = self.rig.engine.board
        if board._commands:
            return
        self._check_idle()
        if self.clock.has_deeds:
            self.clock.to_next_deed()
        else:
            board.stop()

    def _preempt_somebody(self) -> None:
        """Whatever the reason, with whatever frames out: it goes on with the same tokens."""
        roster: Any = self.rig.engine.roster
        able = [handle for handle, each in roster.running.items() if each.spec.preemptions < MAX_PREEMPTIONS]
        if able:
            handle = self.rng.choice(able)
            self.seen[f"preempted {self.place(roster.running[handle])}"] += 1
            roster.preempt(handle)

    # ---- what the world does

    def _arrivals(self) -> None:
        if self.events >= self.most_events or self.is_dead:
            return
        for _ in range(self.rng.choice([1, 1, 1, 1, 2, 5])):
            self._arrive(new_client(self.rng, f"c{len(self.clients)}", self.rig.core.limits.max_context))
        pause = self.rng.expovariate(1 / self._pause_ms) + (400 if self.rng.random() < 0.03 else 0)
        self.clock.after(int(pause * MS), self._arrivals)

    def _arrive(self, client: Client) -> None:
        if self.rig.core.limits.state_rows:
            self.talk.shape(client)
        self.clients[client.name] = client
        client.arrive(self)
        if client.leaves == AT_PLACE:
            self._lurking.append(client)

    @property
    def may_arrive(self) -> bool:
        return self.events < self.most_events and not self.is_dead

    def arrive_behind(self, text: list[int], ends: tuple[int, ...]) -> None:
        """Somebody goes on with a text, if the world goes on."""
        if self.may_arrive:
            client = new_client(self.talk.rng, f"c{len(self.clients)}", self.rig.core.limits.max_context)
            own = client.prompt[: self.talk.rng.choice([1, 2, 9, 20])]
            client.prompt = [*text, *own]
            client.message_ends = tuple(sorted({*ends, len(client.prompt)}))
            self.clients[client.name] = client
            client.arrive(self)

    def heard(self, client: Client) -> None:
        """A client knows all that it will ever know of its answer."""
        if self.rig.core.limits.state_rows:
            self.talk.heard(client, self)

    def _mischief(self) -> None:
        if self.events >= self.most_events or self.is_dead:
            return
        die = self.rng.random()
        if die < 0.02:
            self.seen["clock jump"] += 1
            self.clock.advance(self.rng.choice([JUMP_NS, JUMP_NS // 40]))
        elif die < 0.5:
            self.faults.foreign_completion()
        self.clock.after(self.rng.randrange(1, 40) * MS, self._mischief)

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        """The engine's sink."""
        for request, item in batch:
            self.clients[request.request_id].told(item, self)

    def note_leave(self, client: Client) -> None:
        """Where the request was when its client gave up."""
        for place in {self.place(sequence) for sequence in client.request.sequences}:
            self.seen[f"left {place}"] += 1

    def place(self, sequence: Any) -> str:
        """Where a sequence is just now, in words."""
        engine: Any = self.rig.engine
        state = engine.scheduler.state
        if sequence.finish_reason is not None:
            return "after its end" if sequence.sent_finish else "between end and publication"
        if sequence.handle is None:
            return "before it was taken" if sequence not in engine.roster.waiting else "in the queue"
        named = [
            number
            for number, frame in enumerate(state.frames, 1)
            if any(lane.handle == sequence.handle for lane in frame.plan.lanes)
        ]
        phase = Phase(int(state.requests.phase[sequence.handle.slot])).name.lower()
        return f"in {phase}, frames {named} of {len(state.frames)}"

    def clients_of(self, slot: int) -> list[Client]:
        """Who has the slot: nobody or one."""
        running = self.rig.engine.roster.running.items()
        return [self.clients[sequence.request.request_id] for handle, sequence in running if handle.slot == slot]

    def hurt(self, slot: int) -> None:
        """Whoever has the slot may fail."""
        for client in self.clients_of(slot):
            client.hurt = True

    def hurt_all(self) -> None:
        """The device loses everything: whoever has state there may fail."""
        for sequence in self.rig.engine.roster.running.values():
            if sequence.on_device:
                self.clients[sequence.request.request_id].hurt = True

    # ---- what must hold

    def check_frame(self, frame: FakeFrame) -> None:
        """The page tables that go to the device are the scheduler's; distinct slots share no page."""
        state = self.rig.engine.scheduler.state
        self.seen[f"ran {frame.shape.kind}"] += 1
        if "page_table" not in frame.parts:
            return
        for slot, table in zip(frame.parts["slot"].tolist(), frame.parts["page_table"], strict=True):
            mine = table[table > 0]
            if slot < self.slots and not np.array_equal(mine, state.pool.tables[slot][: len(mine)]):
                raise AssertionError(
                    f"slot {slot} goes to the device with pages {mine}, it has {state.pool.tables[slot]}"
                )
        self.seen[f"{len(state.frames)} frames in flight"] += 1

    def _check_idle(self) -> None:
        engine: Any = self.rig.engine
        self.idles += 1
        state, totals = engine.scheduler.state, engine.board.snapshot()
        problems = [*self.rig.ledger_problems(), *held(engine)]
        if state.frames or len(engine.window):
            problems.append(f"{len(state.frames)} frames, {len(engine.window)} in the window")
        if totals.active or not totals.reconciles():
            problems.append(f"requests: {totals}")
        if problems:
            raise AssertionError(f"idle, but {problems}")

    def _check_answers(self) -> None:
        wrong = {name: problem for name, client in self.clients.items() if (problem := client.problem(self))}
        if wrong:
            raise AssertionError(f"{len(wrong)} of {len(self.clients)} clients: {dict(list(wrong.items())[:3])}")
        self._count_ends()

    def _count_ends(self) -> None:
        for client in self.clients.values():
            if client.refused is not None:
                self.seen[f"refused: {type(client.refused).__name__}"] += 1
            elif client.error is not None:
                self.seen[f"error: {type(client.error).__name__}"] += 1
            for reason in client.reasons.values():
                self.seen[f"ended: {reason}"] += 1
        counters = self.rig.engine.scheduler.snapshot_counters()
        reuse = self.rig.engine.stats().checkpoints
        for what in ("hits", "misses", "hit_tokens", "snapshots", "restores", "evictions"):
            self.seen[f"checkpoint {what}"] += getattr(reuse, what)
        for reason, count in reuse.cuts.items():
            self.seen[f"cut: {reason}"] += count
        self.seen["preempted"] += int(counters["requests_preempted"])  # type: ignore[arg-type]
        self.seen.update(self.faults.counts)
