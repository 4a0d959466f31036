"""Programs with real families: transformers' greedy tokens by prefill, chunks at every split, and any batch."""

from __future__ import annotations

import pytest

from helios_jax.models.source import open_source
from tests.golden.tiny import FAMILIES, golden, tiny_checkpoint
from tests.parity.goldens_kit import check_splits_and_batches
from tests.unit.programs_toy import Chunk, Host

SMOLLM2_PROMPT = "Once upon a time, in a small village by the sea,"
SMOLLM2_GREEDY = [665, 436, 253, 9357, 1573, 267, 19341, 3365, 17644, 793, 30, 909, 4161, 281, 253, 11637, 10000]
SMOLLM2_GREEDY += [411, 253, 3953]


def host_of(name: str, **options: int) -> Host:
    source = open_source(name)
    return Host(source.model, source.load_params("float32"), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_goldens_by_prefill_splits_and_batches(family: str) -> None:
    check_splits_and_batches(host_of(tiny_checkpoint(family), slots=3, context=96), golden(family))


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
