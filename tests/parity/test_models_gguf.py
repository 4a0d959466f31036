"""GGUF files against transformers, the gguf library's reader, and its dequantisation."""

from __future__ import annotations

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.models import checkpoint_files
from helios_jax.models.gguf_files import SUPPORTED_TYPES, open_gguf
from helios_jax.models.params import leaves
from helios_jax.models.reference import greedy_tokens, sequence_logits
from helios_jax.models.source import open_source
from tests.golden.tiny import golden, tiny_checkpoint
from tests.golden.tiny_gguf import ARCHITECTURES, interleave_rows, write_gguf

Kind = gguf.GGMLQuantizationType
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_float32_gguf_equals_transformers(family: str, tmp_path: Path) -> None:
    """Names, the order of q and k rows, rope divisors and linear scaling, ties and biases."""
    source = open_source(write_gguf(family, tmp_path / "m.gguf"))
    stored = golden(family)
    ids = jnp.asarray(np.concatenate([stored["prompt"], stored["greedy"]]))
    logits = jax.jit(lambda p: sequence_logits(source.model, p, ids))(source.load_params("float32"))
    np.testing.assert_allclose(logits, stored["logits"], atol=TOLERANCE, rtol=0)
    assert (source.eos_token_ids, source.bos_token_id) == ((2,), 1)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_and_directory_hold_the_same_parameters(family: str, tmp_path: Path) -> None:
    from_gguf = dict(leaves(open_source(write_gguf(family, tmp_path / "m.gguf")).load_params("float32")))
    from_hf = dict(leaves(open_source(tiny_checkpoint(family)).load_params("float32")))
    assert from_gguf.keys() == from_hf.keys()
    for name, leaf in from_hf.items():
        np.testing.assert_array_equal(from_gguf[name], leaf, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_quantised_files_equal_the_librarys_dequantisation(kind: Kind, tmp_path: Path) -> None:
    """qwen2: rows lie as they are, so every matrix can be compared with the library's reader directly."""
    path = write_gguf("qwen2", tmp_path / "m.gguf", kind)
    params = dict(leaves(open_source(path).load_params("float32")))
    by_name = {t.name: t for t in gguf.GGUFReader(path).tensors}
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.k_proj.bias": "blk.0.attn_k.bias",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for ours, theirs in pairs.items():
        tensor = by_name[theirs]
        np.testing.assert_array_equal(params[ours], gguf.dequantize(tensor.data, tensor.tensor_type), err_msg=ours)
    assert by_name["blk.1.attn_q.weight"].tensor_type == kind


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random bytes of a type that the library cannot write; its float16 scales are made finite."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(kind.value).integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    scales = {Kind.Q8_0: (0,), Kind.Q4_0: (0,), Kind.Q6_K: (block_bytes - 2,)}.get(kind, (0, 2))
    for at in scales:
        raw[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("block_bytes", [1, 1000, 8 << 20])
@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda k: k.name)
def test_every_type_reads_in_blocks_of_rows(
    kind: Kind, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", block_bytes)
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        data = gguf.quantize(np.random.default_rng(0).normal(size=(7, 512)).astype(np.float32), kind)
    else:
        data = random_blocks(kind, 7, 512)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(tmp_path / "t.gguf").tensors["t"]
    assert (tensor.shape, tensor.encoding) == ((7, 512), kind.name)
    expected = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(checkpoint_files.read_tensor(tensor, np.dtype(np.float32)), expected)
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    moved = checkpoint_files.read_tensor(tensor, np.dtype(np.float32), order)
    np.testing.assert_array_equal(moved[order], expected)


def test_row_order_is_undone_on_quantised_rows(tmp_path: Path) -> None:
    """Reordering whole rows commutes with quantising them; both orders of work give the same matrix."""
    path = write_gguf("mistral", tmp_path / "m.gguf", Kind.Q8_0)
    ours = dict(leaves(open_source(path).load_params("float32")))["model.layers.0.self_attn.q_proj.weight"]
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight")
    np.testing.assert_array_equal(interleave_rows(np.asarray(ours), 4), gguf.dequantize(stored.data, Kind.Q8_0))


def test_header_equals_the_librarys_reader(tmp_path: Path) -> None:
    path = write_gguf("llama3", tmp_path / "m.gguf", Kind.Q8_0, **{"general.note": "x" * 70, "some.list": [3, 5, 7]})
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() | ours.array_lengths.keys() == fields.keys()
    for key, value in ours.metadata.items():
        assert value == fields[key].contents()
    assert ours.array_lengths["tokenizer.ggml.tokens"] == 128
    assert {name: (t.offset, t.num_bytes, t.encoding) for name, t in ours.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, t.tensor_type.name) for t in theirs.tensors
    }


SMOLLM2_PROMPT = [6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 411, 260, 3426, 28]
SMOLLM2_GREEDY = [665, 436, 253, 9357, 1573, 267, 19341, 3365, 17644, 793, 30, 909, 4161, 281]
SMOLLM2_GREEDY += [253, 11637, 10000, 411, 253, 3953]


@pytest.mark.slow
def test_smollm2_says_what_is_known() -> None:
    """ "Once upon a time, in a small village by the sea," raw, greedy, float32: the known 20 ids."""
    source = open_source("smollm2")
    assert (source.model.family, source.num_params, source.eos_token_ids) == ("llama", 134_515_008, (2,))
    params = source.load_params("float32")
    assert greedy_tokens(source.model, params, SMOLLM2_PROMPT, 20) == SMOLLM2_GREEDY
