"""The scheduler as clients see it: complete answers over HTTP whatever arrives beside what.

Runs against any idle service with four request slots,

    FLARE_SCHEDULER_TEST_URL=http://127.0.0.1:18131 python -m pytest -q -s -m slow tests/server/test_scheduler.py

whose largest prefill is FLARE_SCHEDULER_TEST_PREFILL prompt tokens (4096), and which answers greedily
the same in every batch if FLARE_SCHEDULER_TEST_EXACT=1. Without a URL it starts SmolLM2 itself, with a smaller
prefill, in ordinary, fixed-width and adaptive speculative mode.

It prints token counts, gaps between arrivals at the client, and what the server's program counters grew by.
The gaps are those of events at a client: neither device times nor times a token.

Source: specification, "Verification".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.service import Service, started

pytestmark = pytest.mark.slow

GIVEN = os.environ.get("FLARE_SCHEDULER_TEST_URL")
OWN_PREFILL = 128
MODES = {
    "ordinary": ("--spec-method", "none"),
    "fixed": ("--spec-width", "fixed"),
    "adaptive": ("--spec-width", "adaptive"),
}
SHORT, LONG, OUTPUT = 12, 2.5, 24  # prompt tokens; prompt in prefills; output tokens
START_S = 0.5  # enough for short prompts to be decoding


@pytest.fixture(scope="module", params=["given"] if GIVEN else list(MODES))
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    if GIVEN:
        capacity = int(os.environ.get("FLARE_SCHEDULER_TEST_PREFILL", "4096"))
        yield Service(GIVEN, capacity, os.environ.get("FLARE_SCHEDULER_TEST_EXACT") == "1")
        return
    core: Path = request.getfixturevalue("smollm2_rounds_core_dir")
    with started(core, *MODES[request.param]) as url:
        yield Service(url, OWN_PREFILL, is_exact=True)


@pytest.fixture(autouse=True)
def idle(service: Service) -> Iterator[None]:
    """Every case begins and ends with an idle service: slots, pages and frames are back."""
    service.wait_until_idle()
    print()
    with service.deltas():
        yield
    service.wait_until_idle()
    assert service.counters().get("helios_compiles_after_ready", 0) == 0


def run(service: Service, jobs: dict[str, tuple[str, int, float]]) -> None:
    answers = service.together(jobs)
    service.check(answers, jobs)


def long_prompt(service: Service, topic: str) -> str:
    return service.prompt(topic, int(LONG * service.prefill_capacity))


def test_concurrent_long_prompts(service: Service) -> None:
    run(service, {f"long {i}": (long_prompt(service, f"tale {i}"), OUTPUT, 0.0) for i in range(4)})


@pytest.mark.parametrize("streams", [2, 4])
def test_decode_streams(service: Service, streams: int) -> None:
    run(service, {f"stream {i}": (service.prompt(f"song {i}", SHORT), 2 * OUTPUT, 0.0) for i in range(streams)})


def test_a_long_prompt_arrives_during_decode(service: Service) -> None:
    jobs = {f"stream {i}": (service.prompt(f"song {i}", SHORT), 2 * OUTPUT, 0.0) for i in range(2)}
    run(service, jobs | {"long": (long_prompt(service, "tale 0"), OUTPUT, START_S)})


def test_short_against_long(service: Service) -> None:
    jobs = {f"long {i}": (long_prompt(service, f"tale {i}"), OUTPUT, 0.0) for i in range(2)}
    run(service, jobs | {f"short {i}": (service.prompt(f"song {i}", SHORT), OUTPUT, 0.0) for i in range(2)})


def test_cancellation_then_reuse_of_the_slot(service: Service) -> None:
    """A client that closes its connection frees its slot for the next, of whom four need all there are."""
    service.leave_after(service.prompt("parting", SHORT), events=3)
    run(service, {f"stream {i}": (service.prompt(f"song {i}", SHORT), 2 * OUTPUT, 0.0) for i in range(4)})


def test_cancellation_beside_streams(service: Service) -> None:
    """Clients leave with the prompt half read and in the middle of an answer; streams beside them notice nothing."""
    jobs = {f"stream {i}": (service.prompt(f"song {i}", SHORT), 2 * OUTPUT, 0.0) for i in range(3)}
    jobs["late"] = (service.prompt("song 3", SHORT), 2 * OUTPUT, 3 * START_S)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(service.together, jobs)
        service.leave_after(long_prompt(service, "tale 1"), seconds=START_S / 4)
        service.leave_after(service.prompt("parting", SHORT), events=2)
        service.check(answers.result(), jobs)
