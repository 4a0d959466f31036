"""Answer bodies of chat and completions, plain and streamed, and log-probabilities as valid JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from helios_jax.engine.outputs import TokenLogprobs
from helios_jax.server.interface import TokenizerLike

MIN_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON cannot say; vLLM's value


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The beginning of a call has its id, type and name; the rest is parts of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Plain answer, and each chunk of a stream: OpenAI gives both the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    details = PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def finite(logprob: float) -> float:
    """The log-probability, or `MIN_LOGPROB` where it has no JSON form."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB


def chat_logprobs(entries: Sequence[TokenLogprobs], top: int, tokenizer: TokenizerLike) -> ChatLogprobs:
    """Chat's form: the chosen token of each position and the `top` likeliest by rank."""
    content = []
    for entry in entries:
        chosen_id, chosen = next(iter(entry.items()))
        by_rank = sorted((item for item in entry.items() if item[1].rank <= top), key=lambda item: item[1].rank)
        alternatives = [
            TopLogprob(value.decoded_token, finite(value.logprob), list(tokenizer.token_bytes(token_id)))
            for token_id, value in by_rank[:top]
        ]
        content.append(
            ChatTokenLogprob(
                chosen.decoded_token, finite(chosen.logprob), list(tokenizer.token_bytes(chosen_id)), alternatives
            )
        )
    return ChatLogprobs(content)


def completion_logprobs(
    entries: Sequence[TokenLogprobs | None], prompt_head: str, offsets: Sequence[int]
) -> CompletionLogprobs:
    """The form of completions: four parallel lists.

    Args:
        entries: One a token; `None` only for the first prompt token, which nothing predicts.
        prompt_head: Text of that first token.
        offsets: Characters before each entry, echo included; see `offsets.py`.
    """
    result = CompletionLogprobs([], [], [], [])
    for entry, offset in zip(entries, offsets, strict=True):
        result.text_offset.append(offset)
        if entry is None:
            result.tokens.append(prompt_head)
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            chosen = next(iter(entry.values()))
            result.tokens.append(chosen.decoded_token)
            result.token_logprobs.append(finite(chosen.logprob))
            alternatives: dict[str, float] = {}
            for value in entry.values():  # two ids may share a text: the likelier one keeps it
                alternatives.setdefault(value.decoded_token, finite(value.logprob))
            result.top_logprobs.append(alternatives)
    return result


def prompt_logprobs_of(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's `prompt_logprobs`: by token id, `null` for the first token."""
    return [
        None
        if entry is None
        else {str(i): PromptLogprob(finite(v.logprob), v.rank, v.decoded_token) for i, v in entry.items()}
        for entry in entries
    ]
