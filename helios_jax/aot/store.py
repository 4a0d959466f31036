"""Files of a core directory: digests, atomic writes, and one writer at a time.

A core is only as trusted as its directory. Digests find damage (a truncated copy, flipped
bits), not malice: who can write the program files can also write the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from typing import IO

from helios_jax.errors import CoreError

try:
    import fcntl
except ImportError:  # not POSIX: atomic renames still hold, two writers only waste work
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = ".lock"
TEMP_PREFIX = ".tmp-"
CHUNK_BYTES = 1 << 22


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: pathlib.Path) -> str:
    """Hex digest of a file, read in chunks (hashing releases the GIL)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomic(path: pathlib.Path, data: bytes) -> None:
    """Writes `data` so that readers see the old file or the whole new one, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        with temp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def read_checked(path: pathlib.Path, size: int, sha256: str) -> bytes:
    """The file's bytes, if size and digest are those of the manifest.

    Raises:
        CoreError: Missing, of another size, or changed; the message says which.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CoreError(f"{path.name} cannot be read ({error.strerror})") from error
    if len(data) != size:
        raise CoreError(f"{path.name} has {len(data)} bytes, the manifest says {size}")
    if sha256_bytes(data) != sha256:
        raise CoreError(f"{path.name} was changed: its sha256 is not the manifest's")
    return data


def is_writable(directory: pathlib.Path) -> bool:
    """Whether files can be made in `directory` (tried: permission bits lie to root and on read-only mounts)."""
    probe = directory / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink(missing_ok=True)  # the holder of the lock may have swept it up already
    except OSError:
        return False
    return True


def remove_leftovers(directory: pathlib.Path) -> None:
    """Deletes what a killed writer left half done in `directory` or one level below.

    Only the holder of the lock may call it.
    """
    for path in [*directory.glob(f"{TEMP_PREFIX}*"), *directory.glob(f"*/{TEMP_PREFIX}*")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive(directory: pathlib.Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the directory's lock; waits for another holder after telling `on_wait`.

    The kernel drops the lock when its holder dies, so a killed prepare never blocks the next.
    """
    if fcntl is None:
        yield
        return
    with (directory / LOCK_NAME).open("wb") as file:
        _lock(file, on_wait)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: IO[bytes], on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
