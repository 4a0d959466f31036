"""Tools in conversations: how a model is told of them, and the grammar of its calls.

A call is written as Hermes models write it, which most open models have learned:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

1. `adapt` prepares messages for the model's template: as they are where the template renders tools, else
   the tools become part of the system message, calls part of the assistant's text, and results a user's.
2. `call_grammar` forces calls where a request requires them; `tool_parser` reads them from the output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from helios_jax.errors import RequestError
from helios_jax.text.grammar import GrammarSpec, lark_string
from helios_jax.text.grammar_schema import GrammarError, check_schema, json_options
from helios_jax.text.template import render_chat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
AFTER = "}\n" + CLOSE  # the arguments
SPACE = r"\x20?"  # what may lie between the parts of a call's arguments
MAX_CALLS = 8  # of one forced output: a small model would go on for ever
PROBE_NAME = "probe_of_tools"
PROBE = {"type": "function", "function": {"name": PROBE_NAME, "description": "", "parameters": {}}}
INSTRUCTIONS = """You may call the functions described in <tools>. To call one, answer with JSON in tags:
<tool_call>
{"name": "function_name", "arguments": {"argument": "value"}}
</tool_call>

<tools>
%s
</tools>"""

Message = Mapping[str, Any]


def takes_tools(tokenizer: Any) -> bool:
    """Whether the model's chat template says anything of tools that it is given."""
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": "hello"}], tools=[PROBE])
    except RequestError:
        return False
    return PROBE_NAME in text


def adapt(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
    """Messages and tools as `render_chat` takes them for this model.

    Args:
        messages: With OpenAI's `tool_calls`, arguments as mappings, and the role "tool".
        tools: OpenAI's `tools`.
    """
    if takes_tools(tokenizer):
        return list(messages), tools or None
    plain = [_plain(message) for message in messages]
    if tools:
        told = INSTRUCTIONS % "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}
        else:
            plain.insert(0, {"role": "system", "content": told})
    return plain, None


def _plain(message: Message) -> Message:
    """A message for a template that knows neither calls nor results."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{OPEN}\n{json.dumps(_body(call), ensure_ascii=False)}\n{CLOSE}" for call in calls]
    said = [message["content"]] if message.get("content") else []
    return {"role": message["role"], "content": "\n".join(said + written)}


def _body(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def call_grammar(
    tools: Sequence[Mapping[str, Any]], *, parallel: bool, answer: GrammarSpec | None = None
) -> GrammarSpec:
    """The grammar of outputs that are calls of `tools`, one or, with `parallel`, up to `MAX_CALLS`.

    Args:
        answer: A JSON schema; the output may then be one of its instances instead.

    Raises:
        GrammarError: A tool's parameters are no JSON schema of an object, or everything together is too large.
    """
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    rules = [f"start: calls{' | answer' if answer is not None else ''}", f"calls: call{more}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        function = tool["function"]
        before = f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        rules.append(f"call_{i}: {lark_string(before)} args_{i} {lark_string(AFTER)}")
        rules.append(f"args_{i}: %json {_embedded(_object_schema(function), json_options(True, SPACE))}")
    if answer is not None:
        rules.append(f"answer: %json {_embedded(json.loads(answer.text), json_options(answer.whitespace))}")
    return GrammarSpec("lark", "\n".join(rules))


def _object_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, an object in any case."""
    given = function.get("parameters")
    schema = dict(given) if given else {}
    if schema.setdefault("type", "object") != "object":
        name = function["name"]
        raise GrammarError(f"the parameters of {name!r} must be an object, not {schema['type']!r}")
    return schema


def _embedded(schema: Any, options: dict[str, Any]) -> str:
    """A schema inside a Lark grammar, with this server's way of writing JSON."""
    text = GrammarSpec.json_schema(schema).text
    check_schema(text)
    if isinstance(schema, bool):
        return text
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
