"""Sampling fields of a body to `SamplingParams`, whose own checks speak for the ranges."""

from __future__ import annotations

from typing import Any

from helios_jax.engine.params import SamplingParams
from helios_jax.errors import RequestError
from helios_jax.server.protocol import SamplingFields
from helios_jax.server.structured import structured_outputs

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
MAX_ID_DIGITS = 19  # of a logit_bias key; more is no token id, and int() of unbounded text is quadratic


def logit_bias_of(given: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's string keys to token ids; ranges are the engine's to check.

    Raises:
        RequestError: A key is not a decimal integer.
    """
    if given is None:
        return None
    result: dict[int, float] = {}
    for key, value in given.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_ID_DIGITS):
            raise RequestError(
                f"logit_bias keys must be token ids as decimal integers, got {key[:40]!r}",
                param="logit_bias",
                code="invalid_value",
            )
        result[int(key)] = value
    return result


def sampling_params(request: SamplingFields, **more: Any) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        request: The body; absent fields keep `SamplingParams`' defaults.
        more: Fields whose meaning differs between endpoints: max_tokens, logprobs, prompt_logprobs; and `form`,
            if it is not the one that the body asks for.

    Raises:
        RequestError: A value is out of its range; names the field.
    """
    form = more.pop("form") if "form" in more else structured_outputs(request)
    given = {name: getattr(request, name) for name in SAME_NAME if getattr(request, name) is not None}
    return SamplingParams(**given, logit_bias=logit_bias_of(request.logit_bias), structured_outputs=form, **more)
