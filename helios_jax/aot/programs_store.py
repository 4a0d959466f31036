"""Brings every program of a catalogue into memory: from the core's files, or by compiling.

1. Programs whose file the manifest vouches for are read, checked and deserialised, in parallel.
2. The others are compiled in parallel (XLA releases the GIL); each is written, with its
   manifest entry, as soon as it is done, so a killed prepare loses only what was in work.
3. An optional program that does not compile is left out and reported; a required one ends
   the preparation.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from helios_jax.aot.compile import Compiler, Executable, ProgramMemory, serialize, without_jax_cache
from helios_jax.aot.manifest import PROGRAMS_DIR, FailedEntry, Manifest, ProgramEntry, write_manifest
from helios_jax.aot.memory import tree_bytes
from helios_jax.aot.progress import COMPILE, LOAD, NOTE, Progress
from helios_jax.aot.report import ProgramReport, ProgramStatus
from helios_jax.aot.store import read_checked, sha256_bytes, write_atomic
from helios_jax.errors import CoreError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape

# Without one of these a request cannot be served at all.
REQUIRED_KINDS = frozenset({ProgramKind.DECODE, ProgramKind.PREFILL, ProgramKind.INITIALIZE})
MAX_COMPILE_THREADS = 16  # each compilation holds hundreds of MB

Result = TypeVar("Result")


class ProgramSet(NamedTuple):
    """What came of a catalogue: executables, one report a shape, the manifest as it now is."""

    executables: dict[ProgramShape, Executable]
    reports: dict[ProgramShape, ProgramReport]
    manifest: Manifest


def worker_threads() -> int:
    """Threads for loading and compiling: the CPUs that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_COMPILE_THREADS)


