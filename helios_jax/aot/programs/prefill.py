"""The prefill and scored-prefill programs: packed prompt chunks of several requests.

1. The tokens of all rows go through the model at positions start, start + 1, ...; their
   keys and values go into the rows' pages. A drafter, if the core has one, does the same.
2. Prompt tokens are marked as seen, tokens at positions from `prompt_len` on (a resumed
   request runs its earlier output again) are counted as output.
3. `committed_len` becomes start + query_len. Where `sample` is set the first token is
   sampled from the row's last position, as decode would.

Only the last position of each row meets the vocabulary, and only if a row samples. The
scored program also meets it for every prompt position, a tile at a time.

Rows without tokens, and padding behind the last row, write to the scratch page and row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.aot.device_state import DeviceState
from helios_jax.aot.programs.attention import prefill_attend
from helios_jax.aot.programs.drafters import Fed, check_draft, make_drafter, split
from helios_jax.aot.programs.logprobs import Logprobs, describe_if, nothing, score
from helios_jax.aot.programs.masks import Mask
from helios_jax.aot.programs.packing import Packed, address_tokens, assemble, pack
from helios_jax.aot.programs.recurrence import prompt_recur, run_target, span_of
from helios_jax.aot.programs.sampling import STATUS_OK, Rows, Sampled, record, sample
from helios_jax.aot.programs.tiling import chunk_rows, prefill_tiling
from helios_jax.aot.programs.types import Params, Program, Result
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape


def build_prefill(shape: ProgramShape, model: Model, dims: Dims, draft: Draft | None = None) -> Program:
    """The prefill, or scored prefill, of `batch_capacity` rows and `token_capacity` packed tokens.

    See `build_program` for `draft`.
    """
    check_draft(model, draft)
    control, completion = control_layout(shape, dims), completion_layout(shape, dims)
    tiling = prefill_tiling(dims, shape.batch_capacity, shape.token_capacity)
    chunk = chunk_rows(shape.batch_capacity, shape.token_capacity)

    def prefill(params: Params, state: DeviceState, ints: jax.Array, floats: jax.Array, bits: jax.Array) -> Result:
        fields, weights = control.split(ints, floats), split(params, draft)
        tables, start = fields["page_table"], fields["start"]
        slot = fields["slot"]
        active = (slot >= 0) & (slot < dims.slots) & (fields["query_len"] > 0)
        query_len = jnp.where(fields["query_len"] > 0, fields["query_len"], 0)
        row = jnp.where(active, slot, dims.slots)
        tokens = jnp.clip(fields["tokens"], 0, dims.vocab_size - 1)
        packed = pack(query_len, start, shape.token_capacity)
        valid = packed.valid & active[packed.row]
        address = address_tokens(tables, packed.row, packed.position, valid, dims.page_size, dims.num_pages)
        attend = prefill_attend(tables, packed, query_len, start, address, tiling)
        recur = prompt_recur(span_of(row, jnp.where(active, query_len, 0), start, packed), chunk)
        hidden, state, recurrent = run_target(model, weights.target, state, tokens, packed.position, attend, recur)
        state = dataclasses.replace(state, recurrent=recurrent)
        state = count_prompt(state, row[packed.row], packed, valid, tokens)
        end = jnp.where(active, start + query_len, 0)
        rows = Rows(row, active & (fields["sample"] > 0), end)
        ending = jnp.clip(packed.offset + query_len - 1, 0, shape.token_capacity - 1)
        last = hidden[ending]
        drafter = make_drafter(draft, model, weights, dims)
        if drafter is not None:
            fed = Fed(row, tables, packed._replace(valid=valid), query_len, start, tokens)
            state = drafter.follow_prompt(state, fed, hidden, tiling)
            state = drafter.remember(state, row, last)
        mask = Mask(bits, fields["masked"][0] > 0)
        sampled, details = _first_token(model, weights.target, last, rows, state, fields["want_logprobs"][0], mask)
        state = dataclasses.replace(
            state,
            committed_len=state.committed_len.at[row].set(end),
            previous_token=state.previous_token.at[row].set(tokens[ending]),
        )
        state = record(state, rows, sampled.token)
        values = {"slot": slot, "committed_len": end} | sampled._asdict() | details._asdict()
        if shape.kind is ProgramKind.SCORED_PREFILL:
            scores = score(hidden, fields["target"], packed.total, lambda part: model.logits(weights.target, part))
            values |= {f"target_{name}": value for name, value in scores.logprobs._asdict().items()}
            failed = jnp.where(valid, scores.status, STATUS_OK)
            values["status"] = values["status"].at[packed.row].max(failed)
        return state, assemble(completion, values)

    return prefill


def count_prompt(
    state: DeviceState, slot: jax.Array, packed: Packed, valid: jax.Array, tokens: jax.Array
) -> DeviceState:
    """Marks prompt tokens [T] as seen and counts earlier output among them."""
    scratch = state.prompt_len.shape[0] - 1
    is_prompt = packed.position < state.prompt_len[slot]
    prompt_row = jnp.where(valid & is_prompt, slot, scratch)
    output_row = jnp.where(valid & ~is_prompt, slot, scratch)
    return dataclasses.replace(
        state,
        prompt_seen=state.prompt_seen.at[prompt_row, tokens].set(True),
        output_counts=state.output_counts.at[output_row, tokens].add(1),
    )


def _first_token(
    model: Model, params: Params, last: jax.Array, rows: Rows, state: DeviceState, wanted: jax.Array, mask: Mask
) -> tuple[Sampled, Logprobs]:
    """Samples from the `last` [B, D] hidden rows; skips the vocabulary when no row samples."""
    count = last.shape[0]

    def some() -> tuple[Sampled, Logprobs]:
        logits = model.logits(params, last)
        sampled = sample(logits, rows, state, mask)
        return sampled, describe_if(wanted > 0, logits, sampled.token)

    def none() -> tuple[Sampled, Logprobs]:
        nobody = jnp.zeros(count, jnp.int32)
        return Sampled(nobody - 1, nobody), nothing(count)

    return lax.cond(rows.active.any(), some, none)
