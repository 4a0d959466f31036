"""What programs give for a golden file: logits and greedy tokens of transformers, however the prompt is cut."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.golden.tiny import GREEDY_LEN
from tests.unit.programs_toy import Chunk, Host

TOLERANCE = 1e-4


def top_logprobs(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities of `ids` by float64 arithmetic."""
    shifted = logits.astype(np.float64) - logits.max()
    return (shifted - np.log(np.exp(shifted).sum()))[ids]


def check_splits_and_batches(host: Host, stored: Mapping[str, np.ndarray]) -> None:
    """Every split of the prompt in two; then slots that are s greedy tokens further on decode together to the end.

    Args:
        host: Three slots.
        stored: `prompt`, `greedy` and `logits` of a golden file.
    """
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
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
