"""LLM serving on JAX: prepared programs, a pure scheduler by value per time, an OpenAI-compatible server.

    from helios_jax import LLM, SamplingParams

    with LLM(model="smollm2") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

Public names are loaded when first used, so that `import helios_jax` imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helios_jax.config import EngineConfig
    from helios_jax.engine.async_llm import AsyncLLM
    from helios_jax.engine.heartbeat import EngineHealth
    from helios_jax.engine.llm import LLM
    from helios_jax.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from helios_jax.engine.params import OutputKind, SamplingParams
    from helios_jax.engine.stats import EngineStats
    from helios_jax.engine.structured import StructuredOutputsParams

_HOMES = {
    "AsyncLLM": "helios_jax.engine.async_llm",
    "CompletionOutput": "helios_jax.engine.outputs",
    "EngineConfig": "helios_jax.config",
    "EngineHealth": "helios_jax.engine.heartbeat",
    "EngineStats": "helios_jax.engine.stats",
    "LLM": "helios_jax.engine.llm",
    "Logprob": "helios_jax.engine.outputs",
    "OutputKind": "helios_jax.engine.params",
    "RequestOutput": "helios_jax.engine.outputs",
    "SamplingParams": "helios_jax.engine.params",
    "StructuredOutputsParams": "helios_jax.engine.structured",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineHealth",
    "EngineStats",
    "Logprob",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("helios-jax")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"
