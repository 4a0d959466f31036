"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat, and calls in its messages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from helios_jax.engine.structured import StructuredOutputsParams
from helios_jax.errors import RequestError
from helios_jax.server.protocol import CalledTool, ChatRequest, NamedTool, Tool
from helios_jax.text.tools import call_grammar

MAX_TOOLS = 128  # OpenAI's limit
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolSet:
    """The tools of one chat.

    Attributes:
        told: OpenAI's descriptions, as templates take them; empty if the model is told of none.
        callable: Those that may be called; empty if calls are not looked for.
        form: The form of the outputs: that of calls where they are required, else the request's own.
        bare: Whether calls without tags are looked for.
    """

    told: list[dict[str, Any]]
    callable: frozenset[str]
    form: StructuredOutputsParams | None
    bare: bool = True


def tool_set(request: ChatRequest, form: StructuredOutputsParams | None) -> ToolSet:
    """What a chat's fields about tools mean together with the form that it asks for.

    Raises:
        RequestError: A tool or a choice is wrong, or both do not go together.
    """
    tools, choice = request.tools or [], request.tool_choice
    told = _descriptions(tools)
    names = [tool.function.name for tool in tools]
    if isinstance(choice, str) and choice not in CHOICES:
        raise _error(
            f"tool_choice must be {', '.join(CHOICES)} or a named function, got {choice[:40]!r}", "tool_choice"
        )
    if not tools:
        if choice not in (None, "none", "auto"):
            raise _error("tool_choice needs tools", "tool_choice")
        return ToolSet([], frozenset(), form)
    if choice == "none":
        return ToolSet([], frozenset(), form)
    parallel = request.parallel_tool_calls is not False
    if choice in (None, "auto"):
        if form is None:
            return ToolSet(told, frozenset(names), None)
        return ToolSet(told, frozenset(names), _either(told, parallel, form), bare=False)
    if form is not None:
        raise RequestError(
            f"tool_choice requires a call, {form.field} another form of the output: give one of them",
            param=form.field,
            code="conflicting_options",
        )
    if isinstance(choice, NamedTool):
        told_of = [told[names.index(_chosen(choice, names))]]
        return ToolSet(told, frozenset(names), _forced(told_of, parallel=False), bare=False)
    return ToolSet(told, frozenset(names), _forced(told, parallel), bare=False)


def _descriptions(tools: list[Tool]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise _error(f"{len(tools)} tools, at most {MAX_TOOLS} are allowed", "tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if tool.type != "function":
            raise RequestError(
                f"tools[{index}].type must be function, got {tool.type[:40]!r}", param="tools", code="unsupported"
            )
        if not NAME.fullmatch(name):
            raise _error(
                f"tools[{index}].function.name must be 1 to 128 letters, digits or _.-, got {name[:40]!r}", "tools"
            )
        if name in seen:
            raise _error(f"two tools have the name {name!r}", "tools")
        seen.add(name)
    return [_description(tool) for tool in tools]


def _description(tool: Tool) -> dict[str, Any]:
    function = msgspec.to_builtins(tool.function)
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _chosen(choice: NamedTool, names: list[str]) -> str:
    if choice.type != "function" or choice.function is None:
        raise RequestError(
            f"tool_choice of type {choice.type[:40]!r} is not supported", param="tool_choice", code="unsupported"
        )
    if choice.function.name not in names:
        raise _error(f"tool_choice names {choice.function.name[:128]!r}, which is not among tools", "tool_choice")
    return choice.function.name


def _forced(tools: list[dict[str, Any]], parallel: bool) -> StructuredOutputsParams:
    return _grammar_of(tools, parallel, None)


def _either(tools: list[dict[str, Any]], parallel: bool, form: StructuredOutputsParams) -> StructuredOutputsParams:
    """Calls, or an answer of the form that the request asks for."""
    if form.json is None and not form.json_object:
        raise RequestError(
            f"{form.field} goes with tools only as JSON: set tool_choice to none, or leave it out",
            param=form.field,
            code="conflicting_options",
        )
    return _grammar_of(tools, parallel, form)


def _grammar_of(
    tools: list[dict[str, Any]], parallel: bool, form: StructuredOutputsParams | None
) -> StructuredOutputsParams:
    answer = None if form is None else form.spec()
    try:
        text = call_grammar(tools, parallel=parallel, answer=answer).text
    except RequestError as error:
        raise RequestError(f"tools: {error}", param="tools", code=error.code) from error
    return StructuredOutputsParams(grammar=text, field="tools")


def template_calls(calls: list[CalledTool], where: str) -> list[dict[str, Any]]:
    """Calls of an assistant's message as templates take them: arguments as mappings.

    Raises:
        RequestError: Another type than function, or arguments that are no JSON object.
    """
    result = []
    for number, call in enumerate(calls):
        place = f"{where}.tool_calls[{number}]"
        if call.type != "function":
            raise RequestError(f"{place}.type must be function", param=f"{where}.tool_calls", code="unsupported")
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise _error(f"{place}.function.arguments must be the text of a JSON object", f"{where}.tool_calls")
        entry: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
        if call.id is not None:
            entry["id"] = call.id
        result.append(entry)
    return result


def _error(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
