"""Ahead-of-time compilation: programs, prepared cores, and the runner of one device.

`import helios_jax.aot` loads neither jax nor a model; the names below do, on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "CoreOptions": "core",
    "PreparedCore": "core",
    "load_core": "core",
    "open_core": "core",
    "prepare": "core",
    "InspectRow": "report",
    "ProgramReport": "report",
    "inspect_core": "report",
    "Progress": "progress",
    "RichProgress": "progress",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
