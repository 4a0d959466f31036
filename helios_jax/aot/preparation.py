"""Makes a prepared core from a model, or loads one that was made before.

1. The directory is locked; a second prepare waits, then finds everything done.
2. The stored manifest is compared with what this process would make: same fingerprint,
   model and extents keep the stored programs, anything else gives the reason for each
   recompilation.
3. Weights first, a draft model's too (a broken model ends here, before minutes of compiling), then text files.
4. Programs are loaded or compiled (`programs_store`); the manifest grows with each.
5. Every program runs once at work, and the device state is made anew; then the core is complete and ready.

A directory that cannot be written, or no more (a full disk), is used as it is: loaded, or
compiled without storing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from helios_jax.aot.claim import claim, is_program_file
from helios_jax.aot.compile import Compiler, ProgramFactory, default_factory
from helios_jax.aot.identity import (
    expected_manifest,
    loaded_options,
    loaded_shapes,
    reopened_manifest,
    same_draft_weights,
    same_weights,
    stored_manifest,
    why_rejected,
)
from helios_jax.aot.manifest import (
    DRAFT_WEIGHTS_DIR,
    PROGRAMS_DIR,
    TEXT_DIR,
    WEIGHTS_DIR,
    Manifest,
    StoredFile,
    read_manifest,
    write_manifest,
)
from helios_jax.aot.memory import MemoryPlan
from helios_jax.aot.options import CoreOptions
from helios_jax.aot.prepared import CoreSourceInfo, PreparedCore
from helios_jax.aot.programs_store import ProgramSet, ProgramStore
from helios_jax.aot.progress import NOTE, Progress, serialised, silent
from helios_jax.aot.report import ProgramStatus
from helios_jax.aot.runner import DeviceRunner
from helios_jax.aot.source import Source, model_from_config
from helios_jax.aot.store import exclusive, is_writable, remove_leftovers
from helios_jax.aot.text_files import copy_text_files
from helios_jax.aot.verify import FailedProgram, smoke
from helios_jax.aot.weights import check_files, convert, restore, save
from helios_jax.errors import CoreError
from helios_jax.models.interface import Draft, Model, heads_of
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import Catalog


@dataclasses.dataclass
class _Job:
    """One preparation in progress.

    `manifest` is what the core will hold, `stored` what the directory held before, `on_disk`
    what its manifest file says now; `options` are what it is loaded for, at most what it holds.
    """

    root: pathlib.Path
    writable: bool
    source: Source | None
    model: Model
    draft_source: Source | None
    draft: Draft | None
    options: CoreOptions
    plan: MemoryPlan
    manifest: Manifest
    stored: Manifest | None
    on_disk: Manifest | None
    reject: str  # why no stored program may be used; "" = they may
    factory: ProgramFactory
    progress: Progress
    notes: list[str]


def prepare(
    source: Source | pathlib.Path | str,
    options: CoreOptions,
    out_dir: pathlib.Path | str,
    progress: Progress = silent,
    *,
    draft: Source | None = None,
    factory: ProgramFactory | None = None,
) -> PreparedCore:
    """Makes the core of `source` in `out_dir`, keeping what is already there and still valid.

    Args:
        source: An opened model, or what `models.source.open_source` takes.
        draft: The opened draft model; None opens what `options.draft_model` names, or the model's heads.

    Raises:
        ConfigError: An option is out of range for the model or the memory.
        CheckpointError: The model's weights or tokenizer cannot be read.
        CoreError: `out_dir` holds something else, or a required program does not compile.
    """
    root = pathlib.Path(out_dir)
    if isinstance(source, (str, pathlib.Path)):
        source = open_source(source)
    draft = opened_draft(options, source, draft)
    draft_model = draft.model if draft is not None else None
    options.resolve(source.model, draft_model)  # a wrong option must not leave an empty directory behind
    used_factory = (factory or default_factory()).with_draft(draft_model)
    notes, progress = _collecting(progress)
    writable = claim(root)
    with _locked(root, writable, progress):
        stored, reject = stored_manifest(root)
        manifest, plan = expected_manifest(source, options, stored, used_factory, draft)
        if stored is not None:
            reject = why_rejected(stored, manifest)
        return _open(
            _Job(
                root=root,
                writable=writable,
                source=source,
                model=source.model,
                draft_source=draft,
                draft=draft_model,
                options=manifest.options,
                plan=plan,
                manifest=manifest,
                stored=stored,
                on_disk=stored,
                reject=reject,
                factory=used_factory,
                progress=progress,
                notes=notes,
            )
        )


def opened_draft(options: CoreOptions, source: Source, draft: Source | None = None) -> Source | None:
    """What proposes beside the model: the draft model that the options name, or the model's own heads, or None.

    Args:
        draft: The draft model, if it is open already.

    Raises:
        ConfigError: The options of speculation do not go together.
        CheckpointError: Its files are missing or broken.
    """
    options.check_method()
    if options.spec_method == "mtp" and heads_of(source.model) is not None:
        return source.heads()
    if options.draft_model is None:
        return None
    return draft if draft is not None else open_source(options.draft_model)


def _stored_draft(stored: Manifest, model: Model) -> Draft | None:
    """What proposes beside the model in a stored core."""
    if stored.options.spec_method == "mtp":
        return heads_of(model)
    return model_from_config(stored.draft.model_config) if stored.draft is not None else None


def load_core(
    directory: pathlib.Path | str,
    progress: Progress = silent,
    *,
    options: CoreOptions | Mapping[str, Any] | None = None,
    model: Model | None = None,
    draft: Draft | None = None,
    factory: ProgramFactory | None = None,
) -> PreparedCore:
    """Loads a core without its model; programs that do not fit this process are compiled again.

    Args:
        options: What the caller wants of the core, as in `core.open_core`. It can only leave out rounds
            that are there: speculation, those of more proposals, those of more target rows.
        model, draft: In place of those of the stored configurations.

    Raises:
        CoreError: No core, an unreadable manifest, or damaged weights or text files.
        ConfigError: The memory plan does not fit what is free now, or the core was made with other options.
    """
    root = pathlib.Path(directory)
    notes, progress = _collecting(progress)
    loaded_options(root, read_manifest(root), options)  # no lock file in a directory that is no core
    writable = is_writable(root)
    with _locked(root, writable, progress):
        stored = read_manifest(root)
        if not stored.weights:
            raise CoreError(f"{root} was not prepared to the end and holds no weights; prepare it again")
        if not stored.text and not (root / TEXT_DIR).is_dir():
            raise CoreError(f"{root} was not prepared to the end and holds no tokenizer; prepare it again")
        if stored.draft is not None and not stored.draft_weights:
            raise CoreError(f"{root} was not prepared to the end and holds no draft model; prepare it again")
        wanted = loaded_options(root, stored, options)
        model = model or model_from_config(stored.source.model_config)
        draft = draft or _stored_draft(stored, model)
        used_factory = (factory or default_factory()).with_draft(draft)
        manifest, plan = reopened_manifest(stored, model, used_factory, draft)
        return _open(
            _Job(
                root=root,
                writable=writable,
                source=None,
                model=model,
                draft_source=None,
                draft=draft,
                options=wanted,
                plan=plan,
                manifest=manifest,
                stored=stored,
                on_disk=stored,
                reject=why_rejected(stored, manifest),
                factory=used_factory,
                progress=progress,
                notes=notes,
            )
        )


def _collecting(progress: Progress) -> tuple[list[str], Progress]:
    """`progress` made safe for threads, and the list that its notes also go to."""
    notes: list[str] = []

    def call(stage: str, done: int, total: int, detail: str = "") -> None:
        if stage == NOTE:
            notes.append(detail)
        progress(stage, done, total, detail)

    return notes, serialised(call)


@contextlib.contextmanager
def _locked(root: pathlib.Path, writable: bool, progress: Progress) -> Iterator[None]:
    """Holds the lock of a directory that can be written, after sweeping up what a killed holder left."""
    if not writable:
        progress(NOTE, 0, 0, f"{root} cannot be written: programs compiled now are not kept")
        yield
        return
    with exclusive(root, lambda: progress(NOTE, 0, 0, f"{root} is in use by another process; waiting")):
        remove_leftovers(root)
        yield


def _open(job: _Job) -> PreparedCore:
    """Steps 3 to 5 of the module docstring."""
    _keep_stored(job)
    _checkpoint(job)
    params = _weights(job)
    text = _text(job)
    _checkpoint(job)
    compiler = Compiler(job.model, job.manifest.dims, job.manifest.options.dtype, job.factory)
    store = ProgramStore(
        directory=job.root,
        manifest=job.manifest,
        compiler=compiler,
        writable=job.writable,
        reject=job.reject,
        retry_failed=job.source is not None,
        progress=job.progress,
        wanted=loaded_shapes(job.manifest.catalog, job.options),
    )
    programs = store.obtain()
    calls = {shape: executable.call for shape, executable in programs.executables.items()}
    runner = DeviceRunner(calls, params, compiler.compile_new_state(), job.manifest.dims)
    job.writable = store.writable
    try:
        smoke(runner, sorted(programs.executables), job.manifest.dims, job.progress)
    except BaseException as error:
        runner.close()
        if isinstance(error, FailedProgram):
            _discard(job, programs, error)
        raise
    job.on_disk = programs.manifest
    job.manifest = dataclasses.replace(programs.manifest, complete=True)
    _checkpoint(job)
    _remove_stale(job)
    return _core(job, programs, params, runner, text)


def _keep_stored(job: _Job) -> None:
    """Takes over from the stored manifest what is still valid."""
    if job.stored is None:
        return
    kept: dict[str, Any] = {"complete": job.stored.complete and not job.reject}
    if not job.reject:
        wanted = frozenset(job.manifest.catalog)
        kept["programs"] = tuple(entry for entry in job.stored.programs if entry.shape in wanted)
        kept["failed"] = tuple(failed for failed in job.stored.failed if failed.shape in wanted)
    if job.source is None or same_weights(job.stored, job.manifest):
        kept |= {"weights": job.stored.weights, "text": job.stored.text}
    if job.source is None or same_draft_weights(job.stored, job.manifest):
        kept["draft_weights"] = job.stored.draft_weights
    job.manifest = dataclasses.replace(job.manifest, **kept)


def _checkpoint(job: _Job) -> None:
    """Writes the manifest if it changed, so that a kill from here on loses nothing stored."""
    if job.writable and job.manifest != job.on_disk:
        try:
            write_manifest(job.root, job.manifest)
        except OSError as error:
            _give_up_writing(job, error)
            return
    job.on_disk = job.manifest


def _give_up_writing(job: _Job, error: OSError) -> None:
    """A full or failing disk costs the next start its time, never this one its core."""
    job.writable = False
    job.progress(NOTE, 0, 0, f"{job.root} cannot be written ({error.strerror or error}): nothing more is kept there")


def _weights(job: _Job) -> Any:
    """The weights on the device, of both models if there are two; `job.manifest` then tells which files keep them."""
    target, files = _tree(job, job.source, job.model, job.manifest.weights, WEIGHTS_DIR)
    job.manifest = dataclasses.replace(job.manifest, weights=files)
    if job.draft is None:
        return target
    draft, files = _tree(job, job.draft_source, job.draft, job.manifest.draft_weights, DRAFT_WEIGHTS_DIR)
    job.manifest = dataclasses.replace(job.manifest, draft_weights=files)
    return {"target": target, "draft": draft}


def _tree(
    job: _Job, source: Source | None, model: Draft, kept: tuple[StoredFile, ...], directory: str
) -> tuple[Any, tuple[StoredFile, ...]]:
    """One model's weights on the device, and the files in the core's `directory` that keep them."""
    dtype = job.manifest.options.dtype
    if kept or source is None:
        try:
            return restore(job.root, kept, model, dtype, job.progress, directory), kept
        except CoreError as error:
            if source is None:
                raise CoreError(f"{job.root}: {error}; prepare the core again from its model") from error
            job.progress(NOTE, 0, 0, f"{error}; reading the model's weights again")
    params = convert(source, dtype, job.progress)
    return params, save(job.root, params, job.progress, directory) if job.writable else ()


def _text(job: _Job) -> pathlib.Path:
    """Where the text files lie: in the core, or with the model if the core cannot be written."""
    kept = job.manifest.text
    if kept or job.source is None:
        try:
            check_files(job.root, kept)
            return job.root / TEXT_DIR
        except CoreError as error:
            if job.source is None:
                raise CoreError(f"{job.root}: {error}; prepare the core again from its model") from error
    files = job.source.text_files()
    if not job.writable:
        return pathlib.Path(files.path)
    try:
        copied = copy_text_files(files, job.root)
    except OSError as error:
        job.manifest = dataclasses.replace(job.manifest, text=())
        _give_up_writing(job, error)
        return pathlib.Path(files.path)
    job.manifest = dataclasses.replace(job.manifest, text=copied)
    return job.root / TEXT_DIR


def _discard(job: _Job, programs: ProgramSet, failed: FailedProgram) -> None:
    """Forgets the stored copy of a program that failed, so that the next start compiles it.

    Raises:
        CoreError: The failure, with what to do; nothing, if the program was compiled just now.
    """
    if programs.reports[failed.shape].status is not ProgramStatus.LOADED or not job.writable:
        return
    kept = tuple(entry for entry in programs.manifest.programs if entry.shape != failed.shape)
    job.manifest = dataclasses.replace(programs.manifest, programs=kept)
    _checkpoint(job)
    raise CoreError(f"{failed}; its stored copy is discarded, start again to compile it") from failed


def _remove_stale(job: _Job) -> None:
    """Deletes program files that the manifest does not name (another catalogue's), and no other file."""
    if not job.writable:
        return
    kept = {entry.file for entry in job.manifest.programs}
    for path in (job.root / PROGRAMS_DIR).glob("*"):
        if path.relative_to(job.root).as_posix() not in kept and is_program_file(path):
            path.unlink(missing_ok=True)
    if job.manifest.draft is None and job.stored is not None and job.stored.draft is not None:
        shutil.rmtree(job.root / DRAFT_WEIGHTS_DIR, ignore_errors=True)
    if not job.manifest.programs:
        with contextlib.suppress(OSError):  # absent, or somebody keeps something there
            (job.root / PROGRAMS_DIR).rmdir()


def _core(job: _Job, programs: ProgramSet, params: Any, runner: DeviceRunner, text_path: pathlib.Path) -> PreparedCore:
    info = job.manifest.source
    return PreparedCore(
        catalog=Catalog(tuple(programs.executables)),
        dims=job.manifest.dims,
        model=job.model,
        draft=job.draft,
        options=job.options,
        memory=job.plan,
        report=tuple(programs.reports[shape] for shape in sorted(programs.reports)),
        notes=tuple(job.notes),
        source_info=CoreSourceInfo(
            name=info.name,
            family=info.family,
            num_params=info.num_params,
            eos_token_ids=info.eos_token_ids,
            bos_token_id=info.bos_token_id,
            text_path=text_path,
        ),
        directory=job.root,
        params=params,
        runner=runner,
    )
