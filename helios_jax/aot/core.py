"""The front door of prepared cores: open whatever the user named.

core = open_core(source_or_directory, CoreOptions(max_slots=8))
frame = core.execute(shape, ints, floats)
ints, floats, timing = frame.wait()
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from helios_jax.aot.manifest import MANIFEST_NAME
from helios_jax.aot.options import CoreOptions, options_given
from helios_jax.aot.preparation import load_core, opened_draft, prepare
from helios_jax.aot.prepared import CoreSourceInfo, PreparedCore
from helios_jax.aot.progress import Progress, silent
from helios_jax.aot.runner import DeviceRunner, InFlight
from helios_jax.aot.source import Source
from helios_jax.models.source import open_source

__all__ = [
    "CoreOptions",
    "CoreSourceInfo",
    "DeviceRunner",
    "InFlight",
    "PreparedCore",
    "core_directory",
    "default_cache_dir",
    "is_core",
    "load_core",
    "open_core",
    "prepare",
]


def default_cache_dir() -> pathlib.Path:
    """Where cores of models given by name or path are kept (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "helios-jax" / "cores"


def is_core(path: pathlib.Path | str) -> bool:
    """Whether `path` is a directory that a prepare has written to."""
    return (pathlib.Path(path) / MANIFEST_NAME).is_file()


def core_directory(
    source: Source, options: CoreOptions, cache_dir: pathlib.Path, draft: Source | None = None
) -> pathlib.Path:
    """The directory of one model, and draft model, with one set of options; a changed checkpoint gets another."""
    facts: list[Any] = [source.config_digest(), source.weights_digest(), options.to_json()]
    if draft is not None:
        facts += [draft.config_digest(), draft.weights_digest()]
    key = json.dumps(facts, sort_keys=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.")[:60] or "model"
    return cache_dir / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def open_core(
    model_or_core: Source | pathlib.Path | str,
    options: CoreOptions | Mapping[str, Any] | None = None,
    cache_dir: pathlib.Path | str | None = None,
    progress: Progress = silent,
    *,
    draft: Source | None = None,
) -> PreparedCore:
    """Opens a prepared core, or prepares the core of a model on first use.

    Args:
        model_or_core: A core's directory, an opened model source, or what
            `models.source.open_source` takes (a name, a directory, a GGUF, a hub id).
        options: None means the defaults. A core keeps its own; one that is set to something
            else than the core holds is refused, but for rounds that can be left out: `spec_method`
            "none", fewer `num_draft_tokens`, less `speculative_token_capacity`. A mapping names
            exactly those that are set; of `CoreOptions`, those that differ from the class defaults are.
        cache_dir: Where the cores of models are kept; None means `default_cache_dir()`.
        draft: The opened draft model; None opens what `options` name, or the model's heads.

    Raises:
        ConfigError, CheckpointError, CoreError: As `prepare` and `load_core` say.
    """
    if isinstance(model_or_core, (str, pathlib.Path)) and is_core(model_or_core):
        return load_core(model_or_core, progress, options=options)
    source: Source = open_source(model_or_core) if isinstance(model_or_core, (str, pathlib.Path)) else model_or_core
    if not isinstance(options, CoreOptions):
        options = CoreOptions(**options_given(options or {}))
    draft = opened_draft(options, source, draft)
    options = options.resolve(source.model, draft.model if draft is not None else None)
    root = pathlib.Path(cache_dir) if cache_dir is not None else default_cache_dir()
    return prepare(source, options, core_directory(source, options, root, draft), progress, draft=draft)
