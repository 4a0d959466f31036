"""Prefix reuse over the fake device: what is restored, what it says, and what an answer must be all the same.

The fake device says another word wherever a wrong page or state row was read. Cases K1 to K6 of the fault list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helios_jax.engine.outputs import RequestOutput
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.scheduler.state_rows import RowUse
from helios_jax.testing import EngineRig, FakeClock, FakeFrame, expected_tokens, hashed_text

PAGE, CHUNK = 16, 64
OPTIONS: dict[str, Any] = {"max_slots": 4, "max_context": 256, "page_size": PAGE, "prefill_chunk": CHUNK}
KINDS = pytest.mark.parametrize("recurrent", [True, False], ids=["hybrid", "attention"])


def made(**options: Any) -> EngineRig:
    """An engine in virtual time, whose captures are not stingy."""
    given = {"state_rows": 8, "clock": FakeClock(), "checkpoint_extra_work_fraction": 2.0}
    return EngineRig(**(OPTIONS | given | options))


@pytest.fixture(params=[True, False], ids=["hybrid", "attention"])
def rig(request: pytest.FixtureRequest) -> Iterator[EngineRig]:
    with made(recurrent=request.param) as rig:
        yield rig


def said(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(hashed_text, prompt, count)


def text(number: int, length: int) -> list[int]:
    """Printable bytes that differ from those of other numbers from the first on."""
    return [97 + (number + i * (number + 3)) % 26 for i in range(length)]


def tokens_of(rig: EngineRig, name: str) -> list[int]:
    outputs = [item for item in rig.received[name] if isinstance(item, RequestOutput)]
    return [token for output in outputs for part in output.outputs for token in part.token_ids]


def ask(rig: EngineRig, prompt: list[int], count: int = 4, ends: tuple[int, ...] = (), **params: Any) -> int:
    """One answer, which is the slow reference's; what was reused for it. Afterwards nothing is out of place."""
    (output,) = rig.finish(name := rig.submit(prompt, message_ends=ends, max_tokens=count, **params))
    assert isinstance(output, RequestOutput), output
    assert tokens_of(rig, name) == said(prompt, count)
    balanced(rig)
    assert output.num_cached_tokens is not None
    return output.num_cached_tokens


def balanced(rig: EngineRig) -> None:
    rig.settle()
    check_invariants(rig.engine.scheduler.state)
    assert rig.ledger_problems() == []


def test_a_chat_of_ten_turns_computes_only_what_is_new(rig: EngineRig) -> None:
    """Case K5: behind the first turn all but the last answer's pending token and the new message is there."""
    history: list[int] = []
    ends: tuple[int, ...] = ()
    for turn in range(10):
        before = len(history)
        history += text(turn, 5 + turn)
        ends = (*ends, len(history))
        cached = ask(rig, history, 6, ends)
        assert cached == (before - 1 if turn else 0)
        history += said(history, 6)
        ends = (*ends, len(history))
    stats = rig.engine.stats().checkpoints
    assert (stats.hits, stats.misses, stats.restores) == (9, 1, 9)


@pytest.mark.parametrize("length", [10, 60, 200, 12_000])
def test_turn_two_prefills_its_own_tokens_only(rig: EngineRig, length: int) -> None:
    """Case K5."""
    if length > OPTIONS["max_context"]:
        with made(recurrent=rig.core.runner.recurrent, max_context=12_288, prefill_chunk=2048) as wide:
            second_turn(wide, length)
    else:
        second_turn(rig, length)


def second_turn(rig: EngineRig, length: int) -> None:
    first = text(3, length)
    ask(rig, first, 5, (length,))
    known = rig.engine.scheduler.snapshot_counters()["used_tokens_by_kind"]["prefill"]  # type: ignore[index]
    second = [*first, *said(first, 5), *text(4, 9)]
    ask(rig, second, 5, (length, length + 5, len(second)))
    used = rig.engine.scheduler.snapshot_counters()["used_tokens_by_kind"]["prefill"]  # type: ignore[index]
    assert used - known == 9 + 1


