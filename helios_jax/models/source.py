"""A model on disk, opened but not read: `open_source`.

Life of a `ModelSource`: 1. `open_source` finds the files and reads headers and configuration;
2. every tensor that the model needs is checked for presence, type and shape, so that a broken
checkpoint is refused before anything is allocated; 3. `load_params` streams the tensors to
the device, largest first: when the large ones pass through the host little else is there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from helios_jax.errors import CheckpointError
from helios_jax.models import safetensors_files
from helios_jax.models.checkpoint_files import StoredTensor, Tensors, read_json, read_tensor
from helios_jax.models.fields import Fields, token_ids
from helios_jax.models.gguf_files import open_gguf
from helios_jax.models.interface import Draft, Model, Params, heads_of, recurrent_layers_of
from helios_jax.models.names import locate
from helios_jax.models.params import dtype_of, leaf_bytes, leaves, num_params, tree_of
from helios_jax.models.registry import gguf_family, hf_family, model_config

GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LAYERS = "model.layers."

Put = Callable[[np.ndarray], Any]
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Where the text room finds tokenizer and template: an "hf" directory or a "gguf" file."""

    kind: str
    path: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """An opened checkpoint.

    Attributes:
        name: What the user typed for short names and hub ids; else the name of the file or directory.
        model: Equations and shapes.
        tensors: Where the tensor of every parameter lies, by parameter name.
        row_order: Parameter name -> where its stored rows belong, or None.
        stored: Every tensor of the checkpoint, those of multi-token-prediction heads among them.
        eos_token_ids: Any of these ends an answer.
        bos_token_id: Token before a prompt, or None.
        file_facts: Name, size and time of every weight file, as they were when the headers were read.
    """

    name: str
    model: Model
    tensors: Tensors
    file_facts: tuple[tuple[str, int, int], ...]
    row_order: Callable[[str], np.ndarray | None]
    text: TextSource
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    stored: Tensors = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters; a tied matrix counts once."""
        return num_params(self.model.abstract_params("float32"))

    def model_config(self) -> dict[str, Any]:
        """The configuration as plain JSON values; `registry.build_model` makes the model of it."""
        return model_config(self.model)

    def config_digest(self) -> str:
        """sha256 of the model configuration: equal digests mean equal programs."""
        return hashlib.sha256(json.dumps(self.model_config(), sort_keys=True).encode()).hexdigest()

    def weights_digest(self) -> str:
        """Fingerprint of the weight files by name, size and time; reads no data."""
        return hashlib.sha256(json.dumps(self.file_facts).encode()).hexdigest()

    def text_files(self) -> TextSource:
        """Where tokenizer, template and configuration lie."""
        return self.text

    def heads(self) -> ModelSource:
        """The multi-token-prediction heads as a source of their own; their `model` is an `MtpHeads`.

        Raises:
            CheckpointError: The model has none, or a tensor of theirs is missing or has another shape.
        """
        heads = heads_of(self.model)
        if heads is None:
            raise CheckpointError(f"{self.name}: a {self.model.family} model without multi-token-prediction heads")
        chosen = _find_tensors(heads, self.stored, str, str(self.text.path))
        _check_stored_types(chosen)
        model: Any = heads
        return dataclasses.replace(
            self, name=f"{self.name} (mtp)", model=model, tensors=chosen, file_facts=_file_facts(chosen)
        )

    def load_params(self, dtype: Any, put: Put = jax.device_put, progress: Progress | None = None) -> Params:
        """The weights in `dtype`, tensor by tensor.

        Args:
            dtype: "float32", "bfloat16" or "float16".
            put: Moves one host array to its device; the host copy is dropped once it arrived.
            progress: Called with (bytes done, bytes in all) of converted weights after each tensor.

        Raises:
            CheckpointError: A file vanished or ends early.
            ConfigError: `dtype` is not supported.

        Cost: one pass over the files; host memory of the largest tensor beside what `put` keeps.
        """
        wanted = dict(leaves(self.model.abstract_params(dtype_of(dtype))))
        total, done = sum(leaf_bytes(leaf) for leaf in wanted.values()), 0
        placed: dict[str, Any] = {}
        for name in sorted(wanted, key=lambda n: -leaf_bytes(wanted[n])):
            # Waiting keeps one host copy alive at a time; transfers of many would pile up.
            placed[name] = jax.block_until_ready(put(self._read(name, wanted[name].dtype)))
            done += leaf_bytes(wanted[name])
            if progress is not None:
                progress(done, total)
        return tree_of((name, placed[name]) for name in wanted)

    def _read(self, name: str, dtype: np.dtype) -> np.ndarray:
        return read_tensor(self.tensors[name], dtype, self.row_order(name))


def open_source(name: str | Path) -> ModelSource:
    """Opens a model: "smollm2", a directory, a .gguf file or a hub id.

    Raises:
        CheckpointError: Anything about the files is missing, broken or unknown; one line.
    """
    path = locate(name)
    shown = str(name) if Path(name) != path else path.resolve().name
    return _open_directory(path, shown) if path.is_dir() else _open_gguf_file(path, shown)


def _open_directory(directory: Path, name: str) -> ModelSource:
    values = read_json(directory / "config.json")
    config = Fields(values, str(directory / "config.json"))
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"{config.where}: architectures must be a list of names")
    family = hf_family(tuple(map(str, architectures)), config.where)
    model = family.from_hf(config)
    tensors = family.hf_tensors(model, safetensors_files.open_directory(directory), str(directory))
    chosen = _check_tensors(model, tensors, str, str(directory))
    _check_stored_types(chosen)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    eos = token_ids(generation.get("eos_token_id"), f"{generation_path}: eos_token_id")
    text = config.section("text_config") or config
    eos += token_ids(values.get("eos_token_id", text.get("eos_token_id")), f"{config.where}: eos_token_id")
    bos = token_ids(values.get("bos_token_id", text.get("bos_token_id")), f"{config.where}: bos_token_id")
    return ModelSource(
        name=name,
        model=model,
        tensors=chosen,
        file_facts=_file_facts(chosen),
        row_order=lambda parameter: None,
        text=TextSource("hf", directory),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        stored=tensors,
    )


def _open_gguf_file(path: Path, name: str) -> ModelSource:
    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} lacks general.architecture")
    family = gguf_family(architecture, str(path))
    if family.from_gguf is None:
        raise CheckpointError(f"{path}: family {family.name} is not read from GGUF files; use its safetensors")
    model = family.from_gguf(Fields(file.metadata, str(path), f"{architecture}."), file.tensors)
    text = Fields(file.metadata, str(path), "tokenizer.ggml.")
    chosen = _check_tensors(model, file.tensors, family.gguf_name, str(path))
    return ModelSource(
        name=name,
        model=model,
        tensors=chosen,
        file_facts=_file_facts(chosen),
        row_order=functools.partial(family.gguf_row_order, model),
        text=TextSource("gguf", path),
        eos_token_ids=tuple(dict.fromkeys(i for key in GGUF_EOS_KEYS if (i := text.integer(key, None)) is not None)),
        bos_token_id=text.integer("bos_token_id", None),
    )


def _file_facts(tensors: Tensors) -> tuple[tuple[str, int, int], ...]:
    """(name, bytes, modification time in ns) of the files that hold the tensors."""
    paths = {piece.path for tensor in tensors.values() for piece in tensor.pieces}
    stats = [(path.name, path.stat()) for path in sorted(paths)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _check_stored_types(chosen: Tensors) -> None:
    """Refuses tensors of a safetensors file that are stored in a type that cannot be read."""
    for parameter, tensor in chosen.items():
        for piece in tensor.pieces:
            if piece.encoding not in safetensors_files.STORED_DTYPES:
                raise CheckpointError(safetensors_files.unsupported(piece.path, parameter, piece.encoding))


def _find_tensors(
    model: Draft, tensors: Tensors, stored_name: Callable[[str], str], where: str
) -> dict[str, StoredTensor]:
    """The tensor of every parameter.

    Raises:
        CheckpointError: One is missing or has another shape.
    """
    chosen: dict[str, StoredTensor] = {}
    for name, leaf in leaves(model.abstract_params("float32")):
        tensor = tensors.get(stored_name(name))
        if tensor is None:
            raise CheckpointError(f"{where} lacks tensor {stored_name(name)}")
        if tensor.shape != leaf.shape:
            raise CheckpointError(
                f"{where}: tensor {stored_name(name)} has shape {list(tensor.shape)}, "
                f"the configuration needs {list(leaf.shape)}"
            )
        chosen[name] = tensor
    return chosen


def _check_tensors(
    model: Model, tensors: Tensors, stored_name: Callable[[str], str], where: str
) -> dict[str, StoredTensor]:
    """The tensor of every parameter.

    Raises:
        CheckpointError: See `_find_tensors`, or a layer holds a tensor that the model would ignore
            (it is then not the model that its configuration claims).
    """
    chosen = _find_tensors(model, tensors, stored_name, where)
    used = {stored_name(name) for name in chosen}
    num_layers = len(model.attention_layers) + len(recurrent_layers_of(model))
    layers = tuple(f"{prefix}{i}." for i in range(num_layers) for prefix in (_LAYERS, "blk."))
    for extra in sorted(tensors.keys() - used):
        # rotary tables of old checkpoints are constants that we compute
        if extra.startswith(layers) and "rotary_emb." not in extra:
            raise CheckpointError(f"{where}: tensor {extra} has no place in a {model.family} model")
    return chosen
