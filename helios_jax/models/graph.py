"""A flax module as a function of a parameter tree: built once, abstractly, and merged while tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from helios_jax.models.interface import Params
from helios_jax.models.params import WIDE, dtype_of, leaves, tree_of


class ModuleGraph:
    """The graph of one module tree, without its weights.

    Args:
        build: Makes the module; it is only ever evaluated abstractly.
    """

    def __init__(self, build: Callable[[], nnx.Module]) -> None:
        self._build = build

    @functools.cached_property
    def _abstract(self) -> tuple[Any, list[tuple[str, tuple[Any, ...], Any]]]:
        """The graph definition and (tensor name, path, abstract parameter) of every leaf."""
        graph, state = nnx.split(nnx.eval_shape(self._build))
        return graph, [(".".join(map(str, path)), path, leaf) for path, leaf in nnx.to_flat_state(state)]

    def abstract_params(self, dtype: jax.typing.DTypeLike) -> Params:
        """The parameter tree as ShapeDtypeStructs of `dtype`, `WIDE` ones of float32; allocates nothing."""
        target = dtype_of(dtype)
        dtypes = {name: dtype_of("float32") if path[-1] in WIDE else target for name, path, _ in self._abstract[1]}
        return tree_of((name, jax.ShapeDtypeStruct(leaf.shape, dtypes[name])) for name, _, leaf in self._abstract[1])

    def merge(self, params: Params) -> Any:
        """The module over the arrays of `params`; called while tracing, so it costs nothing later."""
        graph, entries = self._abstract
        given = dict(leaves(params))
        return nnx.merge(
            graph, nnx.from_flat_state([(path, leaf.replace(given[name])) for name, path, leaf in entries])
        )