def test_what_two_prompts_share_is_reused_without_a_cliff(rig: EngineRig) -> None:
    """Case K1, raw prompts over two intervals: a hybrid has half of it and more from the first interval on."""
    with made(recurrent=rig.core.runner.recurrent, state_rows=64) as many:
        ask(many, text(25, CHUNK + 1))  # durations of prefills and copies are known now
        reused = []
        for number, shared in enumerate((1, 15, 17, 40, 63, 65, 80, 100, 127, 129, 150, 160)):
            whole = text(number, 2 * CHUNK + 40)
            assert ask(many, whole, 2) < PAGE
            reused.append((shared, ask(many, [*whole[:shared], 65, *text(6, 9)], 2)))
    hits = [hit for _, hit in reused]
    assert hits == sorted(hits)
    for shared, hit in reused:
        least = shared // 2 * (shared > CHUNK) if rig.core.runner.recurrent else shared // PAGE * PAGE
        assert least <= hit <= shared


def test_the_same_prompt_twice_and_one_system_prompt_five_times(rig: EngineRig) -> None:
    """Case K2: the second one reuses, and a match that was cut says why."""
    prompt, system = text(1, 70), text(2, 40)
    assert ask(rig, prompt) == 0
    assert ask(rig, prompt) >= 64
    hits = [ask(rig, [*system, *text(10 + i, 30)], ends=(40, 70)) for i in range(5)]
    assert hits[0] == 0
    assert min(hits[1:]) >= 32
    stats = rig.engine.stats().checkpoints
    assert stats.hits == 5
    assert stats.cuts["evicted"] == 0
    assert sum(stats.cut_tokens.values()) < 6 * PAGE


def test_a_cut_match_says_why() -> None:
    """Pages are there but no state; the state was there and gave way; what is shared is less than a page."""
    with made(state_rows=2, checkpoint_extra_work_fraction=0.0) as rig:
        base = text(1, 60)
        ask(rig, base, ends=(60,))
        assert ask(rig, [*base[:40], *text(2, 20)], ends=(60,)) == 0
        assert rig.engine.stats().checkpoints.cuts == {"no_state": 1, "evicted": 0, "too_short": 0}
        ask(rig, text(3, 30), ends=(30,))  # takes the row of the oldest
        assert ask(rig, [*base, *text(4, 5)], ends=(65,)) == 0
        assert rig.engine.stats().checkpoints.cuts == {"no_state": 1, "evicted": 1, "too_short": 0}
        assert ask(rig, [*text(3, 9), 65, *text(5, 9)], ends=(19,)) == 0
        stats = rig.engine.stats().checkpoints
        assert stats.cuts == {"no_state": 1, "evicted": 1, "too_short": 1}
        assert stats.cut_tokens == {"no_state": 40, "evicted": 60, "too_short": 9}
        assert (stats.rows_total, stats.rows_used, stats.published) == (2, 2, 2)


@pytest.mark.parametrize("options", [{}, {"mixed_prefill": True}, {"spec_method": "draft", "num_draft_tokens": 2}])
@KINDS
def test_prompts_that_arrive_during_decodes(options: dict[str, Any], recurrent: bool) -> None:
    """Case K3: mixed programs or not, reuse or not, every answer is that of the slow reference."""
    for rows in (0, 8):
        with made(state_rows=rows, recurrent=recurrent, **options) as rig:
            prompts = [text(i % 3, 20 + i) for i in range(9)]
            names = [rig.submit(prompt, message_ends=(15,), max_tokens=12) for prompt in prompts]
            rig.finish(*names)
            assert [tokens_of(rig, name) for name in names] == [said(prompt, 12) for prompt in prompts]
            balanced(rig)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_codewords_stay_apart(rig: EngineRig, rows: int) -> None:
    """Cases K4 and K6: one row, all rows wanted, K conversations at once; each holds its own codeword only."""
    with made(state_rows=rows, recurrent=rig.core.runner.recurrent, max_queue=64) as small:
        for several in range(1, 5):
            chats = [[*text(0, 20), *text(30 + several * 5 + k, 9)] for k in range(several)]
            for _ in range(3):
                names = [small.submit(chat, message_ends=(20, len(chat)), max_tokens=5) for chat in chats]
                small.finish(*names)
                answers = [tokens_of(small, name) for name in names]
                assert answers == [said(chat, 5) for chat in chats]
                chats = [[*chat, *answer, 97] for chat, answer in zip(chats, answers, strict=True)]
        balanced(small)


