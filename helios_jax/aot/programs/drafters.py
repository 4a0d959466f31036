"""What proposes beside the target on the device, and the upkeep of its own context.

Its keys and values lie in `DeviceState.draft_kv`, at the addresses that the page tables give the
target's. Two kinds:

- a draft model reads tokens alone: row i holds token i. A round of D proposals runs it on the pending
  token and on proposals 1 .. D - 1, so if all D are accepted, the last one is missing; hence every
  program begins by running it on the last committed token, again or for the first time, and the
  pending one.
- multi-token-prediction heads read the target's hidden of position i and the token behind it: row i
  holds token i + 1. What they wrote for proposals came from their own output, so every round ends by
  running them again on the verified rows with the target's hidden; of the last committed position it
  is kept (`DeviceState.mtp_hidden`), because the token behind it is pending, or is the next chunk's.

In both kinds, rows 0 .. committed_len - 2 are there before every program (but a draft model's last).

Axis letters: B lanes, T packed tokens, P page-table entries, D model width.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims
from helios_jax.aot.device_state import DeviceState, LayerPages
from helios_jax.aot.programs.attention import decode_attend, prefill_attend, verify_attend
from helios_jax.aot.programs.lanes import Lanes, address_lanes
from helios_jax.aot.programs.packing import Packed, address_tokens, pack
from helios_jax.aot.programs.tiling import decode_tiling, verify_tiling
from helios_jax.aot.programs.types import Tiling
from helios_jax.models.interface import Attend, Draft, Model, MtpHeads, Params, recurrent_layers_of


class Fed(NamedTuple):
    """Consecutive tokens of each lane, packed, as the target reads them.

    Attributes:
        row: [B] row of the slot table, scratch where inactive.
        tables: [B, P] page ids.
        packed: Where the tokens belong; `valid` is False where nothing may be written.
        query_len, start: [B] tokens of each lane, and the position of the first.
        token: [T] packed tokens.
    """

    row: jax.Array
    tables: jax.Array
    packed: Packed
    query_len: jax.Array
    start: jax.Array
    token: jax.Array


class Drafter(abc.ABC):
    """A proposal source and its weights, while a program is traced.

    Attributes:
        lag: A token's position less that of the row that reads it.
        overlap: Tokens that complete the context: the last committed one, if it may be missing, and the pending one.
        corrects: Whether the rows of proposals must be written again from the target's hidden.
    """

    lag: int
    overlap: int
    corrects: bool

    def __init__(self, dims: Dims) -> None:
        self.dims = dims

    @abc.abstractmethod
    def forward(
        self, tokens: jax.Array, positions: jax.Array, hidden: jax.Array | None, kv: tuple[LayerPages, ...],
        attend: Attend,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:  # fmt: skip
        """One pass over rows [T] at `positions` of their own: output rows [T, D], and the cache."""

    @abc.abstractmethod
    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [R, V] of output rows [R, D]."""

    @abc.abstractmethod
    def inputs(self, state: DeviceState, fed: Fed, hidden: jax.Array | None) -> jax.Array | None:
        """The target's hidden [T, D] at the position before each token; None if it does not matter.

        Args:
            hidden: [T, D] the target's at the tokens themselves; None where only one a lane is fed.
        """

    @abc.abstractmethod
    def remember(self, state: DeviceState, row: jax.Array, hidden: jax.Array) -> DeviceState:
        """Keeps the target's hidden [B, D] of the last committed positions in rows [B] of the slot table."""

    def complete(self, state: DeviceState, lanes: Lanes) -> tuple[DeviceState, jax.Array]:
        """Completes the context up to and with the pending tokens.

        Returns:
            The state, and the output rows [B, D] of the pending tokens.
        """
        num_lanes, most = lanes.row.shape[0], self.overlap
        query_len = jnp.where(lanes.active, jnp.minimum(lanes.position + 1, most), 0)
        start = jnp.maximum(lanes.position + 1 - most, 0)
        packed = pack(query_len, start, most * num_lanes)
        previous = jnp.clip(state.previous_token[lanes.row], 0, self.dims.vocab_size - 1)
        is_pending = packed.position == lanes.position[packed.row]
        token = jnp.where(is_pending, lanes.pending[packed.row], previous[packed.row])
        fed = Fed(lanes.row, lanes.tables, packed, query_len, start, token)
        state, hidden = self._run(state, fed, None, verify_attend, verify_tiling(self.dims, num_lanes, most))
        last = jnp.clip(packed.offset + query_len - 1, 0, token.shape[0] - 1)
        return state, hidden[last]

    def advance(
        self, kv: tuple[LayerPages, ...], lanes: Lanes, number: jax.Array, valid: jax.Array, token: jax.Array,
        hidden: jax.Array,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:  # fmt: skip
        """Runs on proposal `number` (from 1) of each lane, on the output rows [B, D] that predicted it.

        Args:
            valid: [B] whether the lane has that proposal.
            token: [B] the proposals.
        """
        position = jnp.where(valid, lanes.position + number - self.lag, 0)
        address = address_lanes(lanes, position, valid, self.dims)
        attend = decode_attend(lanes.tables, position, valid, address, decode_tiling(self.dims, lanes.row.shape[0]))
        return self.forward(jnp.where(valid, token, 0), position, hidden, kv, attend)

    def follow(self, state: DeviceState, fed: Fed, hidden: jax.Array, width: int) -> DeviceState:
        """Context of tokens that the target has read in a round, at most `width` a lane; `hidden` [T, D] its rows."""
        tiling = verify_tiling(self.dims, fed.row.shape[0], width)
        return self._run(state, fed, hidden, verify_attend, tiling)[0]

    def follow_prompt(self, state: DeviceState, fed: Fed, hidden: jax.Array, tiling: Tiling) -> DeviceState:
        """As `follow`, of prompt chunks."""
        return self._run(state, fed, hidden, prefill_attend, tiling)[0]

    def _run(
        self, state: DeviceState, fed: Fed, hidden: jax.Array | None, make: Callable[..., Attend], tiling: Tiling
    ) -> tuple[DeviceState, jax.Array]:
        """One pass over the rows of packed tokens; the first token of a request may have none."""
        position = fed.packed.position - self.lag
        packed = fed.packed._replace(position=position, valid=fed.packed.valid & (position >= 0))
        place = (packed.row, position, packed.valid)
        address = address_tokens(fed.tables, *place, self.dims.page_size, self.dims.num_pages)
        attend = make(fed.tables, packed, fed.query_len, fed.start - self.lag, address, tiling)
        out, kv = self.forward(fed.token, position, self.inputs(state, fed, hidden), state.draft_kv, attend)
        return dataclasses.replace(state, draft_kv=kv), out


class ModelDrafter(Drafter):
    """A smaller model of the same vocabulary."""

    lag, overlap, corrects = 0, 2, False

    def __init__(self, model: Model, params: Params, dims: Dims) -> None:
        super().__init__(dims)
        self._model, self._params = model, params

    def forward(
        self, tokens: jax.Array, positions: jax.Array, hidden: jax.Array | None, kv: tuple[LayerPages, ...],
        attend: Attend,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:  # fmt: skip
        return self._model.forward(self._params, tokens, positions, kv, attend)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self._model.logits(self._params, hidden)

    def inputs(self, state: DeviceState, fed: Fed, hidden: jax.Array | None) -> jax.Array | None:
        return None

    def remember(self, state: DeviceState, row: jax.Array, hidden: jax.Array) -> DeviceState:
        return state


class HeadsDrafter(Drafter):
    """The target's own multi-token-prediction heads: one, used again for each proposal of a round."""

    lag, overlap, corrects = 1, 1, True

    def __init__(self, heads: MtpHeads, params: Params, target: Model, target_params: Params, dims: Dims) -> None:
        super().__init__(dims)
        self._heads, self._params, self._target, self._target_params = heads, params, target, target_params

    def forward(
        self, tokens: jax.Array, positions: jax.Array, hidden: jax.Array | None, kv: tuple[LayerPages, ...],
        attend: Attend,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:  # fmt: skip
        assert hidden is not None
        return self._heads.predict(self._params, self._target_params, tokens, positions, hidden, kv, attend)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self._target.logits(self._target_params, hidden)

    def inputs(self, state: DeviceState, fed: Fed, hidden: jax.Array | None) -> jax.Array | None:
        kept = state.mtp_hidden[0][fed.row][fed.packed.row]
        if hidden is None:
            return kept
        first = jnp.arange(fed.token.shape[0]) == fed.packed.offset[fed.packed.row]
        return jnp.where(first[:, None], kept, jnp.roll(hidden, 1, axis=0))

    def remember(self, state: DeviceState, row: jax.Array, hidden: jax.Array) -> DeviceState:
        (kept,) = state.mtp_hidden
        return dataclasses.replace(state, mtp_hidden=(kept.at[row].set(hidden),))


class Weights(NamedTuple):
    """The parameters of a core's models; `draft` is empty without a draft."""

    target: Params
    draft: Params


def split(params: Params, draft: Draft | None) -> Weights:
    """What a program is given: the target's tree, or {"target", "draft"} in a core with a draft."""
    return Weights(params, ()) if draft is None else Weights(params["target"], params["draft"])


def make_drafter(draft: Draft | None, model: Model, weights: Weights, dims: Dims) -> Drafter | None:
    """The drafter of a core's `draft`; None without one."""
    if draft is None:
        return None
    if isinstance(draft, MtpHeads):
        return HeadsDrafter(draft, weights.draft, model, weights.target, dims)
    return ModelDrafter(draft, weights.draft, dims)


def check_draft(model: Model, draft: Draft | None) -> None:
    """Refuses a draft whose tokens mean something else.

    Raises:
        ValueError: The vocabularies have different sizes, or the draft has recurrent layers.
    """
    if recurrent_layers_of(draft):
        raise ValueError("a draft model with recurrent layers is not supported: its state could not be rolled back")
    if draft is not None and draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model has {draft.vocab_size} tokens and the target {model.vocab_size};"
            " a draft model needs the target's vocabulary"
        )
