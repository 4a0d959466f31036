"""SamplingParams: how the tokens of one request are chosen, named as vLLM names them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

from helios_jax.engine.structured import StructuredOutputsParams
from helios_jax.errors import RequestError

MAX_LOGIT_BIAS = 300  # entries, OpenAI's limit; equals aot.abi's static extent
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MIN_TEMPERATURE = 1e-2  # smaller positive values are raised to it (vLLM does the same): no division by zero


class OutputKind(enum.Enum):
    """What each yielded `RequestOutput` of an async stream holds (vLLM's RequestOutputKind)."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise RequestError(message, param=param, code="invalid_value")


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """Sampling settings of a request; everything is checked on construction.

    Order on the device: repetition, frequency, presence penalty; logit bias; what a grammar allows;
    temperature; min-p; top-k; top-p. `temperature=0` is greedy.

    Raises:
        RequestError: Naming the field, what was given and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_numbers()
        _require(
            self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputsParams),
            "structured_outputs",
            "structured_outputs must be a StructuredOutputsParams",
        )
        if self.stop is None:
            self.stop = ()
        elif isinstance(self.stop, str):
            self.stop = (self.stop,)
        self.stop = tuple(self.stop)
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", "stop must be non-empty strings")
        _require(
            len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}"
        )
        self.stop_token_ids = tuple(self.stop_token_ids or ())
        self.logit_bias = dict(self.logit_bias or {})
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed",
        )
        for value in self.logit_bias.values():
            _require(-100 <= value <= 100, "logit_bias", f"logit_bias values must be in [-100, 100], got {value}")
        if self.temperature and self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    def _check_numbers(self) -> None:
        def number(name: str, low: float, high: float, open_low: bool = False) -> None:
            value = getattr(self, name)
            ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            ok = ok and (low < value if open_low else low <= value) and value <= high
            _require(ok, name, f"{name} must be in {'(' if open_low else '['}{low}, {high}], got {value!r}")

        def integer(name: str, low: int, high: int, optional: bool = False) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            _require(ok, name, f"{name} must be an integer in [{low}, {high}], got {value!r}")

        integer("n", 1, MAX_N)
        integer("max_tokens", 0, 2**31 - 1, optional=True)
        number("temperature", 0.0, 2.0)
        number("top_p", 0.0, 1.0, open_low=True)
        if self.top_k == -1:  # vLLM's other spelling of "off"
            self.top_k = 0
        integer("top_k", 0, 2**31 - 1)
        number("min_p", 0.0, 1.0)
        number("repetition_penalty", 0.0, 100.0, open_low=True)
        number("presence_penalty", -2.0, 2.0)
        number("frequency_penalty", -2.0, 2.0)
        integer("seed", -(2**63), 2**64 - 1, optional=True)
        integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
