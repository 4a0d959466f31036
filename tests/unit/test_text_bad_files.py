"""Broken tokenizer files: one clear line that names the file, never a traceback or silence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helios_jax.errors import CheckpointError
from helios_jax.text.tokenizer import load_tokenizer
from tests.unit.text_toy import GOLDEN, bpe_values, sentencepiece_values, write_gguf

Change = Callable[[Path], None]


def refused(path: Path) -> str:
    """The one line that says why `path` cannot be loaded."""
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    assert str(path) in message
    return message


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "text_headers", tmp_path / "model"))


def edit(name: str, **values: Any) -> Change:
    """Set keys of a JSON file, which is made if it is not there."""

    def change(directory: Path) -> None:
        path = directory / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | values))

    return change


def write(name: str, data: bytes) -> Change:
    return lambda directory: (directory / name).write_bytes(data) and None


def remove(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove("tokenizer.json"), "has no tokenizer.json"),
        (write("tokenizer.json", b"{"), "tokenizer.json cannot be read as a tokenizer"),
        (write("tokenizer.json", b"\xff\xfe"), "tokenizer.json cannot be read as a tokenizer"),
        (write("tokenizer.json", b'{"model": 3}'), "tokenizer.json cannot be read as a tokenizer"),
        (edit("tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "WordPiece"),
        (write("tokenizer_config.json", b"not json"), "tokenizer_config.json cannot be read as JSON"),
        (write("tokenizer_config.json", b"[" * 100_000), "tokenizer_config.json cannot be read as JSON"),
        (write("tokenizer_config.json", b"[1]"), "must hold a JSON object, it holds a list"),
        (edit("tokenizer_config.json", bos_token=5), "bos_token must be a string"),
        (edit("tokenizer_config.json", added_tokens_decoder={"x": {}}), "added_tokens_decoder is damaged"),
        (edit("tokenizer_config.json", added_tokens_decoder=[1]), "added_tokens_decoder is damaged"),
        (edit("tokenizer_config.json", added_tokens_decoder={"3": {"content": "<new>"}}), "'<new>' the id 3"),
        (write("chat_template.jinja", b"{% for %}"), "chat template 'default' of"),
        (write("chat_template.jinja", b"\xff"), "chat_template.jinja cannot be read"),
        (write("additional_chat_templates/tool_use.jinja", b"{{"), "chat template 'tool_use' of"),
        (edit("tokenizer_config.json", chat_template=7), "chat_template must be a string or a list"),
        (
            edit("tokenizer_config.json", chat_template=[{"name": "default"}]),
            "chat_template must be a string or a list",
        ),
        (edit("generation_config.json", eos_token_id="2"), "eos_token_id must be an id or a list of ids"),
        (edit("config.json", eos_token_id=[1, -2]), "eos_token_id must be an id or a list of ids"),
    ],
)
def test_broken_directories(change: Change, said: str, directory: Path) -> None:
    change(directory)
    assert said in refused(directory)


def test_nothing_there(tmp_path: Path) -> None:
    assert "neither a directory nor a file" in refused(tmp_path / "absent")
    assert "has no tokenizer.json" in refused(tmp_path)


def test_what_only_the_configuration_lists_is_added(directory: Path) -> None:
    """Not every difference between the files is damage."""
    before = load_tokenizer(directory)
    token = {"content": "<extra>", "special": True}
    edit("tokenizer_config.json", added_tokens_decoder={str(before.vocab_size): token}, add_bos_token=False)(directory)
    edit("generation_config.json", eos_token_id=[7, 9])(directory)
    after = load_tokenizer(directory)
    assert after.encode("<extra>") == [before.vocab_size]
    assert after.decode([before.vocab_size]) == ""
    assert (before.adds_bos, after.adds_bos) == (True, False)
    assert after.eos_token_ids == (7, 9, *before.eos_token_ids)


GPT2, LLAMA = bpe_values("headers", "llama-bpe"), sentencepiece_values(["▁ab"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "no tokenizer in this GGUF"),
        ({"model": 5}, "tokenizer.ggml.model must be a str"),
        ({"model": "t5"}, "tokenizer model 't5' is not supported; supported are gpt2, llama"),
        ({"model": "gpt2"}, "tokens is missing or empty"),
        (GPT2 | {"pre": "martian"}, "pre-tokenizer 'martian' is not supported; supported are"),
        (GPT2 | {"merges": ["ab"]}, "merges is missing, or has an entry that is not two tokens"),
        (GPT2 | {"merges": ["nowhere found"]}, "the vocabulary is damaged"),
        (GPT2 | {"merges": [1, 2]}, "merges must be a list of strings"),
        (GPT2 | {"token_type": [1]}, "numbers, one a token; it has 1"),
        (GPT2 | {"eos_token_id": 1_000_000}, "eos_token_id is 1000000, the vocabulary has"),
        (GPT2 | {"bos_token_id": "x"}, "bos_token_id must be a int"),
        (GPT2 | {"tokenizer.chat_template": "{% if %}"}, "is not a valid template"),
        (GPT2 | {"tokenizer.chat_template": 3}, "chat_template must be a string"),
        (LLAMA | {"scores": [0.5]}, "numbers, one a token; it has 1"),
        ({k: v for k, v in LLAMA.items() if k != "scores"}, "scores is missing"),
    ],
)
def test_broken_gguf_values(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refused(write_gguf(tmp_path / "m.gguf", values))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read as GGUF"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(100), "GGUF version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(100), "GGUF version"),  # big endian
    ],
)
def test_other_files(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert said in refused(path)


def test_truncated_gguf(tmp_path: Path) -> None:
    """Cut anywhere, the file is refused."""
    whole = write_gguf(tmp_path / "whole.gguf", LLAMA).read_bytes()
    path = tmp_path / "cut.gguf"
    for cut in {*range(64), *range(64, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:cut])
        message = refused(path)
        assert "truncated" in message or cut == 0


def test_flipped_bytes(tmp_path: Path) -> None:
    """Any byte changed: refused in one line, or still a tokenizer; nothing else comes out."""
    whole = write_gguf(tmp_path / "whole.gguf", LLAMA | {"tokenizer.chat_template": "{{ messages }}"}).read_bytes()
    path, chance = tmp_path / "flipped.gguf", random.Random(11)
    refusals: list[str] = []
    for place in [*range(200), *(chance.randrange(len(whole)) for _ in range(100))]:
        data = bytearray(whole)
        data[place] ^= chance.randrange(1, 256)
        path.write_bytes(data)
        try:
            load_tokenizer(path).decode(range(20))
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 50
    assert not any("\n" in message for message in refusals)
