"""`/v1/chat/completions`: messages through the model's template, answers as assistant messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from helios_jax.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from helios_jax.errors import RequestError
from helios_jax.server.body import decode_body
from helios_jax.server.context import ServerContext
from helios_jax.server.interface import TokenizerLike
from helios_jax.server.job import Job, check_choices
from helios_jax.server.params import sampling_params
from helios_jax.server.protocol import ChatRequest, Message, refuse_unsupported
from helios_jax.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    chat_logprobs,
)
from helios_jax.server.structured import structured_outputs
from helios_jax.server.toolset import template_calls, tool_set
from helios_jax.text.conversation import Conversation, encode_conversation
from helios_jax.text.tool_parser import CallParser, Piece
from helios_jax.text.tools import OPEN, adapt

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED_TEMPLATE_NAMES = frozenset(
    {"tokenizer", "messages", "tools", "add_generation_prompt", "template", "tokenize", "bos_token", "eos_token"}
)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, known roles ("developer" reads as "system").

    Raises:
        RequestError: No messages, a role, a kind of content or a tool call that is not supported.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages", code="invalid_value")
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            allowed = ", ".join(ROLES)
            raise RequestError(
                f"{where}.role must be one of {allowed}, got {message.role[:40]!r}",
                param=f"{where}.role",
                code="unsupported" if message.role == "function" else "invalid_value",
            )
        if message.function_call:
            raise RequestError(
                f"{where}.function_call is not supported: use tool_calls",
                param=f"{where}.function_call",
                code="unsupported",
            )
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": content_text(message, where)}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_calls:
            if role != "assistant":
                raise RequestError(
                    f"{where}.tool_calls belong to an assistant's message",
                    param=f"{where}.tool_calls",
                    code="invalid_value",
                )
            entry["tool_calls"] = template_calls(message.tool_calls, where)
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        elif role == "tool":
            raise RequestError(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id", code="invalid_value")
        result.append(entry)
    return result


def content_text(message: Message, where: str) -> str:
    """Content of a message as one text; parts are joined by a line break, as vLLM joins them."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise RequestError(f"{where}.content is missing", param=f"{where}.content", code="invalid_value")
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{where}.content[{number}] must be a text part with `text`; type {part.type[:40]!r} is not supported"
                " in this version",
                param=f"{where}.content",
                code="unsupported" if part.type != "text" else "invalid_value",
            )
        texts.append(part.text)
    return "\n".join(texts)


async def encode_messages(
    context: ServerContext,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
    tools: Sequence[dict[str, Any]] = (),
) -> Conversation:
    """A conversation through the model's template.

    Raises:
        RequestError: A message, a template argument, or the template itself refuses.
    """
    given = template_kwargs or {}
    reserved = RESERVED_TEMPLATE_NAMES.intersection(given)
    if reserved:
        names = ", ".join(sorted(reserved))
        raise RequestError(
            f"chat_template_kwargs must not set {names}", param="chat_template_kwargs", code="invalid_value"
        )
    converted = template_messages(messages)
    # what a template adds: little to a message, and to a tool what it knows of it
    size = sum(len(m["content"]) for m in converted) + 64 * len(converted) + 512 * len(tools)
    return await context.offload(
        size,
        _encode,
        context.engine.tokenizer,
        converted,
        tools,
        {"add_generation_prompt": add_generation_prompt} | given,
    )


def _encode(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], options: dict[str, Any]
) -> Conversation:
    has_tools = tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
    if not has_tools:
        return encode_conversation(tokenizer, messages, **options)
    adapted, told = adapt(tokenizer, messages, tools)
    return encode_conversation(tokenizer, adapted, tools=told, **options)


async def parse_chat(body: bytes, context: ServerContext, answer_id: str) -> Job:
    """A chat body as a `Job`.

    Raises:
        RequestError: Anything about it that cannot be served, naming the field.
    """
    request = await decode_body(body, ChatRequest, context)
    model = context.check_model(request.model)
    refuse_unsupported(request)
    for name, asked_for in (("echo", bool(request.echo)), ("prompt_logprobs", request.prompt_logprobs is not None)):
        if asked_for:
            raise RequestError(f"{name} is supported by /v1/completions only", param=name, code="unsupported")
    top = request.top_logprobs or 0
    if top and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs", code="invalid_value")
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    tools = await context.offload(len(body), tool_set, request, structured_outputs(request))
    params = sampling_params(request, max_tokens=asked, logprobs=top if request.logprobs else None, form=tools.form)
    check_choices(context, 1, params.n)
    conversation = await encode_messages(
        context, request.messages, request.add_generation_prompt, request.chat_template_kwargs, tools.told
    )
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    writer = ChatWriter(
        answer_id, context.created_now(), model, context.engine.tokenizer, params.logprobs, include_usage
    )
    if tools.callable:
        writer.new_parser = lambda: CallParser(tools.callable, bare=tools.bare)
        if is_special(context.engine.tokenizer, OPEN):
            params.skip_special_tokens = False  # the tags would be missing from the text
    return Job([conversation.token_ids], params, writer, bool(request.stream), include_usage, conversation.message_ends)


