"""Fakes for tests of programs that use helios_jax: no model, no compilation, no waiting."""

from helios_jax.testing.clock import FakeClock
from helios_jax.testing.core import FakeCore, FakeSourceInfo, fake_async_llm, fake_core
from helios_jax.testing.device import FakeFrame, FakeRunner
from helios_jax.testing.gate import Gate
from helios_jax.testing.model import FakeDraft, expected_tokens, hashed_text, scripted
from helios_jax.testing.rig import EngineRig
from helios_jax.testing.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "EngineRig",
    "FakeClock",
    "FakeCore",
    "FakeDraft",
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