def test_every_row_pinned_or_in_use_skips_the_checkpoint() -> None:
    """Case K4: a restore reads the only row; what comes beside it is not captured, and goes on."""
    with made(state_rows=1, max_slots=2) as rig:
        base = text(1, 40)
        ask(rig, base, ends=(40,))
        gate = rig.core.runner.gate
        gate.close()
        names = [rig.submit([*base, 98, 99], message_ends=(42,), max_tokens=4) for _ in range(2)]
        names.append(rig.submit(text(7, 30), message_ends=(30,), max_tokens=4))
        gate.open()
        rig.finish(*names)
        assert [tokens_of(rig, name) for name in names] == [said([*base, 98, 99], 4)] * 2 + [said(text(7, 30), 4)]
        balanced(rig)


def test_a_checkpoint_at_every_offset_of_page_and_interval(rig: EngineRig) -> None:
    for length in (*range(1, PAGE + 2, 3), *range(CHUNK - 2, CHUNK + 3), 2 * CHUNK + 1):
        start = text(40 + length, length)
        ask(rig, start, 3, (length,))
        cached = ask(rig, [*start, *said(start, 3), 97, 98], 3, (length, length + 3, length + 5))
        assert cached >= length


def test_an_answer_cut_at_nine_tenths_and_an_edited_history(rig: EngineRig) -> None:
    prompt = text(1, 50)
    name = rig.submit(prompt, message_ends=(50,), max_tokens=40)
    rig.wait_for(lambda: name in rig.received and len(tokens_of(rig, name)) >= 36)
    rig.abort(name)
    rig.finish(name)
    heard = tokens_of(rig, name)
    assert heard == said(prompt, 40)[: len(heard)]
    assert ask(rig, [*prompt, *heard, 97], 5, (50, 50 + len(heard), 51 + len(heard))) >= 48
    edited = [*prompt[:30], *text(8, 25)]
    assert ask(rig, edited, 5, (30, 55)) in (0, 16)
    assert ask(rig, [*edited, *said(edited, 5), 97], 5, (30, 55, 60, 61)) >= 55


def test_who_sees_the_end_finds_the_state() -> None:
    """The visible end of an answer comes after its last state is published."""
    with made(checkpoint_extra_work_fraction=2.0) as rig:
        ask(rig, text(9, 20), ends=(20,))  # what a copy takes is known
        for turn in range(3):
            prompt = text(turn, 20)
            rig.finish(rig.submit(prompt, message_ends=(20,), max_tokens=9))
            # Nothing waits in between: the next turn is submitted as soon as the end is seen.
            name = rig.submit([*prompt, *said(prompt, 9), 97], message_ends=(20, 29, 30), max_tokens=3)
            (output,) = rig.finish(name)
            assert isinstance(output, RequestOutput)
            assert output.num_cached_tokens == 28
        balanced(rig)


def test_pages_of_checkpoints_give_way_to_requests() -> None:
    """A pool of two contexts: what is kept never keeps a request waiting, nobody gives way, and counts say so."""
    with made(max_slots=2, max_context=128, num_pages=16, state_rows=8) as rig:
        for number in range(12):
            ask(rig, text(number, 60), 10, (60,))
        stats, counters = rig.engine.stats(), rig.engine.scheduler.snapshot_counters()
        assert counters["requests_preempted"] == 0
        assert stats.checkpoints.evictions > 0
        assert stats.checkpoints.pages_held > 0
        assert (stats.pages_used, stats.pages_free) == (0, 16)
        names = [rig.submit(text(50 + i, 100), max_tokens=20) for i in range(2)]
        rig.finish(*names)
        assert [tokens_of(rig, name) for name in names] == [said(text(50 + i, 100), 20) for i in range(2)]
        balanced(rig)


def test_preempted_requests_go_on_from_a_checkpoint(rig: EngineRig) -> None:
    with made(max_slots=4, max_context=128, num_pages=8, recurrent=rig.core.runner.recurrent, max_queue=64) as small:
        names = [small.submit(text(i, 20), message_ends=(20,), max_tokens=40) for i in range(5)]
        small.finish(*names)
        assert [tokens_of(small, name) for name in names] == [said(text(i, 20), 40) for i in range(5)]
        assert small.engine.scheduler.snapshot_counters()["requests_preempted"] != 0
        balanced(small)


