"""Ends of every kind with two frames out: nothing is delivered late, nothing is freed early, everybody is answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helios_jax.engine.drafting import Drafting
from helios_jax.engine.outputs import RequestOutput
from helios_jax.errors import DeviceError
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.types import (
    CheckpointPublished,
    CheckpointRole,
    CompletionRecord,
    ExecutionTiming,
    RequestHandle,
    RequestRebound,
)
from helios_jax.server.metrics import scheduler_families
from helios_jax.testing import EngineRig, FakeClock, expected_tokens, hashed_text, scripted
from tests.simulation.window_kit import Stepped

PROMPTS = {"a": "abc", "b": "the other"}


def tokens_of(world: Stepped, name: str) -> list[int]:
    outputs = [item for item in world.rig.received.get(name, []) if isinstance(item, RequestOutput)]
    return [token for output in outputs for part in output.outputs for token in part.token_ids]


def said(name: str, count: int) -> str:
    return bytes(expected_tokens(hashed_text, list(PROMPTS[name].encode()), count)).decode()


def test_tokens_of_a_second_frame_behind_the_end_are_dropped_and_its_slot_waits_for_it() -> None:
    """The model says EOS; a frame that runs on behind it was submitted already."""
    world = Stepped(max_slots=1, next_token=scripted("hello"))
    name = world.rig.submit("x", max_tokens=50)
    while world.engine.board.open_requests():
        world.step()
    (extra,) = world.engine.window  # one frame for a request that has ended
    state = world.engine.scheduler.state
    assert state.requests.phase[0] == Phase.RETIRING
    assert state.pool.held[0] > 0
    queued = world.rig.submit("y", max_tokens=50)  # waits for the slot, not merely for the end
    world.step()
    assert world.engine.scheduler.state.last_fence == extra.fence
    world.run()
    for each in (name, queued):
        assert (world.rig.text(each), world.rig.reason(each)) == ("hello", "stop")
        assert tokens_of(world, each) == [*b"hello", 257]
    assert world.rig.core.runner.frames[extra.fence - 1].shape.kind == "decode"
    assert world.rig.ledger_problems() == []
    assert world.engine.stats().scheduler["requests_finished"]["stop"] == 2
    world.close()


def test_a_reused_slot_is_not_charged_for_its_predecessor() -> None:
    """The next occupant starts without history, whatever still ran when the last one ended."""
    world = Stepped(max_slots=1, next_token=scripted("hello"))
    world.rig.submit("x", max_tokens=50)
    second = world.rig.submit("y", max_tokens=50)
    while RequestHandle(0, 2) not in world.engine.roster.running:
        world.step()
    requests = world.engine.scheduler.state.requests
    assert requests.output_len[0] == 0
    world.run()
    assert world.rig.text(second) == "hello"
    world.close()


@pytest.mark.parametrize("method", ["none", "draft"])
def test_outputs_of_every_length_end_exactly_there(method: str) -> None:
    world = Stepped(max_slots=3, spec_method=method)
    names = {world.rig.submit("abc", f"{length}", max_tokens=length): length for length in range(1, 25)}
    world.run()
    for name, length in names.items():
        assert tokens_of(world, name) == expected_tokens(hashed_text, list(b"abc"), length)
        assert world.rig.reason(name) == "length"
    assert world.rig.ledger_problems() == []
    world.close()


LENGTH, MOMENTS = 8, 20


@pytest.mark.parametrize("when", ["submitted", "running", "between steps"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_cancel_at_every_moment_of_two_streams(when: str, who: str) -> None:
    """Cases O1 and O3: the other one's output is that of its undisturbed run, and everything comes back."""
    cancels = [cancelled_at(moment, when, who) for moment in range(MOMENTS)]
    ended = [reason for reason, _ in cancels]
    assert ended[0] == "abort"
    assert ended[-1] == "length"
    assert "length" not in ended[: ended.index("length")]
    assert len({frames for _, frames in cancels if frames >= 0}) == 2  # with fewer and with more frames out


@pytest.mark.parametrize(("method", "depth"), [("draft", 1), ("draft", 3), ("draft", 5), ("copy", 3)])
def test_cancel_at_every_round_of_two_streams(method: str, depth: int) -> None:
    """Case O5 without its preemption: whatever was proposed or accepted by then, each token is delivered once."""
    ended = [
        cancelled_at(moment, "running", "a", spec_method=method, num_draft_tokens=depth)[0] for moment in range(2, 16)
    ]
    assert ended[0] == "abort"
    assert ended[-1] == "length"


