"""What became of each program, and the table that `helios-jax inspect` prints."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from typing import Any

from helios_jax.aot.manifest import Manifest, ProgramEntry, read_manifest
from helios_jax.aot.memory import human
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape


class ProgramStatus(enum.StrEnum):
    LOADED = "loaded"
    COMPILED = "compiled"
    MISSING = "missing"  # optional and did not compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One line of the report that `prepare` and `load_core` make.

    Attributes:
        shape: The program.
        status: Loaded from the core, compiled now, or missing.
        reason: Why it was not loaded, or why it is missing; empty when loaded.
        compile_seconds: Tracing, lowering and XLA, when it was compiled (maybe earlier).
        load_seconds: Reading, checking and deserialising; 0 when compiled now.
        file_bytes: Size of its file; 0 when it is not stored.
        temp_bytes: Temporaries of one execution.
        argument_bytes: Arguments of one execution, weights and state included.
        alias_bytes: Arguments that are updated in place.
        donated_bytes: Size of the donated device state; equal to `alias_bytes`.
    """

    shape: ProgramShape
    status: ProgramStatus
    reason: str = ""
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    file_bytes: int = 0
    temp_bytes: int = 0
    argument_bytes: int = 0
    alias_bytes: int = 0
    donated_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectRow:
    """One program of a core on disk, for `helios-jax inspect`."""

    name: str
    kind: str
    batch_capacity: int
    token_capacity: int
    proposal_depth: int = 0
    packed_capacity: int = 0
    prefill_capacity: int = 0
    compile_seconds: float = 0.0
    file_bytes: int = 0
    temp_bytes: int = 0
    argument_bytes: int = 0
    donated_bytes: int = 0
    alias_bytes: int = 0
    problem: str = ""  # empty, or why this program would be compiled again or is missing


INSPECT_HEADER = (
    *(
        "program",
        "rows",
        "tokens",
        "proposals",
        "packed",
        "prompt",
        "compile",
        "file",
        "temporaries",
        "arguments",
        "donated",
    ),
    "problem",
)


def inspect_core(directory: pathlib.Path | str) -> tuple[InspectRow, ...]:
    """The programs of a core, from its manifest and file sizes; loads and runs nothing.

    Raises:
        CoreError: No core there, or its manifest cannot be read.
    """
    root = pathlib.Path(directory)
    manifest = read_manifest(root)
    rows = [_row(entry, _file_problem(root, entry)) for entry in manifest.programs]
    rows += [
        InspectRow(
            **_shape_columns(failed.shape),
            problem=f"did not compile: {failed.error}",
        )
        for failed in manifest.failed
    ]
    return tuple(
        sorted(rows, key=lambda row: (row.kind, row.batch_capacity, row.token_capacity, row.packed_capacity, row.name))
    )


def inspect_caption(directory: pathlib.Path | str) -> str:
    """One line about what a core's rounds and mixed programs are made of; empty in a core without.

    Raises:
        CoreError: As `inspect_core`.
    """
    manifest = read_manifest(pathlib.Path(directory))
    return "; ".join(part for part in (_rounds_caption(manifest), _mixed_caption(manifest)) if part)


def _mixed_caption(manifest: Manifest) -> str:
    shapes = [shape for shape in manifest.catalog if shape.kind is ProgramKind.MIXED]
    if not shapes:
        return ""
    prompt, packed = max(s.prefill_capacity for s in shapes), max(s.packed_capacity for s in shapes)
    return f"mixed programs: {len(shapes)}, a prompt chunk of up to {prompt} tokens, {packed} packed rows at most"


def _rounds_caption(manifest: Manifest) -> str:
    options = manifest.options
    if options.spec_method == "none":
        return ""
    rounds = f"{options.num_draft_tokens} proposals, {options.speculative_token_capacity} target rows"
    draft = f" by {manifest.draft.name}, {manifest.draft.num_params} parameters" if manifest.draft else ""
    return f"speculation: {options.spec_method}{draft}, at most {rounds} a round"


def _shape_columns(shape: ProgramShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "kind": str(shape.kind),
        "batch_capacity": shape.batch_capacity,
        "token_capacity": shape.token_capacity,
        "proposal_depth": shape.proposal_depth,
        "packed_capacity": shape.packed_capacity,
        "prefill_capacity": shape.prefill_capacity,
    }


def _row(entry: ProgramEntry, problem: str) -> InspectRow:
    return InspectRow(
        **_shape_columns(entry.shape),
        compile_seconds=entry.compile_seconds,
        file_bytes=entry.file_bytes,
        temp_bytes=entry.temp_bytes,
        argument_bytes=entry.argument_bytes,
        donated_bytes=entry.donated_bytes,
        alias_bytes=entry.alias_bytes,
        problem=problem,
    )


def _file_problem(root: pathlib.Path, entry: ProgramEntry) -> str:
    try:
        size = (root / entry.file).stat().st_size
    except OSError:
        return "file is missing"
    return "" if size == entry.file_bytes else f"file has {size} bytes, the manifest says {entry.file_bytes}"


def format_row(row: InspectRow) -> tuple[str, ...]:
    """The columns of `INSPECT_HEADER` as text."""
    return (
        row.name,
        str(row.batch_capacity),
        str(row.token_capacity or "-"),
        str(row.proposal_depth or "-"),
        str(row.packed_capacity or "-"),
        str(row.prefill_capacity or "-"),
        f"{row.compile_seconds:.2f} s",
        human(row.file_bytes),
        human(row.temp_bytes),
        human(row.argument_bytes),
        human(row.donated_bytes),
        row.problem,
    )


def summary(reports: tuple[ProgramReport, ...]) -> str:
    """One line: how many programs were loaded, compiled and missing."""
    counts = {status: sum(r.status is status for r in reports) for status in ProgramStatus}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