def is_special(tokenizer: TokenizerLike, text: str) -> bool:
    """Whether a text is one of the tokens that outputs leave out."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return len(ids) == 1 and ids[0] in getattr(tokenizer, "special_ids", ())


@dataclass
class _Choice:
    """What is remembered of one output between its deltas."""

    parser: CallParser | None = None
    role_sent: bool = False
    held_logprobs: list[TokenLogprobs] = field(default_factory=list)


class ChatWriter:
    """Answers in chat's form.

    A delta without text (a token inside a character, or inside a possible stop string) sends
    nothing; its log-probabilities go out with the next one.
    """

    def __init__(
        self, answer_id: str, created: int, model: str, tokenizer: TokenizerLike, top: int | None, usage_null: bool
    ) -> None:
        self._head = (answer_id, created, model)
        self._tokenizer = tokenizer
        self._top = top
        self._usage_null = usage_null
        self._choices: dict[int, _Choice] = {}
        self.new_parser: Callable[[], CallParser] | None = None  # where calls are looked for

    def plain(self, outputs: list[RequestOutput], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                output.index,
                message := self._message(output.text),
                self._logprobs(output.logprobs),
                _reason(output.finish_reason, message.tool_calls is not UNSET) or "",
                output.stop_reason,
            )
            for output in outputs[0].outputs
        ]
        return ChatCompletion(*self._head, choices, usage)

    def _message(self, text: str) -> ChatMessage:
        if self.new_parser is None:
            return ChatMessage(text)
        parser = self.new_parser()
        content, calls = "", []
        for piece in parser.feed(text) + parser.finish():
            content += piece.content
            if piece.name is not None:
                calls.append(ToolCall(new_call_id(), FunctionCall(piece.name, "")))
            elif piece.arguments:
                calls[-1].function.arguments += piece.arguments
        return ChatMessage(content or None, tool_calls=calls) if calls else ChatMessage(content)

    def deltas(self, prompt_index: int, output: RequestOutput) -> Iterator[ChatChunk]:
        for choice in output.outputs:
            yield from self._choice_deltas(choice)

    def _choice_deltas(self, output: CompletionOutput) -> Iterator[ChatChunk]:
        state = self._choices.get(output.index)
        if state is None:
            parser = self.new_parser() if self.new_parser is not None else None
            state = self._choices[output.index] = _Choice(parser)
        if not state.role_sent:
            state.role_sent = True
            yield self._chunk(ChatChunkChoice(output.index, ChatDelta("assistant", "")))
        state.held_logprobs += output.logprobs or []
        for delta in _deltas(state, output):
            logprobs = self._logprobs(state.held_logprobs)
            state.held_logprobs = []
            yield self._chunk(ChatChunkChoice(output.index, delta, logprobs))
        if output.finished:
            reason = _reason(output.finish_reason, state.parser is not None and state.parser.calls > 0)
            yield self._chunk(ChatChunkChoice(output.index, ChatDelta(), None, reason, output.stop_reason))

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(*self._head, [], usage)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(*self._head, [choice], None if self._usage_null else UNSET)

    def _logprobs(self, entries: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return chat_logprobs(entries or [], self._top, self._tokenizer)


def _deltas(state: _Choice, output: CompletionOutput) -> Iterator[ChatDelta]:
    """What a reader is told of new text; at the end at least one delta if log-probabilities wait for one."""
    if state.parser is None:
        pieces = [Piece(content=output.text)] if output.text else []
    else:
        pieces = state.parser.feed(output.text) + (state.parser.finish() if output.finished else [])
    if not pieces and output.finished and state.held_logprobs:
        pieces = [Piece()]
    for piece in pieces:
        if piece.call is None:
            yield ChatDelta(content=piece.content)
        elif piece.name is not None:
            begin = FunctionDelta(piece.name, "")
            yield ChatDelta(tool_calls=[ToolCallDelta(piece.call, begin, new_call_id(), "function")])
        else:
            yield ChatDelta(tool_calls=[ToolCallDelta(piece.call, FunctionDelta(arguments=piece.arguments))])


def _reason(finish_reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason


def new_call_id() -> str:
    return f"call_{uuid4().hex}"