def cancelled_at(moment: int, when: str, who: str, **options: Any) -> tuple[str | None, int]:
    """Run both streams, cancel one at a moment, check both; its finish reason, and the frames out when it was."""
    other, frames = {"a": "b", "b": "a"}[who], [-1]

    def cancel(number: int, at: str) -> None:
        if number == moment and at == when:
            frames[0] = len(world.engine.window)
            world.rig.abort(who)

    world = Stepped(max_slots=2, on_submit=lambda n: cancel(n, "submitted"), on_complete=lambda n: cancel(n, "running"))
    for name in PROMPTS:
        world.rig.submit(PROMPTS[name], name, max_tokens=LENGTH)
    for number in range(10 * MOMENTS):
        cancel(number, "between steps")
        if not world.step():
            break
    reason, text = world.rig.reason(who), world.rig.text(who)
    assert world.rig.text(other) == said(other, LENGTH)
    assert text == said(who, LENGTH) if reason == "length" else said(who, LENGTH).startswith(text)
    assert sum(item.finished for item in world.rig.received[who] if isinstance(item, RequestOutput)) == 1
    assert world.rig.ledger_problems() == []
    assert world.engine.board.snapshot().reconciles()
    world.close()
    return reason, frames[0]


def test_cancel_between_the_launch_and_the_result_of_the_last_step() -> None:
    """Case O3: cancelled, not finished, and no token of the last step; free once both frames are complete."""

    def cancel(number: int) -> None:
        if number == 1 + 7:  # initialize, prefill with the first token, seven decode steps
            world.rig.abort("a")

    world = Stepped(max_slots=1, on_complete=cancel)
    world.rig.submit(PROMPTS["a"], "a", max_tokens=8)
    world.run()
    assert (world.rig.reason("a"), world.rig.text("a")) == ("abort", said("a", 7))
    assert world.engine.board.snapshot().cancelled == 1
    assert world.rig.ledger_problems() == []
    world.close()


@pytest.mark.parametrize("moment", [0, 1])
def test_cancel_before_the_first_token_frees_everything(moment: int) -> None:
    world = Stepped(max_slots=1, on_complete=lambda number: world.rig.abort("a") if number == moment else None)
    world.rig.submit(PROMPTS["a"], "a", max_tokens=8)
    later = world.rig.submit(PROMPTS["b"], "b", max_tokens=8)
    world.run()
    assert (world.rig.reason("a"), world.rig.text("a")) == ("abort", "")
    assert world.rig.text(later) == said("b", 8)
    assert world.rig.ledger_problems() == []
    world.close()


def test_a_cancel_after_the_end_and_before_its_publication_changes_nothing() -> None:
    world = Stepped(max_slots=1)
    world.rig.submit(PROMPTS["a"], "a", max_tokens=5)
    while world.engine.board.open_requests():
        world.step()
    assert not world.rig.has_ended("a")  # complete, and not told yet
    world.rig.abort("a")
    world.run()
    assert (world.rig.reason("a"), world.rig.text("a")) == ("length", said("a", 5))
    assert world.engine.board.snapshot().cancelled == 0
    world.close()


def fails_at(number: int) -> Any:
    def fail(current: int) -> None:
        if current == number:
            raise RuntimeError("device lost")

    return fail


@pytest.mark.parametrize("end", ["on_submit", "on_complete"])
@pytest.mark.parametrize("number", range(2, 11))
def test_a_device_error_with_two_frames_out_answers_everybody_once(end: str, number: int) -> None:
    """Both frames are accounted for, the state is made again, and who waited is served by it."""
    world = Stepped(max_slots=2, **{end: fails_at(number)})
    for name in PROMPTS:
        world.rig.submit(PROMPTS[name], name, max_tokens=10)
    waited = world.rig.submit(PROMPTS["a"], "waited", max_tokens=10)
    world.run()
    for name in PROMPTS:
        *before, last = world.rig.received[name]
        assert isinstance(last, DeviceError)
        assert all(isinstance(item, RequestOutput) for item in before)
        assert said(name, 10).startswith(world.rig.text(name))
    assert world.rig.text(waited) == said("a", 10)
    assert world.rig.core.runner.resets == 1
    totals = world.engine.board.snapshot()
    assert (totals.failed, totals.device_errors, totals.finished["length"]) == (2, 1, 1)
    assert totals.reconciles()
    assert world.rig.ledger_problems() == []
    world.close()


