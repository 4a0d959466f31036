"""Programs against a dense float64 model: chunking, packing, batch composition, pages, windows, poison.

Every `Host` starts from a pool full of NaN, scratch page included, so a read of anything
that the request did not write shows.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.unit.programs_toy import VOCAB, Chunk, Host, prompt_of, reference_greedy, reference_logits

TOLERANCE = 1e-4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_row(out: dict[str, np.ndarray], row: int, tokens: list[int]) -> None:
    """The row's log-probabilities are the reference's after `tokens`."""
    expected = log_softmax(reference_logits(tokens)[-1])
    ids = out["top_ids"][row]
    np.testing.assert_allclose(out["top_logprobs"][row], expected[ids], atol=TOLERANCE)
    np.testing.assert_allclose(out["top_logprobs"][row], np.sort(expected)[::-1][: len(ids)], atol=TOLERANCE)
    assert out["token"][row] == np.argmax(expected)
    assert out["status"][row] == 0


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63])
def test_greedy_text_equals_the_reference(page_size: int, length: int) -> None:
    prompt = prompt_of(length)
    assert Host(page_size=page_size).generate(1, prompt, 24) == reference_greedy(prompt, 24)


def test_every_split_of_a_prompt_gives_the_same_logits() -> None:
    prompt, host = prompt_of(40), Host()
    for split in range(1, 40):
        host.initialize(0, 40)
        first = host.prefill([Chunk(0, prompt[:split], sample=False)])
        assert (first["token"][0], first["committed_len"][0]) == (-1, split)
        assert_row(host.prefill([Chunk(0, prompt[split:], split)], logprobs=True), 0, prompt)


def test_many_chunks_over_several_key_blocks() -> None:
    """550 tokens: three key blocks, nine programs, then decode in the third block."""
    prompt, host = prompt_of(550), Host(context=600, slots=1)
    host.initialize(0, len(prompt))
    for start in range(0, 550, 64):
        out = host.prefill([Chunk(0, prompt[start : start + 64], start, start + 64 >= 550)], logprobs=True)
    assert_row(out, 0, prompt)
    tokens = [*prompt, int(out["token"][0])]
    assert_row(host.decode([0], logprobs=True), 0, tokens)


def test_packed_rows_equal_each_row_alone() -> None:
    """Rows of 1 to 23 tokens, fresh and continued, with an inactive row behind them."""
    lengths, starts = [23, 1, 16, 9], [0, 5, 16, 33]
    prompts = [prompt_of(a + b, 3) for a, b in zip(lengths, starts, strict=True)]
    host = Host()
    for slot, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        host.initialize(slot, len(prompt))
        if start:
            host.prefill([Chunk(slot, prompt[:start], sample=False)])
    chunks = [Chunk(slot, prompts[slot][start:], start) for slot, start in enumerate(starts)]
    out = host.prefill(chunks, rows=8, logprobs=True)
    for row, prompt in enumerate(prompts):
        assert_row(out, row, prompt)
    assert out["token"][4:].tolist() == [-1] * 4


def test_packed_prompts_fill_the_buffer_exactly() -> None:
    prompts, host = [prompt_of(16, s) for s in range(4)], Host()
    for slot in range(4):
        host.initialize(slot, 16)
    out = host.prefill([Chunk(slot, p) for slot, p in enumerate(prompts)], logprobs=True)
    for row, prompt in enumerate(prompts):
        assert_row(out, row, prompt)


def test_decode_does_not_depend_on_the_batch() -> None:
    """Lanes in every order, with gaps, in programs of 1 to 4 lanes; contexts of very different length."""
    prompts = [prompt_of(n, 7) for n in (3, 270, 31)]
    host = Host(context=400)
    texts = [list(p) for p in prompts]
    for slot, prompt in enumerate(prompts):
        host.initialize(slot, len(prompt))
        for start in range(0, len(prompt), 64):
            last = start + 64 >= len(prompt)
            out = host.prefill([Chunk(slot, prompt[start : start + 64], start, last)])
        texts[slot].append(int(out["token"][0]))
    compositions = [(0,), (1,), (2, 0), *list(itertools.permutations([0, 1, 2, None]))[::4]]
    for lanes in compositions:
        out = host.decode(lanes, logprobs=True)
        for lane, slot in enumerate(lanes):
            if slot is None:
                assert out["token"][lane] == -1
                continue
            assert_row(out, lane, texts[slot])
            texts[slot].append(int(out["token"][lane]))
            assert out["committed_len"][lane] == len(texts[slot]) - 1


@pytest.mark.parametrize("length", [1, 17, 64, 130])
def test_scored_prefill_equals_dense_log_softmax(length: int) -> None:
    prompt, host = prompt_of(length), Host(context=160)
    host.initialize(0, length)
    out = host.prefill([Chunk(0, prompt, targets=[*prompt[1:], -1])], tokens=192)
    expected = log_softmax(reference_logits(prompt))
    picked = expected[np.arange(length - 1), prompt[1:]]
    np.testing.assert_allclose(out["target_logprob"][: length - 1], picked, atol=TOLERANCE)
    ranks = 1 + (expected[:-1] > picked[:, None] + 1e-6).sum(1)
    np.testing.assert_array_equal(out["target_rank"][: length - 1], ranks)
    best = np.sort(expected)[:, ::-1][:, : out["target_top_ids"].shape[1]]
    np.testing.assert_allclose(out["target_top_logprobs"][:length], best, atol=TOLERANCE)
    ids = out["target_top_ids"][:length]
    np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), best, atol=TOLERANCE)
    assert out["target_rank"][length - 1] == 0
    assert out["token"][0] == np.argmax(expected[-1])


def test_scored_prefill_in_chunks() -> None:
    prompt, host = prompt_of(100), Host(context=112)
    host.initialize(0, 100)
    targets, found = [*prompt[1:], -1], []
    for start in range(0, 100, 30):
        chunk = Chunk(0, prompt[start : start + 30], start, start + 30 >= 100, targets[start : start + 30])
        out = host.prefill([chunk])
        found += out["target_logprob"][: len(chunk.tokens)].tolist()
    expected = log_softmax(reference_logits(prompt))[np.arange(99), prompt[1:]]
    np.testing.assert_allclose(found[:99], expected, atol=TOLERANCE)


def test_a_lane_with_nan_fails_alone() -> None:
    """One request's cache is poisoned behind its back; its neighbour's logits do not change."""
    prompts, host = [prompt_of(20, s) for s in range(2)], Host()
    texts = [[*p, host.generate(slot, p, 1)[0]] for slot, p in enumerate(prompts)]
    kv = tuple(
        (k.at[int(host.tables[1, 0]), 3].set(np.nan), v.at[int(host.tables[1, 0]), 3].set(np.nan))
        for k, v in host.state.kv
    )
    host.state = host.state.replace(kv=kv)
    out = host.decode([1, 0], logprobs=True)
    assert (out["status"][0], out["token"][0]) == (1, -1)
    assert_row(out, 1, texts[0])


def test_bfloat16_pool_keeps_what_was_written() -> None:
    """16-bit rows travel as uint16: keys read back from the pool give what one pass gives."""
    prompt, host = prompt_of(40), Host(dtype="bfloat16")
    whole = log_softmax(reference_logits(prompt)[-1])
    for split in (1, 16, 25, 39):
        host.initialize(0, 40)
        host.prefill([Chunk(0, prompt[:split], sample=False)])
        out = host.prefill([Chunk(0, prompt[split:], split)], logprobs=True)
        # two layers at 8 significant bits; a swapped key or value moves logits by whole units
        np.testing.assert_allclose(out["top_logprobs"][0][:8], whole[out["top_ids"][0][:8]], atol=0.25)
    out = host.decode([0], logprobs=True)
    assert out["status"][0] == 0
    assert 0 <= out["token"][0] < VOCAB
