"""Whole rounds of multi-token-prediction heads: sampled tokens have the model's distribution (fault P6).

All lanes hold the same history and differ in their seeds; a round is played, counted and taken back.
A bias leaves few tokens of the vocabulary, so that every history of emitted tokens occurs often.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.models.reference import attend_causal
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource
from tests.parity.test_speculative_mtp import PROMPT, VOCAB, agreeing, begin, loaded
from tests.unit.programs_toy import with_settings
from tests.unit.speculative_toy import Offer, Rounds

LANES, ALIVE, SIGMAS = 64, 5, 6.5
SHARE = 0.25  # the heads know the model, but not well
BARRED = -1e4
KIND, LEARNED = ProgramKind.SPECULATIVE, ProposalSource.LEARNED
SHAPES = {
    "width 4": ProgramShape(KIND, LANES, 4, 3, 4 * LANES, 0, LEARNED),
    "width 2": ProgramShape(KIND, LANES, 2, 1, 2 * LANES, 0, LEARNED),
    "width 1": ProgramShape(KIND, LANES, 1, 0, LANES, 0, LEARNED),
    "shared rows": ProgramShape(KIND, LANES, 4, 3, 160, 0, LEARNED, Allocation.PREFIX_LIMIT),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.5},
    "filters": {"temperature": 1.5, "top_p": 0.8, "top_k": 4, "min_p": 0.02},
    "penalties": {"temperature": 0.9, "frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.3},
}
COLUMNS = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@functools.cache
def ready() -> tuple[Rounds, Any, int]:
    """A host whose slots all hold the prompt and one greedy token; its state then, on the host; that token."""
    model, _, heads, _ = loaded()
    params, own = agreeing(SHARE)
    host = Rounds(model, params, draft=heads, draft_params=own, slots=LANES, context=48)
    first = {begin(host, slot, PROMPT) for slot in range(LANES)}
    assert len(first) == 1
    return host, jax.tree.map(np.array, host.state), first.pop()


@functools.cache
def alive() -> np.ndarray:
    """The tokens that the bias leaves: the likeliest after the prompt."""
    return np.sort(np.argsort(-logits_after(np.zeros((1, 0), np.int64))[0])[:ALIVE])


def logits_after(emitted: np.ndarray) -> np.ndarray:
    """The model's float64 logits [N, V] after prompt, first token and each row of tokens [N, E], densely."""
    model, params, first = loaded()[0], agreeing(SHARE)[0], ready()[2]
    history = np.concatenate([np.tile([*PROMPT, first], (len(emitted), 1)), emitted], axis=1)

    def last(tokens: jax.Array) -> jax.Array:
        caches = (None,) * len(model.attention_layers)
        hidden = model.forward(params, tokens, jnp.arange(history.shape[1]), caches, attend_causal)[0]
        return model.logits(params, hidden[-1:])[0]

    return np.asarray(jax.jit(jax.vmap(last))(jnp.asarray(history, jnp.int32)), np.float64)


@functools.cache
def histories(depth: int) -> np.ndarray:
    """[ALIVE ** depth, depth] all rows of indices of live tokens, in the order of their number."""
    return np.arange(ALIVE**depth)[:, None] // ALIVE ** np.arange(depth - 1, -1, -1) % ALIVE


@functools.cache
def expected(name: str, depth: int) -> np.ndarray:
    """[ALIVE ** depth, ALIVE] probabilities of the next live token after each history, by the documented order."""
    settings, tokens = SETTINGS[name], alive()[histories(depth)]
    x = logits_after(tokens)[:, alive()]
    output = np.stack([(np.append(row, ready()[2])[:, None] == alive()).sum(axis=0) for row in tokens])
    seen, factor = (output > 0) | np.isin(alive(), PROMPT), settings.get("repetition_penalty", 1.0)
    x = np.where(seen, np.where(x > 0, x / factor, x * factor), x)
    x -= settings.get("frequency_penalty", 0) * output + settings.get("presence_penalty", 0) * (output > 0)
    p = np.exp((x - x.max(axis=1, keepdims=True)) / settings["temperature"])
    p[p < settings.get("min_p", 0)] = 0
    order = np.argsort(-p, axis=1, kind="stable")
    ranked = np.take_along_axis(p, order, axis=1)
    ranked[:, settings.get("top_k", ALIVE) :] = 0
    ranked /= ranked.sum(axis=1, keepdims=True)
    ranked[np.cumsum(ranked, axis=1) - ranked >= settings.get("top_p", 1.0)] = 0
    np.put_along_axis(p, order, ranked / ranked.sum(axis=1, keepdims=True), axis=1)
    return p


def restored(name: str) -> Any:
    """The state before the round, with the settings, as numpy; keys and values are those on the device."""
    bias = {int(token): BARRED for token in np.setdiff1d(np.arange(VOCAB), alive())}
    rows = with_settings(jax.tree.map(jnp.asarray, ready()[1]), {0: {**SETTINGS[name], "bias": bias}})
    one = {field: np.array(getattr(rows, field)) for field in (*COLUMNS, "bias_ids", "bias_values")}
    return {field: np.repeat(column[:1], LANES + 1, axis=0) for field, column in one.items()}


