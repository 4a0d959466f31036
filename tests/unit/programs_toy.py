"""A small decoder for the programs' tests, its float64 reference, and a host that drives programs.

The model has what matters to attention (rotary positions, grouped heads, one layer with a
window). The reference is dense numpy over the whole sequence: no cache, no pages, no tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.aot.abi import MAX_LOGIT_BIAS, Dims, completion_layout, control_layout, mask_shape
from helios_jax.aot.device_state import DeviceState, new_state
from helios_jax.aot.programs import build_program
from helios_jax.models.interface import AttentionSpec
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape

TABLES = ("kv", "draft_kv", "mtp_hidden", "recurrent", "saved")  # of the state: no single array with a row a slot
WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW = 24, 4, 2, 8, 61, 7


def _rotate(xp: Any, x: Any, positions: Any) -> Any:
    angle = positions[:, None, None] * 0.3 ** xp.arange(HEAD_DIM // 2)
    a, b = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    return xp.concatenate([a * xp.cos(angle) - b * xp.sin(angle), b * xp.cos(angle) + a * xp.sin(angle)], -1)


@dataclasses.dataclass(frozen=True)
class Toy:
    family: str = "toy"
    vocab_size: int = VOCAB
    max_position_embeddings: int = 4096
    attention_layers: tuple[AttentionSpec, ...] = (
        AttentionSpec(0, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5),
        AttentionSpec(1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, WINDOW),
    )

    def abstract_params(self, dtype: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.dtype(dtype)), toy_params())

    def forward(self, params: Any, tokens: Any, positions: Any, caches: Any, attend: Any) -> Any:
        x, kept = params["embed"][tokens], []
        for spec, layer, cache in zip(self.attention_layers, params["layers"], caches, strict=True):
            q = (x @ layer["q"]).reshape(-1, HEADS, HEAD_DIM)
            k = (x @ layer["k"]).reshape(-1, KV_HEADS, HEAD_DIM)
            v = (x @ layer["v"]).reshape(-1, KV_HEADS, HEAD_DIM)
            q, k = (_rotate(jnp, y, positions).astype(x.dtype) for y in (q, k))
            out, cache = attend(spec, q, k, v, cache)
            x = x + out.reshape(-1, HEADS * HEAD_DIM) @ layer["o"]
            kept.append(cache)
        return x, tuple(kept)

    def logits(self, params: Any, hidden: Any) -> Any:
        return (hidden @ params["head"].T).astype(jnp.float32)


@functools.cache
def toy_params() -> Any:
    rng = np.random.default_rng(5)

    def new(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    layers = [
        {
            "q": 2 * new(WIDTH, HEADS * HEAD_DIM),
            "k": 2 * new(WIDTH, KV_HEADS * HEAD_DIM),
            "v": new(WIDTH, KV_HEADS * HEAD_DIM),
            "o": new(HEADS * HEAD_DIM, WIDTH),
        }
        for _ in range(2)
    ]
    return {"embed": new(VOCAB, WIDTH) * 3, "layers": layers, "head": new(VOCAB, WIDTH) * 2}


def reference_logits(tokens: Sequence[int]) -> np.ndarray:
    """float64 logits [len(tokens), V] of the whole sequence, computed densely."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), toy_params())
    x, n = params["embed"][np.asarray(tokens)], len(tokens)
    positions = np.arange(n)
    for spec, layer in zip(Toy().attention_layers, params["layers"], strict=True):
        q = _rotate(np, (x @ layer["q"]).reshape(n, HEADS, HEAD_DIM), positions)
        k = _rotate(np, (x @ layer["k"]).reshape(n, KV_HEADS, HEAD_DIM), positions)
        v = (x @ layer["v"]).reshape(n, KV_HEADS, HEAD_DIM)
        out = np.zeros((n, HEADS, HEAD_DIM))
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = q[:, head] @ k[:, kv_head].T * spec.scale
            distance = positions[:, None] - positions
            scores[(distance < 0) | (distance >= (spec.window or n))] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights @ v[:, kv_head] / weights.sum(1, keepdims=True)
        x = x + out.reshape(n, -1) @ layer["o"]
    return x @ params["head"].T


