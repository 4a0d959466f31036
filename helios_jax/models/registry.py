"""Which family serves which checkpoint. Adding a family is adding one file to `families/`.

A family file calls `register` once, at import; every module of `families` is imported on the
first lookup. Nothing else in the house branches on a model's type.

Families by name: `family(name)`; of a Hugging Face `architectures` entry: `hf_family`; of a
GGUF `general.architecture`: `gguf_family`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np

from helios_jax.errors import CheckpointError
from helios_jax.models.checkpoint_files import Tensors
from helios_jax.models.fields import Fields
from helios_jax.models.interface import Model


def _as_stored(model: Any, tensors: Tensors, where: str) -> Tensors:
    return tensors


def _no_row_order(model: Any, name: str) -> np.ndarray | None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one family's checkpoints become models.

    Attributes:
        name: Key of the registry; also `Model.family`.
        hf_architectures: Entries of `architectures` in config.json.
        gguf_architectures: Values of `general.architecture`.
        from_hf: config.json -> Model.
        from_gguf: (GGUF fields, prefixed by the architecture; tensors by GGUF name) -> Model.
        to_config: Model -> plain JSON values, with the family's name under "family".
        from_config: The inverse of `to_config`.
        hf_tensors: (model, tensors of a Hugging Face directory, the directory for messages) -> the tensors by
            the names of parameters, for files that use other names or keep a parameter in pieces.
        gguf_name: Name of a parameter -> name of its tensor in a GGUF file.
        gguf_row_order: (model, name of a parameter) -> where each stored row belongs, for files
            whose writer reordered rows; None = rows lie where they belong.
    """

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...] = ()
    from_hf: Callable[[Fields], Model]
    from_gguf: Callable[[Fields, Tensors], Model] | None = None
    to_config: Callable[[Any], dict[str, Any]]
    from_config: Callable[[dict[str, Any]], Model]
    hf_tensors: Callable[[Any, Tensors, str], Tensors] = _as_stored
    gguf_name: Callable[[str], str] = str
    gguf_row_order: Callable[[Any, str], np.ndarray | None] = _no_row_order


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Adds a family; its names must be new.

    Raises:
        ValueError: The name or an architecture is taken.
    """
    for other in _FAMILIES.values():
        taken = set(family.hf_architectures) & set(other.hf_architectures)
        taken |= set(family.gguf_architectures) & set(other.gguf_architectures)
        if other.name == family.name or taken:
            raise ValueError(f"family {family.name}: {sorted(taken) or 'its name'} already belongs to {other.name}")
    _FAMILIES[family.name] = family
    return family


@functools.cache
def _import_families() -> None:
    package = importlib.import_module("helios_jax.models.families")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")


def families() -> tuple[Family, ...]:
    """Every registered family, by name."""
    _import_families()
    return tuple(_FAMILIES[name] for name in sorted(_FAMILIES))


def family(name: str) -> Family:
    """The family called `name`.

    Raises:
        CheckpointError: This version has no such family.
    """
    known = {f.name: f for f in families()}
    if name not in known:
        raise CheckpointError(f"model family {name!r} is not in this version; it has {', '.join(known)}")
    return known[name]


def hf_family(architectures: tuple[str, ...], where: str) -> Family:
    """The family of a config.json.

    Raises:
        CheckpointError: No family knows any of its architectures.
    """
    return _find("hf_architectures", architectures, where)


def gguf_family(architecture: str, where: str) -> Family:
    """The family of a GGUF file.

    Raises:
        CheckpointError: No family knows its architecture.
    """
    return _find("gguf_architectures", (architecture,), where)


def _find(attribute: str, wanted: tuple[str, ...], where: str) -> Family:
    known = {architecture: f for f in families() for architecture in getattr(f, attribute)}
    for architecture in wanted:
        if architecture in known:
            return known[architecture]
    shown = ", ".join(wanted) or "none"
    raise CheckpointError(f"{where}: architecture {shown} is unknown; supported are {', '.join(sorted(known))}")


def model_config(model: Model) -> dict[str, Any]:
    """The configuration of a model as plain JSON values; `build_model` makes the model of it."""
    return family(model.family).to_config(model)


def build_model(config: dict[str, Any]) -> Model:
    """The model of a stored configuration, without its checkpoint.

    Raises:
        CheckpointError: Its family is not in this version, or the configuration is damaged.
    """
    name = config.get("family")
    try:
        return family(str(name)).from_config(config)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the stored configuration of a {name} model is damaged: {error}") from error
