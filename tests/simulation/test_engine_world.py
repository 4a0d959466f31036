"""The whole engine through whole histories, each made of one seed (see `world`).

`FAILED` keeps every seed that ever found something, with what it found.
"""

from __future__ import annotations

import collections
import itertools
import logging
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helios_jax.engine import frames, prefixes
from helios_jax.engine.drafting import Drafting
from helios_jax.engine.publication import Publisher
from helios_jax.engine.request import Sequence
from helios_jax.engine.roster import Roster
from helios_jax.scheduler import captures, completion, lifecycle, retirement
from helios_jax.scheduler.state import state_digest
from tests.simulation.world import World
from tests.simulation.world_clients import PLACES
from tests.simulation.world_faults import LIES
from tests.simulation.world_talk import REUSE_PLACES

FAILED: tuple[tuple[int, int, str], ...] = (  # (seed, events, what it found)
    (1009, 200, "planning behind a frame while every stream waits for pages, with mixed programs"),
)
CASES, EVENTS = 10, 10_000  # of each case; the cases are shared among test processes
TROUBLE = {"device_error": 0.01, "submit_error": 0.006, "not_finite": 0.01, "no_time": 0.01, "stall": 0.01}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Engines are stopped on purpose here, and say so at length."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def lived(seed: int, events: int, dumps: Path, **options: Any) -> World:
    """A world that has run; what it found wrong says by which seed."""
    try:
        return World(seed, events, dumps=dumps, **options).run()
    except BaseException as error:
        raise AssertionError(f"seed {seed}, {events} events, {options}: {error}") from error


def test_five_thousand_events(tmp_path: Path) -> None:
    worlds = [lived(seed, 1000, tmp_path) for seed in range(5)]
    assert sum(world.events for world in worlds) >= 5000
    assert sum(world.idles for world in worlds) > 50
    assert sum(world.seen["2 frames in flight"] for world in worlds) > 100


def test_seeds_that_failed_once(tmp_path: Path) -> None:
    for seed, events, _ in FAILED:
        lived(seed, events, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(CASES))
def test_a_hundred_thousand_events(case: int, tmp_path: Path) -> None:
    seen: collections.Counter[str] = collections.Counter()
    seeds, events = itertools.count(1000 + 100 * case), 0
    while events < EVENTS:
        seed = next(seeds)
        world = lived(seed, 1000, tmp_path, rates=None if seed % 2 else TROUBLE)
        events += world.events
        seen += world.seen
    wanted = {"2 frames in flight", "device error", "submit error", "foreign completion", "not finite"}
    assert wanted - set(seen) == set()


@pytest.mark.slow
def test_clients_leave_everywhere(tmp_path: Path) -> None:
    """Every place that a request can be at when it is cancelled was met, and more than once.

    But for one that chance hardly meets: in the second of two frames alone, behind a frame of others.
    """
    left: collections.Counter[str] = collections.Counter()
    for seed in range(2000, 2044):
        plain = (
            {"spec_method": "none", "mixed_prefill": False} if seed % 2 else {}
        )  # decode steps queue behind each other
        world = lived(seed, 800, tmp_path, max_slots=3 + seed % 4, async_scheduling=True, state_rows=0, **plain)
        for place in PLACES:
            left[place] += sum(count for what, count in world.seen.items() if what.startswith(f"left {place}"))
        left["clock jump"] += world.seen["clock jump"]
    wanted = {*PLACES, "clock jump"} - {"in decode, frames [2] of 2"}
    assert {place for place in wanted if left[place] < 2} == set()


REUSES = {
    "checkpoint hits",
    "checkpoint restores",
    "checkpoint evictions",
    "failed copy",
    "cut: no_state",
    "cut: evicted",
}


def test_worlds_that_talk(tmp_path: Path) -> None:
    """Conversations over few state rows: restores, evictions, failed copies, preemption, all beside each other."""
    faults = {"not_finite": 0.006}
    worlds = [lived(seed, 500, tmp_path, state_rows=1 + seed % 5, rates=faults) for seed in range(2100, 2106)]
    seen = sum((world.seen for world in worlds), collections.Counter[str]())
    assert {what for what in REUSES if seen[what] < 2} == set()


@pytest.mark.slow
def test_twenty_thousand_events_of_conversations(tmp_path: Path) -> None:
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(2200, 2220):
        rates = None if seed % 2 else TROUBLE
        seen += lived(seed, 1000, tmp_path, state_rows=(1, 2, 3, 8, 20)[seed % 5], rates=rates).seen
    # Chance hardly meets a restore that is not submitted yet: it mostly is in the step that admits.
    wanted = set(REUSE_PLACES) - {"in restore, frames [] of"}
    assert {place for place in wanted if not any(what.startswith(f"left {place}") for what in seen)} == set()
    assert {what for what in {*REUSES, "device error", "preempted"} if seen[what] < 10} == set()


