"""Random requests, cancelled at random moments: every page and slot comes back, survivors are right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helios_jax.testing import EngineRig, FakeFrame, expected_tokens, hashed_text

NUM_REQUESTS = 1000
CANCELLED = 300


def test_ledger_balances_after_1000_requests_with_30_percent_cancelled() -> None:
    rng = random.Random(20261130)
    countdown: dict[str, int] = {}
    rig: EngineRig

    def cancel_some(frame: FakeFrame) -> None:
        """In the engine thread, between dispatch and completion: victims whose time has come."""
        for name in [name for name, left in countdown.items() if left <= 0]:
            del countdown[name]
            rig.abort(name)
        for name in rng.sample(sorted(countdown), min(3, len(countdown))):
            countdown[name] -= 1

    rig = EngineRig(
        start=False, max_slots=8, num_pages=40, max_context=128, max_queue=NUM_REQUESTS, on_submit=cancel_some
    )
    prompts: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    victims = set(rng.sample(range(NUM_REQUESTS), CANCELLED))
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 5, 15, 16, 17, 40]))]
        # a victim would run to the end of its context, so it never ends before it is cancelled
        lengths[f"r{i}"] = 128 - len(prompt) if i in victims else rng.randrange(1, 8)
        rig.submit(prompt, f"r{i}", max_tokens=lengths[f"r{i}"])
        prompts[f"r{i}"] = prompt
        if i in victims:
            countdown[f"r{i}"] = rng.randrange(0, 4)
    with rig:
        rig.engine.start()
        rig.finish(*prompts)
        assert rig.ledger_problems() == []
    totals = rig.engine.board.snapshot()
    assert totals.reconciles()
    assert totals.active == 0
    assert totals.cancelled == CANCELLED
    assert totals.finished == {"stop": 0, "length": NUM_REQUESTS - CANCELLED}
    for name, prompt in prompts.items():
        if rig.reason(name) == "length":
            expected = bytes(expected_tokens(hashed_text, prompt, lengths[name])).decode()
            assert rig.text(name) == expected


def test_cancelled_text_is_a_prefix_of_the_right_text() -> None:
    cut: list[str] = []
    rig: EngineRig

    def cancel(frame: FakeFrame) -> None:
        if frame.index == 9:
            rig.abort(cut[0])

    rig = EngineRig(start=False, on_submit=cancel)
    cut.append(rig.submit("abc", max_tokens=100))
    with rig:
        rig.engine.start()
        rig.finish(cut[0])
    text = rig.text(cut[0])
    assert rig.reason(cut[0]) == "abort"
    assert 0 < len(text) < 100
    assert bytes(expected_tokens(hashed_text, list(b"abc"), len(text))).decode() == text


@pytest.mark.parametrize("page_size", [16, 64])
def test_prompts_around_page_boundaries_twice(page_size: int) -> None:
    """Lengths page - 1, page, page + 1 and 2 pages; the second run equals the first (cases U3, S3)."""
    with EngineRig(max_slots=1, max_context=4 * page_size, page_size=page_size, prefill_chunk=page_size) as rig:
        for length in (1, page_size - 1, page_size, page_size + 1, 2 * page_size):
            prompt = [int(b) for b in np.random.default_rng(length).integers(97, 122, length)]
            expected = bytes(expected_tokens(hashed_text, prompt, page_size + 1)).decode()
            for _ in range(2):
                name = rig.submit(prompt, max_tokens=page_size + 1)
                rig.finish(name)
                assert rig.text(name) == expected
        assert rig.ledger_problems() == []


def test_prime_limits_filled_exactly() -> None:
    """Slots, chunk, context and pages are primes and all full at once (case S1)."""
    options = {"max_slots": 7, "max_context": 61, "num_pages": 7 * 4, "prefill_chunk": 53}
    with EngineRig(max_queue=0, **options) as rig:
        names = [rig.submit([97 + i] * 53, max_tokens=8) for i in range(7)]
        rig.finish(*names)
        for i, name in enumerate(names):
            assert rig.text(name) == bytes(expected_tokens(hashed_text, [97 + i] * 53, 8)).decode()
        assert rig.ledger_problems() == []
