"""What the service tests share: one service under test, streams read with their arrival times, counter deltas.

The service is given (`FLARE_SCHEDULER_TEST_URL`: any idle server of the OpenAI API) or started here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

PATIENCE_S = 600.0
LEFT_TOKENS = 240  # of answers whose reader leaves: more than it waits for
SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)$")
SHOWN = ("flare_scheduler_executions", "flare_scheduler_programs_by_kind", "flare_speculative_")


@dataclasses.dataclass
class Answer:
    """One finished stream.

    Attributes:
        arrivals_s: When each event with text came, seconds since the request was sent.
        prompt_tokens, output_tokens: The service's usage.
    """

    text: str = ""
    finish_reason: str | None = None
    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    def line(self, name: str) -> str:
        first = self.arrivals_s[0] if self.arrivals_s else float("nan")
        return (
            f"  {name}: {self.prompt_tokens} + {self.output_tokens} tokens, first after {1e3 * first:.0f} ms,"
            f" largest gap {1e3 * max(self.gaps_s, default=0.0):.0f} ms"
        )


class Service:
    """An idle server with four request slots.

    Args:
        prefill_capacity: Prompt tokens of its largest prefill; long prompts need several.
        is_exact: Greedy answers do not depend on the batch (float32): they are compared with solitary ones.
    """

    def __init__(self, url: str, prefill_capacity: int, is_exact: bool) -> None:
        self.prefill_capacity, self.is_exact = prefill_capacity, is_exact
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))
        self.model = self.http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._words: float | None = None
        self._solitary: dict[tuple[str, int], Answer] = {}

    def prompt(self, topic: str, tokens: int) -> str:
        """A text of about `tokens` tokens that names its topic; the service's usage says how many they are."""
        if self._words is None:
            self._words = 400 / self.complete(words("measure", 400), 1).prompt_tokens
        return words(topic, int(tokens * self._words))

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def complete(self, prompt: str, max_tokens: int) -> Answer:
        """A whole streamed completion."""
        answer, begin = Answer(), time.monotonic()
        for event in self.events(prompt, max_tokens):
            for choice in event["choices"]:
                if choice["text"]:
                    answer.arrivals_s.append(time.monotonic() - begin)
                    answer.text += choice["text"]
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            if usage := event.get("usage"):
                answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return answer

    def events(self, prompt: str, max_tokens: int) -> Iterator[dict[str, Any]]:
        """The stream's events; leaving the loop early closes the connection, which cancels the request."""
        with self.http.stream("POST", "/v1/completions", json=self.body(prompt, max_tokens)) as response:
            if response.status_code != httpx.codes.OK:
                raise AssertionError(f"{response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    def leave_after(self, prompt: str, *, events: int = 0, seconds: float = 0.0) -> None:
        """Send a request and close its socket: after some events, or after a time whatever has come by then."""
        if events:
            stream = self.events(prompt, LEFT_TOKENS)
            assert len(list(itertools.islice(stream, events))) == events
            stream.close()  # type: ignore[attr-defined]
            return
        with contextlib.suppress(httpx.ReadTimeout):
            self.http.post("/v1/completions", json=self.body(prompt, LEFT_TOKENS), timeout=seconds)

    def solitary(self, prompt: str, max_tokens: int) -> Answer:
        """The same completion alone, from before; asked for once."""
        key = (prompt, max_tokens)
        if key not in self._solitary:
            self._solitary[key] = self.complete(*key)
        return self._solitary[key]

    def together(self, jobs: dict[str, tuple[str, int, float]]) -> dict[str, Answer]:
        """Completions side by side: prompt, tokens and seconds to wait before it is sent, by name."""

        def late(prompt: str, max_tokens: int, delay_s: float) -> Answer:
            time.sleep(delay_s)
            return self.complete(prompt, max_tokens)

        with ThreadPoolExecutor(len(jobs)) as pool:
            running = {name: pool.submit(late, *job) for name, job in jobs.items()}
            return {name: future.result() for name, future in running.items()}

    def check(self, answers: dict[str, Answer], jobs: dict[str, tuple[str, int, float]]) -> None:
        """Complete answers: every token asked for, the reason, and solitary text where that can be said."""
        for name, (prompt, max_tokens, _) in jobs.items():
            answer = answers[name]
            print(answer.line(name))
            assert answer.finish_reason == "length", (name, answer)
            assert answer.output_tokens == max_tokens, (name, answer)
            assert answer.arrivals_s, name
            alone = self.solitary(prompt, max_tokens)
            assert answer.prompt_tokens == alone.prompt_tokens, name
            if self.is_exact:
                assert answer.text == alone.text, name

    @contextlib.contextmanager
    def deltas(self) -> Iterator[None]:
        """Print by how much the server's own counters of programs grew; nothing if it has none."""
        before = self.counters()
        yield
        for name, value in sorted(self.counters().items()):
            if name.startswith(SHOWN) and value != before.get(name, 0.0) and "_created" not in name:
                print(f"  {name} +{value - before.get(name, 0.0):g}")

    def counters(self) -> dict[str, float]:
        """Every sample of /metrics."""
        reply = self.http.get("/metrics")
        lines = reply.text.splitlines() if reply.status_code == httpx.codes.OK else []
        found = (SAMPLE.match(line) for line in lines)
        return {(m[1] + (m[2] or "")): float(m[3]) for m in found if m}

    def is_idle(self) -> bool:
        """Whether slots and pages are back, as far as the server says."""
        counters = self.counters()
        names = ("helios_engine_sequences_running", "helios_pages_used", "flare_scheduler_frames_in_flight")
        return all(counters.get(name, 0.0) == 0 for name in names)

    def wait_until_idle(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.is_idle():
            assert time.monotonic() < end, self.counters()
            time.sleep(0.02)


def words(topic: str, count: int) -> str:
    """A list of `count` words about a topic."""
    stock = ("river", "stone", "garden", "window", "market", "silver", "morning", "letter", "bridge", "winter")
    return f"The {topic}: " + " ".join(stock[i * (1 + i // 7) % len(stock)] for i in range(count))


@contextlib.contextmanager
def started(core: Path, *flags: str) -> Iterator[str]:
    """The URL of a `helios-jax serve` of its own process, ready; stopped by SIGTERM, which must end it well."""
    command = [sys.executable, "-m", "helios_jax", "serve", str(core), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            url = _url_of(process)
            _wait_ready(url, process)
            yield url
        finally:
            process.terminate()
            output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output[-4000:]


def _url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(r"http://[\w.]+:\d+", line):
            return found[0]
    raise AssertionError("the server ended: " + "".join(seen)[-4000:])


def _wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while httpx.get(url + "/ready").status_code != httpx.codes.OK:
        assert process.poll() is None, "the server ended while it was loading"
        assert time.monotonic() < end, "the server did not become ready"
        time.sleep(0.1)
