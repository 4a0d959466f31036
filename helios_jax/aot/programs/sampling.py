"""One token a row from raw logits, by the settings of the row's slot.

Order: repetition, frequency and presence penalty; logit bias; the mask of allowed tokens; then greedy
(temperature 0), or temperature, min-p, top-k, top-p and a draw. Meanings are vLLM's: the repetition penalty
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
from helios_jax.aot.programs.masks import Mask, allow

PURPOSE_SAMPLE = 0  # the target's own draws: plain tokens, replacements and bonus tokens
PURPOSE_DRAFT = 1  # proposals of a draft model
PURPOSE_ACCEPT = 2  # the decision about a proposal
LEAST_DIVISOR = 1e-30  # a denormal penalty would be flushed to 0, and 0 / 0 is NaN
STATUS_OK = 0
STATUS_NOT_FINITE = 1
STATUS_NOTHING_ALLOWED = 2


class Rows(NamedTuple):
    """The rows to sample for.

    Attributes:
        slot: [R] row of the slot table, scratch where inactive.
        active: [R] whether a token is wanted.
        position: [R] position that the sampled token will have.
        drafts: None, or [R, E] tokens before that position that the slot's `output_counts` do not
            hold yet, because they are proposals; they count as output. -1 = unused.
    """

    slot: jax.Array
    active: jax.Array
    position: jax.Array
    drafts: jax.Array | None = None


class Sampled(NamedTuple):
    """token [R] int32, -1 where nothing was sampled; status [R] int32, see STATUS_*."""

    token: jax.Array
    status: jax.Array


def sample(logits: jax.Array, rows: Rows, state: DeviceState, mask: Mask | None = None) -> Sampled:
    """Samples one token a row.

    Args:
        logits: [R, V] float32, raw. A row with a NaN or an infinity yields token -1 and status 1.
        mask: What each row may sample; None = everything. A row that may sample nothing yields -1 and status 2.

    Cost: O(R V); filters add about 50 passes over the logits, only if a row uses them.
    """
    finite = jnp.isfinite(logits).all(axis=1)
    shaped, possible = allow(shape_logits(logits, rows, state), mask)
    greedy = jnp.argmax(shaped, axis=1).astype(jnp.int32)
    random = is_random(rows, state)

    def sampled() -> jax.Array:
        return jnp.where(random, draw(log_weights(shaped, rows, state), rows, state, PURPOSE_SAMPLE), greedy)

    token = lax.cond(random.any(), sampled, lambda: greedy)
    token = jnp.where(rows.active & finite & possible, token, -1)
    return Sampled(token, failure(rows.active, finite, possible))


def failure(active: jax.Array, finite: jax.Array, possible: jax.Array) -> jax.Array:
    """[R] status of rows by whether their logits are finite and their masks allow a token."""
    status = jnp.where(finite, jnp.where(possible, STATUS_OK, STATUS_NOTHING_ALLOWED), STATUS_NOT_FINITE)
    return jnp.where(active, status, STATUS_OK)


def is_random(rows: Rows, state: DeviceState) -> jax.Array:
    """[R] whether the row's token is drawn; greedy and inactive rows are not."""
    return rows.active & (state.temperature[rows.slot] > 0)


def shape_logits(logits: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    """[R, V] logits after penalties and bias: what greedy rows choose the largest of."""
    return _with_bias(_with_penalties(logits, rows, state), rows, state)


def log_weights(shaped: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    """[R, V] unnormalised log-probabilities of the rows' draws, the row's largest 0.

    Tokens that min-p, top-k or top-p exclude have -inf. Rows that are not random mean nothing.
    """
    random = is_random(rows, state)
    temperature = jnp.where(random, state.temperature[rows.slot], 1.0)
    # relative to the maximum first: dividing by a small temperature cannot overflow
    scaled = (shaped - shaped.max(axis=1, keepdims=True)) / temperature[:, None]
    top_k, top_p = state.top_k[rows.slot], state.top_p[rows.slot]
    kept = keep_min_p(scaled, state.min_p[rows.slot])
    in_use = random & (top_k > 0) & (top_k < shaped.shape[1])
    kept = _optional(kept, in_use, lambda kept: keep_top_k(scaled, kept, top_k))
    kept = _optional(kept, random & (top_p < 1), lambda kept: keep_top_p(scaled, kept, top_p))
    return jnp.where(kept, scaled, -jnp.inf)


def draw(weights: jax.Array, rows: Rows, state: DeviceState, purpose: int) -> jax.Array:
    """One token a row from softmax(weights [R, V]), with the noise of the row's position and `purpose`."""
    noise = gumbel(state.seed[rows.slot], rows.position, purpose, weights.shape[1])
    return jnp.argmax(weights + noise, axis=1).astype(jnp.int32)


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
        if rows.drafts is not None:
            drafts = jnp.where(rows.drafts >= 0, rows.drafts, logits.shape[1])  # past the end: dropped
            counts = counts.at[jnp.arange(drafts.shape[0])[:, None], drafts].add(1, mode="drop")
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


def gumbel(seed: jax.Array, position: jax.Array, purpose: int, size: int) -> jax.Array:
    """Standard Gumbel noise [R, size] of each row's seed words [R, 2] at its `position` [R]."""
    return jax.vmap(lambda words, at: jax.random.gumbel(_key(words, at, purpose), (size,), jnp.float32))(seed, position)


def uniform(seed: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """[R] float32 in [0, 1), one a row, as `gumbel`."""
    return jax.vmap(lambda words, at: jax.random.uniform(_key(words, at, purpose), (), jnp.float32))(seed, position)


def _key(words: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, position), purpose)
