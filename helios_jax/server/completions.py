"""`/v1/completions`: prompts as text or ids, continued as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from helios_jax.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from helios_jax.errors import RequestError
from helios_jax.server.body import decode_body
from helios_jax.server.context import ServerContext
from helios_jax.server.interface import TokenizerLike
from helios_jax.server.job import Job, check_choices
from helios_jax.server.offsets import echo_offsets
from helios_jax.server.params import sampling_params
from helios_jax.server.protocol import CompletionRequest, refuse_unsupported
from helios_jax.server.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    completion_logprobs,
    prompt_logprobs_of,
)
from helios_jax.text.detokenizer import Detokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions only; chat goes on to the end of the context


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """One or several prompts as a list of texts or a list of ids.

    Raises:
        RequestError: Empty, or of mixed kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    for kind in (str, int, list):
        if prompt and all(isinstance(item, kind) for item in prompt):
            return [prompt] if kind is int else prompt  # type: ignore[return-value,list-item]
    raise RequestError(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, not empty or mixed",
        param="prompt",
        code="invalid_value",
    )


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise if an id is not in the vocabulary; the tokenizer must never see it."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}: token id {token_id} is not in the vocabulary, allowed are 0 to {vocab_size - 1}",
                param=param,
                code="invalid_token_id",
            )


def check_prompts(prompts: list[list[int]], vocab_size: int, max_context: int) -> None:
    """Raise if a prompt of ids is too long or holds an unknown id.

    Lengths come first: what cannot fit is refused without a walk over it.
    """
    for ids in prompts:
        if len(ids) > max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; this model's maximum context length is {max_context} tokens:"
                " shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
    for ids in prompts:
        check_ids(ids, vocab_size, "prompt")


async def encode_prompts(
    context: ServerContext, prompts: list[str] | list[list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """Ids of every prompt; none may be empty.

    Raises:
        RequestError: A prompt is empty, or holds ids out of the vocabulary or more than the context.
    """
    engine = context.engine
    result: list[list[int]] = []
    if not isinstance(prompts[0], str):
        size = sum(len(ids) for ids in prompts)
        await context.offload(size, check_prompts, prompts, engine.vocab_size, engine.max_context)
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await context.offload(
                len(prompt), engine.tokenizer.encode, prompt, add_special_tokens=add_special_tokens
            )
        else:
            ids = prompt
        if not ids:
            raise RequestError("prompt must hold at least one token", param="prompt", code="invalid_value")
        result.append(ids)
    return result


async def parse_completion(body: bytes, context: ServerContext, answer_id: str) -> Job:
    """A completion body as a `Job`.

    Raises:
        RequestError: Anything about it that cannot be served, naming the field.
    """
    request = await decode_body(body, CompletionRequest, context)
    model = context.check_model(request.model)
    refuse_unsupported(request)
    stream, echo = bool(request.stream), bool(request.echo)
    if stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs needs stream=false", param="prompt_logprobs", code="unsupported")
    prompts = await context.offload(len(request.prompt), split_prompts, request.prompt)
    params = sampling_params(
        request,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if echo and request.prompt_logprobs is None else request.prompt_logprobs,
    )
    check_choices(context, len(prompts), params.n)
    ids = await encode_prompts(context, prompts, request.add_special_tokens is not False)
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    writer = CompletionWriter((answer_id, context.created_now(), model), context.engine.tokenizer, params.n)
    writer.usage_null = include_usage
    writer.wants_logprobs = request.logprobs is not None
    writer.skip_special_tokens = params.skip_special_tokens
    writer.given_as_text = isinstance(prompts[0], str)
    writer.wants_prompt_logprobs = request.prompt_logprobs is not None
    if echo:
        writer.echoed = [
            prompt if isinstance(prompt, str) else context.engine.tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in prompts
        ]
    return Job(ids, params, writer, stream, include_usage)


@dataclass
class _Choice:
    """What is remembered of one output between its deltas."""

    detokenizer: Detokenizer
    echo_sent: bool = False
    offset: int = 0
    held_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    held_offsets: list[int] = field(default_factory=list)

    def hold(self, entries: Sequence[TokenLogprobs]) -> None:
        """Keep the log-probabilities of new tokens until there is text to send them with."""
        for entry in entries:
            self.held_logprobs.append(entry)
            self.held_offsets.append(self.offset)
            self.offset += len(self.detokenizer.push(next(iter(entry))))


class CompletionWriter:
    """Answers in the form of completions; choice index = prompt index x n + output index."""

    def __init__(self, head: tuple[str, int, str], tokenizer: TokenizerLike, n: int) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._n = n
        self._choices: dict[int, _Choice] = {}
        self._scores: dict[int, list[TokenLogprobs | None]] = {}  # of each prompt; a stream brings them once
        self.usage_null = False
        self.wants_logprobs = False
        self.wants_prompt_logprobs = False
        self.skip_special_tokens = True
        self.given_as_text = True
        self.echoed: list[str] = []  # text of each prompt; empty without echo

    def plain(self, outputs: list[RequestOutput], usage: Usage) -> Completion:
        choices = []
        for prompt_index, output in enumerate(outputs):
            for choice in output.outputs:
                made = self._choice(prompt_index, output, choice)
                if self.wants_prompt_logprobs:
                    made.prompt_logprobs = prompt_logprobs_of(output.prompt_logprobs or [])
                choices.append(made)
        return Completion(*self._head, choices, usage)

    def deltas(self, prompt_index: int, output: RequestOutput) -> Iterator[Completion]:
        for choice in output.outputs:
            made = self._choice(prompt_index, output, choice)
            if made.text or made.finish_reason is not None:
                yield Completion(*self._head, [made], None if self.usage_null else UNSET)

    def usage_chunk(self, usage: Usage) -> Completion:
        return Completion(*self._head, [], usage)

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        index = prompt_index * self._n + choice.index
        if index not in self._choices:
            prompt_ids = output.prompt_token_ids or ()
            self._choices[index] = _Choice(Detokenizer(self._tokenizer, prompt_ids, self.skip_special_tokens))
        state = self._choices[index]
        text = choice.text
        if output.prompt_logprobs is not None:
            self._scores[prompt_index] = output.prompt_logprobs
        if self.echoed and not state.echo_sent:
            state.echo_sent = True
            text = self.echoed[prompt_index] + text
            if self.wants_logprobs:
                self._hold_prompt(state, prompt_index, output.prompt_token_ids)
        state.hold(choice.logprobs or [])
        made = CompletionChoice(index, text, None, choice.finish_reason)
        if choice.finished:
            made.stop_reason = choice.stop_reason
        if self.wants_logprobs and (text or choice.finished):
            made.logprobs = self._take_logprobs(state, output.prompt_token_ids)
        return made

    def _hold_prompt(self, state: _Choice, prompt_index: int, prompt_ids: Sequence[int]) -> None:
        text, scores = self.echoed[prompt_index], self._scores.get(prompt_index, [])
        offsets = echo_offsets(self._tokenizer, prompt_ids, text, self.given_as_text)
        state.held_logprobs += scores
        state.held_offsets += offsets[: len(scores)]
        state.offset = len(text)

    def _take_logprobs(self, state: _Choice, prompt_ids: Sequence[int]) -> CompletionLogprobs:
        head = self._tokenizer.decode_token(prompt_ids[0]) if prompt_ids and None in state.held_logprobs else ""
        logprobs = completion_logprobs(state.held_logprobs, head, state.held_offsets)
        state.held_logprobs, state.held_offsets = [], []
        return logprobs