@dataclasses.dataclass
class ProgramStore:
    """The program files of one core directory, while its lock is held.

    Attributes:
        writable: False: compile as needed, but store nothing. Becomes False when the manifest
            cannot be written any more: files that it does not name are of no use.
        reject: Why no stored program may be used at all; empty when they may.
        retry_failed: Compile again what is recorded as not compiling under this fingerprint.
        wanted: The shapes of the catalogue that are brought into memory; None = all.
    """

    directory: pathlib.Path
    manifest: Manifest
    compiler: Compiler
    writable: bool
    reject: str
    retry_failed: bool
    progress: Progress
    wanted: tuple[ProgramShape, ...] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # guards manifest and its file
        self._executables: dict[ProgramShape, Executable] = {}
        self._reports: dict[ProgramShape, ProgramReport] = {}
        self._shapes = self.manifest.catalog if self.wanted is None else self.wanted
        model, dims = self.compiler.model, self.compiler.dims
        self._donated = tree_bytes(self.compiler.factory.abstract_state(model, dims, self.compiler.dtype))

    def obtain(self) -> ProgramSet:
        """Loads what can be loaded and compiles the rest.

        Raises:
            CoreError: A required program does not compile.
        """
        shapes = self._shapes
        reasons: dict[ProgramShape, str] = {}
        stored = [shape for shape in shapes if not self.reject and self.manifest.entry(shape.name) is not None]
        for done, (shape, problem) in enumerate(self._parallel(self._load, stored), 1):
            if isinstance(problem, CoreError):
                reasons[shape] = str(problem)
            self.progress(LOAD, done, len(stored), shape.name)
        if not self.retry_failed:
            self._skip_failed()
        # The widest programs compile longest: first, so that none is left alone at the end.
        todo = sorted((s for s in shapes if s not in self._reports), key=lambda s: -s.token_capacity)
        for shape in todo:
            reasons.setdefault(shape, self.reject or "not in the core yet")
        with without_jax_cache():
            self._compile_all(todo, reasons)
        return ProgramSet(self._executables, self._reports, self.manifest)

    def _compile_all(self, todo: Sequence[ProgramShape], reasons: Mapping[ProgramShape, str]) -> None:
        for done, (shape, problem) in enumerate(self._parallel(self._compile, todo), 1):
            self._after_compile(shape, problem, reasons[shape])
            seconds = self._reports[shape].compile_seconds
            self.progress(COMPILE, done, len(todo), f"{shape.name} {seconds:.1f} s")

    def _parallel(
        self, work: Callable[[ProgramShape], None], shapes: Sequence[ProgramShape]
    ) -> Iterator[tuple[ProgramShape, CoreError | None]]:
        """Runs `work` on every shape; yields each with its CoreError or None, as they end."""
        if not shapes:
            return
        with concurrent.futures.ThreadPoolExecutor(worker_threads(), "helios-programs") as pool:
            futures = {pool.submit(work, shape): shape for shape in shapes}
            try:
                for future in concurrent.futures.as_completed(futures):
                    error = future.exception()
                    if error is not None and not isinstance(error, CoreError):
                        raise error
                    yield futures[future], error
            finally:  # a raise in the consumer must not wait for programs that nobody needs
                pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, shape: ProgramShape) -> None:
        entry = self.manifest.entry(shape.name)
        assert entry is not None
        started = time.monotonic()
        payload = read_checked(self.directory / entry.file, entry.file_bytes, entry.sha256)
        executable = self.compiler.load(shape, payload)
        self._executables[shape] = executable
        self._reports[shape] = self._report(
            executable, ProgramStatus.LOADED, entry, load_seconds=time.monotonic() - started
        )

    def _compile(self, shape: ProgramShape) -> None:
        executable = self.compiler.compile(shape)
        self._executables[shape] = executable
        entry = self._save(executable) if self.writable else None
        self._reports[shape] = self._report(executable, ProgramStatus.COMPILED, entry)

    def _after_compile(self, shape: ProgramShape, problem: CoreError | None, reason: str) -> None:
        """Adds the reason to the report, or records a program that did not compile."""
        if problem is None:
            self._reports[shape] = dataclasses.replace(self._reports[shape], reason=reason)
            return
        if shape.kind in REQUIRED_KINDS:
            raise problem
        self.progress(NOTE, 0, 0, f"{problem}; the core serves without it")
        self._reports[shape] = ProgramReport(shape=shape, status=ProgramStatus.MISSING, reason=str(problem))
        with self._lock:
            failed = (*(f for f in self.manifest.failed if f.shape != shape), FailedEntry(shape, str(problem)))
            self._update(failed=failed, programs=tuple(e for e in self.manifest.programs if e.shape != shape))

    def _skip_failed(self) -> None:
        """Reports as missing what the manifest says did not compile, without trying for minutes again."""
        for failed in self.manifest.failed:
            if failed.shape in self._shapes and failed.shape.kind not in REQUIRED_KINDS:
                self.progress(NOTE, 0, 0, f"{failed.error}; the core serves without it")
                self._reports[failed.shape] = ProgramReport(
                    shape=failed.shape, status=ProgramStatus.MISSING, reason=failed.error
                )

    def _save(self, executable: Executable) -> ProgramEntry | None:
        """Writes one program and its manifest entry; a full disk costs the next start, not this one."""
        shape = executable.shape
        try:
            payload = serialize(executable)
            file = f"{PROGRAMS_DIR}/{shape.name}.bin"
            write_atomic(self.directory / file, payload)
        except (CoreError, OSError) as error:
            self.progress(NOTE, 0, 0, f"program {shape.name} is not stored: {error}")
            return None
        memory = executable.memory or ProgramMemory(0, 0, 0)
        entry = ProgramEntry(
            shape=shape,
            file=file,
            file_bytes=len(payload),
            sha256=sha256_bytes(payload),
            compile_seconds=round(executable.seconds, 3),
            donated_bytes=self._donated,
            **memory._asdict(),
        )
        with self._lock:
            kept = tuple(e for e in self.manifest.programs if e.shape != shape)
            self._update(programs=(*kept, entry), failed=tuple(f for f in self.manifest.failed if f.shape != shape))
        return entry

    def _update(self, **changes: object) -> None:
        """Changes the manifest and its file; the caller holds the lock."""
        self.manifest = dataclasses.replace(self.manifest, **changes)  # type: ignore[arg-type]
        if not self.writable:
            return
        try:
            write_manifest(self.directory, self.manifest)
        except OSError as error:
            self.writable = False
            why = error.strerror or error
            self.progress(NOTE, 0, 0, f"{self.directory} cannot be written ({why}): nothing more is kept there")

    def _report(
        self, executable: Executable, status: ProgramStatus, entry: ProgramEntry | None, load_seconds: float = 0.0
    ) -> ProgramReport:
        memory = executable.memory or ProgramMemory(0, 0, 0)
        compiled = status is ProgramStatus.COMPILED
        return ProgramReport(
            shape=executable.shape,
            status=status,
            compile_seconds=executable.seconds if compiled else entry.compile_seconds if entry else 0.0,
            load_seconds=load_seconds,
            file_bytes=entry.file_bytes if entry else 0,
            donated_bytes=self._donated,
            **memory._asdict(),
        )
