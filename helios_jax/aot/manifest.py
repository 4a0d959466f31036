"""`manifest.json`: what a core directory holds, and for whom it was made.

Plain JSON, so it can be read by people, compared and checked before anything else in the
directory is touched. It is rewritten (atomically) after every program that compiles, so a
killed prepare continues where it was.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from helios_jax.aot.abi import Dims
from helios_jax.aot.options import CoreOptions
from helios_jax.aot.store import write_atomic
from helios_jax.errors import CoreError, HeliosError
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource

FORMAT = 2
MANIFEST_NAME = "manifest.json"
PROGRAMS_DIR = "programs"
WEIGHTS_DIR = "weights"
DRAFT_WEIGHTS_DIR = "draft-weights"
TEXT_DIR = "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramEntry:
    """One stored executable. Bytes and seconds as in `report.ProgramReport`."""

    shape: ProgramShape
    file: str
    file_bytes: int
    sha256: str
    compile_seconds: float
    temp_bytes: int
    argument_bytes: int
    alias_bytes: int
    donated_bytes: int


@dataclasses.dataclass(frozen=True)
class FailedEntry:
    """An optional program that did not compile, and XLA's or our reason."""

    shape: ProgramShape
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """The model that a core was made from, as far as serving needs it.

    Attributes:
        name: Display name.
        family: Registered model family.
        config_digest: sha256 of the model configuration.
        weights_digest: Cheap fingerprint of the weight files.
        num_params: Number of parameters.
        eos_token_ids: Any of these ends an answer.
        bos_token_id: Token before a prompt, or None.
        model_config: The whole model configuration, so that a core needs no checkpoint.
        text_kind: "hf" or "gguf"; the files lie in the core's `text/`.
    """

    name: str
    family: str
    config_digest: str
    weights_digest: str
    num_params: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    text_kind: str
    model_config: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftInfo:
    """The draft model of a core, as `SourceInfo` describes its model; its tokenizer is the model's."""

    name: str
    family: str
    config_digest: str
    weights_digest: str
    num_params: int
    model_config: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file below the core directory."""

    path: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that decides whether the files of a core may be used.

    `options` are resolved; `asked` are those the caller gave (a later prepare with the same
    ones keeps the memory plan, whatever is free then). `draft` and `draft_weights` are those of the
    draft model, if the core has one.
    """

    helios_version: str
    fingerprint: dict[str, str]
    source: SourceInfo
    asked: CoreOptions
    options: CoreOptions
    dims: Dims
    memory: dict[str, Any]
    catalog: tuple[ProgramShape, ...]
    programs: tuple[ProgramEntry, ...] = ()
    failed: tuple[FailedEntry, ...] = ()
    weights: tuple[StoredFile, ...] = ()
    text: tuple[StoredFile, ...] = ()
    draft: DraftInfo | None = None
    draft_weights: tuple[StoredFile, ...] = ()
    complete: bool = False

    def entry(self, name: str) -> ProgramEntry | None:
        """The stored program called `name`, if there is one."""
        return next((e for e in self.programs if e.shape.name == name), None)


def shape_to_json(shape: ProgramShape) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, str) else v for k, v in dataclasses.asdict(shape).items()}


def shape_from_json(data: dict[str, Any]) -> ProgramShape:
    return ProgramShape(
        **{
            **data,
            "kind": ProgramKind(data["kind"]),
            "proposal_source": ProposalSource(data["proposal_source"]),
            "allocation": Allocation(data["allocation"]),
        }
    )


def _to_json(manifest: Manifest) -> dict[str, Any]:
    plain: dict[str, Any] = {"format": FORMAT, **dataclasses.asdict(manifest)}
    plain["asked"], plain["options"] = manifest.asked.to_json(), manifest.options.to_json()
    return plain


def _from_json(data: dict[str, Any]) -> Manifest:
    def shaped(items: list[dict[str, Any]], cls: type) -> tuple[Any, ...]:
        return tuple(cls(**{**item, "shape": shape_from_json(item["shape"])}) for item in items)

    data = {"draft": None, "draft_weights": []} | data  # cores from before there were draft models
    fields = {field.name: data[field.name] for field in dataclasses.fields(Manifest)}
    source = fields["source"]
    fields["source"] = SourceInfo(**{**source, "eos_token_ids": tuple(source["eos_token_ids"])})
    fields["asked"], fields["options"] = CoreOptions(**fields["asked"]), CoreOptions(**fields["options"])
    fields["dims"] = Dims(**fields["dims"])
    fields["catalog"] = tuple(shape_from_json(item) for item in fields["catalog"])
    fields["programs"] = shaped(fields["programs"], ProgramEntry)
    fields["failed"] = shaped(fields["failed"], FailedEntry)
    fields["weights"] = tuple(StoredFile(**item) for item in fields["weights"])
    fields["text"] = tuple(StoredFile(**item) for item in fields["text"])
    fields["draft"] = DraftInfo(**fields["draft"]) if fields["draft"] is not None else None
    fields["draft_weights"] = tuple(StoredFile(**item) for item in fields["draft_weights"])
    return Manifest(**fields)


def write_manifest(directory: pathlib.Path, manifest: Manifest) -> None:
    """Replaces the manifest atomically."""
    text = json.dumps(_to_json(manifest), indent=1, sort_keys=True) + "\n"
    write_atomic(directory / MANIFEST_NAME, text.encode())


def read_manifest(directory: pathlib.Path) -> Manifest:
    """The manifest of a core.

    Raises:
        CoreError: No core there, damaged, or of another format; one line with what to do.
    """
    path = directory / MANIFEST_NAME
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CoreError(f"{directory} holds no prepared core: {MANIFEST_NAME} is missing") from error
    except (OSError, ValueError) as error:
        raise CoreError(f"{path} is damaged or unreadable; prepare the core again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise CoreError(f"{path} has format {found!r}, this version reads {FORMAT}; prepare the core again")
    try:
        manifest = _from_json(data)
        _check_paths(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, HeliosError) as error:
        raise CoreError(f"{path} is damaged ({error}); prepare the core again") from error
    return manifest


def _check_paths(manifest: Manifest) -> None:
    """Every file lies below the core directory, whatever the manifest claims."""
    files = (*manifest.weights, *manifest.text, *manifest.draft_weights)
    for path in [*(entry.file for entry in manifest.programs), *(file.path for file in files)]:
        pure = pathlib.PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ValueError(f"path {path!r} leaves the core")
