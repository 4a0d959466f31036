"""A mixture of experts: router, experts grouped over packed rows, and the shared expert beside them.

    p = softmax(gate x) over all E, in float32;  w = the k largest of p, divided by their sum if asked
    y = sum_k w_k down_k(silu(gate_k x) * up_k x)  [+ sigmoid(shared_gate x) * shared(x)]

The T x k (row, expert) pairs are sorted by expert and worked off in tiles of one expert's rows: a
loop whose trip count is known only on the device, so experts that nobody chose cost nothing and no
expert is padded to the largest. XLA's CPU lowers `lax.ragged_dot` to a product with every expert,
20 to 400 times slower at 64 experts (docs/adr/0017); other backends have a grouped product of their own.

Source: Shazeer et al. 2017 (arXiv 1701.06538); the published Qwen3 models. Axis letters: T rows, D model,
F width of one expert, E experts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from helios_jax.errors import CheckpointError
from helios_jax.models.layers import FeedForward, Linear, linear

LEAST_SHARED_ROWS = 3  # average rows an expert from which a CPU tile of several rows pays
LEAST_TILE, MOST_TILE = 8, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of a decoder.

    Attributes:
        num_experts, experts_per_token: E, k.
        intermediate_size: F of one expert.
        shared_intermediate_size: F of the gated shared expert, 0 = none.
        normalise: Whether the chosen weights are divided by their sum.
        layers: One entry a layer: has a mixture; the others have the dense feed-forward part.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    normalise: bool = True
    layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.intermediate_size < 1 or self.shared_intermediate_size < 0:
            raise CheckpointError(f"{self.num_experts} experts of {self.intermediate_size} rows are not possible")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise CheckpointError(f"{self.experts_per_token} of {self.num_experts} experts cannot be chosen a token")


def route(logits: jax.Array, count: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Router logits [T, E] -> the weights [T, k] float32 and ids [T, k] of the chosen experts."""
    weights, experts = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), count)
    return (weights / weights.sum(axis=-1, keepdims=True) if normalise else weights), experts


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile: 1 where experts have few rows each, else a power of two near their average."""
    average = num_rows // num_experts
    if average < LEAST_SHARED_ROWS:
        return 1
    return min(MOST_TILE, max(LEAST_TILE, 1 << (average.bit_length() - 1)))


def grouped(x: jax.Array, gate_up: jax.Array, down: jax.Array, sizes: jax.Array, tile: int) -> jax.Array:
    """Each row through its own expert, tile by tile.

    Args:
        x: [M, D] rows sorted by expert.
        gate_up, down: [E, 2 F, D], [E, D, F].
        sizes: [E] rows of each expert; their sum is M.

    Returns:
        [M, D] in x's dtype.

    Cost: sum over experts of ceil(size / tile) iterations; weights of experts without rows are not read.
    """
    num_rows, num_experts = x.shape[0], sizes.shape[0]
    tiles = -(-sizes // tile)
    ends, first = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    # a tile may reach past its expert: into the next one's rows, which come later and overwrite it
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def step(item: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.minimum(jnp.sum(item >= ends, dtype=jnp.int32), num_experts - 1)
        at = first[expert] + (item - (ends[expert] - tiles[expert])) * tile
        mine = lax.dynamic_slice_in_dim(padded, at, tile)
        inner = _swiglu(linear(mine, lax.dynamic_index_in_dim(gate_up, expert, keepdims=False)))
        value = linear(inner, lax.dynamic_index_in_dim(down, expert, keepdims=False))
        return lax.dynamic_update_slice_in_dim(out, value, at, 0)

    return lax.fori_loop(0, ends[-1], step, jnp.zeros_like(padded))[:num_rows]


def _swiglu(both: jax.Array) -> jax.Array:
    """[M, 2 F] gate | up -> silu(gate) * up [M, F]."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _grouped_product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, in] sorted by expert, weights [E, out, in] -> [M, out], accumulated in float32."""
    narrow = x.dtype != jnp.float32
    out = lax.ragged_dot_general(
        x,
        weights,
        sizes,
        lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,)),
        precision=lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.astype(x.dtype)


def grouped_by_backend(x: jax.Array, gate_up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    """`grouped` by what the backend is fast at."""
    if jax.default_backend() == "cpu":
        return grouped(x, gate_up, down, sizes, tile_rows(x.shape[0], sizes.shape[0]))
    return _grouped_product(_swiglu(_grouped_product(x, gate_up, sizes)), down, sizes)


class Experts(nnx.Module):
    """The experts' weights, one array over all of them: [E, 2 F, D] gate | up, and [E, D, F]."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: jax.typing.DTypeLike) -> None:
        count, width = config.num_experts, config.intermediate_size
        self.gate_up_proj = nnx.Param(jnp.zeros((count, 2 * width, hidden_size), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden_size, width), dtype))

    def __call__(self, x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        """x [T, D], weights and ids [T, k] of the chosen experts -> float32 [T, D]."""
        (num_rows, count), num_experts = experts.shape, self.down_proj.shape[0]
        chosen = experts.ravel()
        order = jnp.argsort(chosen, stable=True)
        sizes = jnp.zeros(num_experts, jnp.int32).at[chosen].add(1)
        rows = grouped_by_backend(x[order // count], self.gate_up_proj[...], self.down_proj[...], sizes)
        by_token = jnp.zeros(rows.shape, jnp.float32).at[order].set(rows.astype(jnp.float32))
        # not a product with the weights: a row that is not finite stays in its own token
        return (by_token.reshape(num_rows, count, -1) * weights[..., None]).sum(axis=1)


class MixtureOfExperts(nnx.Module):
    """Router, experts, and the gated shared expert where there is one."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: jax.typing.DTypeLike) -> None:
        self.gate = Linear(hidden_size, config.num_experts, False, dtype)
        self.experts = Experts(config, hidden_size, dtype)
        shared = config.shared_intermediate_size
        self.shared_expert = FeedForward(hidden_size, shared, False, dtype) if shared else None
        self.shared_expert_gate = Linear(hidden_size, 1, False, dtype) if shared else None
        self.count, self.normalise = config.experts_per_token, config.normalise

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]."""
        weights, experts = route(linear(x, self.gate.weight[...], jnp.float32), self.count, self.normalise)
        out = self.experts(x, weights.astype(x.dtype), experts).astype(x.dtype)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out
