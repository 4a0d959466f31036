"""Converted weights kept beside a core, by orbax: saved once, restored in bounded pieces.

orbax restores a whole tree at once into host memory or straight to devices; we restore groups
of tensors, each at most `GROUP_SHARE` of the whole, to the host and hand every tensor on through
`put`, so that host memory stays bounded and progress can be shown. OCDBT storage is used because
it reports a missing data file; a missing chunk of a plain zarr array would read as zeros.

A list of the files and their sizes lies beside them and is compared first: a failed orbax
read leaves futures behind that print tracebacks at exit. Changed bytes are not noticed here;
the core keeps a digest of every file and compares it before it restores.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from helios_jax.errors import CheckpointError
from helios_jax.models.checkpoint_files import one_line, read_json
from helios_jax.models.interface import Params
from helios_jax.models.params import leaf_bytes, leaves, tree_of

# Tensors restored by one orbax call (about 30 ms each): this share of the whole, so that the calls are
# few and their copies small beside the model. A larger tensor is a group of its own.
GROUP_SHARE = 1 / 32
FILES_NAME = "files.json"

Put = Callable[[np.ndarray], Any]
Progress = Callable[[int, int], None]


def _checkpointer() -> ocp.Checkpointer:
    # absl's logger tells of every save and restore on INFO and of harmless defaults on WARNING
    logging.getLogger("absl").setLevel(logging.ERROR)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False))


def save_params(directory: Path, params: Params) -> None:
    """Writes a parameter tree to a directory that does not exist yet.

    Raises:
        CheckpointError: It cannot be written (it exists, the disk is full, ...).
    """
    path = Path(directory).absolute()
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(params))
        (path / FILES_NAME).write_text(json.dumps(_file_sizes(path), indent=1, sort_keys=True) + "\n")
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"weights cannot be written to {directory}: {one_line(error)[:300]}") from error


def restore_params(
    directory: Path, abstract: Params, put: Put = jax.device_put, progress: Progress | None = None
) -> Params:
    """Reads a parameter tree back.

    Args:
        abstract: The tree that is expected (ShapeDtypeStructs); another shape or dtype is an error.
        put: Moves one host array to its device.
        progress: Called with (bytes done, bytes in all) after each tensor.

    Raises:
        CheckpointError: Missing, damaged, or not the expected tree.

    Cost: host memory of one group beside what `put` keeps.
    """
    path = Path(directory).absolute()
    _check_files(path)
    wanted = list(leaves(abstract))
    total, done = sum(leaf_bytes(leaf) for _, leaf in wanted), 0
    placed: dict[str, Any] = {}
    with _checkpointer() as checkpointer:
        for group in _groups(wanted, int(total * GROUP_SHARE)):
            host = dict(leaves(_restore_group(checkpointer, path, group)))
            for name, leaf in group:
                array = host.pop(name)
                if array.shape != leaf.shape or array.dtype != leaf.dtype:
                    raise CheckpointError(
                        f"stored weights {path}: {name} is {array.dtype}{list(array.shape)}, "
                        f"expected {np.dtype(leaf.dtype)}{list(leaf.shape)}"
                    )
                placed[name] = jax.block_until_ready(put(array))
                done += leaf_bytes(leaf)
                if progress is not None:
                    progress(done, total)
    return tree_of((name, placed[name]) for name, _ in wanted)


def _file_sizes(path: Path) -> dict[str, int]:
    files = (file for file in path.rglob("*") if file.is_file() and file != path / FILES_NAME)
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}


def _check_files(path: Path) -> None:
    """Refuses a directory whose files are not those that were written."""
    if not path.is_dir():
        raise CheckpointError(f"stored weights {path} are missing")
    listed, found = read_json(path / FILES_NAME), _file_sizes(path)
    for name, size in listed.items():
        if found.get(name) != size:
            state = "is missing" if name not in found else f"has {found[name]} of {size} bytes"
            raise CheckpointError(f"stored weights {path} are damaged: {name} {state}")


def _groups(entries: list[tuple[str, Any]], most_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Cuts (name, leaf) pairs into runs of at most `most_bytes`, largest first as in loading."""
    group: list[tuple[str, Any]] = []
    size = 0
    for name, leaf in sorted(entries, key=lambda entry: -leaf_bytes(entry[1])):
        if group and size + leaf_bytes(leaf) > most_bytes:
            yield group
            group, size = [], 0
        group.append((name, leaf))
        size += leaf_bytes(leaf)
    if group:
        yield group


def _restore_group(checkpointer: ocp.Checkpointer, path: Path, group: list[tuple[str, Any]]) -> Params:
    item = tree_of(group)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    try:
        return checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item, restore_args=as_numpy, partial_restore=True)
        )
    except Exception as error:  # orbax and tensorstore report damage with many unrelated types
        raise CheckpointError(f"stored weights {path} are damaged or foreign: {one_line(error)[:300]}") from error
