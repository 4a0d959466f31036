"""`/tokenize` and `/detokenize`, with vLLM's bodies."""

from __future__ import annotations

from helios_jax.errors import RequestError
from helios_jax.server.body import decode_body
from helios_jax.server.chat import encode_messages
from helios_jax.server.completions import check_ids
from helios_jax.server.context import ServerContext
from helios_jax.server.protocol import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse


async def tokenize(body: bytes, context: ServerContext) -> TokenizeResponse:
    """Ids of a text, or of a conversation through the model's template.

    Raises:
        RequestError: Neither or both of `prompt` and `messages`, or a message is wrong.
    """
    request = await decode_body(body, TokenizeRequest, context)
    context.check_model(request.model)
    engine = context.engine
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", param="prompt", code="invalid_value")
    if request.messages is not None:
        conversation = await encode_messages(
            context, request.messages, request.add_generation_prompt, request.chat_template_kwargs
        )
        ids = conversation.token_ids
    else:
        text = request.prompt or ""
        ids = await context.offload(
            len(text), engine.tokenizer.encode, text, add_special_tokens=request.add_special_tokens
        )
    texts = None
    if request.return_token_strs:
        texts = await context.offload(len(ids), lambda: [engine.tokenizer.decode_token(i) for i in ids])
    return TokenizeResponse(len(ids), engine.max_context, ids, texts)


async def detokenize(body: bytes, context: ServerContext) -> DetokenizeResponse:
    """Text of ids, special tokens included.

    Raises:
        RequestError: An id is not in the vocabulary.
    """
    request = await decode_body(body, DetokenizeRequest, context)
    context.check_model(request.model)
    engine = context.engine
    await context.offload(len(request.tokens), check_ids, request.tokens, engine.vocab_size, "tokens")
    text = await context.offload(
        len(request.tokens), engine.tokenizer.decode, request.tokens, skip_special_tokens=False
    )
    return DetokenizeResponse(text)
