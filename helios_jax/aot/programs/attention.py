"""Attention over the paged pool, whose cost follows the keys that are there.

No program gathers a context: loops walk blocks of a few pages with a trip count known only
on the device, and keep a running softmax. Prefill walks query tiles of one row at a time;
decode and verification walk a list of (lane, key block) pairs, so a short lane does not pay for a long one.

Axis letters: B rows or lanes, P page-table entries, T query tokens (or those of a tile),
S keys of a block, R pairs worked on together, N query heads = K kv heads x G, H head dim.

    s = scale q.k;  m' = max(m, max s);  l' = l e^(m-m') + sum e^(s-m');  o' = o e^(m-m') + sum e^(s-m') v
    out = o / l       (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867)

Values of masked keys are zeroed before the product: weight 0 times NaN, from a scratch page
or an earlier occupant, would be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.aot.device_state import LayerPages
from helios_jax.aot.programs.packing import Address, Packed, owner
from helios_jax.aot.programs.types import Tiling
from helios_jax.models.interface import Attend, AttentionSpec

MASKED = -1e30  # finite, so that a row without keys gives zeros and no NaN
LEAST_MAXIMUM = -1e29  # far above MASKED, far below any score
LEAST_WEIGHT = 1e-30


class Softmax(NamedTuple):
    """Running softmax of a set of queries: maximum and weight [..., K, G, T], sum [..., K, G, T, H]."""

    maximum: jax.Array
    weight: jax.Array
    total: jax.Array


# (spec, q [T, N, H], cache, dtype of keys and values) -> out [T, N, H]; the queries' own keys are in the cache.
Queries = Callable[[AttentionSpec, jax.Array, LayerPages, jnp.dtype], jax.Array]


def _empty(shape: tuple[int, ...], head_dim: int) -> Softmax:
    zeros = jnp.zeros(shape, jnp.float32)
    return Softmax(zeros + MASKED, zeros, jnp.zeros((*shape, head_dim), jnp.float32))


def _merge(a: Softmax, b: Softmax) -> Softmax:
    maximum = jnp.maximum(a.maximum, b.maximum)
    x, y = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return Softmax(maximum, a.weight * x + b.weight * y, a.total * x[..., None] + b.total * y[..., None])


def _result(state: Softmax) -> jax.Array:
    return state.total / jnp.maximum(state.weight, LEAST_WEIGHT)[..., None]


def write_cache(cache: LayerPages, address: Address, k: jax.Array, v: jax.Array) -> LayerPages:
    """Puts keys and values [T, K, H] at their addresses, in place when the pool is donated."""

    def put(pages: jax.Array, rows: jax.Array) -> jax.Array:
        if rows.dtype.itemsize == 2 and pages.dtype == jnp.uint16:
            rows = lax.bitcast_convert_type(rows, jnp.uint16)
        return pages.at[address.page, address.offset].set(rows.astype(pages.dtype), mode="promise_in_bounds")

    return put(cache[0], k), put(cache[1], v)


def _read(pages: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Pages [R, pages a block] of the pool as keys or values [R, S, K, H] of `dtype`."""
    rows = pages.at[ids].get(mode="promise_in_bounds")
    rows = rows.reshape(ids.shape[0], -1, *pages.shape[2:])
    return lax.bitcast_convert_type(rows, dtype) if dtype.itemsize == 2 else rows


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [R, T, K, G, H] . k [R, S, K, H] -> float32 [R, K, G, T, S].

    A tile of queries is laid out as one matrix a kv head, with keys as [H, S]: XLA's CPU runs
    that a third faster than the product it makes of the einsum. One query has too little work
    to pay for the transposes (docs/LOG.md).
    """
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    if q.shape[1] == 1:
        return jnp.einsum("rtkgh,rskh->rkgts", q, k, precision=precision, preferred_element_type=jnp.float32)
    rows, num_queries, heads, groups, _ = q.shape
    queries = q.transpose(0, 2, 3, 1, 4).reshape(rows, heads, groups * num_queries, -1)
    scores = jnp.matmul(queries, k.transpose(0, 2, 3, 1), precision=precision, preferred_element_type=jnp.float32)
    return scores.reshape(rows, heads, groups, num_queries, -1)


def _weighted(weights: jax.Array, v: jax.Array) -> jax.Array:
    """weights [R, K, G, T, S] of v [R, S, K, H] -> float32 [R, K, G, T, H]; layouts as in `_scores`."""
    precision = lax.Precision.HIGHEST if v.dtype == jnp.float32 else None
    weights = weights.astype(v.dtype)
    rows, heads, groups, num_queries, num_keys = weights.shape
    if num_queries == 1:
        return jnp.einsum("rkgts,rskh->rkgth", weights, v, precision=precision, preferred_element_type=jnp.float32)
    flat = weights.reshape(rows, heads, groups * num_queries, num_keys)
    total = jnp.matmul(flat, v.transpose(0, 2, 1, 3), precision=precision, preferred_element_type=jnp.float32)
    return total.reshape(rows, heads, groups, num_queries, -1)


def _partial(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Softmax:
    """Softmax of queries [R, T, K, G, H] over one block of keys and values [R, S, K, H].

    Args:
        mask: [R, T, S] True where the query sees the key.
    """
    if jax.default_backend() == "cpu":  # XLA's CPU has no fast 16-bit product
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.where(mask[:, None, None], _scores(q, k) * spec.scale, MASKED)
    # A query that sees no key of the block must weigh nothing: exp(MASKED - LEAST_MAXIMUM) is 0.
    maximum = jnp.maximum(scores.max(axis=-1), LEAST_MAXIMUM)
    weights = jnp.exp(scores - maximum[..., None])
    v = jnp.where(mask.any(axis=1)[..., None, None], v, jnp.zeros((), v.dtype))
    return Softmax(maximum, weights.sum(axis=-1), _weighted(weights, v))


def _visible(spec: AttentionSpec, query: jax.Array, key: jax.Array) -> jax.Array:
    """[..., T, S] causal and window mask for positions `query` [..., T] and `key` [..., S]."""
    distance = query[..., :, None] - key[..., None, :]
    mask = distance >= 0
    return mask if spec.window is None else mask & (distance < spec.window)


def _first_block(spec: AttentionSpec, first_query: jax.Array, key_block: int) -> jax.Array:
    """First key block that a query at `first_query` (the earliest) can see."""
    if spec.window is None:
        return jnp.zeros_like(first_query)
    return jnp.maximum(0, first_query - spec.window + 1) // key_block


def _pad_tables(tables: jax.Array, num_pages: int, pages_per_block: int) -> jax.Array:
    """Page tables whose width is a multiple of a block; foreign page ids become scratch."""
    tables = jnp.where((tables > 0) & (tables < num_pages), tables, 0)
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages_per_block)))


def _writing(address: Address, queries: Queries) -> Attend:
    """Writes keys and values to `address`, then attends."""

    def attend(
        spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerPages
    ) -> tuple[jax.Array, LayerPages]:
        cache = write_cache(cache, address, k, v)
        return queries(spec, q, cache, k.dtype), cache

    return attend


def prefill_attend(
    tables: jax.Array, packed: Packed, query_len: jax.Array, start: jax.Array, address: Address, tiling: Tiling
) -> Attend:
    """Attention of packed prompt rows: each query tile of each row walks the row's own keys.

    Cost: sum over rows of query_len x context / (tile x block) iterations of one tile.

    Args:
        tables: [B, P] page ids.
        query_len, start: [B] as in the control vector.
        address: Where the packed tokens' keys and values go.
    """
    return _writing(address, _prompt_queries(tables, packed, query_len, start, tiling))


def _prompt_queries(
    tables: jax.Array, packed: Packed, query_len: jax.Array, start: jax.Array, tiling: Tiling
) -> Queries:  # fmt: skip
    """`prefill_attend` once the keys are written; rows that are not of these lanes mean nothing."""
    tile, (num_rows, _) = tiling.query_tile, tables.shape
    ends = jnp.cumsum(-(-query_len // tile))

    def attend(spec: AttentionSpec, q: jax.Array, cache: LayerPages, dtype: jnp.dtype) -> jax.Array:
        num_tokens = q.shape[0]
        (num_pages, page_size), block = cache[0].shape[:2], tiling.key_block
        pages = _pad_tables(tables, num_pages, block // page_size)
        groups = spec.num_heads // spec.num_kv_heads
        # a tile may reach past its row: into the next row, which comes later and overwrites it
        queries = jnp.pad(q.reshape(num_tokens, spec.num_kv_heads, groups, -1), ((0, tile), (0, 0), (0, 0), (0, 0)))

        def tile_step(item: jax.Array, out: jax.Array) -> jax.Array:
            row = jnp.minimum(owner(item, ends), num_rows - 1)
            done = (item - (ends[row] - -(-query_len[row] // tile))) * tile
            index = done + jnp.arange(tile, dtype=jnp.int32)
            position = start[row] + index
            end = start[row] + jnp.minimum(done + tile, query_len[row])
            mine = lax.dynamic_slice_in_dim(queries, packed.offset[row] + done, tile)[None]

            def block_step(number: jax.Array, state: Softmax) -> Softmax:
                ids = lax.dynamic_slice(pages, (row, number * (block // page_size)), (1, block // page_size))
                key = number * block + jnp.arange(block, dtype=jnp.int32)
                mask = _visible(spec, position, key) & (index < query_len[row])[:, None] & (key < end)
                new = _partial(spec, mine, _read(cache[0], ids, dtype), _read(cache[1], ids, dtype), mask[None])
                return _merge(state, new)

            first = _first_block(spec, start[row] + done, block)
            empty = _empty((1, spec.num_kv_heads, groups, tile), spec.head_dim)
            value = _result(lax.fori_loop(first, -(-end // block), block_step, empty))[0]
            value = value.transpose(2, 0, 1, 3).reshape(tile, spec.num_heads, spec.head_dim)
            return lax.dynamic_update_slice_in_dim(out, value.astype(out.dtype), packed.offset[row] + done, 0)

        out = jnp.zeros((num_tokens + tile, spec.num_heads, spec.head_dim), q.dtype)
        return lax.fori_loop(0, ends[-1], tile_step, out)[:num_tokens]

    return attend


def decode_attend(
    tables: jax.Array, position: jax.Array, active: jax.Array, address: Address, tiling: Tiling
) -> Attend:
    """Attention of one token a lane, over a list of all (lane, key block) pairs.

    Cost: sum over active lanes of context / (block x group) iterations of one group.

    Args:
        tables: [B, P] page ids.
        position, active: [B] position of each lane's token; inactive lanes give zeros.
        address: Where the lanes' keys and values go.
    """

    def attend(
        spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerPages
    ) -> tuple[jax.Array, LayerPages]:
        cache = write_cache(cache, address, k, v)
        queries = q.reshape(q.shape[0], 1, spec.num_kv_heads, -1, spec.head_dim)
        out = _over_pairs(spec, queries, position, active.astype(jnp.int32), tables, cache, k.dtype, tiling)
        return out.reshape(q.shape).astype(q.dtype), cache

    return attend


def verify_attend(
    tables: jax.Array, packed: Packed, query_len: jax.Array, start: jax.Array, address: Address, tiling: Tiling
) -> Attend:
    """Attention of a few consecutive tokens a lane, which share one pass over the lane's keys.

    As decode's, with `tiling.query_tile` queries a pair: a lane's keys are read once for all of its
    drafts. On CPU that takes 0.21 to 0.46 of the time of one pair list entry a row (docs/LOG.md).

    Args:
        tables: [B, P] page ids.
        packed: Where the packed rows [T] belong.
        query_len, start: [B] tokens of each lane, at most `tiling.query_tile`, and the first one's position.
        address: Where the rows' keys and values go.
    """
    return _writing(address, _round_queries(tables, packed, query_len, start, tiling))


def _round_queries(
    tables: jax.Array, packed: Packed, query_len: jax.Array, start: jax.Array, tiling: Tiling
) -> Queries:  # fmt: skip
    """`verify_attend` once the keys are written; rows that are not of these lanes mean nothing."""
    width = tiling.query_tile

    def attend(spec: AttentionSpec, q: jax.Array, cache: LayerPages, dtype: jnp.dtype) -> jax.Array:
        index = packed.offset[:, None] + jnp.arange(width, dtype=jnp.int32)
        rows = q.reshape(q.shape[0], spec.num_kv_heads, -1, spec.head_dim)
        out = _over_pairs(spec, rows.at[index].get(mode="clip"), start, query_len, tables, cache, dtype, tiling)
        depth = jnp.clip(packed.position - start[packed.row], 0, width - 1)
        return out[packed.row, depth].reshape(q.shape).astype(q.dtype)

    return attend


def mixed_attend(
    tables: jax.Array, packed: Packed, is_prompt: jax.Array, query_len: jax.Array, start: jax.Array, address: Address,
    prompt_tiling: Tiling, round_tiling: Tiling,
) -> Attend:  # fmt: skip
    """Attention of packed rows of both phases: a prompt's by query tiles as in prefill, the others' as in a round.

    Args:
        tables: [B, P] page ids.
        packed: Where the packed rows [T] of all lanes belong.
        is_prompt: [B] which lanes are prompts.
        query_len, start: [B] rows of each lane, and the position of the first.
        address: Where the rows' keys and values go.
    """
    prompt = _prompt_queries(tables, packed, jnp.where(is_prompt, query_len, 0), start, prompt_tiling)
    rounds = _round_queries(tables, packed, jnp.where(is_prompt, 0, query_len), start, round_tiling)
    of_prompt = is_prompt[packed.row][:, None, None]

    def attend(spec: AttentionSpec, q: jax.Array, cache: LayerPages, dtype: jnp.dtype) -> jax.Array:
        return jnp.where(of_prompt, prompt(spec, q, cache, dtype), rounds(spec, q, cache, dtype))

    return _writing(address, attend)


def _over_pairs(
    spec: AttentionSpec, queries: jax.Array, start: jax.Array, query_len: jax.Array, tables: jax.Array,
    cache: LayerPages, dtype: jnp.dtype, tiling: Tiling,
) -> jax.Array:  # fmt: skip
    """Attention of `queries` [B, T, K, G, H] at positions start .. start + query_len - 1 [B]: [B, T, K, G, H].

    The loop walks groups of (lane, key block) pairs, so a short lane does not pay for a long one.
    """
    (num_lanes, width, heads, groups, _), block = queries.shape, tiling.key_block
    group, (num_pages, page_size) = tiling.lane_group, cache[0].shape[:2]
    pages = _pad_tables(tables, num_pages, block // page_size).reshape(num_lanes, -1, block // page_size)
    step = jnp.arange(width, dtype=jnp.int32)
    first = _first_block(spec, start, block)
    blocks = jnp.where(query_len > 0, (start + query_len - 1) // block + 1 - first, 0)
    ends = jnp.cumsum(blocks)

    def group_step(number: jax.Array, state: Softmax) -> Softmax:
        pair = number * group + jnp.arange(group, dtype=jnp.int32)
        lane = jnp.minimum(owner(pair, ends), num_lanes - 1)
        at = jnp.where(pair < ends[-1], pair - (ends - blocks)[lane] + first[lane], 0)
        key = at[:, None] * block + jnp.arange(block, dtype=jnp.int32)
        there = (step < query_len[lane][:, None]) & (pair < ends[-1])[:, None]
        mask = _visible(spec, start[lane][:, None] + step, key) & there[:, :, None]
        ids = pages[lane, at]
        new = _partial(spec, queries[lane], _read(cache[0], ids, dtype), _read(cache[1], ids, dtype), mask)
        return _merge_at(state, lane, new)

    empty = _empty((num_lanes, heads, groups, width), spec.head_dim)
    out = _result(lax.fori_loop(0, -(-ends[-1] // group), group_step, empty))
    return out.transpose(0, 3, 1, 2, 4)


def _merge_at(state: Softmax, lane: jax.Array, new: Softmax) -> Softmax:
    """Merges partial results of several pairs into their lanes' rows.

    By scatter, not by a one-hot product: a lane with NaN must not touch the others.
    """
    maximum = state.maximum.at[lane].max(new.maximum)
    old, add = jnp.exp(state.maximum - maximum), jnp.exp(new.maximum - maximum[lane])
    weight = (state.weight * old).at[lane].add(new.weight * add)
    total = (state.total * old[..., None]).at[lane].add(new.total * add[..., None])
    return Softmax(maximum, weight, total)
