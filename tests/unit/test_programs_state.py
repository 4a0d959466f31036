"""What programs do to the slot table and the pool: counting, resetting, resuming, and leaving others alone."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from helios_jax.aot.abi import Dims
from helios_jax.aot.programs import build_program
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from tests.unit.programs_toy import TABLES, VOCAB, Chunk, Host, Toy, prompt_of, reference_logits

SETTINGS: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "seed": (11, 22),
}


def tables(host: Host) -> dict[str, np.ndarray]:
    """The slot table as numpy copies."""
    names = [name for name in host.state.__dataclass_fields__ if name not in TABLES]
    return {name: np.array(getattr(host.state, name)) for name in names}


def pools(host: Host) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(host.state.kv)]


def test_inactive_lanes_and_rows_mutate_nothing_real() -> None:
    host = Host()
    for slot in range(3):
        host.generate(slot, prompt_of(20, slot), 2)
    before, kv = tables(host), pools(host)
    host.decode([None, 1, None, None])
    after = tables(host)
    for name in before:
        same = np.delete(np.arange(host.dims.slots), 1)
        np.testing.assert_array_equal(before[name][same], after[name][same], err_msg=name)
    page, offset = int(host.tables[1, 21 // 16]), 21 % 16
    for old, new in zip(kv, pools(host), strict=True):
        changed = np.argwhere(~((old == new) | (np.isnan(old) & np.isnan(new))).all(axis=(2, 3)))
        assert {tuple(c) for c in changed.tolist()} - {(0, o) for o in range(16)} == {(page, offset)}


def test_an_empty_frame_changes_nothing() -> None:
    """All lanes inactive, as when programs are verified after loading."""
    host = Host()
    host.generate(0, prompt_of(20), 2)
    before, kv = tables(host), pools(host)
    host.decode([None, None])
    host.prefill([Chunk(host.dims.slots - 1, [])], rows=4)
    host.initialize(host.dims.slots, 3)
    for name, old in before.items():
        np.testing.assert_array_equal(old[: host.dims.slots], tables(host)[name][: host.dims.slots], err_msg=name)
    for old, new in zip(kv, pools(host), strict=True):
        np.testing.assert_array_equal(old[1:], new[1:])


def test_initialize_removes_every_trace_of_the_previous_occupant() -> None:
    host, fresh = Host(), Host()
    host.generate(2, prompt_of(20), 5, **SETTINGS, bias={4: 2.0, 9: -1.0}, min_p=0.1, presence_penalty=1.0)
    for each in (host, fresh):
        each.initialize(2, 12, temperature=0.5, seed=(2**32 - 1, 5))
    for name, value in tables(host).items():
        np.testing.assert_array_equal(value[2], tables(fresh)[name][2], err_msg=name)
    assert tables(host)["seed"][2].tolist() == [2**32 - 1, 5]


def test_tokens_are_counted_once_and_on_the_right_side() -> None:
    """A resumed request: 10 prompt tokens, then 6 earlier outputs, in chunks across the border."""
    host, history = Host(), prompt_of(16, 4)
    host.initialize(1, 10)
    host.prefill([Chunk(1, history[:7], 0, False)])
    host.prefill([Chunk(1, history[7:], 7)])
    sampled = [int(host.state.pending_token[1])]
    sampled += [int(host.decode([1])["token"][0]) for _ in range(5)]
    seen = np.zeros(VOCAB, bool)
    seen[history[:10]] = True
    after = tables(host)
    np.testing.assert_array_equal(after["prompt_seen"][1], seen)
    np.testing.assert_array_equal(after["output_counts"][1], np.bincount(history[10:] + sampled, minlength=VOCAB))
    assert after["committed_len"][1] == 16 + 5
    assert after["pending_token"][1] == sampled[-1]
    assert not after["prompt_seen"][[0, 2, 3]].any()
    assert not after["output_counts"][[0, 2, 3]].any()


def test_an_unfinished_prompt_leaves_the_pending_token() -> None:
    host = Host()
    host.initialize(0, 20)
    host.prefill([Chunk(0, prompt_of(8), 0, False)])
    assert tables(host)["pending_token"][0] == 0
    assert tables(host)["output_counts"][0].sum() == 0


def naive_greedy(prompt: list[int], count: int, repetition: float, presence: float, frequency: float) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        logits = reference_logits([*prompt, *out])[-1]
        for token in set(prompt) | set(out):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(out):
            logits[token] -= presence + frequency * out.count(token)
        out.append(int(np.argmax(logits)))
    return out


@pytest.mark.parametrize("penalties", [(1.8, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (0.7, -0.5, 0.4)])
def test_penalties_equal_a_naive_loop(penalties: tuple[float, float, float]) -> None:
    prompt = prompt_of(12, 9)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    out = Host().generate(0, prompt, 20, **dict(zip(names, penalties, strict=True)))
    assert out == naive_greedy(prompt, 20, *penalties)


def test_a_seeded_request_is_the_same_anywhere() -> None:
    """Alone; in another slot; chunked and packed beside neighbours; and resumed after preemption."""
    prompt, host = prompt_of(30, 2), Host()
    expected = host.generate(0, prompt, 16, **SETTINGS)
    assert len(set(expected)) > 4
    assert host.generate(3, prompt, 16, **SETTINGS) == expected

    for slot in (0, 1, 3):
        host.initialize(slot, 14 if slot != 1 else 30, **(SETTINGS if slot == 1 else {"temperature": 1.5}))
    host.prefill([Chunk(1, prompt[:13], 0, False), Chunk(3, prompt_of(14, 1))])
    out = host.prefill([Chunk(0, prompt_of(14, 5)), Chunk(1, prompt[13:], 13)])
    found = [int(out["token"][1])]
    for step in range(7):
        lanes = [3, None, 0, 1] if step % 2 else [1, 0]
        found.append(int(host.decode(lanes)["token"][lanes.index(1)]))
    assert found == expected[:8]

    host.initialize(2, 30, **SETTINGS)  # preempted: prompt and earlier output run again elsewhere
    found.append(int(host.prefill([Chunk(2, prompt + found)])["token"][0]))
    while len(found) < 16:
        found.append(int(host.decode([2])["token"][0]))
    assert found == expected


def test_logprobs_are_those_of_raw_logits_and_cost_nothing_unasked() -> None:
    prompt, host = prompt_of(9), Host()
    host.initialize(0, 9, repetition_penalty=2.0, bias={5: 100.0})
    out = host.prefill([Chunk(0, prompt)], logprobs=True)
    logits = reference_logits(prompt)[-1]
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert out["token"][0] == 5
    assert out["logprob"][0] == pytest.approx(expected[5], abs=1e-4)
    assert out["rank"][0] == 1 + (expected > expected[5]).sum()
    out = host.decode([0])
    assert not out["top_logprobs"].any()
    assert (out["rank"][0], out["logprob"][0]) == (0, 0)


def test_a_context_filled_to_its_last_position() -> None:
    """Prime context: 37 tokens in pages of 16; the last write lands in the last page, the next in scratch."""
    host, prompt = Host(context=37, slots=1), prompt_of(36)
    host.generate(0, prompt, 2)
    kv = pools(host)
    assert np.isfinite(kv[0][host.tables[0, 2], 36 - 32]).all()
    for _ in range(48 - 37 + 1):  # up to the end of the last page, and one beyond, which no plan would ask for
        host.decode([0])
    kv = pools(host)
    host.decode([0])
    for old, new in zip(kv, pools(host), strict=True):
        np.testing.assert_array_equal(old[1:], new[1:])


def test_foreign_page_ids_and_tokens_touch_only_scratch() -> None:
    host = Host()
    host.generate(0, prompt_of(20), 2)
    kv = pools(host)
    shape = ProgramShape(ProgramKind.PREFILL, 1, 64)
    tokens = np.array([-5, 2**31 - 1, VOCAB, 3] + [0] * 60)
    fields = {"slot": 1, "query_len": 4, "sample": 0, "tokens": tokens}
    host.run(shape, page_table=[[-1] * host.dims.pages_per_slot], **fields)
    host.run(shape, page_table=[[10**6] * host.dims.pages_per_slot], **fields)
    for old, new in zip(kv, pools(host), strict=True):
        np.testing.assert_array_equal(old[1:], new[1:])


def test_kinds_without_a_program_are_refused() -> None:
    dims = Dims(slots=1, pages_per_slot=1, num_pages=2, page_size=16, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="no program of kind vision"):
        build_program(ProgramShape(ProgramKind.VISION, 1, 1), Toy(), dims, "float32")
