"""Two frames in flight: the same output, no waiting between decode steps, and what makes the window drain."""

from __future__ import annotations

import itertools
import random

import pytest

from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.types import Constraint
from helios_jax.testing import expected_tokens, hashed_text, scripted
from tests.simulation.window_kit import GENERATION, Stepped

SECOND = 1_000_000_000
STORY = "the cat sat on the mat, the dog sat on the cat, " * 20


@pytest.mark.parametrize("method", ["none", "copy", "draft"])
@pytest.mark.parametrize("streams", [1, 2, 8])
def test_output_is_that_of_one_frame_and_of_the_model(method: str, streams: int) -> None:
    """Random lengths and arrivals in the middle; the reference is the model asked token by token."""
    said = {}
    for async_scheduling in (False, True):
        rng = random.Random(streams)
        world = Stepped(max_slots=streams, spec_method=method, async_scheduling=async_scheduling)
        prompts, lengths = {}, {}
        for _ in range(2):
            for _ in range(streams):
                prompt = [rng.randrange(97, 101) for _ in range(rng.randrange(1, 90))]
                lengths[number := len(prompts)] = rng.randrange(1, 30)
                name = world.rig.submit(prompt, f"{number}", max_tokens=lengths[number])
                prompts[name] = prompt
            for _ in range(rng.randrange(20)):
                world.step()
        world.run()
        said[async_scheduling] = {name: world.rig.text(name) for name in prompts}
        for name, prompt in prompts.items():
            expected = expected_tokens(hashed_text, prompt, lengths[int(name)])
            assert said[async_scheduling][name] == bytes(expected).decode(), name
        assert world.rig.ledger_problems() == []
        assert max(s.ahead for s in world.submissions) == int(async_scheduling)
        world.close()
    assert said[False] == said[True]


@pytest.mark.parametrize("method", ["none", "draft"])
@pytest.mark.parametrize("streams", [1, 2, 8])
def test_the_device_always_has_the_next_step_before_the_last_is_over(method: str, streams: int) -> None:
    """Steps - drains are submitted behind another frame; one wait a frame, none of them in a submission.

    A drain is a first execution of a program (its duration is unknown), and the one after it.
    """
    world = Stepped(max_slots=streams, spec_method=method, max_context=512)
    for number in range(streams):
        world.rig.submit([97 + number] * 5, max_tokens=200)
    world.run()
    steps, discoveries = world.generation(), len({s.shape for s in world.generation()})
    ends = streams  # outputs of rounds differ in when they end: a request that may be over drains the window
    drains = 2 * discoveries + (2 * ends if method == "draft" else 1)
    assert world.queued() >= len(steps) - drains
    assert world.queued() > 0.6 * len(steps)
    assert world.syncs == len(world.submissions) == world.engine.stats().frames_total
    world.close()


def test_one_frame_never_queues() -> None:
    world = Stepped(async_scheduling=False)
    world.rig.submit("abc", max_tokens=50)
    world.run()
    assert world.queued() == 0
    world.close()


def test_plain_decode_of_one_stream_queues_every_step_but_the_first_two() -> None:
    world = Stepped(max_slots=1)
    world.rig.submit("abc", max_tokens=100)
    world.run()
    assert [s.ahead for s in world.generation()] == [0, 0] + [1] * 97  # the first token came with the prefill
    world.close()


@pytest.mark.parametrize(
    "constraint", [Constraint.GRAMMAR, Constraint.HOST_STOPS, Constraint.HOST_FED, Constraint.HISTORY]
)
def test_a_request_that_needs_feedback_drains_the_window(constraint: Constraint) -> None:
    world = Stepped(max_slots=1)
    world.submit("abc", constraint, max_tokens=40)
    world.run()
    assert world.queued() == 0
    world.close()


def test_stop_strings_drain_the_window_and_nothing_runs_behind_them() -> None:
    world = Stepped(max_slots=1, next_token=scripted("one two STOP three"))
    name = world.rig.submit("x", stop="STOP", max_tokens=40)
    world.run()
    assert (world.rig.text(name), world.rig.reason(name)) == ("one two ", "stop")
    assert world.queued() == 0
    assert len(world.generation()) == len("one two STOP") - 1
    world.close()


def test_only_the_frames_that_name_a_constrained_request_drain() -> None:
    """Its neighbour's frames after its end are queued again."""
    world = Stepped(max_slots=2)
    world.submit("abc", Constraint.GRAMMAR, max_tokens=20)
    other = world.rig.submit("abd", max_tokens=100)
    for _ in range(18):
        world.step()
    assert world.queued() == 0
    world.run()
    assert world.queued() > 60
    assert world.rig.text(other) == bytes(expected_tokens(hashed_text, list(b"abd"), 100)).decode()
    world.close()


@pytest.mark.parametrize(("pause_s", "alone"), [(1, 1), (31, 2)])
def test_a_stale_duration_is_measured_in_an_empty_window(pause_s: int, alone: int) -> None:
    world = Stepped(max_slots=1)
    world.rig.submit("abc", max_tokens=20)
    world.run()
    before = len(world.generation())
    world.clock.advance(pause_s * SECOND)
    world.rig.submit("abc", max_tokens=20)
    world.run()
    assert [s.ahead for s in world.generation()[before:]] == [0] * alone + [1] * (19 - alone)
    world.close()


