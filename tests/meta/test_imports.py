"""The rooms of the house: imports run only in the directions of architecture.md section 1."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "helios_jax"

# room -> rooms and third-party packages that it may import
ALLOWED_ROOMS = {
    "scheduler": {"scheduler"},
    "models": {"models"},
    "aot": {"aot", "models", "scheduler"},
    "engine": {"engine", "scheduler", "aot", "text"},
    "text": {"text"},
    "server": {"server", "engine", "text"},
    "simulation": {"simulation", "scheduler"},
    "testing": {"testing", "engine", "scheduler", "aot", "text", "models", "simulation"},
}
COMMON = {"errors", "config"}
FORBIDDEN_PACKAGES = {
    "scheduler": {"jax", "jaxlib", "flax", "time", "random", "logging", "os", "threading"},
    "text": {"jax", "jaxlib", "flax"},
    "server": {"jax", "jaxlib", "flax"},
    "simulation": {"jax", "jaxlib", "flax", "time"},
}
AOT_MAY_TAKE_FROM_SCHEDULER = {"catalog", "types"}


def imports_of(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            module = node.module or ""
            names.append(module)
            if module == "helios_jax":
                names += [f"helios_jax.{alias.name}" for alias in node.names]
    return names


def violations(path: Path, room: str) -> list[str]:
    found = []
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "helios_jax" and len(parts) > 1:
            target = parts[1]
            is_room = (PACKAGE / target).is_dir()
            if is_room and target not in ALLOWED_ROOMS[room]:
                found.append(f"{path.name} imports {name}")
            if not is_room and target not in COMMON and (PACKAGE / f"{target}.py").exists():
                found.append(f"{path.name} imports {name}")
            if room == "aot" and target == "scheduler" and parts[2:] and parts[2] not in AOT_MAY_TAKE_FROM_SCHEDULER:
                found.append(f"{path.name} imports {name}")
        elif parts[0] in FORBIDDEN_PACKAGES.get(room, set()):
            found.append(f"{path.name} imports {name}")
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED_ROOMS))
def test_imports_follow_the_arrows(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    assert [v for path in files for v in violations(path, room)] == []


def test_a_forbidden_import_is_noticed(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("import jax\nfrom helios_jax.engine import loop\nfrom helios_jax import aot\n")
    assert len(violations(planted, "scheduler")) == 3


def test_every_room_has_its_rules() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert rooms == set(ALLOWED_ROOMS)


def test_root_links_show_the_three_rooms() -> None:
    for room in ("scheduler", "models", "aot"):
        link = PACKAGE.parent / room
        assert link.resolve() == (PACKAGE / room).resolve()
