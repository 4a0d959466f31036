"""Safetensors files and directories of shards, read by their headers.

A file is an 8-byte little-endian length, that many bytes of JSON (name -> dtype, shape,
data_offsets), then the data. A sharded checkpoint has `model.safetensors.index.json`, whose
`weight_map` says which file holds which tensor.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from helios_jax.errors import CheckpointError
from helios_jax.models.checkpoint_files import StoredTensor, check_extent, one_line, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
STORED_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: Missing, truncated, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is truncated or not a safetensors file: its header needs {length} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {one_line(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a readable safetensors file: its header is no object")
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    for name, tensor in tensors.items():
        check_extent(tensor, name, size)
    return tensors


def open_directory(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint directory: sharded by its index, one file, or every *.safetensors.

    Raises:
        CheckpointError: A file is missing or broken, or there is none.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return _open_sharded(directory, index)
    single = directory / SINGLE_NAME
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        other = [p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in sorted(directory.glob(pattern))]
        hint = f"; {other[0]} is a pickle, convert it to safetensors" if other else ""
        raise CheckpointError(f"{directory} holds no *.safetensors file{hint}")
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        found = open_file(path)
        if twice := tensors.keys() & found.keys():
            raise CheckpointError(f"tensor {min(twice)} is in {path} and in another file of {directory}")
        tensors |= found
    return tensors


def _open_sharded(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    outside = [file for file in weight_map.values() if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file of this directory")
    shards = {file: open_file(directory / file) for file in sorted(set(weight_map.values()))}
    absent = [name for name, file in weight_map.items() if name not in shards[file]]
    if absent:
        raise CheckpointError(f"{directory / weight_map[absent[0]]} lacks tensor {absent[0]}, which {index.name} lists")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _stored(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        encoding, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of tensor {name} is damaged") from error
    dtype = STORED_DTYPES.get(encoding)
    # Integer tensors (buffers, quantised weights) may lie beside the weights; they are refused when asked for.
    itemsize = dtype.itemsize if dtype else (end - begin) // max(1, math.prod(shape))
    if min(shape, default=1) < 0 or (dtype and end - begin != math.prod(shape) * itemsize):
        raise CheckpointError(f"{path}: tensor {name} of shape {shape} and type {encoding} has {end - begin} bytes")
    return StoredTensor(
        path=path,
        offset=data_start + begin,
        shape=shape,
        row_bytes=math.prod(shape[1:]) * itemsize,
        decode=_viewer(path, name, encoding, dtype),
        encoding=encoding,
    )


def _viewer(path: Path, name: str, encoding: str, dtype: np.dtype | None) -> Any:
    def refuse(raw: np.ndarray) -> np.ndarray:
        raise CheckpointError(unsupported(path, name, encoding))

    return refuse if dtype is None else lambda raw: raw.view(dtype)


def unsupported(path: Path, name: str, encoding: str) -> str:
    """The message for a tensor whose type cannot be read."""
    return f"{path}: tensor {name} has type {encoding}; supported are {', '.join(STORED_DTYPES)}"
