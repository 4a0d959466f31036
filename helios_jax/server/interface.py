"""What the server needs of an engine: the part of `AsyncLLM` that HTTP touches.

A protocol, so that tests drive the server with a scripted engine and no device.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import SamplingParams


class TokenizerLike(Protocol):
    """Text to ids and back; `text.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def decode_token(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class HealthLike(Protocol):
    """Whether the engine thread lives, whether it may be given work, and why not."""

    @property
    def alive(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class EngineLike(Protocol):
    """An asynchronous engine.

    `generate` raises `RequestError` and `CapacityError` before its first output; closing the
    iterator, or cancelling the task that waits on it, cancels the request.
    """

    @property
    def tokenizer(self) -> Any: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        arrival_ns: int | None = None,
        *,
        message_ends: Sequence[int] = (),
    ) -> AsyncIterator[RequestOutput]: ...

    def health(self) -> HealthLike: ...

    def stats(self) -> Any: ...
