"""Programs are traced in several threads at once: merging the module tree must not share state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.models.reference import sequence_logits
from helios_jax.models.source import open_source
from tests.golden.tiny import golden, tiny_checkpoint


def test_one_model_traced_by_many_threads_gives_the_same_logits() -> None:
    source = open_source(tiny_checkpoint("qwen3"))
    model, params = source.model, source.load_params("float32")
    stored = golden("qwen3")

    def lowered(length: int) -> jax.Array:
        ids = jnp.asarray(stored["prompt"][:length])
        return jax.jit(lambda p: sequence_logits(model, p, ids)).lower(params).compile()(params)

    with ThreadPoolExecutor(4) as pool:
        for length, logits in zip((3, 4, 5, 6), pool.map(lowered, (3, 4, 5, 6)), strict=True):
            np.testing.assert_allclose(logits, stored["logits"][:length], atol=1e-4, rtol=0)


def test_tracing_leaves_the_model_as_it_was() -> None:
    """A second trace, and the configuration, do not see tracers of the first."""
    source = open_source(tiny_checkpoint("llama3"))
    params = source.load_params("float32")
    before = source.config_digest()
    for length in (2, 3):
        ids = jnp.arange(length)
        jax.jit(lambda p, ids=ids: sequence_logits(source.model, p, ids)).lower(params)
    assert source.config_digest() == before
    assert jax.tree.all(jax.tree.map(lambda leaf: isinstance(leaf, jax.Array), params))
