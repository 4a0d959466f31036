"""The whole engine over compiled mixed programs: every request gets the tokens of a core without them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helios_jax.aot import CoreOptions, prepare
from helios_jax.aot.core import load_core
from helios_jax.aot.prepared import PreparedCore
from helios_jax.scheduler.catalog import ProgramKind, ProposalSource
from tests.golden.tiny import golden, tiny_checkpoint
from tests.parity.steered_kit import Session, cheap, drawn, same_logprobs

GREEDY = golden("llama3")["greedy"].tolist()
PROMPT = golden("llama3")["prompt"].tolist()
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.9, "seed": 11, "logprobs": 1, "presence_penalty": 0.4},
    {"temperature": 0.0, "stop_token_ids": [17, 33, 60, 90]},
]
pytestmark = pytest.mark.slow  # 22 compiled programs


@pytest.fixture(scope="module")
def root(cache_dir: Path) -> Path:
    """A core of the tiny Llama with copies and mixed programs: 4 slots, context 192, chunk 64; 22 programs."""
    out = cache_dir / "tiny-llama3-mixed"
    options = CoreOptions(
        max_slots=4,
        max_context=192,
        prefill_chunk=64,
        spec_method="copy",
        num_draft_tokens=2,
        speculative_token_capacity=8,
        mixed_prefill=True,
        state_rows=0,
    )
    prepare(tiny_checkpoint("llama3"), options, out).close()
    return out


@pytest.fixture(scope="module")
def joint(root: Path) -> Iterator[PreparedCore]:
    """Plain decoding and mixed programs."""
    with load_core(root, options={"spec_method": "none"}) as core:
        yield core


@pytest.fixture(scope="module")
def apart(root: Path) -> Iterator[PreparedCore]:
    """The same core, loaded without its mixed programs."""
    with load_core(root, options={"spec_method": "none", "mixed_prefill": False}) as core:
        assert not core.supports(ProgramKind.MIXED)
        yield core


def submit_all(session: Session, lengths: list[int], most: int = 12) -> None:
    """Two long streams, and prompts of these lengths; half of them repeat themselves, so that copies fit."""
    rng = random.Random(5)
    for number in range(2):
        session.submit([3 + number, 9, 17, 33, 9, 17, 33, 9], f"stream{number}", max_tokens=150, **SETTINGS[number])
    for number, length in enumerate(lengths):
        prompt = [rng.randrange(3, 128) for _ in range(length)]
        if number % 2:
            prompt = (prompt[:5] * length)[:length]
        settings = SETTINGS[number % len(SETTINGS)]
        session.submit(prompt, f"{number}", max_tokens=rng.randrange(1, most), **settings)


def both(joint: PreparedCore, apart: PreparedCore, lengths: list[int], price: Any) -> Session:
    """The same requests with and without mixed programs; the session with them."""
    sessions = [Session(joint, price), Session(apart, price)]
    for session in sessions:
        submit_all(session, lengths)
        session.run()
    with_mixed, without = sessions
    assert with_mixed.tokens() == without.tokens()
    assert same_logprobs(with_mixed.outputs, without.outputs) > 50
    assert without.core.kinds()["mixed"] == 0
    return with_mixed


def test_every_prompt_length_through_mixed_programs(joint: PreparedCore, apart: PreparedCore) -> None:
    """Mixed programs are the cheap ones: prompts of 1 to 64 tokens, and longer ones in chunks, all go through them."""
    session = both(joint, apart, [*range(1, 65), 65, 100, 128, 150], cheap("mixed"))
    kinds = session.core.kinds()
    assert kinds["mixed"] > 0.8 * (sum(kinds.values()) - kinds["initialize"])


def test_any_order_of_programs(joint: PreparedCore, apart: PreparedCore) -> None:
    session = both(joint, apart, [5, 64, 17, 80, 33, 1, 140, 63, 16, 90, 2, 70] * 2, drawn(3))
    assert {shape.batch_capacity for shape in session.core.ran if shape.kind is ProgramKind.MIXED} == {2, 4}
    assert min(session.core.kinds()[kind] for kind in ("mixed", "prefill", "decode")) > 3


def test_greedy_tokens_are_those_of_transformers(joint: PreparedCore) -> None:
    session = Session(joint, cheap("mixed"))
    for number in range(5):
        session.submit(PROMPT, f"{number}", temperature=0.0, max_tokens=20 + number)
    session.run()
    assert session.core.kinds()["mixed"] > 10
    for number in range(5):
        assert session.tokens()[f"{number}"][0] == GREEDY[: 20 + number]


def test_cancellation_in_the_middle_changes_nobody_else(joint: PreparedCore, apart: PreparedCore) -> None:
    """A third is aborted while queued, prefilling, or decoding beside a prompt; whoever stays has its own tokens."""
    lengths = [40, 150, 8, 100, 64, 20, 130, 5, 77, 31] * 3
    alone = Session(apart, cheap("decode", "prefill"))
    submit_all(alone, lengths, most=30)
    alone.run()
    for seed in range(3):
        rng = random.Random(seed)
        victims = {f"{number}": rng.randrange(0, 60) for number in rng.sample(range(len(lengths)), 10)}

        def abort(session: Session, step: int, victims: dict[str, int] = victims) -> None:
            for name, when in victims.items():
                if when == step:
                    session.assembly.engine.board.abort(name)

        session = Session(joint, cheap("mixed") if seed else drawn(9), step=abort)
        submit_all(session, lengths, most=30)
        session.run()
        assert session.core.kinds()["mixed"] > 10
        aborted = [name for name, (_, reason) in session.tokens().items() if reason == "abort"]
        assert len(aborted) > 3
        for name, (tokens, reason) in session.tokens().items():
            expected, expected_reason = alone.tokens()[name]
            assert tokens == expected[: len(tokens)]
            assert reason in ("abort", expected_reason)
            assert reason == "abort" or tokens == expected


def test_rounds_of_copies_beside_prompts(root: Path, apart: PreparedCore) -> None:
    """Copies decide nothing, so tokens are those of plain decoding without mixed programs, sampled or not."""
    lengths = [*range(1, 65, 3), 65, 100, 128, 150]
    plain = Session(apart, cheap("decode", "prefill"))
    submit_all(plain, lengths)
    plain.run()
    with load_core(root) as core:
        for price in (cheap("mixed"), drawn(1), drawn(2)):
            session = Session(core, price)
            submit_all(session, lengths)
            session.run()
            assert session.tokens() == plain.tokens()
            assert same_logprobs(session.outputs, plain.outputs) > 30
            wide = {s for s in session.core.ran if s.kind is ProgramKind.MIXED and s.proposal_depth}
            assert len(wide) > 1
            assert any(s.kind is ProgramKind.MIXED and not s.proposal_depth for s in session.core.ran)
            rounds = session.assembly.engine.stats().rounds
            assert sum(counts.accepted for counts in rounds.values()) > 3
            assert all(counts.accepted <= counts.offered <= counts.proposed for counts in rounds.values())
            assert {source for source, _ in rounds} == {str(ProposalSource.COPY)}
