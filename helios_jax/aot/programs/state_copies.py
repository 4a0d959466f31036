"""The snapshot and restore programs: complete state of slots into state rows and back, several at once.

A snapshot takes what a request's continuation needs beyond whole pages, which are shared by reference:

- recurrent rows and matrices, bit for bit;
- one page of keys and values a layer, the draft context's too: the page that the request goes on writing;
- the last committed token, the target's hidden there, and which tokens occurred so far, for the penalties.

The endpoint is `committed_len` when the program runs; the completion says it, so that the host can tell a
state that moved on from the one it wanted. A pending token lies behind the endpoint and is left out.

A restore begins as an initialisation does, with the new request's settings, so that a request which is restored
needs no program more than one which is not; a prefill that starts at the endpoint follows. All restored
tokens count as prompt.

The page is the host's choice. Where the endpoint is inside a page it is that one, and a restore needs a fresh
page to put it. With prediction heads it is the last page even if that is full: their row for its last
position depends on the token behind it, so requests that go on differently must not share it.

Row 0 of the state rows is scratch: inactive lanes, whose slot or row is out of range, copy scratch to scratch.

Axis letters: B lanes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.device_state import DeviceState, SavedRows
from helios_jax.aot.programs.initialize import with_settings
from helios_jax.aot.programs.packing import assemble
from helios_jax.aot.programs.types import Params, Program, Result
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape


def build_state_copies(shape: ProgramShape, dims: Dims) -> Program:
    """The snapshot, or the restore, of `shape.batch_capacity` slots.

    Raises:
        ValueError: The core has no state rows.
    """
    if not dims.state_rows:
        raise ValueError(f"{shape.name}: a core without state rows has no state to copy")
    control, completion = control_layout(shape, dims), completion_layout(shape, dims)
    is_snapshot = shape.kind is ProgramKind.SNAPSHOT

    def copies(
        params: Params, state: DeviceState, ints: jax.Array, floats: jax.Array, bits: jax.Array | None = None
    ) -> Result:
        fields = control.split(ints, floats)
        slot, saved_row, page = fields["slot"], fields["row"], fields["page"]
        active = (slot >= 0) & (slot < dims.slots) & (saved_row > 0) & (saved_row <= dims.state_rows)
        slot_row = jnp.where(active, slot, dims.slots)
        row = jnp.where(active, saved_row, 0)
        page = jnp.where(active & (page > 0) & (page < dims.num_pages), page, 0)
        if is_snapshot:
            state = _save(state, slot_row, row, page)
        else:
            state = _bring_back(with_settings(state, slot_row, fields), slot_row, row, page)
        endpoint = jnp.where(active, state.committed_len[slot_row], 0)
        return state, assemble(completion, {"slot": slot, "row": row, "committed_len": endpoint})

    return copies


def _copied(targets: Any, at: jax.Array, sources: Any, source_at: jax.Array) -> Any:
    """`targets` with rows `at` [B] replaced by rows `source_at` [B] of `sources`, leaf by leaf."""

    def copy(target: jax.Array, source: jax.Array) -> jax.Array:
        rows = source.at[source_at].get(mode="promise_in_bounds")
        return target.at[at].set(rows, mode="promise_in_bounds")

    return jax.tree.map(copy, targets, sources)


def _save(state: DeviceState, slot: jax.Array, row: jax.Array, page: jax.Array) -> DeviceState:
    (saved,) = state.saved
    pools = _copied((saved.kv, saved.draft_kv), row, (state.kv, state.draft_kv), page)
    tables = _copied((saved.recurrent, saved.mtp_hidden), row, (state.recurrent, state.mtp_hidden), slot)
    kept = SavedRows(
        kv=pools[0],
        draft_kv=pools[1],
        recurrent=tables[0],
        mtp_hidden=tables[1],
        committed_len=saved.committed_len.at[row].set(state.committed_len[slot]),
        previous_token=saved.previous_token.at[row].set(state.previous_token[slot]),
        seen=saved.seen.at[row].set(_seen(state, slot)),
    )
    return dataclasses.replace(state, saved=(kept,))


def _seen(state: DeviceState, slot: jax.Array) -> jax.Array:
    """[B, V] which tokens occur among the committed ones.

    A pending token is among the counts, but not yet there: then they are one more than the committed output. (In
    the middle of a prompt, or of output that a resumed request runs again, there is none.)
    """
    count = state.output_counts[slot]
    has_pending = count.sum(axis=1) > jnp.maximum(state.committed_len[slot] - state.prompt_len[slot], 0)
    pending = jnp.where(has_pending, state.pending_token[slot], -1)
    is_pending = jnp.arange(count.shape[1]) == pending[:, None]
    return state.prompt_seen[slot] | (count - is_pending > 0)


def _bring_back(state: DeviceState, slot: jax.Array, row: jax.Array, page: jax.Array) -> DeviceState:
    (saved,) = state.saved
    kv, draft_kv = _copied((state.kv, state.draft_kv), page, (saved.kv, saved.draft_kv), row)
    recurrent, hidden = _copied((state.recurrent, state.mtp_hidden), slot, (saved.recurrent, saved.mtp_hidden), row)
    return dataclasses.replace(
        state,
        kv=kv,
        draft_kv=draft_kv,
        recurrent=recurrent,
        mtp_hidden=hidden,
        committed_len=state.committed_len.at[slot].set(saved.committed_len[row]),
        prompt_len=state.prompt_len.at[slot].max(saved.committed_len[row]),
        previous_token=state.previous_token.at[slot].set(saved.previous_token[row]),
        prompt_seen=state.prompt_seen.at[slot].set(saved.seen[row]),
    )
