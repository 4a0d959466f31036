"""What readers get: stops, n outputs, log-probabilities, limits and kinds of output, over the fake device."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.errors import RequestError, UnavailableError
from helios_jax.testing import EngineRig, expected_tokens, hashed_text, scripted

EOS = 257


def only(rig: EngineRig, name: str) -> RequestOutput:
    """The last output of a request that did not fail."""
    (item,) = rig.finish(name)
    assert isinstance(item, RequestOutput)
    return item


def test_greedy_text_equals_the_reference_for_random_batches() -> None:
    rng = random.Random(7)
    with EngineRig(max_slots=5, page_size=16, prefill_chunk=64) as rig:
        prompts = {}
        for _ in range(40):
            prompt = [rng.randrange(97, 122) for _ in range(rng.randrange(1, 150))]
            prompts[rig.submit(prompt, max_tokens=20)] = prompt
        rig.finish(*prompts)
        for name, prompt in prompts.items():
            assert rig.text(name) == bytes(expected_tokens(hashed_text, prompt, 20)).decode()


@pytest.mark.parametrize(
    ("stop", "shown", "reason"),
    [
        (["DEFGHIJ"], "ABC", "stop"),
        (["DEFXYZ"], "ABCDEFGHIJKLMN", "stop"),  # a false alarm is released
        (["HIJ", "GHIJK"], "ABCDEFG", "stop"),  # the one that is complete first, though the other began first
        (["A"], "", "stop"),
        (["N"], "ABCDEFGHIJKLM", "stop"),
    ],
)
def test_stop_strings_never_leak(stop: list[str], shown: str, reason: str) -> None:
    with EngineRig(next_token=scripted("ABCDEFGHIJKLMN")) as rig:
        name = rig.submit("x", stop=stop, max_tokens=50)
        rig.finish(name)
        assert rig.text(name) == shown
        assert rig.reason(name) == reason
        deltas = [part.text for item in rig.received[name] for part in item.outputs]
        assert all(deltas[:-1])  # no empty deltas before the last
        assert not any(text in "".join(deltas) for text in stop)
        assert rig.ledger_problems() == []


def test_stop_string_beats_length_and_can_be_included() -> None:
    with EngineRig(next_token=scripted("one STOP two")) as rig:
        cut = rig.submit("x", stop="STOP", max_tokens=len("one STOP"))
        kept = rig.submit("x", stop="STOP", include_stop_str_in_output=True, max_tokens=50)
        rig.finish(cut, kept)
        assert (rig.text(cut), rig.reason(cut)) == ("one ", "stop")
        assert (rig.text(kept), rig.reason(kept)) == ("one STOP", "stop")
        assert rig.received[kept][-1].outputs[0].stop_reason == "STOP"


def test_held_back_text_is_shown_at_the_end_of_length() -> None:
    with EngineRig(next_token=scripted("abc STO")) as rig:
        name = rig.submit("x", stop="STOP", max_tokens=7)
        rig.finish(name)
        assert (rig.text(name), rig.reason(name)) == ("abc STO", "length")


def test_eos_and_stop_token_ids() -> None:
    with EngineRig(next_token=scripted("hello")) as rig:
        ended = rig.submit("x", max_tokens=50, kind=OutputKind.FINAL_ONLY)
        ignored = rig.submit("x", max_tokens=8, ignore_eos=True, kind=OutputKind.FINAL_ONLY)
        by_id = rig.submit("x", max_tokens=50, stop_token_ids=[ord("l")], kind=OutputKind.FINAL_ONLY)
        first, second, third = (only(rig, name).outputs[0] for name in (ended, ignored, by_id))
        assert (first.text, first.finish_reason, first.stop_reason) == ("hello", "stop", None)
        assert first.token_ids == [*b"hello", EOS]
        assert (second.text, second.finish_reason, len(second.token_ids)) == ("hello", "length", 8)
        assert (third.text, third.finish_reason, third.stop_reason) == ("he", "stop", ord("l"))


def test_n_outputs_have_their_own_seeds_indices_and_ends() -> None:
    with EngineRig(max_slots=2) as rig:
        name = rig.submit("abc", n=3, seed=42, temperature=1.0, max_tokens=12)
        rig.finish(name)
        for i in range(3):
            expected = bytes(expected_tokens(hashed_text, list(b"abc"), 12, 42 + i)).decode()
            assert rig.text(name, i) == expected
            assert rig.reason(name, i) == "length"
        assert len({rig.text(name, i) for i in range(3)}) == 3
        assert [item.finished for item in rig.received[name]].count(True) == 1


def test_unseeded_requests_differ_and_seeded_ones_repeat() -> None:
    with EngineRig() as rig:
        names = [rig.submit("abc", temperature=1.0, max_tokens=20) for _ in range(3)]
        seeded = [rig.submit("abc", temperature=1.0, seed=-1, max_tokens=20) for _ in range(2)]
        rig.finish(*names, *seeded)
        assert len({rig.text(name) for name in names}) == 3
        assert rig.text(seeded[0]) == rig.text(seeded[1])


def test_logprobs_of_tokens_and_prompt() -> None:
    with EngineRig(prefill_chunk=64) as rig:
        prompt = [97 + i % 20 for i in range(100)]  # two scored chunks
        name = rig.submit(
            prompt, max_tokens=3, logprobs=2, prompt_logprobs=1, n=2, temperature=1.0, kind=OutputKind.FINAL_ONLY
        )
        output = only(rig, name)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == prompt[1:]
        for part in output.outputs:
            assert part.logprobs is not None
            assert [next(iter(entry)) for entry in part.logprobs] == part.token_ids
            assert all(len(entry) == 2 for entry in part.logprobs)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_prompt_logprobs_come_with_the_first_output(kind: OutputKind) -> None:
    with EngineRig() as rig:
        name = rig.submit([97] * 90, n=2, max_tokens=4, prompt_logprobs=0, kind=kind)
        rig.finish(name)
        first = rig.received[name][0]
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == 90


@pytest.mark.parametrize("scored", [None, 0, 5])
def test_max_tokens_zero_answers_without_output(scored: int | None) -> None:
    with EngineRig() as rig:
        name = rig.submit("abcdef", max_tokens=0, prompt_logprobs=scored, kind=OutputKind.FINAL_ONLY)
        output = only(rig, name)
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "length"
        assert (output.prompt_logprobs is None) == (scored is None)
        assert rig.ledger_problems() == []
        assert rig.engine.board.snapshot().finished["length"] == 1


def test_max_tokens_none_and_huge_are_capped_by_the_context() -> None:
    with EngineRig(max_context=64) as rig:
        names = [rig.submit([97] * 60, max_tokens=limit) for limit in (None, 10**9)]
        names.append(rig.submit([97] * 63, max_tokens=5))
        rig.finish(*names)
        assert [len(rig.text(name)) for name in names] == [4, 4, 1]
        assert {rig.reason(name) for name in names} == {"length"}


@pytest.mark.parametrize("length", [64, 65])
def test_prompt_that_leaves_no_room_is_refused_with_numbers(length: int) -> None:
    with EngineRig(max_context=64) as rig:
        with pytest.raises(RequestError, match=rf"{length} tokens.*64 tokens") as caught:
            rig.submit([97] * length, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"


def test_kinds_of_output_agree() -> None:
    with EngineRig(next_token=scripted("hällo wörld")) as rig:
        names = {kind: rig.submit("x", max_tokens=40, kind=kind) for kind in OutputKind}
        rig.finish(*names.values())
        assert rig.text(names[OutputKind.DELTA]) == "hällo wörld"
        cumulative = [item.outputs[0].text for item in rig.received[names[OutputKind.CUMULATIVE]]]
        assert all(b.startswith(a) for a, b in itertools.pairwise(cumulative))
        assert cumulative[-1] == "hällo wörld"
        assert len(rig.received[names[OutputKind.FINAL_ONLY]]) == 1
        tokens = [t for item in rig.received[names[OutputKind.DELTA]] for t in item.outputs[0].token_ids]
        assert tokens == only(rig, names[OutputKind.FINAL_ONLY]).outputs[0].token_ids


def test_trace_has_a_line_for_every_frame(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with EngineRig(trace=path) as rig:
        rig.finish(rig.submit("abc", max_tokens=5))
        frames = len(rig.core.runner.frames)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["fence"] for line in lines] == list(range(1, frames + 1))
    assert [line["kind"] for line in lines][:2] == ["initialize", "prefill"]
    assert lines[1]["tokens"] == 3
    assert lines[1]["requests"] == ["r1"]
    assert all(line["device_ns"][0] > 0 and line["host_ns"] > 0 for line in lines)
    for line in lines:
        assert (line["observation_age_ns"] is None) == (line["reason"] == "discovery") == (line["estimated_ns"] == 0)
        assert line["exploration_credit_ns"] == 0  # nothing of so short a run is a probe


def test_drain_refuses_new_work_and_lets_the_rest_end() -> None:
    with EngineRig() as rig:
        name = rig.submit("abc", max_tokens=50)
        assert rig.engine.drain(10)
        with pytest.raises(UnavailableError, match="draining"):
            rig.submit("abc", max_tokens=1)
        rig.finish(name)
        assert rig.reason(name) == "length"
        assert not rig.engine.health().ready