@pytest.mark.slow
def test_fresh_seeds(tmp_path: Path) -> None:
    for _ in range(5):
        lived(secrets.randbits(48), 1000, tmp_path)


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_malformed_completion_stops_the_engine_and_everybody_is_answered(lie: str, tmp_path: Path) -> None:
    options = {"spec_method": "draft", "num_draft_tokens": 2, "spec_width": "adaptive", "max_slots": 2}
    assert any(lived(seed, 200, tmp_path, lie=lie, **options).is_dead for seed in range(100, 104))


def test_everybody_is_answered_whenever_the_engine_is_closed(tmp_path: Path) -> None:
    worlds = [
        lived(seed, 400, tmp_path, closes_ns=1_000_000 * 3**number) for number, seed in enumerate(range(400, 406))
    ]
    assert sum(world.seen["error: UnavailableError"] for world in worlds) > 5


def test_a_seed_is_a_whole_history(tmp_path: Path) -> None:
    first, second = (lived(7, 300, tmp_path) for _ in range(2))
    assert state_digest(first.rig.engine.scheduler.state) == state_digest(second.rig.engine.scheduler.state)
    assert first.seen == second.seen
    assert [client.text for client in first.clients.values()] == [client.text for client in second.clients.values()]


def test_a_clock_that_runs_backwards_is_refused_and_everybody_is_answered(tmp_path: Path) -> None:
    """`advance_to` says so: the engine stops; nobody waits for ever."""
    world = World(3, 400, dumps=tmp_path, max_slots=2)
    world.clock.after(300_000_000, lambda: world.clock.step_back(200_000_000))
    with pytest.raises(Exception, match="backwards"):
        world.run()
    assert world.is_dead
    assert [name for name, client in world.clients.items() if client.problem(world)] == []


# ---- the worlds would notice


def _frees_early(patch: pytest.MonkeyPatch) -> None:
    """Slots and pages go back although frames that name them are outstanding."""
    release = retirement.release

    def early(state: Any) -> Any:
        import dataclasses

        freed = release(dataclasses.replace(state, frames=()))
        return dataclasses.replace(freed, frames=state.frames)

    patch.setattr(retirement, "release", early)
    patch.setattr(completion, "release", early)


def _forgets_no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drafting, "forget", lambda self, handle: None)


def _loses_a_token(patch: pytest.MonkeyPatch) -> None:
    push = Sequence.push
    patch.setattr(
        Sequence, "push", lambda self, token, ends_output: len(self.token_ids) == 5 or push(self, token, ends_output)
    )


def _never_cancels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "cancel", lambda state, handle: state)


def _spares_the_lost(patch: pytest.MonkeyPatch) -> None:
    """After a device error, requests go on with state that is gone."""
    fail = Roster.fail
    patch.setattr(Roster, "fail", lambda self, request, error: "device" in str(error) or fail(self, request, error))


def _delivers_twice(patch: pytest.MonkeyPatch) -> None:
    flush = Publisher.flush

    def twice(self: Any) -> None:
        batches = dict(self._batches)
        for request in self._dirty:
            if request.has_news and len(request.sequences[0].token_ids) == 4:
                batches.setdefault(request.sink, []).append((request, request.take_output()))
        self._batches = batches
        for sink, batch in batches.items():
            sink.deliver(list(batch))
        flush(self)

    patch.setattr(Publisher, "flush", twice)


def _believes_lengths(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is long enough is taken for one that begins with the checkpoint's tokens."""
    patch.setattr(prefixes, "_common", lambda one, other: min(len(one), len(other)))


def _keeps_lost_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """After a device error, checkpoints stay published whose rows are blank."""
    patch.setattr(captures, "drop_checkpoints", lambda state: state)


def _copies_another_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frames, "shared_pages", lambda endpoint, size, extent: max(0, endpoint // size - 1))


def _frees_kept_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages go back with their request although checkpoints share them."""
    patch.setattr(completion, "follow", lambda pool, checkpoints: pool)


PLANTED: tuple[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]], ...] = (
    (_frees_early, {}),
    (_forgets_no_copies, {"spec_method": "copy", "num_draft_tokens": 2}),
    (_loses_a_token, {}),
    (_never_cancels, {}),
    (_spares_the_lost, {"rates": {"device_error": 0.05}}),
    (_delivers_twice, {}),
    (_believes_lengths, {"state_rows": 4}),
    (_keeps_lost_checkpoints, {"state_rows": 4, "rates": {"device_error": 0.02}}),
    (_copies_another_page, {"state_rows": 4}),
    (_frees_kept_pages, {"state_rows": 4}),
)


@pytest.mark.parametrize(("plant", "options"), PLANTED)
def test_a_planted_fault_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], options: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(monkeypatch)
    noticed = []
    for seed in range(300, 304):
        try:
            World(seed, 200, dumps=tmp_path, max_slots=2, **options).run()
        except Exception as error:
            noticed.append(error)
            break
    assert noticed
