"""Copies into a core what serving needs of a model besides its weights.

Tokenizer, chat template and configuration go to the core's `text/`, so that a core can be
served where the model is not. For a GGUF model that is one GGUF without tensors.
"""

from __future__ import annotations

import pathlib
import shutil
import uuid
from typing import Any, Protocol

import gguf

from helios_jax.aot.manifest import TEXT_DIR, StoredFile
from helios_jax.aot.store import TEMP_PREFIX, sha256_file
from helios_jax.errors import CheckpointError

HF_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
GGUF_NAME = "tokenizer.gguf"


class TextFiles(Protocol):
    """What `ModelSource.text_files()` gives: `kind` is "hf" (a directory) or "gguf" (a file)."""

    @property
    def kind(self) -> str:
        """ "hf" or "gguf"."""

    @property
    def path(self) -> pathlib.Path:
        """The directory, or the file."""


def copy_text_files(source: TextFiles, core: pathlib.Path) -> tuple[StoredFile, ...]:
    """Replaces the core's `text/` by the source's files.

    Raises:
        CheckpointError: The source has no tokenizer, or it cannot be read.
        OSError: The core cannot be written.
    """
    target, temp = core / TEXT_DIR, core / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    temp.mkdir(parents=True)
    try:
        if source.kind == "gguf":
            copy_gguf_metadata(pathlib.Path(source.path), temp / GGUF_NAME)
        else:
            for name in HF_FILES:
                if (pathlib.Path(source.path) / name).is_file():
                    shutil.copyfile(pathlib.Path(source.path) / name, temp / name)
        shutil.rmtree(target, ignore_errors=True)
        temp.rename(target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return describe(core, target)


def describe(core: pathlib.Path, directory: pathlib.Path) -> tuple[StoredFile, ...]:
    """The files below `directory` with size and digest, by path relative to the core."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return tuple(
        StoredFile(path=path.relative_to(core).as_posix(), bytes=path.stat().st_size, sha256=sha256_file(path))
        for path in files
    )


def copy_gguf_metadata(source: pathlib.Path, target: pathlib.Path) -> None:
    """Writes every key and value of a GGUF, and none of its tensors.

    Raises:
        CheckpointError: `source` is not a readable GGUF.
    """
    try:
        reader = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(target, arch=_value(reader.fields["general.architecture"]))
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":  # written by the writer itself
                continue
            kind = field.types[0]
            sub_type = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, _value(field), kind, sub_type=sub_type)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{source} is not a readable GGUF file: {error}") from error
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _value(field: gguf.ReaderField) -> Any:
    return field.contents()
