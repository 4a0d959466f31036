"""Whoever still holds something of a request: every container of the engine's objects, by name."""

from __future__ import annotations

import collections
from typing import Any

from helios_jax.engine.request import Request, Sequence
from helios_jax.scheduler.types import RequestHandle

CONTAINERS = (dict, list, set, tuple, collections.deque)
MEMORIES = ("events", "scheduler", "core", "config", "totals")  # history, or checked by other means


def held(root: Any) -> list[str]:
    """Paths of containers below `root` that hold a request, a sequence or a handle, with how many they hold."""
    found: list[str] = []
    _walk(root, "engine", found, set())
    return found


def _walk(value: Any, path: str, found: list[str], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, RequestHandle | Request | Sequence):
        found.append(path)
    elif isinstance(value, CONTAINERS):
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        mine = [item for item in items if isinstance(item, RequestHandle | Request | Sequence)]
        if mine:
            found.append(f"{path} ({len(value)})")
            return
        for item in items:
            _walk(item, f"{path}[]", found, seen)
    elif type(value).__module__.startswith("helios_jax.engine"):
        names = vars(value) if hasattr(value, "__dict__") else {}
        for name, item in names.items():
            if name.lstrip("_") not in MEMORIES:
                _walk(item, f"{path}.{name}", found, seen)