def test_a_failed_copy_fails_nobody() -> None:
    def spoil(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if frame.shape.kind is ProgramKind.SNAPSHOT:
            out["committed_len"] += 1

    with made(on_complete=spoil) as rig:
        for _ in range(3):
            assert ask(rig, text(1, 40), ends=(30,)) == 0
        assert rig.engine.stats().checkpoints.published == 0
        assert rig.engine.scheduler.snapshot_counters()["snapshots_skipped"]["failed"] > 0  # type: ignore[index]


def test_a_device_error_drops_every_checkpoint() -> None:
    """Also one that a request waits to be restored from: it starts anew, and nobody reads what is lost."""
    broken: list[int] = []

    def breaks(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if broken and broken[0] == frame.index:
            raise RuntimeError("the frame failed")

    with made(on_complete=breaks) as rig:
        base = text(1, 40)
        ask(rig, base, ends=(40,))
        assert ask(rig, [*base, 97], ends=(41,)) == 40
        gate = rig.core.runner.gate
        gate.close()
        broken.append(len(rig.core.runner.frames))
        victim = rig.submit(text(2, 30), max_tokens=3)
        gate.wait_for_frame()
        others = [rig.submit([*base, 98 + i], message_ends=(41,), max_tokens=5) for i in range(2)]
        gate.open()
        rig.finish(victim, *others)
        assert isinstance(rig.received[victim][-1], Exception)
        assert [tokens_of(rig, name) for name in others] == [said([*base, 98 + i], 5) for i in range(2)]
        balanced(rig)
        state = rig.engine.scheduler.state
        assert state.retention.checkpoints.ids.min(initial=99) > 2  # those of before are gone
        assert {RowUse.FREE, RowUse.PUBLISHED} >= {RowUse(use) for use in state.retention.rows.use.tolist()}


def test_penalties_and_scores_do_not_notice() -> None:
    """Scored prompts are computed whole; with penalties of repetition only whole states are taken."""
    with made(recurrent=False) as rig:
        prompt = text(1, 50)
        ask(rig, prompt, ends=(40,))
        assert ask(rig, [*prompt[:45], 97], ends=(45,), repetition_penalty=1.1) == 40
        assert ask(rig, [*prompt[:36], 97], ends=(36,), repetition_penalty=1.1) == 0
        assert ask(rig, [*prompt[:35], 65], ends=(36,)) == 32
        assert ask(rig, prompt, ends=(40,), prompt_logprobs=1) == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    with EngineRig(**OPTIONS, state_rows=8, enable_prefix_caching=False) as rig:
        for _ in range(2):
            (output,) = rig.finish(rig.submit(text(1, 50), message_ends=(40,), max_tokens=4))
            assert isinstance(output, RequestOutput)
            assert output.num_cached_tokens is None
        assert rig.engine.stats().checkpoints.snapshots == 0


def test_the_head_of_a_queue_is_matched_once(rig: EngineRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks at every step until it is admitted; what is published changes seldom."""
    prefixes, found = rig.engine.prefixes, []
    find = prefixes.find

    def counted(*args: Any, **options: Any) -> tuple[int, int]:
        found.append(len(args[0]))
        return find(*args, **options)

    monkeypatch.setattr(prefixes, "find", counted)
    first = [rig.submit(text(number, 20), message_ends=(20,), max_tokens=100) for number in range(4)]
    last = rig.submit(text(9, 21), max_tokens=2)
    rig.finish(*first, last)
    assert found.count(20) <= 8
    assert found.count(21) <= 10


@pytest.mark.parametrize("frames", [1, 2])
def test_an_answer_that_a_stop_token_ends_is_there_for_the_next_turn(frames: int) -> None:
    """With two frames out, the second has consumed the stop token when the first one shows it: so has the state."""
    with made(frames=frames, async_scheduling=frames == 2) as rig:
        ask(rig, text(9, 20), ends=(20,))  # what copies and steps take is known
        prompt = text(1, 30)
        answer = said(prompt, 30)
        stop = answer[20]
        length = answer.index(stop) + 1
        rig.finish(name := rig.submit(prompt, message_ends=(30,), max_tokens=30, stop_token_ids=[stop]))
        assert tokens_of(rig, name) == answer[:length]
        cached = ask(rig, [*prompt, *answer[:length], *text(2, 5)], ends=(30, 30 + length, 35 + length))
        assert cached == 30 + length - (frames == 1)


def test_a_prompt_that_is_asked_again_protects_its_state() -> None:
    """Two rows, the older of which is asked for again as a whole: the other one gives way to the next prompt."""
    with made(state_rows=2, checkpoint_extra_work_fraction=0.0) as rig:
        first, second = text(1, 30), text(2, 30)
        for prompt in (first, second, first):
            ask(rig, prompt, 2, (30,))
        ask(rig, text(3, 30), 2, (30,))
        assert ask(rig, [*first, 97], 2, (31,)) == 30
