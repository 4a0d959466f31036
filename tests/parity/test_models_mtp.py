"""Multi-token-prediction heads against the reference equations on transformers' layers, within 1e-4 in float32."""

from __future__ import annotations

import functools
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helios_jax.errors import CheckpointError
from helios_jax.models.interface import MtpHeads, heads_of, run_model
from helios_jax.models.params import leaves
from helios_jax.models.reference import DenseCache, attend_causal, attend_dense, no_caches, recur_plain
from helios_jax.models.registry import build_model
from helios_jax.models.source import open_source
from tests.golden.tiny import GOLDEN_DIR, golden, tiny_checkpoint, tiny_mtp_tensors, tiny_tensors

FAMILY, TOLERANCE = "qwen3_5", 1e-4
WITH_HEADS = (FAMILY, "qwen3_next", "qwen3_5_hybrid", "qwen3_5_moe")
STARTS, STEPS = range(24, 48), 4


@functools.cache
def reference(family: str = FAMILY) -> dict[str, np.ndarray]:
    with np.load(GOLDEN_DIR / f"{family}_mtp.npz") as stored:
        return dict(stored)


@functools.cache
def loaded(family: str = FAMILY) -> tuple[Any, Any, MtpHeads, Any, np.ndarray, jax.Array]:
    """Model, its parameters, heads, theirs, known tokens [88] and the model's hidden rows [88, D]."""
    source = open_source(tiny_checkpoint(family))
    model, params = source.model, source.load_params("float32")
    heads, own = heads_of(model), source.heads().load_params("float32")
    assert heads is not None
    tokens = np.concatenate([golden(family)["prompt"], golden(family)["greedy"]])

    @jax.jit
    def run(params: Any) -> jax.Array:
        where = jnp.arange(88)
        return run_model(model, params, jnp.asarray(tokens), where, no_caches(model), attend_causal, recur_plain)[0]

    return model, params, heads, own, tokens, run(params)


@pytest.mark.parametrize("family", WITH_HEADS)
def test_the_reference_belongs_to_these_weights(family: str) -> None:
    crc = zlib.crc32(b"".join(w.tobytes() for _, w in sorted(tiny_mtp_tensors(family).items())))
    assert crc == reference(family)["crc"], "tiny.py changed: run python -m tests.golden.make_mtp"
    assert reference(family)["margin"] > 10 * TOLERANCE


@pytest.mark.parametrize("family", [FAMILY, *(pytest.param(f, marks=pytest.mark.slow) for f in WITH_HEADS[1:])])
def test_one_pass_over_known_tokens_equals_the_reference(family: str) -> None:
    _, params, heads, own, tokens, hidden = loaded(family)

    @jax.jit
    def run(params: Any, own: Any) -> jax.Array:
        rows = jnp.arange(len(tokens) - 1)
        return heads.predict(own, params, jnp.asarray(tokens[1:]), rows, hidden[:-1], (None,), attend_causal)[0]

    np.testing.assert_allclose(run(params, own), reference(family)["hidden"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("start", [24, 37])
def test_steps_on_their_own_output_equal_the_reference(start: int) -> None:
    """A pass over what is known, then one row at a time on the heads' own cache and output."""
    model, params, heads, own, tokens, hidden = loaded()
    spec = heads.attention_layers[0]
    empty = jnp.zeros((0, spec.num_kv_heads, spec.head_dim))
    given, said, outputs = jnp.asarray(tokens[1 : start + 1]), [], []
    rows, states, caches = jnp.arange(start), hidden[:start], (DenseCache(empty, empty),)
    for step in range(STEPS):
        out, caches = heads.predict(own, params, given, rows, states, caches, attend_dense)
        states = out[-1:]
        said.append(int(jnp.argmax(model.logits(params, states)[0])))
        outputs.append(states[0])
        given, rows = jnp.asarray(said[-1:]), jnp.array([start + step])
    assert said == reference()["chain"][STARTS.index(start)].tolist()
    np.testing.assert_allclose(jnp.stack(outputs), reference()["chain_hidden"][STARTS.index(start)], atol=TOLERANCE)


def test_the_heads_are_a_source_of_their_own() -> None:
    """Cores that do not use them do not load them; both trees are named as the checkpoint names them."""
    source = open_source(tiny_checkpoint(FAMILY, "sharded"))
    heads = source.heads()
    params = dict(leaves(heads.load_params("float32")))
    assert params.keys() == tiny_mtp_tensors(FAMILY).keys()
    for name, tensor in tiny_mtp_tensors(FAMILY).items():
        np.testing.assert_array_equal(params[name], tensor, err_msg=name)
    assert dict(leaves(source.model.abstract_params("float32"))).keys() == tiny_tensors(FAMILY).keys()
    assert heads.num_params == sum(t.size for t in tiny_mtp_tensors(FAMILY).values())
    rebuilt = heads_of(build_model(json.loads(json.dumps(heads.model_config()))))
    assert rebuilt is not None
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.shape == b.shape, rebuilt.abstract_params("float32"), heads.load_params("float32"))
    )


def changed(tmp_path: Path, config: dict[str, Any], without: str = "") -> Path:
    """The tiny checkpoint with other fields in its configuration, and without the tensors that begin so."""
    directory = Path(shutil.copytree(tiny_checkpoint(FAMILY), tmp_path / "m"))
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | config))
    if without:
        tensors = load_file(directory / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if not n.startswith(without)}, directory / "model.safetensors")
    return directory


def test_checkpoints_without_their_heads_still_serve(tmp_path: Path) -> None:
    """Converted and fine-tuned copies often lack the tensors that the configuration tells of."""
    source = open_source(changed(tmp_path, {}, without="mtp."))
    with pytest.raises(CheckpointError, match=r"lacks tensor mtp\.fc\.weight"):
        source.heads()


def test_models_without_heads_say_so(tmp_path: Path) -> None:
    source = open_source(changed(tmp_path, {"mtp_num_hidden_layers": 0}))
    assert heads_of(source.model) is None
    with pytest.raises(CheckpointError, match="a qwen3_5 model without multi-token-prediction heads"):
        source.heads()
    with pytest.raises(CheckpointError, match="a qwen3 model without"):
        open_source(tiny_checkpoint("qwen3")).heads()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": None}, "lacks the field linear_num_key_heads"),
        ({"layer_types": ["full_attention"]}, "must be 2 entries of full_attention and linear_attention"),
        ({"mtp_num_hidden_layers": 2}, "multi-token prediction with 2 layers"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.03}}, "needs pairs"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "in \\(0, 1\\]"),
    ],
)
def test_what_this_version_does_not_have_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_source(changed(tmp_path, config))
