"""Programs with real families: transformers' greedy tokens by prefill, chunks at every split, and any batch."""

from __future__ import annotations

import numpy as np
import pytest

from helios_jax.models.source import open_source
from tests.golden.tiny import FAMILIES, GREEDY_LEN, golden, tiny_checkpoint
from tests.unit.programs_toy import Chunk, Host

TOLERANCE = 1e-4
SMOLLM2_PROMPT = "Once upon a time, in a small village by the sea,"
SMOLLM2_GREEDY = [665, 436, 253, 9357, 1573, 267, 19341, 3365, 17644, 793, 30, 909, 4161, 281, 253, 11637, 10000]
SMOLLM2_GREEDY += [411, 253, 3953]


def host_of(name: str, **options: int) -> Host:
    source = open_source(name)
    return Host(source.model, source.load_params("float32"), **options)


def top_logprobs(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return (shifted - np.log(np.exp(shifted).sum()))[ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_goldens_by_prefill_splits_and_batches(family: str) -> None:
    """Slot s holds the prompt and s of its greedy tokens; then all lanes decode together to the end."""
    stored = golden(family)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    host = host_of(tiny_checkpoint(family), slots=3, context=96)
    for split in range(1, len(prompt)):
        host.initialize(0, len(prompt))
        host.prefill([Chunk(0, prompt[:split], 0, False)], rows=2)
        out = host.prefill([Chunk(0, prompt[split:], split)], rows=2, logprobs=True)
        expected = top_logprobs(stored["logits"][len(prompt) - 1], out["top_ids"][0])
        np.testing.assert_allclose(out["top_logprobs"][0], expected, atol=TOLERANCE)
        assert out["token"][0] == greedy[0]
    for slot in (1, 2):
        host.initialize(slot, len(prompt) + slot)
    out = host.prefill([Chunk(1, prompt + greedy[:1]), Chunk(2, prompt + greedy[:2])])
    assert out["token"].tolist() == greedy[1:3]
    for step in range(1, GREEDY_LEN - 2):
        lanes = [[0, 1, 2, None], [2, None, 0, 1]][step % 2]
        out = host.decode(lanes, logprobs=True)
        for lane, slot in enumerate(lanes):
            if slot is None:
                continue
            assert out["token"][lane] == greedy[step + slot]
            logits = stored["logits"][len(prompt) + step + slot - 1]
            expected = top_logprobs(logits, out["top_ids"][lane])
            np.testing.assert_allclose(out["top_logprobs"][lane], expected, atol=TOLERANCE)


@pytest.mark.slow
def test_smollm2_says_the_known_words() -> None:
    """The first 20 greedy ids in float32: alone, in two chunks, and beside neighbours."""
    from helios_jax.text.tokenizer import load_tokenizer

    source = open_source("smollm2")
    prompt = load_tokenizer(source.text_files().path).encode(SMOLLM2_PROMPT)
    host = Host(source.model, source.load_params("float32"), slots=3, context=64, poison=True)
    assert host.generate(0, prompt, 20) == SMOLLM2_GREEDY
    for slot in (0, 1, 2):
        host.initialize(slot, len(prompt), temperature=0.0 if slot == 1 else 1.0, seed=(slot, 3))
    host.prefill([Chunk(1, prompt[:5], 0, False)])
    out = host.prefill([Chunk(0, prompt), Chunk(1, prompt[5:], 5), Chunk(2, prompt[:4])])
    found = [int(out["token"][1])]
    found += [int(host.decode([2, 1, 0, None])["token"][1]) for _ in range(19)]
    assert found == SMOLLM2_GREEDY
