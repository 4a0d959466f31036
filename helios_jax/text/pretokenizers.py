"""How the BPE vocabularies of GGUF files cut a text into words before merging.

GGUF names the rule (`tokenizer.ggml.pre`) and leaves its meaning to llama.cpp's source
(`llm_tokenizer_bpe` in `llama-vocab.cpp`); the patterns are those of the models' own tokenizers.
A new model is one entry here.
"""

from __future__ import annotations

import dataclasses

from tokenizers import Regex, pre_tokenizers

from helios_jax.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Patterns applied one after the other, each cutting the pieces of the one before.

    Attributes:
        whole_words: A piece that is a token is taken whole, without its merges.
        nfc: The text is put into Unicode normal form C first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """As `tokenizers` wants it, spelling bytes in GPT-2's alphabet at the end."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_RULES = {
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(patterns=(_GPT2,)),
    "smollm": PreTokenizer(patterns=(_DIGIT, _GPT2)),
    "llama-bpe": PreTokenizer(patterns=(_LLAMA3,), whole_words=True),
    "qwen2": PreTokenizer(patterns=(_QWEN2,), nfc=True),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), whole_words=True),
}
_SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule of that name.

    Raises:
        CheckpointError: Not one of those known; the ids would be wrong in silence.
    """
    found = _RULES.get(_SAME_AS.get(name, name))
    if found is None:
        known = ", ".join(sorted({*_RULES, *_SAME_AS}))
        raise CheckpointError(f"pre-tokenizer {name!r} is not supported; supported are {known}")
    return found
