"""Gated DeltaNet: a linear attention whose state a key-value matrix is, corrected by the delta rule.

Symbols, of one value head: S [K, V] the state, k, q, v, g <= 0 (`decay`), beta of each token t:

    S <- e^g S;   delta = beta (v - k^T S);   S <- S + k delta^T;   o = q^T S

Three evaluations of the same recurrence, all in float32:

- `step`: one token, as above; decode.
- `read_chunk`: C consecutive tokens at once, without touching the state. With c = cumsum(g) and
  D_ij = e^(c_i - c_j) for j <= i:
    A = strictly lower part of beta_i (k_i . k_j) D_ij;  (I + A) delta = beta (v - e^c k^T S)
    o_i = e^(c_i) q_i^T S + sum over j <= i of D_ij (q_i . k_j) delta_j
  The rows of delta depend on earlier ones only, so a proposal that falls spoils nothing before it.
- `write_chunk`: the state after the first n of those tokens,
    S_n = e^(c_(n-1)) S + sum over i < n of e^(c_(n-1) - c_i) k_i delta_i^T
  Prompts write all of a chunk; a speculative round writes once its verdict is known.

Sources: Yang et al. 2024 (arXiv 2412.06464), its WY form of the chunk; heads and norms as in the
published Qwen3-Next and Qwen3.5. A token whose decay and beta are 0 changes no state.

Axis letters: T packed tokens, B lanes, C tokens of a chunk, N key heads, R value heads a key head, K and V
widths of key and value heads; leading axes of chunk functions are free.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.errors import CheckpointError
from helios_jax.models.interface import RecurrentSpec

L2_EPS = 1e-6
HIGH = lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """The recurrent layers of a decoder.

    Attributes:
        num_key_heads, num_value_heads, key_dim, value_dim, kernel: See `RecurrentSpec`.
        packed_projections: q, k, v and z of a key head lie together in one matrix, b and a in another (Qwen3-Next).
        gate: "silu" or "sigmoid", on z before it multiplies the normed output.
        layers: One entry a layer: is recurrent; the others attend.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    packed_projections: bool = False
    gate: str = "silu"
    layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if min(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.kernel - 1) < 1:
            raise CheckpointError(f"a recurrent layer needs heads, widths and a kernel of at least 2: {self}")
        if self.num_value_heads % self.num_key_heads:
            raise CheckpointError(
                f"{self.num_value_heads} value heads are not a multiple of {self.num_key_heads} key heads"
            )
        if self.gate not in ("silu", "sigmoid"):
            raise CheckpointError(f"output_gate_type {self.gate!r} is not supported; silu and sigmoid are")

    def spec(self, layer: int) -> RecurrentSpec:
        """What programs need to know of layer `layer`."""
        heads = (self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)
        return RecurrentSpec(layer, *heads, self.kernel)


class Heads(NamedTuple):
    """Convolved rows by head, and their gates.

    Attributes:
        q, k: [..., N, K] of length 1 (q times K^-0.5); v: [..., N, R, V].
        decay, beta: [..., N, R].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array

    def where(self, valid: jax.Array) -> Heads:
        """Rows that are not `valid` [...] become tokens that change no state and read zeros."""

        def keep(leaf: jax.Array) -> jax.Array:
            return jnp.where(valid.reshape(*valid.shape, *[1] * (leaf.ndim - valid.ndim)), leaf, 0.0)

        return Heads(*map(keep, self))


class Deltas(NamedTuple):
    """What `write_chunk` needs of a chunk: k [..., C, N, K], delta [..., C, N, R, V], c [..., C, N, R]."""

    k: jax.Array
    delta: jax.Array
    decayed: jax.Array


def split_heads(spec: RecurrentSpec, mixed: jax.Array, decay: jax.Array, beta: jax.Array) -> Heads:
    """Convolved rows [T, channels], and gates [T, value heads], as float32 heads."""
    keys, groups = spec.num_key_heads * spec.key_dim, (spec.num_key_heads, -1)
    q, k, v = jnp.split(mixed.astype(jnp.float32), (keys, 2 * keys), axis=-1)
    rows = mixed.shape[:-1]
    q, k = (_unit(x.reshape(*rows, spec.num_key_heads, spec.key_dim)) for x in (q, k))
    v = v.reshape(*rows, spec.num_key_heads, -1, spec.value_dim)
    return Heads(q * spec.key_dim**-0.5, k, v, decay.reshape(*rows, *groups), beta.reshape(*rows, *groups))


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def convolve(
    mixed: jax.Array, before: jax.Array, taps: jax.Array, offset: jax.Array, length: jax.Array, depth: jax.Array
) -> jax.Array:
    """silu of the causal convolution of packed rows, which begin behind `before`.

    Args:
        mixed: [T, channels] rows of all lanes.
        before: [B, kernel - 1, channels] the rows before each lane's first.
        taps: [channels, kernel].
        offset, length: [B] where a lane's rows begin, and how many there are.
        depth: [T] index of each row in its lane.

    Returns:
        [T, channels] in mixed's dtype.
    """
    kernel, num_rows = taps.shape[1], mixed.shape[0]
    wide, weights = mixed.astype(jnp.float32), taps.astype(jnp.float32)
    out = wide * weights[:, -1]
    for back in range(1, kernel):
        earlier = jnp.where((depth >= back)[:, None], jnp.roll(wide, back, axis=0), 0.0)
        out = out + earlier * weights[:, kernel - 1 - back]
    # the first kernel - 1 rows of a lane also see rows of `before`
    reach = jnp.arange(kernel - 1)
    index = jnp.where(reach < length[:, None], offset[:, None] + reach, num_rows)  # past the end: dropped
    seen = before.astype(jnp.float32)
    parts = [(seen[:, row:] * weights[:, : kernel - 1 - row].T).sum(axis=1) for row in range(kernel - 1)]
    return jax.nn.silu(out.at[index].add(jnp.stack(parts, axis=1), mode="drop")).astype(mixed.dtype)


def last_rows(mixed: jax.Array, before: jax.Array, offset: jax.Array, kept: jax.Array) -> jax.Array:
    """The convolution's state [B, kernel - 1, channels] after the first `kept` [B] of each lane's rows."""
    reach = before.shape[1]
    at = kept[:, None] - reach + jnp.arange(reach)
    mine = mixed.at[offset[:, None] + at].get(mode="clip")
    older = jnp.take_along_axis(before, jnp.clip(at + reach, 0, reach - 1)[..., None], axis=1)
    return jnp.where((at >= 0)[..., None], mine, older)


def step(heads: Heads, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each lane: heads [..., N, ...], state [..., N, R, K, V] -> (out [..., N, R, V], state)."""
    faded = jnp.exp(heads.decay)[..., None, None] * state
    seen = jnp.einsum("...nk,...nrkv->...nrv", heads.k, faded, precision=HIGH)
    delta = heads.beta[..., None] * (heads.v - seen)
    state = faded + heads.k[..., None, :, None] * delta[..., None, :]
    return jnp.einsum("...nk,...nrkv->...nrv", heads.q, state, precision=HIGH), state


