"""Text to ids and back, and what else serving must know of a tokenizer.

A `Tokenizer` is one `tokenizers.Tokenizer`, the ids that begin and end texts, and the chat
templates. Where they come from is the business of `hf_files` (a directory with `tokenizer.json`)
and `gguf_tokenizer` (the metadata of a GGUF); this module only chooses between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import processors

from helios_jax.errors import CheckpointError, RequestError
from helios_jax.text.token_bytes import ByteRule, byte_rule, strip_start

GGUF_NAME = "tokenizer.gguf"  # a GGUF without tensors, as prepared cores keep it
DEFAULT_TEMPLATE = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """What a model's files say of its tokenizer.

    Attributes:
        backend: Text to ids, with added tokens and the tokens it puts around a text.
        special_tokens: Name, as templates know it ("bos_token"), to the token's text.
        eos_token_ids: Ids that end an output, the main one first.
        chat_templates: Template by name; "default" is the ordinary one.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_templates: Mapping[str, str]


class Tokenizer:
    """Encodes, decodes and knows the bytes of every token.

    Attributes:
        vocab_size: One more than the largest id; a model's vocabulary may be padded beyond it.
        eos_token_ids: Ids that end an output, the main one first.
        bos_token_id: The id that begins a text, None if there is none.
        adds_bos: Whether `encode` puts it there.
        special_ids: Ids that `skip_special_tokens` leaves out.
        byte_rule: How the vocabulary spells bytes.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self.special_tokens = dict(parts.special_tokens)
        self.chat_templates = dict(parts.chat_templates)
        self.eos_token_ids = parts.eos_token_ids
        self.bos_token_id = parts.bos_token_id
        self.byte_rule: ByteRule = byte_rule(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._literal = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bytes: dict[int, bytes] = {}  # filled as tokens are met, at most one entry an id
        self.adds_bos = self.bos_token_id is not None and self._first_id("a") == self.bos_token_id

    def _first_id(self, text: str) -> int | None:
        return next(iter(self._backend.encode(text).ids), None)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object, for what is built on the whole vocabulary."""
        return self._backend

    @property
    def chat_template(self) -> str | None:
        """The ordinary template, None if the model has none."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens written in it become their ids.

        A text that already begins with the BOS that this tokenizer would add gets only one.

        Raises:
            RequestError: The text has characters that Unicode does not (unpaired surrogates).
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "the text is not valid Unicode (it has an unpaired surrogate)", param="prompt", code="invalid_value"
            ) from error
        if add_special_tokens and self.adds_bos and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """(start, end) in characters of each token of `encode(text, add_special_tokens=False)`.

        Tokens that share a character have its span; spaces at the edges may be left out of a token's span.
        """
        spans: list[tuple[int, int]] = self._backend.encode(text, add_special_tokens=False).offsets
        return spans

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; of an added token its text, of an id without a token b""."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes_of(token_id)
            if 0 <= token_id < self.vocab_size:
                self._bytes[token_id] = found
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self.byte_rule.bytes_of(token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(int(i)) for i in ids if i not in skipped)
        return strip_start(data, self.byte_rule, self.byte_rule.max_strip)[0].decode("utf-8", errors="replace")

    def decode_token(self, token_id: int) -> str:
        """Text of one token alone, a leading space kept, special tokens by their names."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Write files from which `load_tokenizer(directory)` makes an equal tokenizer."""
        from helios_jax.text.hf_files import write_hf

        write_hf(self, directory)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory, a core's `text/` directory, or a GGUF file.

    Raises:
        CheckpointError: No tokenizer there, a damaged one, or one of a kind that is not supported.
    """
    from helios_jax.text.gguf_tokenizer import parts_from_gguf
    from helios_jax.text.hf_files import TOKENIZER_NAME, parts_from_hf
    from helios_jax.text.template import check_template

    path = Path(path)
    if path.is_dir() and not (path / TOKENIZER_NAME).is_file() and (path / GGUF_NAME).is_file():
        path = path / GGUF_NAME
    if path.is_dir():
        parts = parts_from_hf(path)
    elif path.is_file():
        parts = parts_from_gguf(path)
    else:
        raise CheckpointError(f"{path} is neither a directory nor a file: there is no tokenizer")
    for name, template in parts.chat_templates.items():
        check_template(template, f"chat template {name!r} of {path}")
    try:
        return Tokenizer(parts)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def put_around(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Make `backend` begin encoded texts with BOS and end them with EOS, where given."""
    known = [(backend.id_to_token(i), i) for i in dict.fromkeys((bos_id, eos_id)) if i is not None]
    before = [backend.id_to_token(bos_id)] if bos_id is not None else []
    after = [backend.id_to_token(eos_id)] if eos_id is not None else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
        special_tokens=known,
    )
