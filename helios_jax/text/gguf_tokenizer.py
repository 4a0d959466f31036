"""Tokenizers from the metadata of GGUF files: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Source: GGUF specification, "Tokenizer"; llama.cpp `src/llama-vocab.cpp` for what its keys mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from helios_jax.errors import CheckpointError
from helios_jax.text.gguf_metadata import read_metadata
from helios_jax.text.hf_files import named_templates
from helios_jax.text.pretokenizers import pre_tokenizer
from helios_jax.text.tokenizer import TokenizerParts, put_around

PREFIX = "tokenizer."
SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of tokenizer.ggml.token_type
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
}


def parts_from_gguf(path: Path) -> TokenizerParts:
    """What a GGUF says of its tokenizer.

    Raises:
        CheckpointError: Not a GGUF, without a tokenizer, damaged, or of a kind that is not supported.
    """
    metadata = read_metadata(path, lambda key: key.startswith(PREFIX))
    try:
        return parts_from_metadata(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parts_from_metadata(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The same from the keys that begin with `tokenizer.`.

    Raises:
        CheckpointError: As `parts_from_gguf`.
    """
    fields = _Fields(metadata)
    kind = fields.get("model", str, None)
    if kind is None:
        raise CheckpointError("there is no tokenizer in this GGUF (no key tokenizer.ggml.model)")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(f"tokenizer model {kind!r} is not supported; supported are {', '.join(builders)}")
    tokens = fields.strings("tokens")
    if not tokens:
        raise CheckpointError("tokenizer.ggml.tokens is missing or empty")
    try:
        backend = builders[kind](fields, tokens)
        _add_tokens(backend, fields, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception for every kind of bad vocabulary
        raise CheckpointError(f"the vocabulary is damaged: {' '.join(str(error).split())[:300]}") from error
    bos_id, eos_id = fields.token_id("bos_token_id", tokens), fields.token_id("eos_token_id", tokens)
    # A vocabulary of SentencePiece begins texts with BOS unless told otherwise, as in llama.cpp.
    adds_bos = fields.get("add_bos_token", bool, kind == "llama") and bos_id is not None
    adds_eos = fields.get("add_eos_token", bool, False) and eos_id is not None
    if adds_bos or adds_eos:
        put_around(backend, bos_id if adds_bos else None, eos_id if adds_eos else None)
    named = ((name, fields.token_id(key, tokens)) for name, key in TOKEN_KEYS.items())
    ends = (fields.token_id(key, tokens) for key in END_KEYS)
    return TokenizerParts(
        backend=backend,
        special_tokens={name: tokens[i] for name, i in named if i is not None},
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        bos_token_id=bos_id,
        chat_templates=_chat_templates(metadata),
    )


class _Fields:
    """The keys `tokenizer.ggml.*`, with their types checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and not isinstance(value, kind):
            raise CheckpointError(f"tokenizer.ggml.{name} must be a {kind.__name__}, it is {str(value)[:60]!r}")
        return value

    def strings(self, name: str) -> list[str]:
        found = self.get(name, list, [])
        if not all(isinstance(item, str) for item in found):
            raise CheckpointError(f"tokenizer.ggml.{name} must be a list of strings")
        return found

    def numbers(self, name: str, count: int) -> list[Any]:
        """A list of one number a token, or [] when the key is missing."""
        found = self.get(name, list, [])
        if found and (len(found) != count or not all(isinstance(item, (int, float)) for item in found)):
            raise CheckpointError(f"tokenizer.ggml.{name} must be {count} numbers, one a token; it has {len(found)}")
        return found

    def token_id(self, name: str, tokens: Sequence[str]) -> int | None:
        found = self.get(name, int, None)
        if found is None or 0 <= found < len(tokens):
            return found
        raise CheckpointError(f"tokenizer.ggml.{name} is {found}, the vocabulary has {len(tokens)} tokens")


def _byte_level(fields: _Fields, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    rule = pre_tokenizer(fields.get("pre", str, "default"))
    merges = [tuple(merge.split(" ", 1)) for merge in fields.strings("merges")]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise CheckpointError("tokenizer.ggml.merges is missing, or has an entry that is not two tokens")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=rule.whole_words)  # type: ignore[arg-type]
    )
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: _Fields, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    scores = fields.numbers("scores", len(tokens))
    if not scores:
        raise CheckpointError("tokenizer.ggml.scores is missing, a vocabulary of SentencePiece needs it")
    kinds = fields.numbers("token_type", len(tokens)) or [NORMAL] * len(tokens)
    vocabulary = _vocabulary(tokens)
    unknown = fields.token_id("unknown_token_id", tokens)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_by_score(tokens, scores, kinds, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    decode = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", bool, True):
        replace.insert(0, normalizers.Prepend(SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(replace)
    backend.decoder = decoders.Sequence(decode)
    return backend


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)  # of tokens spelt alike the first one is what text becomes
    return vocabulary


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best score first.

    SentencePiece merges the pair whose result has the best score; BPE the pair that is first in the
    list. So the list is all pairs in the order of their results' scores.
    """
    found = []
    for index, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True)):
        if kind != NORMAL or vocabulary[token] != index:
            continue
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found += [(-score, index, cut, pair) for cut, pair in enumerate(pairs) if all(p in vocabulary for p in pair)]
    return [entry[-1] for entry in sorted(found)]


def _add_tokens(backend: tokenizers.Tokenizer, fields: _Fields, tokens: Sequence[str]) -> None:
    """Control and user-defined tokens are found in a text before anything else."""
    kinds = fields.numbers("token_type", len(tokens))
    # `tokenizers` refuses empty ones, and of tokens spelt alike knows only the first.
    added = [
        tokenizers.AddedToken(token, special=kind in (UNKNOWN, CONTROL), normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = named_templates(metadata.get(key), key)
    for name in metadata.get("tokenizer.chat_templates") or []:
        templates |= {name: t} if isinstance(t := metadata.get(f"{key}.{name}"), str) else {}
    return templates