def read_chunk(heads: Heads, state: jax.Array) -> tuple[jax.Array, Deltas]:
    """C tokens of each lane: heads [..., C, N, ...], state [..., N, R, K, V] -> (out [..., C, N, R, V], deltas)."""
    size = heads.k.shape[-3]
    decayed = jnp.cumsum(heads.decay, axis=-3)
    c = jnp.moveaxis(decayed, -3, -1)  # [..., N, R, C]
    behind = jnp.arange(size)[:, None] >= jnp.arange(size)
    between = jnp.exp(jnp.where(behind, c[..., :, None] - c[..., None, :], -jnp.inf))
    alike = jnp.einsum("...ink,...jnk->...nij", heads.k, heads.k, precision=HIGH)[..., None, :, :]
    beta = jnp.moveaxis(heads.beta, -3, -1)
    coupling = jnp.tril(beta[..., None] * alike * between, -1)
    fade = jnp.exp(decayed)[..., None]
    seen = fade * jnp.einsum("...ink,...nrkv->...inrv", heads.k, state, precision=HIGH)
    wanted = heads.beta[..., None] * (heads.v - seen)
    delta = jnp.einsum("...nrij,...jnrv->...inrv", inverse_unit_lower(coupling), wanted, precision=HIGH)
    mixing = jnp.einsum("...ink,...jnk->...nij", heads.q, heads.k, precision=HIGH)[..., None, :, :] * between
    out = fade * jnp.einsum("...ink,...nrkv->...inrv", heads.q, state, precision=HIGH)
    out = out + jnp.einsum("...nrij,...jnrv->...inrv", mixing, delta, precision=HIGH)
    return out, Deltas(heads.k, delta, decayed)


def write_chunk(deltas: Deltas, kept: jax.Array, state: jax.Array) -> jax.Array:
    """The state [..., N, R, K, V] after the first `kept` [...] tokens of a chunk; as it was where that is 0."""
    size = deltas.k.shape[-3]
    last = jnp.maximum(kept - 1, 0)[..., None, None, None]
    end = jnp.take_along_axis(deltas.decayed, last, axis=-3)
    stays = (jnp.arange(size) < kept[..., None])[..., None, None]
    share = jnp.exp(jnp.where(stays, end - deltas.decayed, -jnp.inf))
    # rows behind the kept ones may hold anything, NaN too: they are left out, not weighed with 0
    rows = jnp.where(stays[..., None], share[..., None] * deltas.delta, 0.0)
    keys = jnp.where(stays, deltas.k, 0.0)
    added = jnp.einsum("...ink,...inrv->...nrkv", keys, rows, precision=HIGH)
    fade = jnp.where(kept[..., None, None] > 0, jnp.exp(end[..., 0, :, :]), 1.0)
    return fade[..., None, None] * state + added


def inverse_unit_lower(strict: jax.Array) -> jax.Array:
    """(I + A)^-1 of strictly lower triangular A [..., C, C].

    Blocks on the diagonal double in size: the inverse of [[P, 0], [Q, R]] is
    [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]. log2(C) pairs of products, as stable as substitution; the
    series I - A + A^2 ... is not, its terms grow like binomials where keys are alike.
    """
    size = strict.shape[-1]
    whole = 1 << max(0, size - 1).bit_length()
    pad = [(0, 0)] * (strict.ndim - 2) + [(0, whole - size)] * 2
    blocks, lead = jnp.pad(strict, pad), strict.shape[:-2]
    inverse = jnp.ones((*lead, whole, 1, 1), strict.dtype)
    half = 1
    while half < whole:
        count = whole // (2 * half)
        grid = blocks.reshape(*lead, count, 2 * half, count, 2 * half)
        diagonal = jnp.moveaxis(jnp.diagonal(grid, axis1=-4, axis2=-2), -1, -3)
        pairs = inverse.reshape(*lead, count, 2, half, half)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        corner = -_product(_product(second, diagonal[..., half:, :half]), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        half *= 2
    return inverse[..., 0, :size, :size]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=HIGH)
