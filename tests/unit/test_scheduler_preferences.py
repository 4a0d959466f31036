"""PolicyConfig, presets, and when the policy may be configured."""

from __future__ import annotations

import dataclasses
import math

import pytest

from helios_jax.errors import ConfigError
from helios_jax.scheduler import PolicyConfig, configure_policy, policy_preset
from tests.unit.scheduler_toy import admitted, request, small_state

FIELDS = [field.name for field in dataclasses.fields(PolicyConfig)]


def test_defaults_are_the_specification_s() -> None:
    assert dataclasses.asdict(PolicyConfig()) == {
        "output_token_value": 64,
        "token_fairness": 16,
        "delivery_fairness": 4,
        "decode_age_price": 0.1,
        "terminal_value": 256,
        "terminal_age_price": 1,
        "adaptation_ms": 100,
        "estimate_ttl_ns": 30_000_000_000,
        "adaptive_verification_alpha": 1,
        "speculation": "adaptive",
        "checkpoint_extra_work_fraction": 0.05,
    }


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, "1", None, True, -(10**400)])
def test_every_field_is_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        PolicyConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("exponent", [400, 5000])
def test_integers_that_no_float_holds(name: str, exponent: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*got an integer of [0-9]+ bits"):
        PolicyConfig(**{name: 10**exponent})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FIELDS)
def test_zero_disables_a_coefficient_and_nothing_else(name: str) -> None:
    if name in ("adaptation_ms", "estimate_ttl_ns", "adaptive_verification_alpha", "speculation"):
        with pytest.raises(ConfigError, match=name):
            PolicyConfig(**{name: 0})
    else:
        assert getattr(PolicyConfig(**{name: 0}), name) == 0


def test_presets() -> None:
    assert policy_preset("balanced") == PolicyConfig()
    assert policy_preset("throughput") == PolicyConfig(delivery_fairness=0.0, decode_age_price=0.0)
    changed = policy_preset(
        "throughput", terminal_value=3.0, terminal_age_price=0.0, checkpoint_extra_work_fraction=0.5
    )
    assert (changed.terminal_value, changed.terminal_age_price, changed.delivery_fairness) == (3.0, 0.0, 0.0)
    assert changed.checkpoint_extra_work_fraction == 0.5
    with pytest.raises(ConfigError, match="balanced, throughput"):
        policy_preset("fast")


def test_configured_before_the_first_admission_only() -> None:
    state = configure_policy(small_state(), policy_preset("throughput"))
    assert state.policy.decode_age_price == 0
    state, _ = admitted(state, request())
    with pytest.raises(ConfigError, match="before the first admission"):
        configure_policy(state, PolicyConfig())
