"""One token a row from raw logits, by the settings of the row's slot.

Order: repetition, frequency and presence penalty; logit bias; then greedy (temperature 0),
or temperature, min-p, top-k, top-p and a draw. Meanings are vLLM's: the repetition penalty
sees prompt and output, the other two the output alone.

Randomness: key = fold(fold(request seed, position of the sampled token), purpose), and the
draw is Gumbel-max over the vocabulary. A row's token therefore depends on its own logits
and settings only: not on its batch mates, its slot, the program or the chunking.

Parts that no active row needs are skipped by `lax.cond`. A skipped part and a part with
neutral settings give bitwise equal values, so neighbours' settings do not matter either.

Axis letters: R rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs.filters import keep_min_p, keep_top_k, keep_top_p

PURPOSE_SAMPLE = 0  # other purposes (draft, acceptance) fold in other numbers
LEAST_DIVISOR = 1e-30  # a denormal penalty would be flushed to 0, and 0 / 0 is NaN
STATUS_OK = 0
STATUS_NOT_FINITE = 1


class Rows(NamedTuple):
    """The rows to sample for.

    Attributes:
        slot: [R] row of the slot table, scratch where inactive.
        active: [R] whether a token is wanted.
        position: [R] position that the sampled token will have.
    """

    slot: jax.Array
    active: jax.Array
    position: jax.Array


class Sampled(NamedTuple):
    """token [R] int32, -1 where nothing was sampled; status [R] int32, see STATUS_*."""

    token: jax.Array
    status: jax.Array


def sample(logits: jax.Array, rows: Rows, state: DeviceState) -> Sampled:
    """Samples one token a row.

    Args:
        logits: [R, V] float32, raw. A row with a NaN or an infinity yields token -1 and status 1.

    Cost: O(R V); filters add about 50 passes over the logits, only if a row uses them.
    """
    finite = jnp.isfinite(logits).all(axis=1)
    shaped = _with_bias(_with_penalties(logits, rows, state), rows, state)
    greedy = jnp.argmax(shaped, axis=1).astype(jnp.int32)
    temperature = state.temperature[rows.slot]
    random = rows.active & (temperature > 0)

    def draw() -> jax.Array:
        return jnp.where(random, _draw(shaped, jnp.where(random, temperature, 1.0), rows, state), greedy)

    token = lax.cond(random.any(), draw, lambda: greedy)
    token = jnp.where(rows.active & finite, token, -1)
    return Sampled(token, jnp.where(rows.active & ~finite, STATUS_NOT_FINITE, STATUS_OK))


def record(state: DeviceState, rows: Rows, token: jax.Array) -> DeviceState:
    """Makes each sampled `token` [R] its slot's pending token and counts it as output, once."""
    emitted = token >= 0
    slot = jnp.where(emitted, rows.slot, state.pending_token.shape[0] - 1)
    token = jnp.where(emitted, token, 0)
    return dataclasses.replace(
        state,
        pending_token=state.pending_token.at[slot].set(token),
        output_counts=state.output_counts.at[slot, token].add(1),
    )


def _clip(logits: jax.Array) -> jax.Array:
    """Extreme settings may overflow; the largest float orders as infinity does, without its NaNs."""
    return jnp.clip(logits, -jnp.finfo(jnp.float32).max, jnp.finfo(jnp.float32).max)


def _with_penalties(logits: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    repetition = state.repetition_penalty[rows.slot]
    frequency = state.frequency_penalty[rows.slot]
    presence = state.presence_penalty[rows.slot]

    def penalized() -> jax.Array:
        counts = state.output_counts[rows.slot]
        seen = state.prompt_seen[rows.slot] | (counts > 0)
        factor = jnp.maximum(repetition, LEAST_DIVISOR)[:, None]
        out = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
        out = _clip(out) - frequency[:, None] * counts - presence[:, None] * (counts > 0)
        return _clip(out)

    used = rows.active & ((repetition != 1) | (frequency != 0) | (presence != 0))
    return lax.cond(used.any(), penalized, lambda: logits)


def _with_bias(logits: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    ids = state.bias_ids[rows.slot]

    def biased() -> jax.Array:
        unused = jnp.where(ids >= 0, ids, logits.shape[1])  # past the end: dropped
        index = jnp.arange(ids.shape[0])[:, None]
        return _clip(logits.at[index, unused].add(state.bias_values[rows.slot], mode="drop"))

    return lax.cond((rows.active[:, None] & (ids >= 0)).any(), biased, lambda: logits)


def _optional(kept: jax.Array, used: jax.Array, keep: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return lax.cond(used.any(), keep, lambda same: same, kept)


def _draw(logits: jax.Array, temperature: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    """One draw a row from softmax(logits / temperature) limited by the row's filters."""
    # relative to the maximum first: dividing by a small temperature cannot overflow
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature[:, None]
    top_k, top_p = state.top_k[rows.slot], state.top_p[rows.slot]
    random = rows.active & (state.temperature[rows.slot] > 0)
    kept = keep_min_p(scaled, state.min_p[rows.slot])
    in_use = random & (top_k > 0) & (top_k < logits.shape[1])
    kept = _optional(kept, in_use, lambda kept: keep_top_k(scaled, kept, top_k))
    kept = _optional(kept, random & (top_p < 1), lambda kept: keep_top_p(scaled, kept, top_p))
    noise = gumbel(state.seed[rows.slot], rows.position, PURPOSE_SAMPLE, logits.shape[1])
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=1).astype(jnp.int32)


def gumbel(seed: jax.Array, position: jax.Array, purpose: int, size: int) -> jax.Array:
    """Standard Gumbel noise [R, size] of each row's seed words [R, 2] at its `position` [R]."""

    def one(words: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, at), purpose)
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(one)(seed, position)
