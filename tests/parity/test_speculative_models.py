"""Rounds with real families: transformers' greedy tokens with copies and with another family as draft."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from helios_jax.models.source import open_source
from tests.golden.tiny import GREEDY_LEN, VOCAB, golden, tiny_checkpoint
from tests.unit.programs_toy import Chunk
from tests.unit.speculative_toy import LEARNED, NARROW, RAGGED, Offer, Rounds

TOLERANCE = 1e-4


@functools.cache
def loaded(family: str) -> tuple[Any, Any]:
    source = open_source(tiny_checkpoint(family))
    return source.model, source.load_params("float32")


def host_of(target: str, draft: str | None) -> Rounds:
    model, params = loaded(target)
    if draft is None:
        return Rounds(model, params, slots=3, context=96)
    other, other_params = loaded(draft)
    return Rounds(model, params, draft=other, draft_params=other_params, slots=3, context=96)


# a sliding window shorter than a block and the prompt; biases and tied embeddings as draft
@pytest.mark.parametrize(
    ("target", "draft"),
    [("qwen3_window", None), ("llama3", "qwen2"), pytest.param("mistral", "mistral", marks=pytest.mark.slow)],
)
def test_goldens_by_rounds_of_changing_width(target: str, draft: str | None) -> None:
    """Slot s starts s tokens further on; lanes idle and swap; tokens and log-probabilities are transformers'."""
    stored, rng = golden(target), np.random.default_rng(len(target))
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    host = host_of(target, draft)
    outputs: dict[int, list[int]] = {}
    for slot in range(3):
        host.initialize(slot, len(prompt) + slot)
        outputs[slot] = greedy[:slot]
        outputs[slot].append(int(host.prefill([Chunk(slot, prompt + greedy[:slot])])["token"][0]))
    offered = accepted = 0
    while any(len(o) < GREEDY_LEN for o in outputs.values()):
        shape = RAGGED if draft is None else [LEARNED, LEARNED, NARROW][rng.integers(3)]
        offers: list[Offer | None] = []
        for slot in rng.permutation(3).tolist():
            left = GREEDY_LEN - len(outputs[slot])
            if left and rng.random() < 0.8:
                at, depth = len(outputs[slot]), min(3, left - 1)
                tokens = np.where(rng.random(depth) < 0.8, greedy[at : at + depth], rng.integers(0, VOCAB, depth))
                width = 1 if shape is NARROW else 4
                offers.append(Offer(slot, min(width, left), tokens.tolist(), [0.9, 0.8, 0.7][:depth]))
            else:
                offers.append(None)
        before = {slot: len(o) for slot, o in outputs.items()}
        out = host.round(shape, offers, logprobs=True)
        host.extend(outputs, offers, out)
        offered, accepted = offered + int(out["offered"].sum()), accepted + int(out["accepted"].sum())
        for lane, offer in enumerate(offers):
            for column in range(0 if offer is None else int(out["num_tokens"][lane])):
                logits = stored["logits"][len(prompt) + before[offer.slot] + column - 1].astype(np.float64)
                shifted = logits - logits.max()
                expected = (shifted - np.log(np.exp(shifted).sum()))[out["top_ids"][lane, column]]
                np.testing.assert_allclose(out["top_logprobs"][lane, column], expected, atol=TOLERANCE)
    assert all(o == greedy for o in outputs.values())
    assert offered > 30
    assert accepted == offered if draft == target else accepted < offered
