"""From a token as the vocabulary spells it to the bytes it stands for.

`tokenizers` decodes whole sequences; streaming and log-probabilities need the bytes of one token.
The decoder of a tokenizer is read once into a `ByteRule`; after that the text of a sequence is the
UTF-8 decoding of its tokens' bytes, less what is stripped at its start. Where `tokenizers` turns
every byte of a run of byte tokens into U+FFFD as soon as one is bad, only the bad ones become
U+FFFD here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from helios_jax.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the other 68 from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in plain}
    others = [b for b in range(256) if chr(b) not in alphabet]
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteRule:
    """How tokens become bytes.

    Attributes:
        byte_level: Tokens are spelt in GPT-2's byte alphabet.
        byte_tokens: `<0x0A>` stands for one byte.
        replacements: (found, replaced by), in order.
        prefix: Put before every token (a vocabulary of words).
        strip: What may be stripped at the start of a text, at most `max_strip` times.
    """

    byte_level: bool = False
    byte_tokens: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    strip: bytes = b" "
    max_strip: int = 0

    def bytes_of(self, token: str) -> bytes:
        """Bytes of an ordinary token; added tokens are literal and do not come here."""
        if self.byte_tokens and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(found[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_level and all(c in _ALPHABET for c in token):
            return bytes(_ALPHABET[c] for c in token)
        return (self.prefix + token).encode()


def byte_rule(backend: tokenizers.Tokenizer) -> ByteRule:
    """The rule that the tokenizer's decoder describes.

    Raises:
        CheckpointError: A decoder that does not work token by token.
    """
    if backend.decoder is None:  # `tokenizers` then joins the tokens with spaces
        return ByteRule(prefix=" ", max_strip=1)
    rule = ByteRule()
    for step in _steps(json.loads(backend.decoder.__getstate__())):
        rule = dataclasses.replace(rule, **_reading(step, rule))
    return rule


def _steps(decoder: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _reading(step: Mapping[str, Any], rule: ByteRule) -> dict[str, Any]:
    """What one step of a decoder changes in the rule."""
    match step:
        case {"type": "ByteLevel"}:
            return {"byte_level": True}
        case {"type": "ByteFallback"}:
            return {"byte_tokens": True}
        case {"type": "Fuse"}:
            return {}
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return {"replacements": (*rule.replacements, (old, new))}
        case {"type": "Metaspace", "replacement": old}:
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            return {
                "replacements": (*rule.replacements, (old, " ")),
                "max_strip": rule.max_strip + (scheme != "never"),
            }
        case {"type": "Strip", "content": content, "start": start, "stop": 0}:
            return {"strip": content.encode(), "max_strip": rule.max_strip + start}
    raise CheckpointError(
        f"the tokenizer's decoder has a step {json.dumps(step)[:120]}, which cannot be streamed; supported are "
        "ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a string and Strip at the start"
    )


def strip_start(data: bytes, rule: ByteRule, left: int) -> tuple[bytes, int]:
    """Strip what may still be stripped at a text's start; returns the rest and how much may be stripped after it."""
    while left and data.startswith(rule.strip):
        data, left = data[len(rule.strip) :], left - 1
    return data, (0 if data else left)
