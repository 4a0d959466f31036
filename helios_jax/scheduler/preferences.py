"""PolicyConfig: the preferences of the selection policy, checked once, and their presets.

The numbers trade throughput against cadence. They are neither measurements of programs nor
guarantees of latency; zero removes a preference (specification: "Policy preferences").
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from helios_jax.errors import ConfigError

SPECULATION_MODES = ("adaptive", "fixed", "off")
_COEFFICIENTS = (
    "output_token_value",
    "token_fairness",
    "delivery_fairness",
    "decode_age_price",
    "terminal_value",
    "terminal_age_price",
    "checkpoint_extra_work_fraction",
)


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _shown(value: object) -> str:
    """A value for a message; Python refuses to write out integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Preferences in prompt-token units of value; a consumed uncached prompt token is worth 1.

    Attributes:
        output_token_value: beta, value of one output token.
        token_fairness: f, coefficient of the logarithm of the token rate, value/ms.
        delivery_fairness: g, coefficient of the logarithm of the delivery rate, value/ms.
        decode_age_price: c, linear cost of output age, value/ms^2.
        terminal_value: Value of one terminal retirement.
        terminal_age_price: Linear cost of terminal waiting, value/ms^2.
        adaptation_ms: tau, adaptation time of the service prices.
        estimate_ttl_ns: Age beyond which a duration estimate is stale.
        adaptive_verification_alpha: Exponent on prefix-survival estimates.
        speculation: `adaptive`: every verification width competes; `fixed`: the widest loaded only;
            `off`: width one only.
        checkpoint_extra_work_fraction: Time that optional checkpoints of a request may take, per
            estimated time of its uncached prefill; decode earns it for a terminal one.

    Raises:
        ConfigError: Naming the field, what was given and what is allowed.
    """

    output_token_value: float = 64.0
    token_fairness: float = 16.0
    delivery_fairness: float = 4.0
    decode_age_price: float = 0.1
    terminal_value: float = 256.0
    terminal_age_price: float = 1.0
    adaptation_ms: float = 100.0
    estimate_ttl_ns: int = 30_000_000_000
    adaptive_verification_alpha: float = 1.0
    speculation: str = "adaptive"
    checkpoint_extra_work_fraction: float = 0.05

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """f, g, c and the price of terminal age: what rates and waiting are multiplied by."""
        return self.token_fairness, self.delivery_fairness, self.decode_age_price, self.terminal_age_price

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise ConfigError(f"{name} must be finite and nonnegative (0 disables it), got {_shown(value)}")
        for name in ("adaptation_ms", "adaptive_verification_alpha"):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                raise ConfigError(f"{name} must be finite and greater than zero, got {_shown(value)}")
        if self.speculation not in SPECULATION_MODES:
            allowed = ", ".join(SPECULATION_MODES)
            raise ConfigError(f"speculation must be one of {allowed}, got {_shown(self.speculation)}")
        ttl = self.estimate_ttl_ns
        if not isinstance(ttl, int) or isinstance(ttl, bool) or not 0 < ttl < 2**62:
            raise ConfigError(f"estimate_ttl_ns must be a positive integer below 2**62, got {_shown(ttl)}")


POLICY_PRESETS = ("balanced", "throughput")


def policy_preset(
    name: str,
    *,
    terminal_value: float | None = None,
    terminal_age_price: float | None = None,
    checkpoint_extra_work_fraction: float | None = None,
    adaptive_verification_alpha: float | None = None,
    speculation: str | None = None,
) -> PolicyConfig:
    """The preset `name`, with the preferences overridden that are given.

    `balanced` is the defaults. `throughput` keeps token fairness and the output-token value
    and sets delivery fairness and decode-age price to zero; it can choose longer output bursts.

    Raises:
        ConfigError: Unknown preset or a coefficient that is not allowed.
    """
    if name not in POLICY_PRESETS:
        raise ConfigError(f"unknown scheduler policy {name!r}; choose one of {', '.join(POLICY_PRESETS)}")
    policy = PolicyConfig()
    if name == "throughput":
        policy = dataclasses.replace(policy, delivery_fairness=0.0, decode_age_price=0.0)
    overrides: dict[str, Any] = {
        "terminal_value": terminal_value,
        "terminal_age_price": terminal_age_price,
        "checkpoint_extra_work_fraction": checkpoint_extra_work_fraction,
        "adaptive_verification_alpha": adaptive_verification_alpha,
        "speculation": speculation,
    }
    return dataclasses.replace(policy, **{name: value for name, value in overrides.items() if value is not None})
