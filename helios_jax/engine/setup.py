"""From what the user named (a model, or a core) to an engine that is ready to start."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helios_jax.config import DEFAULT_MODEL, EngineConfig, cache_dir
from helios_jax.engine.intake import Intake
from helios_jax.engine.loop import Engine
from helios_jax.errors import CoreError
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.text.grammar import GrammarCompiler
from helios_jax.text.tokenizer import load_tokenizer

Progress = Callable[..., None]  # (stage, done, total, detail); see aot.progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What to serve: a model and how its core is made, or a core as it is.

    Attributes:
        model: Name, directory, GGUF file or hub id; or a core's directory.
        core: Directory of a prepared core. Where `model` is given too, the core is prepared
            there if it does not exist yet, and served as it is if it does.
        options: Keyword options of `aot.CoreOptions`; None means that nothing was said.
    """

    model: str | Path | None = None
    core: str | Path | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def open(self, progress: Progress | None = None) -> Any:
        """Load the core, or prepare it on first use; may compile for minutes.

        Raises:
            ConfigError, CheckpointError, CoreError: As `aot.core` says.
        """
        from helios_jax.aot.core import is_core, open_core  # jax is imported here
        from helios_jax.aot.progress import silent

        show: Any = progress or silent
        if self.core is not None and is_core(self.core):
            return open_core(self.core, self.options, progress=show)
        if self.core is not None and self.model is not None:
            return self.prepare(progress)
        if self.core is not None:
            raise CoreError(f"{self.core} holds no prepared core: prepare one, or name a model to make it from")
        return open_core(self.model or DEFAULT_MODEL, self.options, cache_dir() / "cores", show)

    def prepare(self, progress: Progress | None = None) -> Any:
        """Make the core of `model` at `core`, keeping what is there and still valid.

        Raises:
            ConfigError, CheckpointError, CoreError: As `aot.core` says.
        """
        from helios_jax.aot.core import CoreOptions, prepare
        from helios_jax.aot.options import options_given
        from helios_jax.aot.progress import silent

        assert self.model is not None
        assert self.core is not None
        show: Any = progress or silent
        return prepare(self.model, CoreOptions(**options_given(self.options)), self.core, show)


def configured(config: EngineConfig | None, **changes: Any) -> EngineConfig:
    """`config`, or the defaults, with the `changes` that are not None."""
    return dataclasses.replace(config or EngineConfig(), **{k: v for k, v in changes.items() if v is not None})


@dataclasses.dataclass(frozen=True)
class Assembly:
    """An engine that has not been started, and what requests of it are checked and built with."""

    engine: Engine
    intake: Intake
    tokenizer: Any
    model_name: str


def assemble(
    core: Any, config: EngineConfig, tokenizer: Any = None, clock: Callable[[], int] = time.monotonic_ns
) -> Assembly:
    """Put an engine around a core; `tokenizer` None loads the core's own."""
    if tokenizer is None:
        tokenizer = load_tokenizer(Path(core.source_info.text_path))
    engine = Engine(core, tokenizer, config, clock)
    intake = Intake(
        limits=core.limits,
        vocab_size=core.dims.vocab_size,
        eos_token_ids=tuple(core.source_info.eos_token_ids),
        tokenizer=tokenizer,
        max_sequences=engine.board.capacity,
        can_score=bool(core.catalog.of_kind(ProgramKind.SCORED_PREFILL)),
        grammars=GrammarCompiler(
            tokenizer, core.dims.vocab_size, core.source_info.eos_token_ids, config.grammar_timeout_s
        ),
    )
    return Assembly(engine, intake, tokenizer, core.source_info.name)
