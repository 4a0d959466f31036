"""GGUF files, read by their headers; blocks are dequantised by the `gguf` library.

The header is walked here and not with `gguf.GGUFReader`: that one makes an array object for
each of the vocabulary's strings (seconds at every start), and reports a truncated file as
an arithmetic accident. Tests compare both readers.

Layout, little endian: magic, version, tensor count, key/value count; key/values (string,
type, value); tensor records (name, dimensions innermost first, type, offset); padding to
`general.alignment`; data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from helios_jax.errors import CheckpointError
from helios_jax.models.checkpoint_files import StoredTensor, check_extent, one_line

VERSIONS = (2, 3)
MAX_KEPT_ARRAY = 4096  # longer arrays (vocabularies) are walked over, only their length is kept
MAX_DIMS = 4
SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
)
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The header of one GGUF file.

    Attributes:
        metadata: Key -> scalar, string, or list of short arrays of scalars.
        array_lengths: Key -> length of every array, kept or not.
        tensors: By their GGUF names; shapes row major.
    """

    path: Path
    metadata: dict[str, Any]
    array_lengths: dict[str, int]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """Reads primitives from a buffer, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        if self.at + length > len(self.data):
            raise EOFError
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def skip_strings(self, count: int) -> None:
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at


def open_gguf(path: Path) -> GGUFFile:
    """Header, metadata and tensor places of a GGUF file; reads no weights.

    Raises:
        CheckpointError: Missing, truncated, not GGUF, big endian or of an unknown version.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (EOFError, struct.error, IndexError) as error:
        raise CheckpointError(f"{path} is truncated within its header; fetch it again") from error
    except (OSError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {one_line(error)}") from error


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {magic!r}")
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise CheckpointError(f"{path} is GGUF version {version} (or big endian); versions {VERSIONS} are read")
    num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        kind = GGUFValueType(cursor.scalar("<I"))
        if kind is GGUFValueType.ARRAY:
            lengths[key], kept = _array(cursor)
            if kept is not None:
                metadata[key] = kept
        else:
            metadata[key] = _value(cursor, kind)
    records = [_record(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; it must be a positive integer")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind_id, offset in records:
        tensors[name] = _stored(path, name, shape, kind_id, start + offset)
        check_extent(tensors[name], name, len(cursor.data))
    return GGUFFile(path, metadata, lengths, tensors)


def _value(cursor: _Cursor, kind: GGUFValueType) -> Any:
    return cursor.string() if kind is GGUFValueType.STRING else cursor.scalar(_SCALARS[kind])


def _array(cursor: _Cursor) -> tuple[int, list[Any] | None]:
    """Length and, for short arrays of scalars, the values of an array."""
    kind, length = GGUFValueType(cursor.scalar("<I")), cursor.scalar("<Q")
    if length > len(cursor.data):
        raise EOFError
    if kind is GGUFValueType.STRING:
        cursor.skip_strings(length)
        return length, None
    if kind is GGUFValueType.ARRAY:
        for _ in range(length):
            _array(cursor)
        return length, None
    if length <= MAX_KEPT_ARRAY:
        return length, [_value(cursor, kind) for _ in range(length)]
    cursor.at += length * struct.calcsize(_SCALARS[kind])
    return length, None


def _record(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.string(), cursor.scalar("<I")
    if num_dims > MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    dims = [cursor.scalar("<Q") for _ in range(num_dims)]
    return name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q")


def _stored(path: Path, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> StoredTensor:
    known = {kind.value: kind for kind in GGMLQuantizationType}
    kind = known.get(kind_id)
    if kind not in SUPPORTED_TYPES:
        label = kind.name if kind else f"number {kind_id}"
        names = ", ".join(t.name for t in SUPPORTED_TYPES)
        raise CheckpointError(f"{path}: tensor {name} has type {label}; supported are {names}")
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise CheckpointError(f"{path}: rows of tensor {name} {shape} are no multiple of the {kind.name} block {block}")
    if len(shape) < 2 and block > 1:  # one quantised row: it cannot be cut into elements
        raise CheckpointError(f"{path}: tensor {name} has one axis and type {kind.name}; F32, F16 or BF16 are needed")
    row_bytes = math.prod(shape[1:]) * block_bytes // block
    return StoredTensor(
        path=path,
        offset=offset,
        shape=shape,
        row_bytes=row_bytes,
        decode=functools.partial(_decode, kind=kind),
        encoding=kind.name,
    )


def _decode(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8 [rows, row_bytes] -> values of whole rows."""
    if kind is GGMLQuantizationType.BF16:
        return raw.view(np.dtype(jnp.bfloat16))
    if kind is GGMLQuantizationType.F16:
        return raw.view(np.float16)
    if kind is GGMLQuantizationType.F32:
        return raw.view(np.float32)
    return gguf.dequantize(raw, kind)
