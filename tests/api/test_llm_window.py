"""Two frames in flight over compiled programs: every token as with one frame, and every step queued that can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helios_jax import SamplingParams
from helios_jax.aot.core import load_core
from helios_jax.config import EngineConfig
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.engine.request import Request
from helios_jax.engine.setup import assemble
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.testing import FakeClock

GENERATION = (ProgramKind.DECODE, ProgramKind.SPECULATIVE)
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 11, "logprobs": 2},
    {"temperature": 0.0, "stop_token_ids": [17, 33, 60]},
    {"temperature": 1.2, "seed": 3, "min_p": 0.05, "n": 2},
]
Tokens = dict[str, list[tuple[int, list[int], str | None]]]


class Driven:
    """An engine over a real core, stepped by the test. Its clock stands still, so no frame ever overruns."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.outputs: Tokens = {}
        self.ahead: list[int] = []  # frames outstanding at each submission of a decode step

    def deliver(self, batch: list[tuple[Request, RequestOutput | Exception]]) -> None:
        for request, item in batch:
            assert isinstance(item, RequestOutput), item
            told = [(part.index, part.token_ids, part.finish_reason) for part in item.outputs]
            self.outputs[request.request_id] = told

    def run(self, prompts: list[list[int]], *, two: bool, max_tokens: int) -> Tokens:
        assembly = assemble(self.core, EngineConfig(async_scheduling=two), clock=FakeClock())
        engine, submit = assembly.engine, self.core.runner.submit
        self.outputs, self.ahead = {}, []

        def watched(shape: Any, *control: Any) -> Any:
            if shape.kind in GENERATION:
                self.ahead.append(len(engine.window))
            return submit(shape, *control)

        self.core.runner.submit = watched
        try:
            for number, prompt in enumerate(prompts):
                params = SamplingParams(
                    max_tokens=max_tokens - number % 4, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY,
                    **SETTINGS[number % len(SETTINGS)],
                )  # fmt: skip
                request = assembly.intake.request(prompt, params, request_id=f"{number}", sink=self, arrival_ns=0)
                engine.board.submit(request)
            while engine.step():
                pass
        finally:
            self.core.runner.submit = submit
        stats = engine.stats()
        assert stats.pages_used == stats.running == stats.waiting == 0
        assert stats.requests.reconciles()
        assert len(self.outputs) == len(prompts)
        return self.outputs


def prompts_of(streams: int) -> list[list[int]]:
    repeated = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9]
    return [repeated[number % 5 :] + [40 + number] * (number % 3) for number in range(streams)]


@pytest.fixture(scope="module")
def plain(tiny_core_dir: Path) -> Iterator[Driven]:
    with load_core(tiny_core_dir) as core:
        yield Driven(core)


@pytest.fixture(scope="module")
def copying(tiny_copy_core_dir: Path) -> Iterator[Driven]:
    with load_core(tiny_copy_core_dir) as core:
        yield Driven(core)


@pytest.mark.parametrize("streams", [2, 5, 8])
def test_tokens_are_those_of_one_frame(plain: Driven, streams: int) -> None:
    one = plain.run(prompts_of(streams), two=False, max_tokens=40)
    assert set(plain.ahead) == {0}
    two = plain.run(prompts_of(streams), two=True, max_tokens=40)
    assert two == one
    assert sum(plain.ahead) > 0.5 * len(plain.ahead)


def test_one_stream_waits_for_the_host_in_its_first_two_steps_only(plain: Driven) -> None:
    plain.run(prompts_of(1), two=True, max_tokens=40)
    assert plain.ahead == [0, 0] + [1] * 37


def test_rounds_of_copies_give_the_tokens_of_one_frame(copying: Driven) -> None:
    prompts = [prompt * 3 for prompt in prompts_of(6)]
    one = copying.run(prompts, two=False, max_tokens=50)
    two = copying.run(prompts, two=True, max_tokens=50)
    assert two == one
