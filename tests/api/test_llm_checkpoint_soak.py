"""Conversations on a compiled hybrid model, six hundred requests of them, with checkpoints on and clients that leave.

Whoever stayed got what the same prompt gives an engine that keeps nothing. At every pause the ledgers are those of
an idle engine: no slot, no page but those of checkpoints, rows free or published, nothing referred to twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from helios_jax import AsyncLLM, EngineConfig, OutputKind, SamplingParams
from helios_jax.scheduler import check_invariants
from helios_jax.scheduler.state_rows import RowUse

pytestmark = pytest.mark.slow
NUM_REQUESTS, LEAVING_SHARE, SEED = 600, 0.2, 20261130
PHASES = (1, 2, 5)  # clients at a time: fewer conversations than state rows, and more
PATIENCE_S = 30.0
ROOM = 200  # tokens of a conversation before another begins; the context is 256
CONFIG = EngineConfig(checkpoint_extra_work_fraction=2.0, max_queue=64)
COLD = EngineConfig(enable_prefix_caching=False)


@dataclasses.dataclass
class Talk:
    """A conversation: its tokens, and where its messages end."""

    tokens: list[int]
    ends: list[int]

    def add(self, tokens: list[int]) -> None:
        self.tokens = [*self.tokens, *tokens]
        self.ends = [*self.ends, len(self.tokens)]


@dataclasses.dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    tokens: list[int]
    cached: int


class Client:
    """One conversation after the other; system prompts are few, so conversations share their beginnings."""

    def __init__(self, number: int) -> None:
        self._rng = random.Random(SEED + number)
        self.answers: list[Answer] = []
        self._begin()

    def _words(self, low: int, high: int) -> list[int]:
        return [self._rng.randrange(3, 128) for _ in range(self._rng.randint(low, high))]

    def _begin(self) -> None:
        self._talk = Talk([], [])
        system = random.Random(self._rng.randrange(3))
        self._talk.add([system.randrange(3, 128) for _ in range(system.randint(10, 40))])

    async def ask(self, llm: AsyncLLM) -> None:
        """One turn; its client may leave in the middle, and go on from what it heard."""
        if len(self._talk.tokens) > ROOM or self._rng.random() < 0.1:
            self._begin()
        if self._rng.random() < 0.1:  # an edited history
            self._talk = Talk(self._talk.tokens[: self._talk.ends[0]], self._talk.ends[:1])
        self._talk.add(self._words(1, 20))
        prompt, count = tuple(self._talk.tokens), self._rng.randint(1, 12)
        leaves = self._rng.random() < LEAVING_SHARE
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=OutputKind.DELTA)
        heard, cached = list[int](), 0
        stream = llm.generate(prompt, params, message_ends=self._talk.ends)
        try:
            async for output in stream:
                heard += output.outputs[0].token_ids
                cached = output.num_cached_tokens or 0
                if leaves and len(heard) >= int(0.9 * count):
                    break
        finally:
            await stream.aclose()
        self.answers.append(Answer(prompt, heard, cached))
        self._talk.add(heard)


async def idle(llm: AsyncLLM) -> None:
    """Until every request has ended and the copies behind the last ones have, too."""
    assert await asyncio.to_thread(llm._ready.engine.board.wait_until_empty, PATIENCE_S)
    for _ in range(int(PATIENCE_S / 0.01)):
        if llm.stats().scheduler["frames_in_flight"] == 0 and llm.stats().pages_used == 0:
            return
        await asyncio.sleep(0.01)


def check_ledgers(llm: AsyncLLM) -> None:
    stats, state = llm.stats(), llm._ready.engine.scheduler.state
    check_invariants(state)
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.requests.reconciles()
    assert stats.compiles_after_ready == 0
    uses = [RowUse(use) for use in state.retention.rows.use.tolist()]
    assert {*uses} <= {RowUse.FREE, RowUse.PUBLISHED}
    assert uses.count(RowUse.PUBLISHED) == stats.checkpoints.published == stats.checkpoints.rows_used


async def played(core: Path) -> tuple[list[Client], Any]:
    clients = [Client(number) for number in range(max(PHASES))]

    async def turns(client: Client, llm: AsyncLLM, count: int) -> None:
        for _ in range(count):
            await client.ask(llm)

    async with AsyncLLM(core=core, config=CONFIG) as llm:
        for several in PHASES:
            count = NUM_REQUESTS // len(PHASES) // several
            await asyncio.gather(*(turns(client, llm, count) for client in clients[:several]))
            await idle(llm)
            check_ledgers(llm)
        return clients, llm.stats()


async def alone(core: Path, answers: list[Answer]) -> list[list[int]]:
    """What an engine that keeps nothing says to the same prompts, one after the other."""
    async with AsyncLLM(core=core, config=COLD) as llm:
        said = []
        for answer in answers:
            params = SamplingParams(temperature=0, max_tokens=max(1, len(answer.tokens)), ignore_eos=True)
            async for output in llm.generate(list(answer.prompt), params):
                last = output
            said.append(last.outputs[0].token_ids[: len(answer.tokens)])
        return said


def test_six_hundred_requests_on_a_hybrid(tiny_hybrid_core_dir: Path) -> None:
    clients, stats = asyncio.run(played(tiny_hybrid_core_dir))
    answers = [answer for client in clients for answer in client.answers]
    assert len(answers) == stats.requests.arrived == NUM_REQUESTS
    assert stats.requests.cancelled > 20  # of about 120 who leave; some had heard all when their going was noticed
    assert asyncio.run(alone(tiny_hybrid_core_dir, answers)) == [answer.tokens for answer in answers]
    assert sum(answer.cached > 0 for answer in answers) > NUM_REQUESTS / 10
    assert stats.checkpoints.evictions > 10
