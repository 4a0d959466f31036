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
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.text.tokenizer import load_tokenizer

Progress = Callable[..., None]  # (stage, done, total, detail); see aot.progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What to serve: a model and how its core is made, or a core as it is.

    Attributes:
        model: Name, directory, GGUF file or hub id; or a core's directory.
        core: Directory of a prepared core. Where `model` is given too, the core is prepared
            there if it does not exist yet.
        options: Keyword options of `aot.CoreOptions`; None means its default.
    """

    model: str | Path | None = None
    core: str | Path | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def open(self, progress: Progress | None = None) -> Any:
        """Load the core, or prepare it; may compile for minutes.

        Raises:
            ConfigError, CheckpointError, CoreError: As `aot.core` says.
        """
        from helios_jax.aot.core import CoreOptions, is_core, open_core, prepare  # jax is imported here
        from helios_jax.aot.progress import silent

        options = CoreOptions(**{name: value for name, value in self.options.items() if value is not None})
        show: Any = progress or silent
        if self.core is not None and (self.model is None or is_core(self.core)):
            return open_core(self.core, options, progress=show)
        if self.core is not None:
            from helios_jax.models.source import open_source

            return prepare(open_source(str(self.model)), options, self.core, show)
        return open_core(self.model or DEFAULT_MODEL, options, cache_dir() / "cores", show)


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
    )
    return Assembly(engine, intake, tokenizer, core.source_info.name)