def test_a_host_that_overran_queues_nothing_until_it_has_completed() -> None:
    """The second frame was to end long ago: the estimate is wrong, and the completion says how."""
    world = Stepped(max_slots=1)
    plan = world.engine.scheduler.plan

    def slow_host() -> object:
        if len(world.submissions) == 20:
            world.clock.advance(SECOND)
            world.engine.scheduler.advance_to(world.clock())
        return plan()

    world.engine.scheduler.plan = slow_host  # type: ignore[method-assign,assignment]
    world.rig.submit("abc", max_tokens=60)
    world.run()
    assert [s.ahead for s in world.submissions[18:24]] == [1, 1, 0, 1, 1, 1]
    world.close()


def test_phases_never_share_the_window_and_prerequisites_run_alone() -> None:
    rng = random.Random(5)
    world = Stepped(max_slots=4, prefill_chunk=64)
    for _ in range(12):
        world.rig.submit([97] * rng.randrange(1, 150), max_tokens=rng.randrange(1, 60))
        for _ in range(rng.randrange(12)):
            world.step()
    world.run()
    for before, after in itertools.pairwise(world.submissions):
        if after.ahead:
            assert before.kind in GENERATION
            assert after.kind in GENERATION
    assert {s.kind for s in world.submissions if s.ahead} == {ProgramKind.DECODE}
    assert world.queued() > 20
    world.close()


def test_a_prompt_that_arrives_is_not_displaced_by_decode_that_could_be_queued() -> None:
    """The gate: once selection wants the prompt's programs, no decode step slips in while the window drains."""

    def arrive(number: int) -> None:
        if number == 25:
            world.rig.submit("late", "late", max_tokens=5)

    world = Stepped(max_slots=2, on_submit=arrive, policy="throughput")
    world.rig.submit("abc", max_tokens=60)
    world.run()
    kinds = [s.kind for s in world.submissions]
    first = kinds.index(ProgramKind.INITIALIZE, 4)
    # Number 25 was on its way already, and 24 ahead of it: nothing else comes first.
    assert first == 26
    assert kinds[first : first + 2] == [ProgramKind.INITIALIZE, ProgramKind.PREFILL]
    assert [s.ahead for s in world.submissions[first : first + 3]] == [0, 0, 0]
    world.close()


def test_copies_are_used_with_two_frames_and_cost_no_token() -> None:
    """Rounds of copies need feedback, so they drain the window; they are not displaced by plain decode."""
    rounds = {}
    for two in (False, True):
        options = {"max_context": 512, "spec_method": "copy", "next_token": scripted(STORY)}
        world = Stepped(max_slots=1, async_scheduling=two, **options)
        name = world.rig.submit("say it", max_tokens=300)
        world.run()
        assert world.rig.text(name) == STORY[:300]
        rounds[two] = sum(c.rounds for c in world.engine.stats().rounds.values())
        accepted = sum(c.accepted for c in world.engine.stats().rounds.values())
        assert accepted > 150
        world.close()
    assert rounds[True] >= 0.9 * rounds[False]


def test_copies_are_judged_with_the_offer_that_they_were_made_of() -> None:
    """What a round teaches of its match length is that of its own copy, not of one that was found since."""
    world = Stepped(max_slots=1, max_context=512, spec_method="copy", next_token=scripted(STORY))
    seen = []
    observe = world.engine._drafting._history.observe

    def recorded(match_len: int, offered: int, accepted: int) -> None:
        seen.append((match_len, offered, accepted))
        observe(match_len, offered, accepted)

    world.engine._drafting._history.observe = recorded  # type: ignore[method-assign]
    supplied = []
    push = world.engine.window.push

    def noted(frame: object) -> None:
        supplied.extend(copy.match_len for copy in frame.copies.values())  # type: ignore[attr-defined]
        push(frame)  # type: ignore[arg-type]

    world.engine.window.push = noted  # type: ignore[method-assign,assignment]
    world.rig.submit("say it", max_tokens=200)
    world.run()
    assert len(seen) > 20
    assert [match for match, _, _ in seen] == [match for match in supplied if match][: len(seen)]
    world.close()


def test_thirty_two_long_decodes_and_steady_arrivals_have_a_bounded_gap() -> None:
    """Case Q1, in virtual time: no stream waits for more than a few of the longest programs."""
    streams, times = 32, dict[str, list[int]]()

    def arrive(number: int) -> None:
        if number % 12 == 0:
            world.rig.submit([97 + number % 20] * 60, f"late {number}", max_tokens=4)

    world = Stepped(max_slots=streams + 8, on_complete=arrive, check=False)
    deliver = world.rig.deliver

    def timed(batch: list) -> None:
        for request, _ in batch:
            times.setdefault(request.request_id, []).append(world.clock())
        deliver(batch)

    world.rig.deliver = timed  # type: ignore[method-assign]
    names = [world.rig.submit([97 + i] * 7, f"long {i}", max_tokens=120) for i in range(streams)]
    world.run()
    longest = max(world.rig.core.runner.duration_ns(shape) for shape in world.rig.core.catalog)
    for name in names:
        gaps = [after - before for before, after in itertools.pairwise(times[name])]
        assert len(gaps) == 119
        assert max(gaps[50:]) <= 2 * longest, name  # the start is discovery, of every program in turn
    assert world.queued() > 50
    assert len(times) > streams + 15
    world.close()
