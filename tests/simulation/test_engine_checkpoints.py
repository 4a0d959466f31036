"""Prefix reuse over the fake device: what is restored, what it says, and what an answer must be all the same."""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.engine.outputs import RequestOutput
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.testing import EngineRig, expected_tokens, hashed_text

OPTIONS: dict[str, Any] = {"max_slots": 4, "max_context": 256, "page_size": 16, "prefill_chunk": 64, "state_rows": 8}


@pytest.fixture
def rig() -> Any:
    with EngineRig(**OPTIONS) as rig:
        yield rig


def ask(rig: EngineRig, prompt: list[int], count: int, ends: tuple[int, ...] = (), **params: Any) -> RequestOutput:
    """One answer, which is the slow reference's; then nothing is out of place."""
    name = rig.submit(prompt, message_ends=ends, max_tokens=count, **params)
    (output,) = rig.finish(name)
    assert isinstance(output, RequestOutput), output
    assert tokens_of(rig, name) == expected_tokens(hashed_text, prompt, count)
    rig.settle()
    check_invariants(rig.engine.scheduler.state)
    assert rig.ledger_problems() == []
    return output


def tokens_of(rig: EngineRig, name: str) -> list[int]:
    outputs = [item for item in rig.received[name] if isinstance(item, RequestOutput)]
    return [token for output in outputs for part in output.outputs for token in part.token_ids]


def text(number: int, length: int) -> list[int]:
    """A prompt of printable bytes that differs from others from its first token on."""
    return [97 + (number + i * (number + 3)) % 26 for i in range(length)]


def test_the_next_turn_computes_only_what_is_new(rig: EngineRig) -> None:
    first = text(1, 50)
    cold = ask(rig, first, 8, (40,))
    assert cold.num_cached_tokens == 0
    said = expected_tokens(hashed_text, first, 8)
    warm = ask(rig, [*first, *said, *text(2, 20)], 8, (40, 58, 78))
    assert warm.num_cached_tokens is not None
    assert warm.num_cached_tokens >= 40
    stats = rig.engine.stats().checkpoints
    assert (stats.hits, stats.misses, stats.queried_tokens) == (1, 1, 50 + 78)
    assert stats.hit_tokens == warm.num_cached_tokens
    assert stats.restores == 1


def test_without_prefix_caching_nothing_is_kept() -> None:
    with EngineRig(**OPTIONS, enable_prefix_caching=False) as rig:
        for _ in range(2):
            assert ask(rig, text(1, 50), 4, (40,)).num_cached_tokens is None
        assert rig.engine.stats().checkpoints.snapshots == 0
