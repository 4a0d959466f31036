"""Fakes for tests of programs that use helios_jax: no model, no compilation, no waiting."""

from helios_jax.testing.clock import FakeClock
from helios_jax.testing.core import FakeCore, FakeSourceInfo, fake_async_llm, fake_core
from helios_jax.testing.device import FakeFrame, FakeRunner, Gate, hashed_text, scripted
from helios_jax.testing.rig import EngineRig, expected_tokens
from helios_jax.testing.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "EngineRig",
    "FakeClock",
    "FakeCore",
    "FakeFrame",
    "FakeRunner",
    "FakeSourceInfo",
    "Gate",
    "expected_tokens",
    "fake_async_llm",
    "fake_core",
    "hashed_text",
    "scripted",
]
