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


def test_both_name_the_same_options() -> None:
    assert set(inspect.signature(AsyncLLM).parameters) == set(inspect.signature(LLM).parameters)