def test_what_was_submitted_before_a_failed_submission_is_delivered() -> None:
    world = Stepped(max_slots=1, on_submit=fails_at(10))
    world.rig.submit(PROMPTS["a"], "a", max_tokens=20)
    world.run()
    assert world.submissions[10].ahead == 1
    assert world.rig.text("a") == said("a", 9)  # a token of each frame from the prefill, number 1, to number 9
    assert isinstance(world.rig.received["a"][-1], DeviceError)
    world.close()


def test_a_completion_that_comes_after_its_frame_was_given_up_is_counted_and_ignored() -> None:
    """Case O4. The first of two frames fails, the other one still comes back from the device."""
    world = Stepped(max_slots=1)
    runner, waits = world.rig.core.runner, []
    submit = runner.submit

    def submitted(*args: Any, **kwargs: Any) -> Any:
        in_flight = submit(*args, **kwargs)
        wait, number = in_flight.wait, len(world.submissions) - 1

        def waited(timeout: float | None = None) -> Any:
            result = wait(timeout)
            waits.append(number)
            if number == 10:
                raise DeviceError("the answer was lost")
            return result

        in_flight.wait = waited
        return in_flight

    runner.submit = submitted
    world.rig.submit(PROMPTS["a"], "a", max_tokens=20)
    queued = world.rig.submit(PROMPTS["b"], "b", max_tokens=20)
    world.run()
    assert waits[10:12] == [10, 11]
    assert world.submissions[11].ahead == 1
    assert isinstance(world.rig.received["a"][-1], DeviceError)
    assert world.rig.text(queued) == said("b", 20)
    counters = world.engine.stats().scheduler
    assert counters["completions_ignored"] == 1
    exposed = {sample.name: sample.value for family in scheduler_families(counters) for sample in family.samples}
    assert exposed["flare_scheduler_completions_ignored_total"] == 1
    assert world.rig.ledger_problems() == []
    world.close()


def test_a_foreign_completion_changes_nothing_but_its_counter() -> None:
    world = Stepped(max_slots=1)
    world.rig.submit(PROMPTS["a"], "a", max_tokens=10)
    for _ in range(5):
        world.step()
    for fence in (1, 99):
        record = CompletionRecord(RequestHandle(0, 1), 1, (7,), 5)
        assert world.engine.scheduler.complete(fence, [record], ExecutionTiming((1,), 1)) == ()
    world.run()
    assert world.rig.text("a") == said("a", 10)
    assert world.engine.stats().scheduler["completions_ignored"] == 2
    world.close()


def test_readiness_says_that_the_device_state_is_being_made_again() -> None:
    seen = []
    with EngineRig(max_slots=1, on_complete=lambda frame, out: frame.index == 3 and fails_at(3)(3)) as rig:
        reset = rig.core.runner.reset

        def watched() -> None:
            seen.append(rig.engine.health())
            reset()

        rig.core.runner.reset = watched  # type: ignore[method-assign]
        rig.finish(rig.submit("abc", max_tokens=10))
        rig.settle()
        rig.finish(rig.submit("abc", max_tokens=3))
        assert rig.engine.health().ready
    (during,) = seen
    assert (during.alive, during.ready) == (True, False)
    assert "the device state is being made again after a device error: the fake device failed" in during.reason


def test_a_sequence_follows_its_slot_to_a_fresh_generation_and_names_its_checkpoints() -> None:
    with EngineRig(start=False, clock=FakeClock(), max_slots=1, spec_method="copy") as rig:
        rig.submit([97, 98, 97, 98, 97, 98], "a", max_tokens=50)
        for _ in range(6):
            rig.engine.step()
        (handle,) = rig.engine.roster.running
        sequence, fresh = rig.engine.roster.running[handle], RequestHandle(handle.slot, handle.generation + 1)
        drafting: Drafting = rig.engine._drafting
        supplied = drafting.copies(handle)
        named: list[tuple[int, Any]] = []
        rig.engine.scheduler.identify_checkpoint = lambda *given: named.append(given)  # type: ignore[method-assign]
        rig.engine.roster.follow(
            [RequestRebound(handle, fresh), CheckpointPublished(fresh, 5, 4, CheckpointRole.ANCHOR)]
        )
        assert rig.engine.roster.running == {fresh: sequence}
        assert sequence.handle == fresh
        assert [(number, key.array.tolist()) for number, key in named] == [(5, [97, 98, 97, 98])]
        assert drafting.copies(fresh)[0] == supplied[0]
        assert np.array_equal(drafting.copies(fresh)[1], supplied[1])
        assert drafting.copies(handle)[0] == ()
        rig.engine.roster.follow([RequestRebound(handle, fresh)])  # one that has left since
        assert rig.engine.roster.running == {fresh: sequence}
