"""Decode and prefill speed of a served model, beside the memory-bandwidth bound and a peer.

    python -m benchmarks.serving [--model smollm2] [--dtype float32] [--streams 1 4 8]
                                 [--peer-python PATH] [--rounds 3]

Everything is measured side by side in one run, in alternating rounds, because absolute times
of a shared machine do not travel; the ratios do. What is reported, medians over rounds:

- decode tokens/s by number of streams, from the engine's own frame trace (wall time from the
  start of the first decode frame with all streams to the end of the last one, host included);
- host overhead a step: the part of that wall time in which no program ran;
- prefill tokens/s of one long prompt;
- the bound: steps/s if every weight were read once a step at the measured read bandwidth;
- the same work by transformers (`benchmarks.peer_transformers`), if a Python with torch is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.bandwidth import read_bandwidth
from helios_jax import LLM, SamplingParams
from helios_jax.config import EngineConfig
from helios_jax.models.source import open_source

PROMPT_LEN, PREFILL_LEN, NEW_TOKENS = 64, 512, 64


@dataclasses.dataclass
class Round:
    """One round's figures; lists over rounds are reduced by the median."""

    bandwidth: float
    decode: dict[int, float]
    host_ms: dict[int, float]
    prefill: float
    peer: dict[str, Any] | None


def _frames(trace: Path, start: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()[start:]]


def _generate(llm: LLM, streams: int, prompt_len: int, new_tokens: int, trace: Path) -> list[dict[str, Any]]:
    """Runs `streams` random prompts to exactly `new_tokens` each and returns the frames."""
    start = len(trace.read_text().splitlines())
    rng = np.random.default_rng(streams)
    vocab = llm.core.dims.vocab_size
    prompts = [rng.integers(3, vocab, prompt_len).tolist() for _ in range(streams)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
    return _frames(trace, start)


def _decode_speed(frames: list[dict[str, Any]], streams: int) -> tuple[float, float]:
    """(tokens/s, host ms a step) over the decode frames that carry all streams."""
    full = [f for f in frames if f["kind"] == "decode" and f["lanes"] == streams]
    span_ns = full[-1]["now_ns"] - full[0]["now_ns"]  # completion to completion
    busy_ns = sum(max(f["device_ns"]) for f in full[1:])
    steps = len(full) - 1
    return streams * steps / span_ns * 1e9, (span_ns - busy_ns) / steps / 1e6


def _prefill_speed(frames: list[dict[str, Any]]) -> float:
    prompt = [f for f in frames if f["kind"] == "prefill" and f["reason"] == "ordinary"]
    return sum(f["tokens"] for f in prompt) / sum(f["wall_ns"] for f in prompt) * 1e9


def _peer(python: str | None, model: str, streams: list[int]) -> dict[str, Any] | None:
    if python is None:
        return None
    path = open_source(model).text_files().path
    where = ["--gguf", path.name, "--model", str(path.parent)] if path.is_file() else ["--model", str(path)]
    command = [python, str(Path(__file__).with_name("peer_transformers.py")), *where]
    command += ["--streams", *map(str, streams), "--new-tokens", str(NEW_TOKENS)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def _weight_bytes(llm: LLM) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(llm.core.params))


def _round(llm: LLM, trace: Path, args: argparse.Namespace) -> Round:
    decode, host = {}, {}
    for streams in args.streams:
        frames = _generate(llm, streams, PROMPT_LEN, NEW_TOKENS, trace)
        decode[streams], host[streams] = _decode_speed(frames, streams)
    prefill = _prefill_speed(_generate(llm, 1, PREFILL_LEN, 1, trace))
    return Round(read_bandwidth(), decode, host, prefill, _peer(args.peer_python, args.model, args.streams))


def _report(rounds: list[Round], weight_bytes: int, args: argparse.Namespace) -> str:
    def median(pick: Any) -> float:
        return statistics.median(pick(r) for r in rounds)

    bandwidth = median(lambda r: r.bandwidth)
    lines = [
        f"{args.model}, {args.dtype}, {jax.default_backend()}, medians of {len(rounds)} rounds",
        f"read bandwidth {bandwidth / 1e9:.1f} GB/s, weights {weight_bytes / 1e6:.0f} MB: "
        f"at most {bandwidth / weight_bytes:.1f} steps/s",
        "",
        "| | tokens/s | of the bound | x transformers | host ms a step |",
        "|---|---|---|---|---|",
    ]
    for streams in args.streams:
        speed = median(lambda r, s=streams: r.decode[s])
        share = median(lambda r, s=streams: r.decode[s] / (s * r.bandwidth / weight_bytes))
        peer = "-"
        if rounds[0].peer:
            peer = f"{median(lambda r, s=streams: r.decode[s] / r.peer['decode'][str(s)]):.2f}"
        host = median(lambda r, s=streams: r.host_ms[s])
        lines.append(f"| decode, {streams} streams | {speed:.1f} | {share:.2f} | {peer} | {host:.2f} |")
    peer = f"{median(lambda r: r.prefill / r.peer['prefill']):.2f}" if rounds[0].peer else "-"
    lines.append(f"| prefill, {PREFILL_LEN} tokens | {median(lambda r: r.prefill):.0f} | - | {peer} | - |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", help="a Python that has torch and transformers")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.touch()
        # Rounds repeat their prompts, as the peer does: nothing of them is to be reused.
        config = EngineConfig(trace=trace, enable_prefix_caching=False)
        with LLM(args.model, max_slots=max(args.streams), dtype=args.dtype, config=config) as llm:
            for streams in args.streams:  # every program measured once: discovery is not steady state
                _generate(llm, streams, PROMPT_LEN, 4, trace)
            for _ in range(4):
                _generate(llm, 1, PREFILL_LEN, 1, trace)
            rounds = []
            for number in range(args.rounds):
                rounds.append(_round(llm, trace, args))
                print(f"round {number + 1} of {args.rounds}: {rounds[-1]}", file=sys.stderr)
            print(_report(rounds, _weight_bytes(llm), args))
            print(f"\ncompiles after ready: {llm.stats().compiles_after_ready}")


if __name__ == "__main__":
    main()