def reference_greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(reference_logits(tokens)[-1])))
    return tokens[len(prompt) :]


def abstract_bits(shape: ProgramShape, dims: Dims) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The mask argument of a program that samples."""
    extents = mask_shape(shape, dims)
    return () if extents is None else (jax.ShapeDtypeStruct(extents, jnp.uint32),)


def no_bits(shape: ProgramShape, dims: Dims) -> tuple[np.ndarray, ...]:
    """A mask that nobody reads, and that allows nothing if somebody does."""
    return tuple(np.zeros(each.shape, np.uint32) for each in abstract_bits(shape, dims))


@functools.cache
def compiled(shape: ProgramShape, model: Any, dims: Dims, dtype: str) -> Any:
    """The executable of a shape, as a core would compile it."""
    control = control_layout(shape, dims)
    arguments = (
        model.abstract_params(dtype),
        jax.eval_shape(lambda: new_state(model, dims, dtype)),
        jax.ShapeDtypeStruct((control.int_size,), jnp.int32),
        jax.ShapeDtypeStruct((control.float_size,), jnp.float32),
        *abstract_bits(shape, dims),
    )
    return jax.jit(build_program(shape, model, dims, dtype), donate_argnums=1).lower(*arguments).compile()


NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}


@dataclasses.dataclass
class Chunk:
    """One row of a prefill: `tokens` from position `start` on."""

    slot: int
    tokens: Sequence[int]
    start: int = 0
    sample: bool = True
    targets: Sequence[int] | None = None


def settings_of(prompt_len: int, *, bias: dict[int, float] | None = None, **settings: Any) -> dict[str, Any]:
    """Control fields of a request that takes over a slot: initialize has them, and restore."""
    ids, values = np.full(MAX_LOGIT_BIAS, -1, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token, value) in enumerate((bias or {}).items()):
        ids[i], values[i] = token, value
    seed = np.asarray(settings.pop("seed", (0, 0)), np.uint32).view(np.int32)
    return NEUTRAL | settings | {"prompt_len": prompt_len, "bias_ids": ids, "bias_values": values, "seed": seed}


class Host:
    """Drives the programs of one model with pages handed out at random; knows no scheduler."""

    def __init__(
        self,
        model: Any = None,
        params: Any = None,
        *,
        slots: int = 4,
        context: int = 96,
        page_size: int = 16,
        dtype: str = "float32",
        poison: bool = True,
    ) -> None:
        self.model, self.dtype = model or Toy(), dtype
        pages = -(-context // page_size)
        self.dims = Dims(
            slots=slots,
            pages_per_slot=pages,
            num_pages=slots * pages + 1,
            page_size=page_size,
            vocab_size=self.model.vocab_size,
        )
        self.params = jax.tree.map(lambda a: jnp.asarray(a, jnp.dtype(dtype)), params or toy_params())
        order = np.random.default_rng(1).permutation(slots * pages)
        self.tables = (1 + order).reshape(slots, pages).astype(np.int32)
        self.state: DeviceState = new_state(self.model, self.dims, dtype)
        if poison:
            nan = 0x7FC0 if jnp.dtype(dtype).itemsize == 2 else np.nan
            pools = jax.tree.map(lambda p: jnp.asarray(np.full(p.shape, nan, p.dtype)), self.state.kv)
            rows = jax.tree.map(lambda t: jnp.asarray(np.full(t.shape, nan, t.dtype)), self.state.recurrent)
            self.state = self.state.replace(kv=pools, recurrent=rows)

    bits: np.ndarray | None = None  # of the next frame

    def program(self, shape: ProgramShape) -> Any:
        return compiled(shape, self.model, self.dims, self.dtype)

    def run(self, shape: ProgramShape, **fields: Any) -> dict[str, np.ndarray]:
        ints, floats, parts = control_layout(shape, self.dims).new()
        for name, value in fields.items():
            parts[name][...] = value
        bits, self.bits = no_bits(shape, self.dims) if self.bits is None else (self.bits,), None
        self.state, (out_ints, out_floats) = self.program(shape)(self.params, self.state, ints, floats, *bits)
        return completion_layout(shape, self.dims).split(np.asarray(out_ints), np.asarray(out_floats))

    def initialize(self, slot: int, prompt_len: int, **settings: Any) -> None:
        self.run(ProgramShape(ProgramKind.INITIALIZE, 1, 0), slot=slot, **settings_of(prompt_len, **settings))

    def prefill(
        self, chunks: Sequence[Chunk], *, rows: int | None = None, tokens: int = 64, logprobs: bool = False
    ) -> dict[str, np.ndarray]:
        scored = any(c.targets is not None for c in chunks)
        kind = ProgramKind.SCORED_PREFILL if scored else ProgramKind.PREFILL
        shape = ProgramShape(kind, rows or len(chunks), tokens)
        b = shape.batch_capacity
        fields: dict[str, Any] = {name: np.zeros(b, np.int32) for name in ("query_len", "start", "sample")}
        fields["slot"] = np.full(b, self.dims.slots, np.int32)
        fields["page_table"] = np.zeros((b, self.dims.pages_per_slot), np.int32)
        fields["want_logprobs"] = int(logprobs)
        fields["tokens"] = np.full(tokens, VOCAB + 7, np.int32)
        packed = np.concatenate([np.asarray(c.tokens, np.int32) for c in chunks])
        fields["tokens"][: len(packed)] = packed
        if scored:
            fields["target"] = np.full(tokens, -1, np.int32)
            fields["target"][: len(packed)] = np.concatenate([np.asarray(c.targets, np.int32) for c in chunks])
        for i, chunk in enumerate(chunks):
            fields["slot"][i], fields["query_len"][i] = chunk.slot, len(chunk.tokens)
            fields["start"][i], fields["sample"][i] = chunk.start, chunk.sample
            used = -(-(chunk.start + len(chunk.tokens)) // self.dims.page_size)
            fields["page_table"][i, :used] = self.tables[chunk.slot, :used]
        return self.run(shape, **fields)

    def decode(self, slots: Sequence[int | None], *, logprobs: bool = False) -> dict[str, np.ndarray]:
        """One decode step; None is an inactive lane."""
        shape = ProgramShape(ProgramKind.DECODE, len(slots), 1)
        tables = np.zeros((len(slots), self.dims.pages_per_slot), np.int32)
        for lane, slot in enumerate(slots):
            if slot is not None:
                tables[lane] = self.tables[slot]
        lanes = [self.dims.slots if s is None else s for s in slots]
        return self.run(shape, slot=lanes, page_table=tables, want_logprobs=int(logprobs))

    def generate(self, slot: int, prompt: Sequence[int], count: int, **settings: Any) -> list[int]:
        """Alone: initialise, one prefill, then decodes with one lane."""
        self.initialize(slot, len(prompt), **settings)
        out = [int(self.prefill([Chunk(slot, prompt)])["token"][0])]
        while len(out) < count:
            out.append(int(self.decode([slot])["token"][0]))
        return out


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def with_settings(state: DeviceState, rows: dict[int, dict[str, Any]]) -> DeviceState:
    """The state with sampling settings of some slots; `bias` is a mapping of token to value."""
    changed: dict[str, Any] = {}
    for slot, settings in rows.items():
        settings = dict(settings)
        bias = settings.pop("bias", {})
        settings["bias_ids"] = [*bias, *[-1] * (MAX_LOGIT_BIAS - len(bias))]
        settings["bias_values"] = [*bias.values(), *[0.0] * (MAX_LOGIT_BIAS - len(bias))]
        for name, value in settings.items():
            column = changed.get(name, getattr(state, name))
            changed[name] = column.at[slot].set(jnp.asarray(value, column.dtype))
    return state.replace(**changed)
