"""Modules and functions stay small: new ones within the bound, listed ones may only shrink."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 70
# path -> lines, path:function -> lines; an entry may be lowered or removed, never raised
LARGER: dict[str, int] = {}


def measured() -> dict[str, int]:
    sizes: dict[str, int] = {}
    for folder in ("helios_jax", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            text = path.read_text()
            sizes[name] = text.count("\n")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    assert node.end_lineno is not None
                    sizes[f"{name}:{node.name}"] = node.end_lineno - node.lineno + 1
    return sizes


def test_nothing_grows_past_its_bound() -> None:
    over = []
    for name, lines in measured().items():
        bound = LARGER.get(name, MAX_FUNCTION_LINES if ":" in name else MAX_MODULE_LINES)
        if lines > bound:
            over.append(f"{name}: {lines} lines, bound {bound}")
    assert over == []


def test_the_ratchet_holds_no_stale_entry() -> None:
    sizes = measured()
    assert [name for name, lines in LARGER.items() if sizes.get(name, 0) < lines] == []
