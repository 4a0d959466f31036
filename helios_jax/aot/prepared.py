"""`PreparedCore`: loaded programs, weights and device state, ready to run frames."""

from __future__ import annotations

import dataclasses
import pathlib
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import numpy as np

from helios_jax.aot.abi import Dims
from helios_jax.aot.counters import compile_counter
from helios_jax.aot.device_state import abstract_state
from helios_jax.aot.host_copies import HostCopies, compile_host_copies
from helios_jax.aot.memory import MemoryPlan
from helios_jax.aot.options import CoreOptions
from helios_jax.aot.report import ProgramReport, summary
from helios_jax.aot.runner import DeviceRunner, InFlight
from helios_jax.errors import ConfigError
from helios_jax.models.interface import Draft, Model, recurrent_layers_of
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProgramShape
from helios_jax.scheduler.types import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreSourceInfo:
    """What the layers above need of the model, besides its programs.

    Attributes:
        name: Display name.
        family: Registered model family.
        num_params: Number of parameters.
        eos_token_ids: Any of these ends an answer.
        bos_token_id: Token before a prompt, or None.
        text_path: A directory with the tokenizer files (or a GGUF) for `load_tokenizer`.
    """

    name: str
    family: str
    num_params: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    text_path: pathlib.Path


class PreparedCore:
    """Everything that the engine runs a model with; use as a context manager or `close` it.

    Attributes:
        catalog: The shapes that are loaded; an optional program that did not compile is not in it.
        dims: Static extents of the programs.
        model: The architecture (no weights).
        draft: That of the draft model or of the model's multi-token-prediction heads, or None.
        options: Resolved options; where this load left rounds out, with what is left.
        memory: Bytes of weights, state and pages.
        report: One line a program of the full catalogue.
        notes: Warnings of this preparation, in order.
        source_info: Name, EOS ids and text files of the model.
        directory: The core's directory.
        runner: Weights and state on the device.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        dims: Dims,
        model: Model,
        options: CoreOptions,
        memory: MemoryPlan,
        report: tuple[ProgramReport, ...],
        notes: tuple[str, ...],
        source_info: CoreSourceInfo,
        directory: pathlib.Path,
        params: Any,
        runner: DeviceRunner,
        draft: Draft | None = None,
    ) -> None:
        self.catalog = catalog
        self.dims = dims
        self.model = model
        self.draft = draft
        self.options = options
        self.memory = memory
        self.report = report
        self.notes = notes
        self.source_info = source_info
        self.directory = directory
        self.params = params
        self.runner = runner
        self._compiles_at_ready = compile_counter().total

    @property
    def limits(self) -> Limits:
        """The scheduler's sizes: slots, pages, page size, context, state rows, what drafts write behind a lane."""
        assert self.options.max_context is not None
        copies = self.supports(ProgramKind.SNAPSHOT) and self.supports(ProgramKind.RESTORE)
        return Limits(
            slots=self.dims.slots,
            pages=self.dims.num_pages - 1,
            page_size=self.dims.page_size,
            max_context=self.options.max_context,
            state_rows=self.dims.state_rows if copies else 0,
            draft_extent=self.options.draft_extent,
            shares_parts=not self.options.draft_extent and not recurrent_layers_of(self.model),
        )

    def supports(self, kind: ProgramKind) -> bool:
        """Whether any program of this family is loaded (scored prefill may be missing)."""
        return bool(self.catalog.of_kind(kind))

    def execute(
        self, shape: ProgramShape, ints: np.ndarray, floats: np.ndarray, bits: np.ndarray | None = None
    ) -> InFlight:
        """Submits one frame; see `DeviceRunner.submit`."""
        return self.runner.submit(shape, ints, floats, bits)

    def reset(self) -> None:
        """Fresh device state after a failure; see `DeviceRunner.reset`. Compiles nothing."""
        self.runner.reset()

    def enable_host_copies(self) -> HostCopies:
        """Compile what copies checkpoints to the host and back (a second or two); before `ready`.

        Raises:
            ConfigError: The core has no state rows.
        """
        if not self.dims.state_rows:
            raise ConfigError("host_checkpoint_bytes needs a core with state rows: this one keeps no checkpoints")
        state = abstract_state(self.model, self.dims, jnp.dtype(self.options.dtype), self.draft)
        self.runner.host_copies = copies = compile_host_copies(state)
        return copies

    def compiles_after_ready(self) -> int:
        """Compilations in this process since the core was ready; anything but 0 is a bug."""
        return compile_counter().total - self._compiles_at_ready

    def summary(self) -> str:
        """One line for people: model, sizes, and what became of the programs."""
        return (
            f"{self.source_info.name}: {self.options.max_slots} slots of {self.options.max_context} tokens,"
            f" {self.dims.num_pages - 1} pages of {self.dims.page_size}, {self.limits.state_rows} checkpoint rows,"
            f" {self.options.dtype};"
            f"{self._speculation()} programs: {summary(self.report)}"
        )

    def _speculation(self) -> str:
        method = self.options.spec_method
        return "" if method == "none" else f" speculation by {method}, {self.options.num_draft_tokens} proposals;"

    def close(self) -> None:
        """Waits for frames in flight and drops weights and state. Idempotent."""
        self.runner.close()
        self.params = None

    def __enter__(self) -> PreparedCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
