"""The parameter tree: a nested dict of arrays whose joined path is the checkpoint's tensor name.

`{"model": {"layers": {"0": {"self_attn": {"q_proj": {"weight": W}}}}}}` holds the tensor
`model.layers.0.self_attn.q_proj.weight`. Keys are strings throughout, layer numbers too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from helios_jax.errors import ConfigError
from helios_jax.models.interface import Params

DTYPES = ("float32", "bfloat16", "float16")
WIDE = ("A_log", "dt_bias")  # parameters of few elements inside an exponential: float32 whatever the others are


def dtype_of(name: Any) -> np.dtype:
    """The numpy dtype of one of `DTYPES`.

    Raises:
        ConfigError: Another type was asked for.
    """
    dtype = np.dtype(jnp.bfloat16) if name == "bfloat16" else np.dtype(name) if _is_dtype(name) else None
    if dtype is None or dtype.name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return dtype


def _is_dtype(name: Any) -> bool:
    try:
        np.dtype(name)
    except TypeError:
        return False
    return True


def leaves(params: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (tensor name, leaf) of a parameter tree, in the order of the tree."""
    for key, value in params.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from leaves(value, name)
        else:
            yield name, value


def tree_of(named: Iterable[tuple[str, Any]]) -> Params:
    """The parameter tree of (tensor name, leaf) pairs; the inverse of `leaves`."""
    tree: dict[str, Any] = {}
    for name, leaf in named:
        node = tree
        *parents, last = name.split(".")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def leaf_bytes(leaf: Any) -> int:
    """Bytes of an array or of what a ShapeDtypeStruct describes."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def num_params(params: Params) -> int:
    """Elements of all leaves."""
    return sum(math.prod(leaf.shape) for _, leaf in leaves(params))
