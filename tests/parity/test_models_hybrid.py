"""Hybrid and mixture families against transformers: logits within 1e-4, the same 64 greedy tokens, in float32."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helios_jax.errors import CheckpointError
from helios_jax.models.interface import heads_of, recurrent_layers_of
from helios_jax.models.params import leaves
from helios_jax.models.reference import sequence_logits
from helios_jax.models.registry import build_model
from helios_jax.models.source import open_source
from tests.golden.tiny import golden, tiny_checkpoint, tiny_tensors
from tests.golden.tiny_hybrid import HYBRIDS, packed_experts

TOLERANCE = 1e-4
FAST = "qwen3_next"  # has everything: packed projections, mixtures, a shared expert, a dense layer, attention
MIXTURES = tuple(family for family in HYBRIDS if family != "qwen3_5_hybrid")


@functools.cache
def loaded(family: str, variant: str = "float32") -> tuple[Any, Any]:
    source = open_source(tiny_checkpoint(family, variant))
    return source.model, source.load_params("float32")


@pytest.mark.parametrize("family", [FAST, *(pytest.param(f, marks=pytest.mark.slow) for f in HYBRIDS if f != FAST)])
def test_logits_and_greedy_tokens_equal_transformers(family: str) -> None:
    model, params = loaded(family)
    stored = golden(family)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    logits = jax.jit(lambda p, ids: sequence_logits(model, p, ids))(params, jnp.asarray(prompt + greedy))
    np.testing.assert_allclose(logits, stored["logits"], atol=TOLERANCE, rtol=0)
    assert np.argmax(logits, axis=1)[len(prompt) - 1 : -1].tolist() == greedy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"), [("qwen3_5_hybrid", "bfloat16"), ("qwen3_next", "bfloat16"), ("qwen3_moe", "float16")]
)
def test_stored_types_compute_the_same(family: str, variant: str) -> None:
    model, params = loaded(family, variant)
    stored = golden(family)
    logits = jax.jit(lambda p, ids: sequence_logits(model, p, ids))(params, jnp.asarray(stored["prompt"]))
    np.testing.assert_allclose(logits, stored[f"logits_{variant}"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("variant", ["sharded", "packed"])
def test_experts_load_alike_packed_and_one_by_one(family: str, variant: str) -> None:
    model, params = loaded(family, variant)
    named = dict(leaves(params))
    expected = packed_experts(tiny_tensors(family))
    assert named.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(named[name], tensor, err_msg=name)
    rebuilt = build_model(json.loads(json.dumps(open_source(tiny_checkpoint(family, variant)).model_config())))
    assert rebuilt.attention_layers == model.attention_layers
    assert recurrent_layers_of(rebuilt) == recurrent_layers_of(model)
    same = jax.tree.map(lambda a, b: a.shape == b.shape, rebuilt.abstract_params("float32"), params)
    assert jax.tree.all(same)


@pytest.mark.parametrize("family", ["qwen3_5_hybrid", "qwen3_5_moe"])
def test_the_text_model_inside_a_vision_model_is_the_same(family: str) -> None:
    source, plain = open_source(tiny_checkpoint(family, "vision")), open_source(tiny_checkpoint(family))
    assert source.config_digest() == plain.config_digest()
    assert (source.eos_token_ids, source.bos_token_id) == (plain.eos_token_ids, plain.bos_token_id)
    for mine, theirs in ((source, plain), (source.heads(), plain.heads())):
        expected = dict(leaves(theirs.load_params("float32")))
        found = dict(leaves(mine.load_params("float32")))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_decay_parameters_stay_wide() -> None:
    """A_log and dt_bias stand inside exponentials; a 16-bit core keeps them as they are stored."""
    source = open_source(tiny_checkpoint("qwen3_5_hybrid"))
    named, stored = dict(leaves(source.load_params("bfloat16"))), tiny_tensors("qwen3_5_hybrid")
    for name, leaf in named.items():
        wide = name.endswith(("A_log", "dt_bias"))
        assert leaf.dtype == (jnp.float32 if wide else jnp.bfloat16), name
        if wide:
            np.testing.assert_array_equal(leaf, stored[name])


def changed(tmp_path: Path, family: str, config: dict[str, Any], without: str = "", also: str = "") -> Path:
    """A tiny checkpoint with other fields, without one tensor, or with a copy of its last one named `also`."""
    directory = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "m"))
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | config))
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != without}
    if also:
        kept[also] = np.zeros((2, 3), np.float32)
    save_file(kept, directory / "model.safetensors")
    return directory


EXPERT = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("family", "config", "without", "also", "message"),
    [
        ("qwen3_moe", {}, f"{EXPERT}.3.up_proj.weight", "", r"lacks tensor .*experts\.3\.up_proj\.weight"),
        ("qwen3_moe", {}, "", f"{EXPERT}.6.up_proj.weight", r"experts\.6\.up_proj\.weight has no place"),
        ("qwen3_moe", {}, f"{EXPERT}.3.up_proj.weight", f"{EXPERT}.3.up_proj.weight", r"shape \[2, 3\], unlike"),
        ("qwen3_moe", {"num_experts": 7}, "", "", r"lacks tensor .*experts\.6\.gate_proj\.weight"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "", "", "9 of 6 experts"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "", "", "experts of 0 rows"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "", "", "decoder_sparse_step must be positive"),
        ("qwen3_5_hybrid", {"linear_num_value_heads": 3}, "", "", "3 value heads are not a multiple of 2"),
        ("qwen3_5_hybrid", {"linear_conv_kernel_dim": 1}, "", "", "a kernel of at least 2"),
        ("qwen3_5_hybrid", {"output_gate_type": "relu"}, "", "", "output_gate_type 'relu'"),
        ("qwen3_5_hybrid", {"layer_types": ["mamba"] * 3}, "", "", "must be 3 entries of full_attention and"),
        ("qwen3_5_hybrid", {"layer_types": ["full_attention"]}, "", "", "must be 3 entries"),
        ("qwen3_5_hybrid", {"linear_key_head_dim": 16}, "", "", "the configuration needs"),
        ("qwen3_next", {}, "model.layers.0.linear_attn.A_log", "", r"lacks tensor .*linear_attn\.A_log"),
    ],
)
def test_broken_checkpoints_are_refused(
    tmp_path: Path, family: str, config: dict[str, Any], without: str, also: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_source(changed(tmp_path, family, config, without, also))


def test_heads_are_there_where_the_family_has_them() -> None:
    assert heads_of(loaded("qwen3_moe")[0]) is None
    for family in ("qwen3_next", "qwen3_5_hybrid", "qwen3_5_moe"):
        heads = heads_of(loaded(family)[0])
        assert heads is not None
        assert recurrent_layers_of(heads) == ()
        assert len(heads.attention_layers) == 1
