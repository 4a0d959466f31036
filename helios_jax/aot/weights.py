"""Puts the weights of a core on the device: from the core's copy, or from the model."""

from __future__ import annotations

import concurrent.futures
import pathlib
import shutil
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax

from helios_jax.aot.manifest import WEIGHTS_DIR, StoredFile
from helios_jax.aot.memory import tree_bytes
from helios_jax.aot.programs_store import worker_threads
from helios_jax.aot.progress import NOTE, SAVE, WEIGHTS, Progress
from helios_jax.aot.source import Source
from helios_jax.aot.store import TEMP_PREFIX, sha256_file
from helios_jax.aot.text_files import describe
from helios_jax.errors import CheckpointError, CoreError
from helios_jax.models.interface import Draft
from helios_jax.models.weights_store import restore_params, save_params

Put = Callable[[Any], jax.Array]


def check_files(core: pathlib.Path, files: Sequence[StoredFile]) -> None:
    """Compares stored files with the manifest: sizes first, then digests, in parallel.

    Raises:
        CoreError: Naming the first file that is missing, of another size or changed.
    """
    for file in files:
        path = core / file.path
        size = path.stat().st_size if path.is_file() else None
        if size != file.bytes:
            raise CoreError(f"{file.path} " + ("is missing" if size is None else f"has {size} of {file.bytes} bytes"))
    with concurrent.futures.ThreadPoolExecutor(worker_threads()) as pool:
        for file, digest in zip(files, pool.map(lambda f: sha256_file(core / f.path), files), strict=True):
            if digest != file.sha256:
                raise CoreError(f"{file.path} was changed: its sha256 is not the manifest's")


def restore(
    core: pathlib.Path,
    files: Sequence[StoredFile],
    model: Draft,
    dtype: str,
    progress: Progress,
    directory: str = WEIGHTS_DIR,
) -> Any:
    """The core's own copy of the weights of `model`, in its `directory`, on the device.

    Raises:
        CoreError: There is none, or it is damaged.
    """
    if not files:
        raise CoreError("the core holds no weights")
    check_files(core, files)
    report = lambda done, total: progress(WEIGHTS, done, total)  # noqa: E731
    try:
        return restore_params(core / directory, model.abstract_params(dtype), jax.device_put, report)
    except CheckpointError as error:
        raise CoreError(str(error)) from error


def convert(source: Source, dtype: str, progress: Progress) -> Any:
    """The model's weights in `dtype`, leaf by leaf onto the device.

    Raises:
        CheckpointError: The model's files are missing or broken.
    """
    return source.load_params(dtype, jax.device_put, lambda done, total: progress(WEIGHTS, done, total))


def save(core: pathlib.Path, params: Any, progress: Progress, directory: str = WEIGHTS_DIR) -> tuple[StoredFile, ...]:
    """Keeps the converted weights in the core's `directory`; none, with a note, when that fails."""
    temp, target = core / f"{TEMP_PREFIX}{uuid.uuid4().hex}", core / directory
    num_bytes = tree_bytes(params)
    progress(SAVE, 0, num_bytes)
    try:
        save_params(temp, params)
        shutil.rmtree(target, ignore_errors=True)
        temp.rename(target)
    except (OSError, CheckpointError, CoreError) as error:
        progress(NOTE, 0, 0, f"the converted weights are not kept: {error}")
        return ()
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    files = describe(core, target)
    progress(SAVE, num_bytes, num_bytes)
    return files
