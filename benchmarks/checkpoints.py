"""Time to the first token of the turns of a chat, with and without checkpoints, and what copies of a state cost.

    python -m benchmarks.checkpoints [--model smollm2 | --tiny FAMILY | --core DIR] [--turns 10] [--words 60]

Every turn is asked twice in one run, side by side, because absolute times of a shared machine do not travel:

- cached: as the next turn of its conversation, whose earlier turns the engine has seen;
- cold: with another first word, so that nothing of it was ever seen. Prompts have the same length in tokens.

The time is that of the whole way: template, tokenizer, queue, programs, text. A snapshot and a restore are timed by
the device, from the frame trace; the bound is one read and one write of what they move at the read bandwidth of
this machine, measured in the same run.

`--model` also takes a directory; tests/golden/tiny.py writes a hybrid one of 40 million random weights whose
tokens are characters: `--tiny qwen3_5_long --words 16`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.bandwidth import read_bandwidth
from helios_jax import LLM, SamplingParams
from helios_jax.aot.device_state import abstract_state
from helios_jax.aot.memory import tree_bytes
from helios_jax.config import EngineConfig

WORDS = ("water", "stone", "light", "river", "house", "green", "small", "paper", "field", "table", "music", "winter",
         "sugar", "north", "cloud", "horse")  # fmt: skip
MARKS = ("alpha", "bravo", "delta", "hotel", "india", "kilo", "lima", "mike", "oscar", "papa", "romeo", "tango")
ANSWER_TOKENS = 16


class Talk:
    """A conversation; its first words are whatever mark it is asked with."""

    def __init__(self, rng: random.Random, words: int) -> None:
        self._rng, self._words = rng, words
        self._system = self._text()
        self._turns: list[dict[str, str]] = []

    def _text(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._words))

    def ask(self) -> None:
        self._turns.append({"role": "user", "content": self._text()})

    def take(self, answer: str) -> None:
        self._turns.append({"role": "assistant", "content": answer})

    def marked(self, mark: str) -> list[dict[str, str]]:
        """The messages so far, marked."""
        return [{"role": "system", "content": f"{mark} {self._system}"}, *self._turns]


def first_token(llm: LLM, messages: list[dict[str, str]], count: int) -> tuple[float, str, int, int]:
    """(seconds to the first output, the answer, prompt tokens, of these reused)."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    begin = time.perf_counter()
    seconds, answer, prompt, cached = 0.0, "", 0, 0
    for output in llm.stream(llm.chat_prompt(messages), params):
        seconds = seconds or time.perf_counter() - begin
        answer += output.outputs[0].text
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
    return seconds, answer, prompt, cached


def chat(llm: LLM, turns: int, words: int, seed: int) -> list[dict[str, float]]:
    """One conversation; a row a turn: prompt tokens, reused ones, seconds cached and cold."""
    rng = random.Random(seed)
    talk, rows = Talk(rng, words), []
    for turn in range(1, turns + 1):
        talk.ask()
        cold, _, _, seen = first_token(llm, talk.marked(f"{seed} {turn} {rng.choice(MARKS)}"), 1)
        cached, answer, prompt, reused = first_token(llm, talk.marked(f"{seed} 0 {MARKS[0]}"), ANSWER_TOKENS)
        talk.take(answer)
        rows.append({"prompt": prompt, "reused": reused, "cached": cached, "cold": cold, "cold_reused": seen})
    return rows


def state_bytes(core: Any) -> int:
    """What one state row holds."""
    (saved,) = abstract_state(core.model, core.dims, core.options.dtype, core.draft).saved
    return tree_bytes(saved) // (core.dims.state_rows + 1)


def copies(trace: Path, start: int, moved: int, bandwidth: float) -> list[str]:
    """A line a kind of copy: device time of a state, beside reading and writing its bytes once."""
    frames = [json.loads(line) for line in trace.read_text().splitlines()[start:]]
    lines = []
    for kind in ("snapshot", "restore"):
        times = [max(f["device_ns"]) / f["lanes"] / 1e6 for f in frames if f["kind"] == kind]
        if not times:
            lines.append(f"| {kind} | 0 | - | - | - |")
            continue
        bound = 2 * moved / bandwidth * 1e3
        median = statistics.median(times)
        lines.append(f"| {kind} | {len(times)} | {median:.3f} | {bound:.4f} | {median / bound:.1f} |")
    return lines


def report(rounds: list[list[dict[str, float]]], llm: LLM, trace: Path, start: int) -> str:
    bandwidth, moved = read_bandwidth(), state_bytes(llm.core)
    lines = [
        f"{llm.model_name}, {jax.default_backend()}, medians of {len(rounds)} conversations",
        "",
        "| turn | prompt tokens | reused | cached, ms | cold, ms | cached / cold |",
        "|---|---|---|---|---|---|",
    ]
    for turn in range(len(rounds[0])):

        def median(name: str, turn: int = turn) -> float:
            return statistics.median(rows[turn][name] for rows in rounds)

        ratio = statistics.median(rows[turn]["cached"] / rows[turn]["cold"] for rows in rounds)
        times = f"{median('cached') * 1e3:.1f} | {median('cold') * 1e3:.1f}"
        lines.append(f"| {turn + 1} | {median('prompt'):.0f} | {median('reused'):.0f} | {times} | {ratio:.2f} |")
    lines += [
        "",
        f"a state row {moved / 1e6:.3f} MB, read bandwidth {bandwidth / 1e9:.1f} GB/s",
        "",
        "| copy of one state | number | device ms | bound, ms | x bound |",
        "|---|---|---|---|---|",
        *copies(trace, start, moved, bandwidth),
    ]
    return "\n".join(lines)


def run(model: str, args: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.touch()
        options: dict[str, Any] = {"max_slots": 2, "dtype": args.dtype, "max_context": args.max_context}
        target: dict[str, Any] = {"core": args.core} if args.core else {"model": model, **options}
        with LLM(**target, config=EngineConfig(trace=trace)) as llm:
            chat(llm, 3, args.words, seed=0)  # every program is measured once: discovery is not steady state
            start = len(trace.read_text().splitlines())
            rounds = []
            for number in range(1, args.rounds + 1):
                rounds.append(chat(llm, args.turns, args.words, number))
                print(f"round {number} of {args.rounds}: {rounds[-1]}", file=sys.stderr)
            text = report(rounds, llm, trace, start)
            return f"{text}\n\ncompiles after ready: {llm.stats().compiles_after_ready}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tiny", metavar="FAMILY", help="a tiny model of the tests instead")
    parser.add_argument("--core", metavar="DIR", help="a prepared core instead, with its own options")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-context", type=int, default=None)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.tiny:
        from tests.golden.tiny import tiny_checkpoint

        args.model = str(tiny_checkpoint(args.tiny))
    print(run(args.model, args))


if __name__ == "__main__":
    main()
