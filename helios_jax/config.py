"""Defaults and the few settings that come from the environment, read in this one place."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from helios_jax.errors import ConfigError

DEFAULT_MODEL = "smollm2"
CACHE_VARIABLE = "HELIOS_JAX_CACHE"
API_KEY_VARIABLE = "HELIOS_JAX_API_KEY"
DEFAULT_MAX_QUEUE = 256  # sequences that may wait for a slot
DEFAULT_READY_TIMEOUT_S = 60.0
DEFAULT_GRAMMAR_TIMEOUT_S = 5.0
MAX_QUEUE_LIMIT = 1_000_000
SPEC_WIDTHS = ("adaptive", "fixed", "off")


def cache_dir() -> Path:
    """Where prepared cores and dumps are kept: $HELIOS_JAX_CACHE or ~/.cache/helios-jax."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "helios-jax"


def api_key() -> str | None:
    """Bearer token from $HELIOS_JAX_API_KEY: a command line is visible to every user of a machine."""
    return os.environ.get(API_KEY_VARIABLE) or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine serves a core; nothing here changes a program.

    Attributes:
        max_queue: Sequences that may wait beyond those in slots; more are refused (HTTP 429).
        ready_timeout_s: A step or device call longer than this makes the engine not ready.
        trace: File that gets one JSON line a frame, or None.
        dump_dir: Where state and recent events go after an internal error; None is `cache_dir()/dumps`.
        policy: Scheduler preset, "balanced" or "throughput".
        terminal_value, terminal_age_price, checkpoint_extra_work_fraction: Override the preset's coefficients.
        spec_width: In a core with speculative rounds, "adaptive": every width of the core competes, and the
            device may share target rows between requests; "fixed": the widest only; "off": none is used.
        mtp_adaptive_verification_alpha: Exponent on the acceptance estimates that widths are chosen by, finite
            and positive; above 1 is more careful than what was observed, None is 1.
        grammar_timeout_s: For the compilation of one grammar of structured outputs; slower ones are refused.
        enable_prefix_caching: Keep states of prompts and conversations in the core's state rows, and begin with them
            where another prompt begins with the same tokens; False computes every prompt.
        host_checkpoint_bytes: Host memory for checkpoints that gave way on the device; they are copied back when a
            prompt begins with one. 0 keeps none there.
        async_scheduling: Submit the next decode step before the last one is over, so that the device does not
            wait for the host; False has one frame in flight at a time.

    Raises:
        ConfigError: Naming the option, what was given and what is allowed.
    """

    max_queue: int = DEFAULT_MAX_QUEUE
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    trace: Path | str | None = None
    dump_dir: Path | str | None = None
    policy: str = "balanced"
    terminal_value: float | None = None
    terminal_age_price: float | None = None
    checkpoint_extra_work_fraction: float | None = None
    spec_width: str = "adaptive"
    mtp_adaptive_verification_alpha: float | None = None
    enable_prefix_caching: bool = True
    host_checkpoint_bytes: int = 0
    async_scheduling: bool = True
    grammar_timeout_s: float = DEFAULT_GRAMMAR_TIMEOUT_S

    def __post_init__(self) -> None:
        queue = self.max_queue
        if not isinstance(queue, int) or isinstance(queue, bool) or not 0 <= queue <= MAX_QUEUE_LIMIT:
            raise ConfigError(f"max_queue must be an integer in [0, {MAX_QUEUE_LIMIT}], got {queue!r}")
        tier = self.host_checkpoint_bytes
        if not isinstance(tier, int) or isinstance(tier, bool) or tier < 0:
            raise ConfigError(f"host_checkpoint_bytes must be an integer of at least 0, got {tier!r}")
        for name in ("ready_timeout_s", "grammar_timeout_s"):
            timeout = getattr(self, name)
            if not (isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout > 0):
                raise ConfigError(f"{name} must be a positive number of seconds, got {timeout!r}")
        if self.spec_width not in SPEC_WIDTHS:
            raise ConfigError(f"spec_width must be one of {', '.join(SPEC_WIDTHS)}, got {self.spec_width!r}")
        alpha = self.mtp_adaptive_verification_alpha
        number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and math.isfinite(alpha) and alpha > 0
        if alpha is not None and not number:
            raise ConfigError(f"mtp_adaptive_verification_alpha must be finite and greater than zero, got {alpha!r}")
