"""The real engine and compiled programs of a tiny model, with a page pool that is too small for its requests.

Every output, preempted or not, is that of the same request alone in the whole pool.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from helios_jax.aot.core import load_core
from helios_jax.config import EngineConfig
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.engine.setup import assemble
from helios_jax.scheduler import check_invariants
from helios_jax.scheduler.reservation import MAX_PREEMPTIONS
from helios_jax.testing import EngineRig

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
    {"temperature": 0.9, "logit_bias": {5: 2.0, 9: -3.0}, "stop": ["qz"]},
]


class SmallPool:
    """A core of which the scheduler may use only the first pages."""

    def __init__(self, core: Any, pages: int | None) -> None:
        self._core = core
        self.limits = core.limits if pages is None else dataclasses.replace(core.limits, pages=pages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class RealRig(EngineRig):
    """`EngineRig` around a prepared core."""

    def __init__(self, directory: Path, pages: int | None) -> None:
        self.core = SmallPool(load_core(directory), pages)  # type: ignore[assignment]
        self.assembly = assemble(self.core, EngineConfig(spec_width="adaptive"))
        self.tokenizer, self.engine = self.assembly.tokenizer, self.assembly.engine
        self.received, self._changed, self._count = {}, threading.Condition(), 0
        self.engine.start()

    def close(self) -> None:
        self.engine.close()


def requests(seed: int, number: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {"prompt": [rng.randrange(3, 128) for _ in range(rng.randrange(1, 50))], "max_tokens": rng.randrange(1, 70),
         "seed": index, "ignore_eos": True, **KINDS[index % len(KINDS)]}
        for index in range(number)
    ]  # fmt: skip


def result(rig: RealRig, name: str) -> tuple[list[int], str, str | None, list[float], int]:
    """Tokens, text, finish reason, log-probabilities (prompt's and output's) and the preemptions of a request."""
    outputs = [item for item in rig.received[name] if isinstance(item, RequestOutput)]
    parts = [part for output in outputs for part in output.outputs]
    tokens = [token for part in parts for token in part.token_ids]
    scored = [entry for output in outputs for entry in output.prompt_logprobs or ()][1:]
    judged = list(zip(outputs[0].prompt_token_ids[1:], scored, strict=False))
    judged += zip(tokens, [entry for part in parts for entry in part.logprobs or ()], strict=False)
    numbers = [entry[token].logprob for token, entry in judged if entry is not None]
    return tokens, rig.text(name), rig.reason(name), numbers, outputs[-1].metrics.preemptions


@pytest.mark.long
@pytest.mark.parametrize(("core", "pages", "number"), [("tiny_core_dir", 17, 20), ("tiny_copy_core_dir", 9, 12)])
def test_outputs_equal_those_of_requests_alone(
    core: str, pages: int, number: int, request: pytest.FixtureRequest
) -> None:
    """Greedy and seeded, penalties, bias, log-probabilities of prompt and output, stop strings, streamed."""
    directory, wanted = request.getfixturevalue(core), requests(3, number)
    with RealRig(directory, pages) as rig:
        names = [rig.submit(kind=OutputKind.DELTA, **settings) for settings in wanted]
        rig.finish(*names)
        crowded = [result(rig, name) for name in names]
        rig.settle()
        assert rig.ledger_problems() == []
        check_invariants(rig.engine.scheduler.state)
        counters = rig.engine.scheduler.state.counters
    with RealRig(directory, None) as rig:
        for settings, (tokens, text, reason, numbers, preemptions) in zip(wanted, crowded, strict=True):
            name = rig.submit(kind=OutputKind.DELTA, **settings)
            rig.finish(name)
            alone = result(rig, name)
            assert (tokens, text, reason) == alone[:3]
            assert numbers == pytest.approx(alone[3], abs=1e-3)
            assert preemptions <= MAX_PREEMPTIONS
            assert alone[4] == 0
    assert counters.preempted == sum(entry[4] for entry in crowded) > 0
