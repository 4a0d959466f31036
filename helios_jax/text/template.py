"""Chat templates: a conversation as the text, and the ids, that the model was trained on.

Templates are Jinja in a sandbox, with the names that transformers gives them, so that a model's
own template renders the same text here. A template is part of a model's files; the messages are
part of a request, so what a template cannot make of them is the request's error.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from helios_jax.errors import CheckpointError, RequestError

TOOL_TEMPLATE = "tool_use"  # the name of the template that is used when tools are given, if there is one
MAX_TEMPLATES = 32  # compiled templates kept
Message = Mapping[str, Any]


class _TemplateRaise(Exception):
    """What a template says with `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's name and type)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _TemplateRaise(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=MAX_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def check_template(source: str, where: str) -> None:
    """Compile a model's template.

    Raises:
        CheckpointError: It is not Jinja; `where` begins the message.
    """
    try:
        _compiled(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a valid template: {_reason(error)}") from error


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **kwargs: Any,
) -> str:
    """The text of a conversation.

    Args:
        tokenizer: Gives `chat_template` or `chat_templates`, and the special tokens' texts.
        messages: Mappings with "role", "content" and what else the template reads.
        tools: JSON descriptions of functions, as the template wants them.
        add_generation_prompt: End with what begins the assistant's answer.
        template: The name of one of the model's templates, or a template itself.
        kwargs: Further variables of the template.

    Raises:
        RequestError: No template, or it cannot render these messages (param "messages").
    """
    source = _source(tokenizer, template, bool(tools))
    variables = _special_tokens(tokenizer) | kwargs
    variables |= {"messages": list(messages), "tools": tools, "add_generation_prompt": add_generation_prompt}
    variables.setdefault("documents", None)
    try:
        return _compiled(source).render(**variables)
    except _TemplateRaise as error:
        raise _bad_messages(f"the chat template refuses the messages: {_reason(error)}") from error
    except Exception as error:  # a template is a program: it fails with whatever Python raises
        raise _bad_messages(f"the chat template cannot render the messages: {_reason(error)}") from error


def encode_chat(tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[int]:
    """The ids of a conversation, with exactly one BOS where the tokenizer begins texts with it.

    The options are `render_chat`'s.

    Raises:
        RequestError: As `render_chat`.
    """
    return encode_rendered(tokenizer, render_chat(tokenizer, messages, **options))


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered template. Templates of some models write BOS themselves, those of others leave it out.

    Raises:
        RequestError: The text is not valid Unicode (param "messages").
    """
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except RequestError as error:
        raise _bad_messages(str(error)) from error
    if not tokenizer.adds_bos:
        return ids
    bos = tokenizer.bos_token_id
    written = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[written:]]


def _source(tokenizer: Any, template: str | None, has_tools: bool) -> str:
    named: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
    if template is not None:
        source = named.get(template, template)
        try:
            _compiled(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise RequestError(
                f"chat_template is not a valid template: {_reason(error)}", param="chat_template", code="invalid_value"
            ) from error
        return source
    if has_tools and TOOL_TEMPLATE in named:
        return named[TOOL_TEMPLATE]
    if tokenizer.chat_template is None:
        names = f" of the name 'default' (it has {', '.join(sorted(named))})" if named else ""
        raise _bad_messages(f"this model has no chat template{names}: use plain completions, or give a template")
    return tokenizer.chat_template


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    found = getattr(tokenizer, "special_tokens", None)
    if found is None:
        found = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token")}
    return {name: token for name, token in found.items() if token is not None}


def _bad_messages(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_value")


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
