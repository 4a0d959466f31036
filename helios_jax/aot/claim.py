"""Which directories may become, or already are, cores: nothing of anybody else's is ever deleted.

A preparation replaces and deletes files, so it first makes sure that the directory is its
own: by a manifest that is ours, or, without a readable one, by finding nothing in there
that a preparation would not have written.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from helios_jax.aot.manifest import DRAFT_WEIGHTS_DIR, MANIFEST_NAME, PROGRAMS_DIR, TEXT_DIR, WEIGHTS_DIR
from helios_jax.aot.store import LOCK_NAME, TEMP_PREFIX, is_writable
from helios_jax.aot.text_files import GGUF_NAME, HF_FILES
from helios_jax.errors import CoreError
from helios_jax.scheduler.catalog import ProgramKind

# <kind>-b<rows>, then -t<tokens> and the like: `ProgramShape.name`.
PROGRAM_FILE = re.compile(rf"(?:{'|'.join(map(str, ProgramKind))})-b\d+(?:-[a-z0-9_]+)*\.bin")
MANIFEST_KEYS = frozenset({"format", "helios_version"})  # in every format, past and to come
CHECKPOINT_FILES = ("_CHECKPOINT_METADATA", "_METADATA")  # at the top of what orbax writes


def claim(root: pathlib.Path) -> bool:
    """Makes the directory if need be; True if it can be written.

    Raises:
        CoreError: It is no directory, or holds something that is no core.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise CoreError(f"{root} is not a directory") from error
    except OSError:
        return False
    names = {path.name for path in root.iterdir() if not _is_passing(path.name)}
    if names and not _has_our_manifest(root) and not _is_all_ours(root, names):
        raise CoreError(f"{root} is not empty and holds no core: choose another directory, or empty it")
    return is_writable(root)


def is_program_file(path: pathlib.Path) -> bool:
    """Whether `path` is a file that is named as a stored program."""
    return PROGRAM_FILE.fullmatch(path.name) is not None and path.is_file()


def _is_passing(name: str) -> bool:
    """The lock, and what a killed preparation was writing."""
    return name == LOCK_NAME or name.startswith(TEMP_PREFIX)


def _has_our_manifest(root: pathlib.Path) -> bool:
    """Whether there is a manifest of any of our versions (many tools call a file of theirs so)."""
    try:
        data: Any = json.loads((root / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.keys() >= MANIFEST_KEYS


def _is_all_ours(root: pathlib.Path, names: set[str]) -> bool:
    """Whether a directory without a readable manifest holds the parts of a core and nothing else.

    A manifest alone, damaged or somebody else's, proves nothing.
    """
    parts = names - {MANIFEST_NAME}
    if not parts or not parts <= {PROGRAMS_DIR, WEIGHTS_DIR, DRAFT_WEIGHTS_DIR, TEXT_DIR}:
        return False
    return all((root / name).is_dir() and _is_our_part(root / name) for name in parts)


def _is_our_part(part: pathlib.Path) -> bool:
    files = [path for path in part.iterdir() if not _is_passing(path.name)]
    if part.name == PROGRAMS_DIR:
        return all(is_program_file(path) for path in files)
    if part.name == TEXT_DIR:
        return {path.name for path in files} <= {*HF_FILES, GGUF_NAME}
    return not files or any((part / name).is_file() for name in CHECKPOINT_FILES)
