"""Every family against transformers: logits within 1e-4, the same 64 greedy tokens, in float32."""

from __future__ import annotations

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.models.interface import Model, Params
from helios_jax.models.params import leaves
from helios_jax.models.reference import attend_dense, empty_caches, greedy_tokens, sequence_logits
from helios_jax.models.source import open_source
from tests.golden.tiny import FAMILIES, GREEDY_LEN, PROMPT_LEN, golden, tiny_checkpoint, tiny_tensors
from tests.golden.tiny_hybrid import HYBRIDS

TOLERANCE = 1e-4


def loaded(family: str, variant: str = "float32") -> tuple[Model, Params]:
    source = open_source(tiny_checkpoint(family, variant))
    return source.model, source.load_params("float32")


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_goldens_belong_to_these_weights(family: str) -> None:
    crc = zlib.crc32(b"".join(tensor.tobytes() for _, tensor in sorted(tiny_tensors(family).items())))
    stored = golden(family)
    assert crc == stored["crc"], "tiny.py changed: run python -m tests.golden.make_models"
    assert stored["margin"] > 10 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(family: str) -> None:
    model, params = loaded(family)
    stored = golden(family)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    logits = jax.jit(lambda p, ids: sequence_logits(model, p, ids))(params, jnp.asarray(prompt + greedy))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, stored["logits"], atol=TOLERANCE, rtol=0)
    assert greedy_tokens(model, params, prompt, GREEDY_LEN) == greedy


@pytest.mark.parametrize(
    ("family", "variant"),
    [*((family, "bfloat16") for family in FAMILIES), ("qwen3", "float16"), ("llama_linear", "sharded")],
)
def test_stored_types_and_shards_compute_the_same(family: str, variant: str) -> None:
    """The tensors themselves are compared in tests/unit/test_models_source.py."""
    model, params = loaded(family, variant)
    stored = golden(family)
    expected = stored["logits"][:PROMPT_LEN] if variant == "sharded" else stored[f"logits_{variant}"]
    logits = jax.jit(lambda p, ids: sequence_logits(model, p, ids))(params, jnp.asarray(stored["prompt"]))
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


def chunk_logits(model: Model, params: Params, ids: jax.Array, start: int, caches: tuple) -> tuple[jax.Array, tuple]:
    """Logits of tokens that follow `start` others, whose keys and values are in `caches`."""

    @jax.jit
    def run(params: Params, ids: jax.Array, caches: tuple) -> tuple[jax.Array, tuple]:
        hidden, caches = model.forward(params, ids, start + jnp.arange(ids.size), caches, attend_dense)
        return model.logits(params, hidden), caches

    return run(params, ids, caches)


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3_window"])
def test_chunks_and_single_steps_equal_one_pass(family: str) -> None:
    """The dense cache is the oracle of the paged programs, so it must hold by itself.

    Cuts at 1, in the middle and around the window; the last token of each is a single step.
    """
    model, params = loaded(family)
    stored = golden(family)
    length = 11
    ids, expected = jnp.asarray(stored["prompt"][:length]), stored["logits"][:length]
    for cuts in ([0, 1, 5, length], [0, 8, 9, length - 1, length]):
        caches, parts = empty_caches(model), []
        for start, stop in itertools.pairwise(cuts):
            logits, caches = chunk_logits(model, params, ids[start:stop], start, caches)
            parts.append(logits)
        np.testing.assert_allclose(jnp.concatenate(parts), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_stay_near_float32(dtype: str) -> None:
    """One row (padded to two) and many rows give the same numbers in narrow types."""
    source = open_source(tiny_checkpoint("llama3"))
    params = source.load_params(dtype)
    assert {leaf.dtype.name for _, leaf in leaves(params)} == {dtype}
    stored = golden("llama3")
    ids = jnp.asarray(stored["prompt"])
    logits = jax.jit(lambda p: sequence_logits(source.model, p, ids))(params)
    assert logits.dtype == jnp.float32
    # 8 (11) significant bits through two layers: errors of a few steps of the logits' own rounding
    spread = np.abs(logits - stored["logits"][:PROMPT_LEN])
    assert spread.max() < (0.5 if dtype == "bfloat16" else 0.06)
    assert spread.mean() < (0.05 if dtype == "bfloat16" else 0.006)
    row, _ = chunk_logits(source.model, params, ids[:1], 0, empty_caches(source.model, jnp.dtype(dtype)))
    assert np.abs(row - logits[:1]).max() < (0.25 if dtype == "bfloat16" else 0.03)
