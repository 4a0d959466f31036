"""Tensors lying in files, whatever the format: where, how encoded, and how to read one.

A format (`safetensors_files`, `gguf_files`) reads headers only and gives a `StoredTensor` for
each name. `read_tensor` then reads one tensor in blocks of rows and converts each block at
once, so reading a tensor costs its converted size plus one block of host memory. Files are
read with plain reads, not mapped: pages of a mapping would count as the process's memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helios_jax.errors import CheckpointError

BLOCK_BYTES = 8 << 20  # stored bytes read and converted at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        path, offset: Where its first byte lies.
        shape: As the model uses it (row major).
        row_bytes: Stored bytes of one index of the first axis (of everything for a scalar).
        decode: uint8 [rows, row_bytes] -> array of rows * row elements, a float type.
        encoding: Name of the stored type, for messages.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    row_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    encoding: str

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def pieces(self) -> tuple[StoredTensor, ...]:
        """What lies in one place of a file each: the tensor itself, unless it is joined of others."""
        return (self,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedTensor(StoredTensor):
    """A tensor whose elements are those of `parts`, one part after the other. Its own place is the first one's."""

    parts: tuple[StoredTensor, ...]

    @property
    def pieces(self) -> tuple[StoredTensor, ...]:
        return self.parts


def join(parts: tuple[StoredTensor, ...], shape: tuple[int, ...]) -> JoinedTensor:
    """The tensor of `shape` that `parts` are in row-major order; their elements must be as many."""
    first = parts[0]
    return JoinedTensor(
        path=first.path,
        offset=first.offset,
        shape=shape,
        row_bytes=sum(part.num_bytes for part in parts) // max(1, shape[0]),
        decode=first.decode,
        encoding=first.encoding,
        parts=parts,
    )


def one_line(error: BaseException) -> str:
    """The message of a foreign exception on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def check_extent(tensor: StoredTensor, name: str, file_bytes: int) -> None:
    """Refuses a tensor that ends behind its file.

    Raises:
        CheckpointError: The file was truncated.
    """
    end = tensor.offset + tensor.num_bytes
    if tensor.offset < 0 or end > file_bytes:
        raise CheckpointError(
            f"{tensor.path} is truncated: tensor {name} ends at byte {end}, the file has {file_bytes}; fetch it again"
        )


def read_tensor(tensor: StoredTensor, dtype: np.dtype, row_order: np.ndarray | None = None) -> np.ndarray:
    """One tensor, converted.

    Args:
        dtype: Type of the result.
        row_order: `row_order[i]` is where stored row i belongs; None = where it lies.

    Returns:
        A fresh array of `tensor.shape`.

    Raises:
        CheckpointError: The file cannot be read, ends early or holds a damaged block.
    """
    if isinstance(tensor, JoinedTensor):
        return _read_joined(tensor, dtype)
    rows = tensor.num_rows
    out = np.empty((rows, math.prod(tensor.shape[1:])), dtype)
    block = max(1, BLOCK_BYTES // max(1, tensor.row_bytes))
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, rows, block):
                stop = min(rows, start + block)
                raw = np.fromfile(file, np.uint8, (stop - start) * tensor.row_bytes)
                if raw.size != (stop - start) * tensor.row_bytes:
                    raise CheckpointError(f"{tensor.path} is truncated; fetch it again")
                where = slice(start, stop) if row_order is None else row_order[start:stop]
                with np.errstate(over="ignore"):  # a value beyond float16 becomes inf, as everywhere
                    out[where] = tensor.decode(raw.reshape(stop - start, tensor.row_bytes)).reshape(stop - start, -1)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.path} cannot be read: {one_line(error)}") from error
    return out.reshape(tensor.shape)


def _read_joined(tensor: JoinedTensor, dtype: np.dtype) -> np.ndarray:
    """Part after part into one array: its size and one part of host memory."""
    out, done = np.empty(math.prod(tensor.shape), dtype), 0
    for part in tensor.parts:
        size = math.prod(part.shape)
        out[done : done + size] = read_tensor(part, dtype).ravel()
        done += size
    return out.reshape(tensor.shape)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        CheckpointError: It is missing, unreadable, or not an object.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__}; an object is needed")
    return data


Tensors = Mapping[str, StoredTensor]
