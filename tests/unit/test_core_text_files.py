"""Text files of a core: which are copied, and a GGUF without its tensors."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from helios_jax.aot.text_files import GGUF_NAME, copy_text_files
from helios_jax.errors import CheckpointError
from tests.unit.core_toy import ToyTextFiles


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_token_list(["<s>", "é", "日本", ""])
    writer.add_token_types([3, 1, 1, 6])
    writer.add_token_scores([0.0, -1.5, 2.5, 0.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def facts(path: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(path).fields
    return {name: (field.types, field.contents()) for name, field in fields.items() if not name.startswith("GGUF.")}


def test_a_gguf_keeps_every_key_and_no_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    files = copy_text_files(ToyTextFiles("gguf", tmp_path / "model.gguf"), tmp_path / "core")
    assert [file.path for file in files] == [f"text/{GGUF_NAME}"]
    copy = tmp_path / "core" / "text" / GGUF_NAME
    assert facts(copy) == facts(tmp_path / "model.gguf")
    assert gguf.GGUFReader(copy).tensors == []


def test_a_directory_gives_its_text_files_only_and_replaces_older_ones(tmp_path: Path) -> None:
    model, core = tmp_path / "model", tmp_path / "core"
    model.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "README.md"):
        (model / name).write_text(name)
    (core / "text").mkdir(parents=True)
    (core / "text" / "old.json").write_text("another model's")
    files = copy_text_files(ToyTextFiles("hf", model), core)
    assert {file.path: file.bytes for file in files} == {"text/chat_template.jinja": 19, "text/tokenizer.json": 14}
    assert {path.name for path in (core / "text").iterdir()} == {"chat_template.jinja", "tokenizer.json"}
    assert {path.name for path in core.iterdir()} == {"text"}


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"not a model"])
def test_a_broken_gguf_is_one_clear_error_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    (tmp_path / "core").mkdir()
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        copy_text_files(ToyTextFiles("gguf", tmp_path / "model.gguf"), tmp_path / "core")
    assert list((tmp_path / "core").iterdir()) == []
