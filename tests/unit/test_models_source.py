"""Opening and loading: facts of a source, memory while streaming, the store, the registry."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from helios_jax.errors import CheckpointError
from helios_jax.models import registry
from helios_jax.models.params import leaf_bytes, leaves, tree_of
from helios_jax.models.registry import Family, build_model, families, register
from helios_jax.models.source import open_source
from helios_jax.models.weights_store import restore_params, save_params
from tests.golden.tiny import FAMILIES, tiny_checkpoint, tiny_tensors
from tests.golden.tiny_gguf import write_gguf


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_files_tensors(family: str) -> None:
    source = open_source(tiny_checkpoint(family, "sharded"))
    expected = tiny_tensors(family)
    params = dict(leaves(source.load_params("float32")))
    assert params.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(params[name], tensor, err_msg=name)
    assert source.num_params == sum(t.size for t in expected.values())


@pytest.mark.parametrize("variant", ["bfloat16", "float16"])
def test_stored_types_convert_by_rounding_once(variant: str) -> None:
    source = open_source(tiny_checkpoint("qwen2", variant))
    for name, leaf in leaves(source.load_params("float32")):
        expected = tiny_tensors("qwen2")[name].astype(jnp.dtype(variant)).astype(np.float32)
        np.testing.assert_array_equal(leaf, expected, err_msg=name)


def test_end_and_start_tokens_come_from_both_configurations(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_checkpoint("llama3"), tmp_path / "m"))
    assert open_source(directory).eos_token_ids == (2, 5)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    source = open_source(directory)
    assert (source.eos_token_ids, source.bos_token_id) == ((7, 2, 5), 1)
    assert (source.text_files().kind, source.text_files().path, source.name) == ("hf", directory, "m")


def test_gguf_end_tokens_and_name(tmp_path: Path) -> None:
    path = write_gguf("qwen2", tmp_path / "m.gguf", **{"tokenizer.ggml.eot_token_id": 9})
    source = open_source(path)
    assert (source.eos_token_ids, source.name) == ((2, 9), "m.gguf")
    assert (source.text_files().kind, source.text_files().path) == ("gguf", path)


def test_digests_tell_configurations_and_files_apart(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "m"))
    first = open_source(directory)
    assert first.config_digest() == open_source(directory).config_digest()
    assert first.weights_digest() == open_source(directory).weights_digest()
    os.utime(directory / "model.safetensors", ns=(1, 1))
    assert first.weights_digest() != (touched := open_source(directory)).weights_digest()
    assert first.config_digest() == touched.config_digest()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))
    assert open_source(directory).config_digest() != first.config_digest()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_configuration_rebuilds_the_model(family: str) -> None:
    source = open_source(tiny_checkpoint(family))
    rebuilt = build_model(json.loads(json.dumps(source.model_config())))
    assert rebuilt.config == source.model.config  # type: ignore[attr-defined]
    assert rebuilt.attention_layers == source.model.attention_layers
    assert rebuilt.vocab_size == 128


@pytest.mark.parametrize("config", [{}, {"family": "gone"}, {"family": "llama"}, {"family": "llama", "rope": 3}])
def test_a_damaged_stored_configuration_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        build_model(config)


def test_progress_counts_every_byte_once() -> None:
    source = open_source(tiny_checkpoint("mistral"))
    steps: list[tuple[int, int]] = []
    params = source.load_params("bfloat16", progress=lambda done, total: steps.append((done, total)))
    total = sum(leaf_bytes(leaf) for _, leaf in leaves(params))
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert len(steps) == len(dict(leaves(params)))


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 MB of float32 weights, a third of it in the embedding."""
    directory = tmp_path_factory.mktemp("wide")
    config = json.loads((tiny_checkpoint("qwen2") / "config.json").read_text())
    config |= {"vocab_size": 12288, "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4}
    (directory / "config.json").write_text(json.dumps(config))
    model = registry.hf_family(("Qwen2ForCausalLM",), "").from_hf(registry.Fields(config, "config"))
    zeros = {name: np.zeros(leaf.shape, np.float32) for name, leaf in leaves(model.abstract_params("float32"))}
    save_file(zeros, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_stays_under_1_3_times_the_model(wide_checkpoint: Path, dtype: str) -> None:
    """Host bytes alive at the worst moment, where the host copy *is* the device copy (put copies and keeps)."""
    source = open_source(wide_checkpoint)
    total = sum(leaf_bytes(leaf) for _, leaf in leaves(source.model.abstract_params(dtype)))
    tracemalloc.start()
    try:
        source.load_params(dtype, put=np.copy)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 8 MiB is the block of stored bytes (and its float32 form) under conversion, whatever the model
    assert peak < 1.3 * total + (8 << 20) * (dtype == "bfloat16")
    assert peak > total


# -- weights store -------------------------------------------------------------------------------


def stored(tmp_path: Path, dtype: str = "float32") -> tuple[Path, Any, Any]:
    source = open_source(tiny_checkpoint("qwen3"))
    params = source.load_params(dtype)
    save_params(tmp_path / "weights", params)
    return tmp_path / "weights", params, source.model.abstract_params(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_store_gives_back_what_it_took(tmp_path: Path, dtype: str) -> None:
    directory, params, abstract = stored(tmp_path, dtype)
    moved = directory.rename(tmp_path / "moved")  # cores are written aside and renamed
    steps: list[tuple[int, int]] = []
    restored = restore_params(moved, abstract, progress=lambda done, total: steps.append((done, total)))
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    for (name, was), (_, now) in zip(leaves(params), leaves(restored), strict=True):
        assert now.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(was, now, err_msg=name)
    assert steps[-1][0] == steps[-1][1] == sum(leaf_bytes(leaf) for _, leaf in leaves(params))
    assert len(steps) == len(list(leaves(params)))


def test_store_refuses_to_overwrite(tmp_path: Path) -> None:
    directory, params, _ = stored(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_params(directory, params)


def test_store_that_is_missing_truncated_or_incomplete(tmp_path: Path) -> None:
    directory, _, abstract = stored(tmp_path)
    with pytest.raises(CheckpointError, match="are missing"):
        restore_params(tmp_path / "elsewhere", abstract)
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointError) as caught:
            restore_params(directory, abstract)
        assert "\n" not in str(caught.value)
        path.unlink()
        with pytest.raises(CheckpointError, match="missing"):
            restore_params(directory, abstract)
        path.write_bytes(data)
    restore_params(directory, abstract)


def test_store_of_another_model_or_type(tmp_path: Path) -> None:
    directory, _, _ = stored(tmp_path)
    model = open_source(tiny_checkpoint("qwen3")).model
    with pytest.raises(CheckpointError, match="expected bfloat16"):
        restore_params(directory, model.abstract_params("bfloat16"))
    with pytest.raises(CheckpointError, match=r"damaged or foreign|expected"):
        restore_params(directory, open_source(tiny_checkpoint("qwen2")).model.abstract_params("float32"))


# -- registry and trees --------------------------------------------------------------------------


def test_every_family_is_registered_with_its_architectures() -> None:
    by_name = {f.name: (f.hf_architectures, f.gguf_architectures) for f in families()}
    assert by_name["llama"] == (("LlamaForCausalLM",), ("llama",))
    assert by_name["mistral"] == (("MistralForCausalLM",), ())
    assert by_name["qwen2"] == (("Qwen2ForCausalLM",), ("qwen2",))
    assert by_name["qwen3"] == (("Qwen3ForCausalLM",), ("qwen3",))


def test_a_new_family_is_one_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", dict({f.name: f for f in families()}))
    llama = registry.family("llama")
    register(
        dataclasses.replace(
            llama, name="smol", hf_architectures=("SmolForCausalLM",), gguf_architectures=(), from_hf=llama.from_hf
        )
    )
    directory = Path(shutil.copytree(tiny_checkpoint("llama3"), tmp_path / "m"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Other", "SmolForCausalLM"]}))
    assert open_source(directory).model.vocab_size == 128


def test_two_families_cannot_share_an_architecture() -> None:
    llama: Family = registry.family("llama")
    with pytest.raises(ValueError, match="already belongs to llama"):
        register(dataclasses.replace(llama, name="other"))
    with pytest.raises(ValueError, match="already belongs to llama"):
        register(dataclasses.replace(llama, hf_architectures=(), gguf_architectures=()))


def test_trees_and_names_are_inverse() -> None:
    named = {"a.b.0.w": 1, "a.b.10.w": 2, "a.c": 3, "d": 4}
    assert dict(leaves(tree_of(named.items()))) == named
