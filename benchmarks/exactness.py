"""Greedy tokens of speculative rounds against plain decode's, token for token, on a real model.

    python -m benchmarks.exactness [--sources copy self random] [--prompts 40] [--tokens 512] [--work DIR]

Plain decode with all slots of a core says what is wanted. Then every request is played again by
rounds of random programs of the core's catalogue (any B, W, P and allocation, some decode steps
between), with random lanes of it, while requests join, end and are cancelled. Sources:

- copy: half of the proposals are looked up in the request, half are what is wanted; some are spoiled;
- self: the draft model is the model itself, so nearly all is accepted;
- random: a tiny draft model with random weights and the same vocabulary, so nearly nothing is.

Programs of other shapes sum in another order. Where two logits are so close that this decides, a
round may say the other token: such a difference is listed with the gap of plain decode's two best
logits, and what follows is compared with plain decode of the prompt and what was said until then.
The exit status is 1 if a difference is larger than TIE or is not the second best token.

Finished requests are kept in DIR/SOURCE.jsonl; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.lanes import Said
from benchmarks.sweep import Difference, Played, Sweep, Task, plain_decode
from helios_jax.aot import CoreOptions, prepare
from helios_jax.aot.prepared import PreparedCore
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.text.template import encode_chat
from helios_jax.text.tokenizer import load_tokenizer

PROMPTS = Path(__file__).parents[2] / "shared" / "data" / "prompts" / "spec_bench.jsonl"
SOURCES = ("copy", "self", "random")
LONGEST_PROMPT = 1000  # tokens


def chosen_prompts(path: Path, count: int, tokenizer: Any) -> list[Task]:
    """`count` first turns as chats of at most LONGEST_PROMPT tokens, in turn from every category, in file order."""
    by_category: dict[str, list[Task]] = {}
    for line in path.read_text().splitlines():
        question = json.loads(line)
        tasks = by_category.setdefault(question["category"], [])
        if len(tasks) * len(by_category) > 4 * count:
            continue  # encoding is slow, and these would not be chosen
        prompt = encode_chat(tokenizer, [{"role": "user", "content": question["turns"][0]}])
        if len(prompt) <= LONGEST_PROMPT:
            tasks.append(Task(f"{question['category']}-{question['question_id']}", prompt))
    deepest = max(map(len, by_category.values()))
    turns = [tasks[i] for i in range(deepest) for tasks in by_category.values() if i < len(tasks)]
    return turns[:count]


def random_draft(directory: Path, vocab_size: int, context: int) -> Path:
    """A one-layer Llama with random weights as a Hugging Face directory; it agrees with nobody."""
    if (directory / "config.json").is_file():
        return directory  # written anew it would be another model to a core
    directory.mkdir(parents=True, exist_ok=True)
    width, rng = 64, np.random.default_rng(11)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": width,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    layer = "model.layers.0."
    matrices = {
        "model.embed_tokens": (vocab_size, width), f"{layer}self_attn.q_proj": (width, width),
        f"{layer}self_attn.k_proj": (width // 2, width), f"{layer}self_attn.v_proj": (width // 2, width),
        f"{layer}self_attn.o_proj": (width, width), f"{layer}mlp.gate_proj": (96, width),
        f"{layer}mlp.up_proj": (96, width), f"{layer}mlp.down_proj": (width, 96),
    }  # fmt: skip
    tensors = {f"{name}.weight": rng.standard_normal(of, np.float32) / np.float32(8) for name, of in matrices.items()}
    for name in ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm"):
        tensors[f"{name}.weight"] = np.ones(width, np.float32)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def shown(played: Sequence[Played]) -> list[str]:
    """The table of one source."""
    shapes: collections.Counter[str] = collections.Counter()
    emitted: collections.Counter[str] = collections.Counter()
    for one in played:
        for name, (lanes, tokens) in one.shapes.items():
            shapes[name] += lanes
            emitted[name] += tokens
    lines = [f"{'program':48} {'lanes':>7} {'tokens':>7} {'a lane':>7}"]
    for name, lanes in sorted(shapes.items()):
        lines.append(f"{name:48} {lanes:7} {emitted[name]:7} {emitted[name] / lanes:7.2f}")
    cancelled = sum(one.cancelled for one in played)
    found = [(one.name, d) for one in played for d in one.differences]
    lines.append(
        f"{len(played) - cancelled} requests to their end, {cancelled} cancelled on the way, "
        f"{sum(one.tokens for one in played)} tokens, {len(found)} differences"
    )
    for name, d in found:
        kind = "near-tie" if d.is_tie else "DIFFERENCE"
        instead = f"said {d.said}, wanted {d.wanted} (second {d.second})"
        lines.append(f"  {kind} {name} token {d.at}: {instead}, gap {d.gap:.2e}")
    return lines


def _core(args: argparse.Namespace, source: str) -> PreparedCore:
    extra: dict[str, Any] = {"spec_method": "copy"} if source == "copy" else {"spec_method": "draft"}
    context = LONGEST_PROMPT + args.tokens + 24
    if source == "self":
        extra["draft_model"] = args.model
    if source == "random":
        model = open_source(args.model).model
        extra["draft_model"] = str(random_draft(args.work / "draft", model.vocab_size, model.max_position_embeddings))
    options = CoreOptions(max_slots=args.slots, max_context=context, dtype="float32", prefill_chunk=64, **extra)
    return prepare(args.model, options, args.work / source, lambda *a: print(*a, file=sys.stderr))


def _references(core: PreparedCore, tasks: Sequence[Task], args: argparse.Namespace) -> None:
    path = args.work / f"plain-{args.tokens}.jsonl"
    known = {one["name"]: one["said"] for one in _lines(path)}
    missing = [task for task in tasks if task.name not in known]
    for first in range(0, len(missing), core.dims.slots):
        group = missing[first : first + core.dims.slots]
        plain_decode(core, group, args.tokens)
        _keep(path, [{"name": task.name, "said": [dataclasses.astuple(one) for one in task.wanted]} for task in group])
    for task in tasks:
        task.wanted = task.wanted or [Said(*one) for one in known[task.name]]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _keep(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _source(args: argparse.Namespace, source: str, report: Callable[[str], None]) -> bool:
    """Plays one source; whether all was equal, or near-ties."""
    path = args.work / f"{source}-{args.tokens}.jsonl"
    played = [Played(**one | {"differences": [Difference(**d) for d in one["differences"]]}) for one in _lines(path)]
    over = {one.name for one in played if not one.cancelled}
    with _core(args, source) as core:
        tasks = chosen_prompts(args.questions, args.prompts, load_tokenizer(Path(core.source_info.text_path)))
        _references(core, tasks, args)
        tasks = [task for task in tasks if task.name not in over]
        start = time.monotonic()
        for one in Sweep(core, tasks, args.tokens, args.seed + len(over)).play():
            played.append(one)
            _keep(path, [dataclasses.asdict(one)])
            seconds = time.monotonic() - start
            print(f"{seconds:7.0f} s {source} {one.name} {one.tokens} {one.differences}", file=sys.stderr, flush=True)
        names = {shape.name for shape in core.catalog.of_kind(ProgramKind.SPECULATIVE)}
        assert core.compiles_after_ready() == 0
    unvisited = sorted(names - {name for one in played for name in one.shapes})
    report(f"\n{source}: " + (f"NOT VISITED {unvisited}" if unvisited else f"every one of {len(names)} rounds"))
    for line in shown(played):
        report(line)
    return not unvisited and all(d.is_tie for one in played for d in one.differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=Path, default=PROMPTS, help="spec_bench.jsonl")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("exactness-work"), help="cores and results")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    right = [_source(args, source, print) for source in args.sources]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
