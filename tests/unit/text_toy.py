"""Small tokenizers for tests of the text room, written by the `gguf` package or given byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

GOLDEN = Path(__file__).parents[1] / "golden"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class ListTokenizer:
    """Tokens as a list of bytes; ids in `special_ids` are special."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.special_ids = frozenset(special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def golden_tokens(kind: str) -> tuple[list[str], list[str], dict[int, bool]]:
    """Tokens, merges, and added id -> special, of a golden `tokenizer.json`."""
    state = json.loads((GOLDEN / f"text_{kind}" / "tokenizer.json").read_text())
    ids = {**state["model"]["vocab"], **{t["content"]: t["id"] for t in state["added_tokens"]}}
    merges = [" ".join(m) for m in state["model"]["merges"]]
    return sorted(ids, key=ids.__getitem__), merges, {t["id"]: t["special"] for t in state["added_tokens"]}


def write_gguf(path: Path, values: Mapping[str, Any]) -> Path:
    """A GGUF without tensors; keys `tokenizer.ggml.*` are given without their prefix."""
    writer = gguf.GGUFWriter(path, arch="llama")
    for name, value in values.items():
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def bpe_values(kind: str, pre: str) -> dict[str, Any]:
    """The GGUF keys of a golden byte-level tokenizer."""
    tokens, merges, added = golden_tokens(kind)
    kinds = [{None: NORMAL, True: CONTROL, False: USER_DEFINED}[added.get(i)] for i in range(len(tokens))]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": kinds}


def sentencepiece_values(words: Sequence[str]) -> dict[str, Any]:
    """The GGUF keys of a SentencePiece vocabulary: every word, its beginnings and its characters.

    Scores fall with the id, as SentencePiece trains them: beginnings first, so that words can be built.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces = [word[:end] for word in words for end in range(2, len(word) + 1)]
    tokens += list(dict.fromkeys(pieces))
    tokens += sorted({c for word in words for c in word} - set(tokens))
    kinds += [NORMAL] * (len(tokens) - len(kinds))
    scores = [0.0 if kind != NORMAL else -float(i) for i, kind in enumerate(kinds)]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
