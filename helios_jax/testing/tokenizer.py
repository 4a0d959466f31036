"""ByteTokenizer: one token a byte, so that tests can read every id."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258, 259
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPLIT = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")


class ByteTokenizer:
    """Ids 0..255 are bytes, 256.. are `SPECIAL_TOKENS`; the interface of `text.tokenizer.Tokenizer`.

    Args:
        adds_bos: Put `<bos>` before encoded text when special tokens are asked for.
        vocab_size: Ids from 260 up are padding without text.
    """

    def __init__(self, *, adds_bos: bool = False, vocab_size: int = 256 + len(SPECIAL_TOKENS)) -> None:
        if vocab_size < 256 + len(SPECIAL_TOKENS):
            raise ValueError(f"vocab_size must be at least {256 + len(SPECIAL_TOKENS)}, got {vocab_size}")
        self.vocab_size = vocab_size
        self.adds_bos = adds_bos
        self.bos_token_id: int | None = 256
        self.eos_token_ids: tuple[int, ...] = (257,)
        self.bos_token = SPECIAL_TOKENS[0]
        self.eos_token = SPECIAL_TOKENS[1]
        self.special_ids = frozenset(range(256, vocab_size))
        self.chat_template: str | None = CHAT_TEMPLATE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes of the text; special tokens written in it become their ids."""
        ids = [256] if add_special_tokens and self.adds_bos else []
        for part in _SPLIT.split(text):
            if part in SPECIAL_TOKENS:
                ids.append(256 + SPECIAL_TOKENS.index(part))
            else:
                ids.extend(part.encode())
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; of a special token, its name."""
        if token_id < 256:
            return bytes([token_id])
        index = token_id - 256
        return SPECIAL_TOKENS[index].encode() if index < len(SPECIAL_TOKENS) else b""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", errors="replace")

    def decode_token(self, token_id: int) -> str:
        """Text of one token alone, special ones by name."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Write what `ByteTokenizer` needs to be made again."""
        (directory / "byte_tokenizer.json").write_text(
            json.dumps({"adds_bos": self.adds_bos, "vocab_size": self.vocab_size})
        )
