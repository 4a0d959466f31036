"""Small cost, trace and acceptance files for the simulator's tests, and the way to the shared ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax.simulation.prefixes import Prompt
from helios_jax.simulation.traces import BLOCK_TOKENS

SHARED = Path(__file__).parents[3] / "shared" / "data"


def shared_data(name: str) -> Path:
    """A file of ../shared/data; where it is absent the test is skipped, as that folder's README wants.

    These are files that the repository must not hold. CI's checkout has the folder beside it, so there all of them run.
    """
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} of ../shared/data is absent")
    return path


def profile_document(**changes: Any) -> dict[str, Any]:
    """A tiny profile file: every component is linear, so any composition has a closed form.

    linear = 2 + 0.01 tokens, head = 0.5 + 0.001 rows, decode attention = 0.0001 rows x context, prompt
    attention = 0.1 + 0.0001 chunk + 0.00001 prefix, drafts 0.3 + 0.01 rows.
    """
    tokens, rows, ctx, chunk, prefix = [1, 64, 4096], [1, 64, 512], [128, 8192], [64, 2048], [0, 4096]
    batch = [1, 32, 64]
    entry: dict[str, Any] = {
        "id": "toy.gpu",
        "model": {"name": "Toy"},
        "gpu": "toy",
        "kv_bytes_per_token": 1024,
        "components": {
            "linear_ms": {"tokens": tokens, "ms": [2 + 0.01 * t for t in tokens]},
            "lm_head_ms": {"rows": rows, "ms": [0.5 + 0.001 * r for r in rows]},
            "attn_decode_ms": {"batch": batch, "ctx": ctx, "ms": [[1e-4 * b * c for c in ctx] for b in batch]},
            "attn_prefill_ms": {
                "chunk": chunk,
                "prefix": prefix,
                "ms": [[0.1 + 1e-4 * c + 1e-5 * p for p in prefix] for c in chunk],
            },
            "verify_attn_factor": 2.0,
        },
        "draft": {
            "batch": batch,
            "eagle3_per_position_ms": [0.3 + 0.01 * b for b in batch],
            "mtp_per_position_ms": [0.6 + 0.01 * b for b in batch],
            "ngram_ms": 0.0,
        },
    }
    return {"schema": 1, "units": "ms", "profiles": [{**entry, **changes}]}


def profile_file(folder: Path, **changes: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps(profile_document(**changes)))
    return path


def azure_file(folder: Path, requests: list[tuple[float, int, int]]) -> Path:
    """A trace of (second, prompt, output) rows in Azure's format."""
    path = folder / "azure.csv"
    lines = [f"2023-11-16 18:{int(at // 60):02d}:{at % 60:010.7f},{prompt},{output}" for at, prompt, output in requests]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def acceptance_file(folder: Path) -> Path:
    document = {
        "per_position": [
            {"method": "eagle3", "target": "Toy", "k": 3, "per_position": [0.8, 0.6, 0.3]},
            {"method": "mtp (1 head)", "target": "Toy", "k": 1, "per_position": [0.9]},
        ],
        "golden_al": {"models": {"toy_eagle3": {"on": [1.8, 2.4, 2.7, 2.6]}}},
        "specforge_al": {"models": {"Big | draft": {"maths": {"3": 2.4, "5": 2.8}}}},
    }
    path = folder / "acceptance.json"
    path.write_text(json.dumps(document))
    return path


def interpolated(table: dict[str, Any], rows: str, columns: str, row: float, column: float) -> float:
    """A second implementation of a bilinear lookup, by numpy."""
    values = np.array(table["ms"])
    by_row = [np.interp(row, table[rows], values[:, j]) for j in range(values.shape[1])]
    return float(np.interp(column, table[columns], by_row))


def prefix_prompts(rng: random.Random, count: int) -> list[Prompt]:
    """Conversations that share a system prompt, go on, fork and repeat; every id stands for one prefix."""
    ids: dict[tuple[object, ...], int] = {}
    prompts: list[Prompt] = []
    for number in range(count):
        before = rng.choice(prompts) if prompts and rng.random() < 0.6 else Prompt(BLOCK_TOKENS, 0, (0,))
        whole = before.blocks[: before.length // BLOCK_TOKENS]
        if rng.random() < 0.1:
            prompts.append(before)
            continue
        kept = whole[: rng.randint(1, len(whole))] if rng.random() < 0.2 else whole
        length = len(kept) * BLOCK_TOKENS + rng.randint(1, 6 * BLOCK_TOKENS)
        blocks = list(kept)
        while len(blocks) * BLOCK_TOKENS < length:
            blocks.append(ids.setdefault((number, len(blocks)), len(ids) + 1))
        prompts.append(Prompt(length, rng.randint(1, 600), tuple(blocks)))
    return prompts
