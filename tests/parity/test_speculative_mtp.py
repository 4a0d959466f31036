"""Rounds whose proposals come from multi-token-prediction heads: the target's tokens, and a context without a hole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.device_state import abstract_state
from helios_jax.models.interface import heads_of
from helios_jax.models.params import leaves, tree_of
from helios_jax.models.reference import DenseCache, attend_causal, attend_dense, greedy_tokens
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import ProgramShape
from tests.golden.tiny import GOLDEN_DIR, GREEDY_LEN, VOCAB, golden, tiny_checkpoint
from tests.unit.programs_toy import Chunk
from tests.unit.speculative_toy import LEARNED, NARROW, RECTANGLE, Offer, Rounds, compiled
from tests.unit.test_programs_memory import tree_bytes

FAMILY, TOLERANCE, LENGTH = "qwen3_5", 1e-4, 96
PROMPT = golden(FAMILY)["prompt"].tolist()


@functools.cache
def loaded() -> tuple[Any, Any, Any, Any]:
    """Model and heads, with their parameters."""
    source = open_source(tiny_checkpoint(FAMILY))
    return source.model, source.load_params("float32"), heads_of(source.model), source.heads().load_params("float32")


@functools.cache
def agreeing(share: float) -> tuple[Any, Any]:
    """Parameters of a model and of heads that predict it the better the smaller `share` is, exactly at 0.

    Layers add `share` of what they would; without them the next token depends on the last one alone,
    and heads with fc = [1, 0] and the model's own norm see the same of it.
    """
    _, params, _, own = loaded()
    named, heads = dict(leaves(params)), dict(leaves(own))
    for tree in (named, heads):
        for name in tree:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tree[name] = share * tree[name]
    width = named["model.norm.weight"].size
    heads["mtp.norm.weight"] = named["model.norm.weight"]
    heads["mtp.pre_fc_norm_embedding.weight"] = jnp.zeros(width)
    passing = jnp.concatenate([jnp.eye(width), jnp.zeros((width, width))], axis=1)
    heads["mtp.fc.weight"] = passing + share * heads["mtp.fc.weight"].at[:, :width].set(0)
    return tree_of(named.items()), tree_of(heads.items())


def host_of(share: float | None = None) -> Rounds:
    """A host of the random model and heads, or of agreeing ones."""
    model, params, heads, own = loaded()
    if share is not None:
        params, own = agreeing(share)
    return Rounds(model, params, draft=heads, draft_params=own, slots=3, context=LENGTH)


def begin(host: Rounds, slot: int, history: list[int], cuts: tuple[int, ...] = (), **settings: Any) -> int:
    """Prefills `history` in chunks; the token that follows."""
    host.initialize(slot, len(history), **settings)
    start = 0
    for stop in cuts:
        host.prefill([Chunk(slot, history[start:stop], start, False)])
        start = stop
    return int(host.prefill([Chunk(slot, history[start:], start)])["token"][0])


def test_proposals_are_the_reference_s_and_tokens_transformers() -> None:
    """Slots start s tokens further on, in chunks; every round's confidences are those of the reference's chain."""
    host, stored, rng = host_of(), golden(FAMILY), np.random.default_rng(3)
    with np.load(GOLDEN_DIR / f"{FAMILY}_mtp.npz") as file:
        chain = file["chain_hidden"]
    head = np.asarray(dict(leaves(loaded()[1]))["lm_head.weight"], np.float64)
    greedy = stored["greedy"].tolist()
    outputs = {slot: greedy[:slot] for slot in range(3)}
    for slot, cuts in enumerate([(), (1, 17), (9,)]):
        outputs[slot].append(begin(host, slot, PROMPT + greedy[:slot], cuts))
    offered = accepted = checked = 0
    while any(len(o) < GREEDY_LEN for o in outputs.values()):
        shape = [LEARNED, LEARNED, LEARNED, NARROW][rng.integers(4)]
        slots = [slot for slot in rng.permutation(3).tolist() if len(outputs[slot]) < GREEDY_LEN and rng.random() < 0.8]
        width = 1 if shape is NARROW else 4
        offers: list[Offer | None] = [Offer(s, int(min(width, GREEDY_LEN - len(outputs[s])))) for s in slots]
        before = {slot: len(PROMPT) + len(outputs[slot]) - 1 for slot in slots}
        out = host.round(shape, offers)
        host.extend(outputs, offers, out)
        offered, accepted = offered + int(out["offered"].sum()), accepted + int(out["accepted"].sum())
        for slot in slots:
            if shape is LEARNED and before[slot] - len(PROMPT) < len(chain):
                logits = chain[before[slot] - len(PROMPT), :3].astype(np.float64) @ head.T
                best = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
                np.testing.assert_allclose(out["confidence"][0, slot], best, atol=TOLERANCE)
                checked += 1
    assert all(o == greedy for o in outputs.values())
    assert accepted < offered / 4
    assert checked > 30


@functools.cache
def context_of(share: float) -> Any:
    """tokens [LENGTH] -> keys and values [LENGTH - 1, K, H] of the heads' layer and the model's hidden, densely."""
    model, _, heads, _ = loaded()
    spec = heads.attention_layers[0]
    empty = jnp.zeros((0, spec.num_kv_heads, spec.head_dim))

    @jax.jit
    def run(params: Any, own: Any, tokens: jax.Array) -> Any:
        rows, layers = jnp.arange(LENGTH), (None,) * len(model.attention_layers)
        hidden = model.forward(params, tokens, rows, layers, attend_causal)[0]
        caches = (DenseCache(empty, empty),)
        caches = heads.predict(own, params, tokens[1:], rows[:-1], hidden[:-1], caches, attend_dense)[1]
        return caches[0], hidden

    return lambda tokens: run(*agreeing(share), jnp.asarray(np.resize(tokens, LENGTH)))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_context_has_no_hole_after_any_rounds(seed: int) -> None:
    """Learned rounds, copies, width one and plain decode in random order, with and without acceptance.

    Afterwards the heads' cache holds what one dense pass over the target's hidden rows gives.
    """
    share, rng = 0.1, np.random.default_rng(seed)
    model, params = loaded()[0], agreeing(share)[0]
    host = host_of(share)
    prompts = [PROMPT, PROMPT[3:], PROMPT[:11]]
    truth = [greedy_tokens(model, params, prompt, 60) for prompt in prompts]
    outputs = {slot: [begin(host, slot, prompt, (5,) if slot == 1 else ())] for slot, prompt in enumerate(prompts)}
    offered = accepted = mixed = 0
    for _ in range(26):
        shape: ProgramShape | None = [LEARNED, LEARNED, LEARNED, RECTANGLE, NARROW, None][rng.integers(6)]
        slots = [slot for slot in rng.permutation(3).tolist() if len(outputs[slot]) < 56 and rng.random() < 0.8][:2]
        if not slots:
            continue
        if shape is None:
            for slot, token in zip(slots, host.decode([*slots, None][:2])["token"], strict=False):
                outputs[slot].append(int(token))
            continue
        offers: list[Offer | None] = []
        for slot in slots:
            copy = truth[slot][len(outputs[slot]) :][:3]
            copy[-1] = int(rng.integers(VOCAB))
            offers.append(Offer(slot, 1 if shape is NARROW else int(rng.integers(1, 5)), copy, [0.9, 0.8, 0.7]))
        out = host.round(shape, offers)
        host.extend(outputs, offers, out)
        if shape is LEARNED:
            lanes = len(slots)
            offered, accepted = offered + int(out["offered"].sum()), accepted + int(out["accepted"].sum())
            mixed += int(((out["accepted"] > 0) & (out["accepted"] < out["offered"]))[:lanes].sum())
    for slot, prompt in enumerate(prompts):
        assert outputs[slot] == truth[slot][: len(outputs[slot])]
        known = prompt + outputs[slot]
        count = len(known) - 1
        cache, hidden = context_of(share)(known)
        pages, offsets = host.tables[slot, np.arange(count - 1) // 16], np.arange(count - 1) % 16
        for mine, theirs in zip(host.state.draft_kv[0], cache, strict=True):
            np.testing.assert_allclose(np.array(mine)[pages, offsets], theirs[: count - 1], atol=TOLERANCE)
        np.testing.assert_allclose(host.state.mtp_hidden[0][slot], hidden[count - 1], atol=TOLERANCE)
    assert 0.15 * offered < accepted < 0.95 * offered
    assert mixed > 1


def test_heads_that_know_the_target_are_always_accepted() -> None:
    """p = q but for rounding: greedy, and sampled with filters and penalties."""
    host = host_of(0.0)
    settings = {"temperature": 1.1, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "frequency_penalty": 0.4, "seed": (7, 5)}
    outputs = {0: [begin(host, 0, PROMPT)], 1: [begin(host, 1, PROMPT, **settings)]}
    offered = accepted = 0
    for _ in range(14):
        offers: list[Offer | None] = [Offer(slot, 4) for slot in outputs]
        out = host.round(LEARNED, offers)
        host.extend(outputs, offers, out)
        offered, accepted = offered + int(out["offered"].sum()), accepted + int(out["accepted"].sum())
        for lane in range(2):
            np.testing.assert_allclose(out["survival"][lane, : out["offered"][lane]], 1.0, atol=1e-3)
    assert accepted >= offered - 1
    assert offered > 60
    assert outputs[0] == greedy_tokens(loaded()[0], agreeing(0.0)[0], PROMPT, len(outputs[0]))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_pools_and_kept_rows_are_updated_in_place(dtype: str) -> None:
    model, _, heads, _ = loaded()
    dims = host_of().dims
    state = abstract_state(model, dims, dtype, heads)
    assert state.mtp_hidden[0].shape == (4, 64)
    for shape in (LEARNED, NARROW):
        memory = compiled(shape, model, dims, dtype, heads).memory_analysis()
        assert memory.alias_size_in_bytes == tree_bytes(state)
