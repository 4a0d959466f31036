"""Log-probabilities of the device into the dictionaries of `outputs.TokenLogprobs`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from helios_jax.engine.outputs import Logprob, TokenLogprobs
from helios_jax.scheduler.types import Lane


def token_logprobs(
    token: int,
    logprob: float,
    rank: int,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    count: int,
    decode: Callable[[int], str],
) -> TokenLogprobs:
    """The token first, then the `count` most likely ones by rank (it may be one of them)."""
    found = {token: Logprob(logprob, rank, decode(token))}
    for place, (other, value) in enumerate(zip(top_ids[:count].tolist(), top_logprobs[:count].tolist(), strict=True)):
        if other not in found:
            found[other] = Logprob(value, place + 1, decode(other))
    return found


def sampled_logprobs(
    fields: dict[str, np.ndarray], index: tuple[int, ...], token: int, count: int, decode: Callable[[int], str]
) -> TokenLogprobs:
    """Of one sampled token; `index` is (row,), in a round or mixed program (row, number of the token)."""
    return token_logprobs(
        token,
        float(fields["logprob"][index]),
        int(fields["rank"][index]),
        fields["top_ids"][index],
        fields["top_logprobs"][index],
        count,
        decode,
    )


def prompt_logprobs(
    fields: dict[str, np.ndarray], offset: int, lane: Lane, prompt: np.ndarray, count: int, decode: Callable[[int], str]
) -> list[TokenLogprobs]:
    """Of the prompt tokens that follow those of a scored-prefill lane packed at `offset`."""
    scored = []
    for i in range(lane.length):
        position = lane.start + i + 1  # token i predicts the one after it
        if position >= len(prompt):
            break
        scored.append(
            token_logprobs(
                int(prompt[position]),
                float(fields["target_logprob"][offset + i]),
                int(fields["target_rank"][offset + i]),
                fields["target_top_ids"][offset + i],
                fields["target_top_logprobs"][offset + i],
                count,
                decode,
            )
        )
    return scored
