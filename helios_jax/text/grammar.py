"""Grammars that restrict outputs: compiled by llguidance over a model's vocabulary, with limits.

Life of a grammar:

1. `GrammarSpec`: what a request asks for, as text; size and depth are checked when it is made.
2. `GrammarCompiler.compile` has it tried out by a process that can be killed (`grammar_process`), then
   compiles it here, once: compiled grammars are kept.
3. `Grammar.matcher` gives every sequence its own `Matcher`.

Whatever is wrong with a grammar is a `RequestError`. JSON is written with at most one line break
and an indentation between its parts, so that a model that likes whitespace comes to an end.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np

from helios_jax.text.grammar_process import PROCESS, Died, TooSlow
from helios_jax.text.grammar_schema import GrammarError, check_schema, json_options

MAX_BYTES = 128 * 1024  # of one grammar's text
TIMEOUT_S = 5.0  # for one compilation
MAX_CACHED = 64  # grammars kept
THREADS = 2
JSON_OBJECT = '{"type":"object"}'
# A mask costs the engine thread at most about 10 ms, a grammar at most about 30 MB.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


@dataclasses.dataclass(frozen=True)
class GrammarSpec:
    """A grammar as text.

    Attributes:
        kind: "json_schema", "regex" or "lark" (GBNF too).
        whitespace: Whether JSON may have whitespace between its parts.

    Raises:
        GrammarError: More than `MAX_BYTES`, or a schema that `check_schema` refuses.
    """

    kind: str
    text: str
    whitespace: bool = True

    def __post_init__(self) -> None:
        size = len(self.text.encode(errors="surrogatepass"))
        if size > MAX_BYTES:
            raise GrammarError(f"the grammar has {size} bytes, at most {MAX_BYTES} are allowed", "grammar_too_large")
        if any("\ud800" <= char <= "\udfff" for char in self.text):
            raise GrammarError("the grammar is not valid Unicode (it has an unpaired surrogate)")
        if self.kind == "json_schema":
            check_schema(self.text)

    @classmethod
    def json_schema(cls, schema: Any, whitespace: bool = True) -> GrammarSpec:
        """Of a schema as text, or as Python objects."""
        if isinstance(schema, str):
            return cls("json_schema", schema, whitespace)
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False), whitespace)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is no JSON: {error}") from error

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """One of some texts."""
        if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise GrammarError("choices must be a list of texts, at least one and none of them empty")
        return cls("lark", "start: " + " | ".join(lark_string(text) for text in choices))


def lark_string(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class Matcher:
    """Where one sequence stands in its grammar. Used by one thread at a time.

    Attributes:
        error: Why it cannot go on; nothing of it may be used then.
    """

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos = eos_ids
        self.error: str | None = None

    @property
    def is_over(self) -> bool:
        """Nothing can follow what was written, and it is complete."""
        return self.error is None and self._matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        """What was written may end here."""
        return self.error is None and self._matcher.is_accepting()

    def advance(self, token: int) -> None:
        """Take a sampled token. One that the grammar does not allow, or that comes behind its end, is an error."""
        if self.error is not None:
            return
        if self._matcher.is_stopped():
            self.error = "a token came after the end of the grammar"
        elif not self._matcher.consume_token(token):
            self.error = self._reason()

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of the next token into uint32 `words` [ceil(V / 32)]; all zero after an error."""
        assert words.dtype == np.uint32
        assert words.flags.c_contiguous
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self.error = self._reason()
        if self.error is not None:
            words[:] = 0

    def fill_along(self, rows: np.ndarray, tokens: Sequence[int]) -> None:
        """Masks of the next token and of those behind each of `tokens`, as far as the grammar allows them.

        Args:
            rows: uint32 [1 + number of tokens at most, ceil(V / 32)]; what lies behind stays as it is.
        """
        self.fill(rows[0])
        done = 0
        for token, row in zip(tokens, rows[1:], strict=False):
            if not self._try(token):
                break
            done += 1
            self.fill(row)
        self._back(done)

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` could follow, one after the other; an end of sequence is never among them."""
        done = 0
        for token in tokens:
            if not self._try(token):
                break
            done += 1
        self._back(done)
        return done

    def _try(self, token: int) -> bool:
        # The library cannot take back an end of sequence, and nothing needs to be known behind one.
        if self.error is not None or token in self._eos or self._matcher.is_stopped():
            return False
        return self._matcher.try_consume_tokens([token]) == 1

    def _back(self, count: int) -> None:
        if count and self.error is None and not self._matcher.rollback(count):
            self.error = self._reason()

    def _reason(self) -> str:
        return first_line(self._matcher.get_error()) or f"stopped ({self._matcher.stop_reason()})"


class Grammar:
    """A compiled grammar. Safe to use from several threads."""

    def __init__(self, prototype: llguidance.LLMatcher, eos_ids: frozenset[int]) -> None:
        self._prototype, self._eos, self._lock = prototype, eos_ids, threading.Lock()

    def matcher(self) -> Matcher:
        """A new one at the beginning."""
        with self._lock:
            return Matcher(self._prototype.deep_copy(), self._eos)


class _Vocabulary:
    """A tokenizer in the shape that llguidance asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        known = min(tokenizer.vocab_size, vocab_size)
        special = {i for i in tokenizer.special_ids if i < vocab_size} | set(eos_ids)
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self.special_token_ids = sorted(special)
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, add_special_tokens=False)


class GrammarCompiler:
    """Compiles grammars for one model and keeps them. Safe to use from several threads.

    Args:
        tokenizer: `Tokenizer`, or what has its `token_bytes`, `special_ids` and `encode`.
        vocab_size: Ids of the model; those that the tokenizer does not know are never allowed.
        eos_token_ids: Each of them ends an output whose grammar may end.
        timeout_s: For one compilation.

    Attributes:
        pool: Threads to compile in, for those who cannot wait; none is started before it is used.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._source = (tokenizer, vocab_size, [i for i in dict.fromkeys(eos_token_ids) if i < vocab_size])
        self._timeout_s = timeout_s
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="helios-grammar")
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._cache: collections.OrderedDict[GrammarSpec, Grammar] = collections.OrderedDict()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar, compiled now or earlier; takes up to three times the time limit.

        Raises:
            GrammarError: Invalid, not supported, too large or too slow.
            CapacityError: Too many others compile grammars.
        """
        found = self.kept(spec)
        if found is not None:
            return found
        grammar = self._compile(spec, _tried(spec, self._timeout_s))
        with self._lock:
            self._cache[spec] = grammar
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def kept(self, spec: GrammarSpec) -> Grammar | None:
        """The grammar if it was compiled before and is still kept."""
        with self._lock:
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
            return found

    def _compile(self, spec: GrammarSpec, text: str) -> Grammar:
        eos = self._source[2]
        if not eos:
            raise GrammarError("this model has no end-of-sequence token, so no grammar can end an output")
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._tokens(), text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one is the slowest: here nobody waits for it but this request
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be used: {first_line(matcher.get_error())}")
        return Grammar(matcher, frozenset(eos))

    def _tokens(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                tokenizer, size, eos = self._source
                vocabulary: Any = _Vocabulary(tokenizer, size, eos)
                self._vocabulary = llguidance.LLTokenizer(vocabulary, eos_token=eos)
            return self._vocabulary


def _tried(spec: GrammarSpec, timeout_s: float) -> str:
    """The grammar in llguidance's form, after another process has compiled it."""
    options = json_options(spec.whitespace)
    question = {"kind": spec.kind, "text": spec.text, "options": options, "limits": LIMITS}
    try:
        answer = PROCESS.ask(question, timeout_s)
    except TooSlow as error:
        raise GrammarError(f"the grammar takes more than {timeout_s:g} s to compile", "grammar_too_slow") from error
    except Died as error:
        raise GrammarError("the grammar is nested too deeply, or needs too much memory", "grammar_too_large") from error
    if "grammar" in answer:
        return answer["grammar"]
    raise GrammarError(f"the grammar is invalid or not supported: {first_line(answer['error'])}")


def first_line(message: str) -> str:
    """An error of the library for people: a line, without what it says of its own code."""
    if message.startswith("panic"):
        return "it is larger than the library can hold"
    return " ".join(message.split("\n<", 1)[0].split())[:300]
