"""Request bodies: OpenAI's fields, vLLM's extensions, and the fields that would change the answer.

Unknown fields are accepted and ignored, as OpenAI and vLLM do, so that newer clients work. A known
field of the wrong type is an error. A field that asks for something this version does not do
(`UNSUPPORTED`) is an error unless its value is neutral: an answer that ignores it would be wrong.
"""

from __future__ import annotations

from typing import Any

import msgspec

from helios_jax.errors import RequestError

# field -> values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "tools": (None, []),  # of completions; chat has them
    "function_call": (None, "none", "auto"),
    "guided_whitespace_pattern": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
}


NOTHING = msgspec.Raw(b"null")  # of a field whose JSON text is kept as it is


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = NOTHING
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field of this name; exactly one of the first five."""

    json: msgspec.Raw = NOTHING
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    # read only to be refused
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class FunctionSpec(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: FunctionSpec
    type: str = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    function: FunctionName | None = None
    type: str = "function"


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and completions have in common; `None` means the documented default."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # vLLM's extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    # the form of the outputs, see structured.py
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = NOTHING
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # read only to be refused, see UNSUPPORTED
    functions: Any = None
    function_call: Any = None
    guided_whitespace_pattern: Any = None
    modalities: Any = None
    audio: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    min_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    # Homogeneous lists only; `completions.split_prompts` checks it, as a union of two list types cannot be decoded.
    prompt: str | list[str | int | list[int]]
    tools: Any = None
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's body: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "helios-jax"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


def refuse_unsupported(request: SamplingFields) -> None:
    """Raise for a field whose effect this version does not have.

    Raises:
        RequestError: Naming the field; code `unsupported`.
    """
    for name, neutral in UNSUPPORTED.items():
        if name == "tools" and isinstance(request, ChatRequest):
            continue
        value = getattr(request, name, None)
        # `is not` first: False == 0, and a type of its own must not pass for another's neutral value
        if not any(value is n or (type(value) is type(n) and value == n) for n in neutral):
            raise RequestError(f"{name} is not supported in this version", param=name, code="unsupported")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError(
            f"best_of is not supported in this version (got {request.best_of}); leave it out and use n",
            param="best_of",
            code="unsupported",
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options", code="invalid_value")
