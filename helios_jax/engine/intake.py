"""From a prompt and SamplingParams to a `Request`: everything that can be refused is refused here.

Runs in the caller's thread, before the engine hears of the request, so that a wrong request
costs the engine nothing and its error reaches the caller directly.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import reprlib
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Any

import numpy as np

from helios_jax.engine.outputs import RequestMetrics
from helios_jax.engine.params import SamplingParams
from helios_jax.engine.request import Request, Sequence, Sink
from helios_jax.errors import RequestError
from helios_jax.scheduler.types import Constraint, Limits, RequestSpec
from helios_jax.text.detokenizer import Detokenizer
from helios_jax.text.grammar import Grammar, GrammarCompiler
from helios_jax.text.grammar_schema import GrammarError
from helios_jax.text.stops import StopBuffer

SEED_BITS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intake:
    """What requests are checked against.

    Attributes:
        limits: The scheduler's.
        vocab_size: Ids from here up do not exist.
        eos_token_ids: Any of them ends an output unless `ignore_eos`.
        tokenizer: Text in and out.
        grammars: Compiles what structured outputs ask for.
        max_sequences: Sequences that slots and queue hold together; bounds n.
        can_score: The core has scored-prefill programs (they are optional).
    """

    limits: Limits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any
    grammars: GrammarCompiler
    max_sequences: int
    can_score: bool = True

    @property
    def max_context(self) -> int:
        """Tokens that one request may hold: the context, or the page pool if that is smaller."""
        return min(self.limits.max_context, self.limits.pages * self.limits.page_size - self.limits.draft_extent)

    def request(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams,
        *,
        request_id: str,
        sink: Sink,
        arrival_ns: int,
        text: str | None = None,
        grammar: Grammar | None = None,
        message_ends: SequenceOf[int] = (),
    ) -> Request:
        """Check and build one request; `text` is the prompt's text where ids are given.

        `message_ends` are the numbers of prompt tokens with which a message is complete, growing: where another
        prompt that begins with the same messages may take up what was computed.

        `grammar` is what `self.grammar(params)` gave; None compiles it here.

        `max_tokens` None, or more than the context leaves, means what the context leaves.

        Raises:
            RequestError: Naming the field, what was given and what is allowed.
        """
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt)
        else:
            ids = self._token_ids(prompt, params)
        self._check_length(len(ids), params)
        self._check_ids(ids, params)
        ends = _message_ends(message_ends, len(ids))
        if params.n > self.max_sequences:
            raise RequestError(
                f"n is {params.n}, this engine holds at most {self.max_sequences} outputs at a time: lower n",
                param="n",
                code="invalid_value",
            )
        if params.prompt_logprobs is not None and not self.can_score:
            raise RequestError(
                "this core has no scored-prefill programs, so it cannot give log-probabilities of the prompt",
                param="prompt_logprobs",
                code="unsupported",
            )
        request = Request(request_id, text, ids, params, sink, RequestMetrics(arrival_ns=arrival_ns))
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        tokens = np.asarray(ids, np.int32)
        base = params.seed if params.seed is not None else int.from_bytes(os.urandom(SEED_BITS // 8), "little")
        grammar = grammar or self.grammar(params)
        request.sequences = [self._sequence(request, index, base, tokens, grammar, ends) for index in range(params.n)]
        return request

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """The compiled grammar of a request, None if it has none; may take seconds.

        Raises:
            RequestError: It is invalid, not supported, or beyond the limits.
            CapacityError: Too many others compile grammars.
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        spec = asked.spec()
        try:
            return self.grammars.compile(spec)
        except GrammarError as error:
            raise asked.named(error) from error

    def kept_grammar(self, params: SamplingParams) -> Grammar | None:
        """As `grammar`, at once: None also if it is not compiled yet."""
        asked = params.structured_outputs
        return None if asked is None else self.grammars.kept(asked.spec())

    def compile_grammar(self, params: SamplingParams) -> Future[Grammar | None]:
        """As `grammar`, in a thread of the compiler's: an event loop must not wait for it."""
        return self.grammars.pool.submit(self.grammar, params)

    def _sequence(
        self,
        request: Request,
        index: int,
        base_seed: int,
        tokens: np.ndarray,
        grammar: Grammar | None,
        message_ends: tuple[int, ...],
    ) -> Sequence:
        params = request.params
        room = self.max_context - len(tokens)
        stop_ids = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(self.eos_token_ids))
        spec = RequestSpec(
            prompt=tokens,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=frozenset(stop_ids),
            scored=params.prompt_logprobs is not None and index == 0,  # one sequence scores for all
            message_ends=message_ends,
            constraints=_constraints(params),
        )
        return Sequence(
            request=request,
            index=index,
            seed=(base_seed + index) % 2**SEED_BITS,
            spec=spec,
            detokenizer=Detokenizer(self.tokenizer, request.prompt_token_ids, params.skip_special_tokens),
            stops=StopBuffer(tuple(params.stop or ()), params.include_stop_str_in_output),
            matcher=None if grammar is None else grammar.matcher(),
        )

    def _token_ids(self, prompt: SequenceOf[int], params: SamplingParams) -> list[int]:
        """The ids as Python integers. Their number is checked before any of them is looked at.

        This may run on an event loop: a prompt of millions of ids is refused in no time.
        """
        if (isinstance(prompt, np.ndarray) and prompt.ndim == 1) or isinstance(prompt, SequenceOf):
            self._check_length(len(prompt), params)
            ids = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        else:
            ids = [prompt]
        if not all(_is_integer_type(kind) for kind in set(map(type, ids))):
            token = next(token for token in ids if not _is_integer_type(type(token)))
            raise RequestError(
                f"a prompt is a string or a list of token ids, found {reprlib.repr(token)}",
                param="prompt",
                code="invalid_type",
            )
        return list(map(int, ids))

    def _check_length(self, prompt_len: int, params: SamplingParams) -> None:
        if prompt_len == 0:
            raise RequestError(
                "the prompt is empty: it must have at least 1 token", param="prompt", code="invalid_value"
            )
        wanted = 0 if params.max_tokens == 0 else 1
        if prompt_len + wanted > self.max_context:
            output = f" and at least {wanted} more of output" if wanted else ""
            raise RequestError(
                f"the prompt has {prompt_len} tokens{output}; this model's maximum context length is"
                f" {self.max_context} tokens: shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )

    def _check_ids(self, ids: list[int], params: SamplingParams) -> None:
        fields = {"prompt": ids, "logit_bias": params.logit_bias or (), "stop_token_ids": params.stop_token_ids or ()}
        for name, tokens in fields.items():
            if not self._are_ids(tokens):
                token = next(token for token in tokens if not self._are_ids([token]))
                raise RequestError(
                    f"{name} has token id {token!r}; ids of this model are integers in [0, {self.vocab_size - 1}]",
                    param=name,
                    code="invalid_token_id",
                )

    def _are_ids(self, tokens: Iterable[int]) -> bool:
        tokens = list(tokens)
        if not all(issubclass(kind, int) and kind is not bool for kind in set(map(type, tokens))):
            return False
        try:
            values = np.array(tokens, np.int64)
        except OverflowError:
            return False
        return not len(values) or bool(values.min() >= 0 and values.max() < self.vocab_size)


def _message_ends(given: SequenceOf[int], prompt_len: int) -> tuple[int, ...]:
    """As the scheduler wants them.

    Raises:
        RequestError: Not growing integers of 1 to the prompt's length.
    """
    ends = tuple(given)
    integers = all(_is_integer_type(type(end)) for end in ends)
    if not integers or not all(a < b for a, b in itertools.pairwise((0, *ends, prompt_len + 1))):
        raise RequestError(
            f"message_ends must be growing integers from 1 to {prompt_len}, the tokens of the prompt, got {ends!r}",
            param="message_ends",
            code="invalid_value",
        )
    return tuple(int(end) for end in ends)


def _constraints(params: SamplingParams) -> Constraint:
    """What of the settings restricts the request's programs, or what others may learn from it."""
    constraints = Constraint.HOST_STOPS if params.stop else Constraint.NONE
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    if penalised or params.logit_bias:
        constraints |= Constraint.TARGET_ONLY  # they act on the target, where no draft sees them
    if params.structured_outputs is not None:
        constraints |= Constraint.GRAMMAR | Constraint.NO_LEARNED  # no host sees learned proposals before they run
    return constraints


def _is_integer_type(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and kind is not bool