def blocks(shape: ProgramShape, name: str, rounds: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Emitted tokens [N, W], how many [N], and accepted proposals; lanes have ceilings 1 .. W in turn."""
    host, before, _ = ready()
    changed = restored(name)
    kept = ("pending_token", "previous_token", "committed_len", "output_counts", "mtp_hidden")
    limits = 1 + np.arange(LANES) % shape.token_capacity
    offers = [Offer(slot, int(limit)) for slot, limit in enumerate(limits)]
    rng, tokens, counts, accepted = np.random.default_rng(8), [], [], 0
    for _ in range(rounds):
        fields = {field: jax.tree.map(jnp.array, getattr(before, field)) for field in kept}
        seed = rng.integers(0, 2**32, (LANES + 1, 2), np.uint32)
        host.state = host.state.replace(**fields, **{k: jnp.array(v) for k, v in changed.items()}, seed=jnp.array(seed))
        out = host.round(shape, offers)
        tokens.append(out["tokens"].copy())
        counts.append(out["num_tokens"].copy())
        accepted += int(out["accepted"].sum())
    return np.concatenate(tokens), np.concatenate(counts), accepted


def chi_square(found: np.ndarray, probability: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom of counts [N, V] against probabilities; rare rows are one, as are rare cells.

    The sum of unlike multinomials varies less than one multinomial does, so pooling rows only makes the test milder.
    """
    assert not found[probability == 0].any()
    wanted = probability * found.sum(axis=1, keepdims=True)
    rare = found.sum(axis=1) < 60
    found, wanted = (np.vstack([part[~rare], part[rare].sum(axis=0)]) for part in (found, wanted))
    statistic, freedom = 0.0, 0
    for mine, row in zip(wanted, found, strict=True):
        common = mine > 5
        cells, counted = np.append(mine[common], mine[~common].sum()), np.append(row[common], row[~common].sum())
        if len(cells) > 2 and cells[-1] <= 5:
            cells, counted = np.append(cells[:-2], cells[-2:].sum()), np.append(counted[:-2], counted[-2:].sum())
        if cells.min() > 5:
            statistic += ((counted - cells) ** 2 / cells).sum()
            freedom += len(cells) - 1
    return float(statistic), freedom


def check(shape: ProgramShape, name: str, rounds: int) -> int:
    """Every position, given all that was emitted before it; the tokens counted."""
    tokens, emitted, accepted = blocks(shape, name, rounds)
    assert np.isin(tokens[tokens >= 0], alive()).all()
    number = np.searchsorted(alive(), np.maximum(tokens, 0))
    history, judged = np.zeros(len(tokens), np.int64), 0
    for depth in range(shape.token_capacity):
        there = emitted > depth
        cells = ALIVE * history[there] + number[there, depth]
        found = np.bincount(cells, minlength=ALIVE ** (depth + 1)).reshape(-1, ALIVE)
        statistic, freedom = chi_square(found, expected(name, depth))
        assert freedom >= 2
        assert statistic < freedom + SIGMAS * np.sqrt(2 * freedom), (depth, statistic, freedom)
        history = ALIVE * history + number[:, depth]
        judged += int(found.sum())
    if shape.proposal_depth:
        assert 0.1 * judged < accepted < 0.7 * judged
    return judged


@pytest.mark.parametrize("name", ["plain", "filters"])
def test_sampled_rounds_have_the_model_s_distribution(name: str) -> None:
    assert check(SHAPES["width 4"], name, 150) > 6_000


@pytest.mark.long
@pytest.mark.parametrize(("width", "rounds"), [("width 4", 1250), ("width 2", 700), ("shared rows", 650)])
@pytest.mark.parametrize("name", SETTINGS)
def test_200_000_sampled_tokens_have_the_model_s_distribution(name: str, width: str, rounds: int) -> None:
    """Half of the 200,000 of each settings in the widest rectangle, a quarter each in the others."""
    assert check(SHAPES[width], name, rounds) > (100_000 if width == "width 4" else 50_000)


@pytest.mark.long
def test_rounds_of_width_one_have_it_too() -> None:
    assert check(SHAPES["width 1"], "filters", 300) == 300 * LANES


def test_the_check_would_notice_the_heads_own_distribution() -> None:
    """Cells counted with other settings than expected are far outside the bound."""
    tokens, emitted, _ = blocks(SHAPES["width 4"], "plain", 60)
    found = np.bincount(np.searchsorted(alive(), tokens[emitted > 0, 0]), minlength=ALIVE)[None]
    statistic, freedom = chi_square(found, expected("cold", 0))
    assert statistic > freedom + SIGMAS * np.sqrt(2 * freedom)
