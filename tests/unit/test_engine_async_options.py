"""AsyncLLM and LLM take the same options by the same names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from helios_jax.config import EngineConfig
from helios_jax.engine import async_llm, llm
from helios_jax.engine.async_llm import AsyncLLM
from helios_jax.engine.llm import LLM
from helios_jax.engine.setup import Target, assemble
from helios_jax.errors import ConfigError
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.testing import ByteTokenizer, fake_core


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What reaches the engine, with a fake core in place of a model."""
    seen: dict[str, Any] = {}

    def opened(self: Target, progress: Any = None) -> Any:
        seen["options"] = {name: value for name, value in self.options.items() if value is not None}
        return fake_core()

    def assembled(core: Any, config: EngineConfig, *rest: Any) -> Any:
        seen["policy"] = config.policy
        return assemble(core, config, ByteTokenizer())

    monkeypatch.setattr(Target, "open", opened)
    monkeypatch.setattr(async_llm, "assemble", assembled)
    monkeypatch.setattr(llm, "assemble", assembled)
    return seen


POLICIES = [
    ({}, "balanced"),
    ({"policy": "throughput"}, "throughput"),
    ({"config": EngineConfig(policy="throughput")}, "throughput"),
    ({"config": EngineConfig(policy="throughput"), "policy": "balanced"}, "balanced"),
]


@pytest.mark.parametrize(("given", "policy"), POLICIES)
def test_policy_is_the_keywords_or_the_configs(seen: dict[str, Any], given: dict[str, Any], policy: str) -> None:
    with LLM(max_slots=2, page_size=8, progress=False, **given):
        assert seen == {"policy": policy, "options": {"max_slots": 2, "page_size": 8}}
    seen.clear()
    AsyncLLM(max_slots=2, page_size=8, **given)._make().engine.close()
    assert seen == {"policy": policy, "options": {"max_slots": 2, "page_size": 8}}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_speculation_reaches_core_and_scheduler(
    seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    policies = []
    build = Scheduler.__init__

    def spy(self: Scheduler, catalog: Any, limits: Any, policy: Any) -> None:
        policies.append(policy)
        build(self, catalog, limits, policy)

    monkeypatch.setattr(Scheduler, "__init__", spy)
    asked = {"spec_method": "draft", "draft_model": "small", "num_draft_tokens": 3, "speculative_token_capacity": 8}
    made = kind(**asked, spec_width="fixed", mtp_adaptive_verification_alpha=2.0, policy="throughput")
    (made._make().engine if kind is AsyncLLM else made).close()
    assert seen["options"] == asked
    assert (policies[0].speculation, policies[0].adaptive_verification_alpha) == ("fixed", 2.0)
    assert policies[0].delivery_fairness == 0  # the preset's


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_width": "wide"}, "spec_width must be one of adaptive, fixed, off, got 'wide'"),
        ({"mtp_adaptive_verification_alpha": 0}, "finite and greater than zero, got 0"),
        ({"mtp_adaptive_verification_alpha": float("inf")}, "finite and greater than zero, got inf"),
        ({"mtp_adaptive_verification_alpha": True}, "finite and greater than zero, got True"),
    ],
)
def test_a_bad_choice_of_widths_is_said_before_anything_is_loaded(given: dict[str, Any], message: str) -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match=message):
            kind("/nonexistent", **given)


def test_both_name_the_same_options() -> None:
    assert set(inspect.signature(AsyncLLM).parameters) == set(inspect.signature(LLM).parameters)


@pytest.mark.parametrize(
    ("given", "frames"), [({}, 2), ({"async_scheduling": False}, 1), ({"async_scheduling": True}, 2)]
)
def test_async_scheduling_is_the_number_of_frames_in_flight(seen: dict[str, Any], given: dict, frames: int) -> None:
    for make in (LLM(progress=False, **given)._assembly, AsyncLLM(**given)._make()):
        assert make.engine.scheduler.state.limits.frames == make.engine.window.frames == frames
        make.engine.close()
