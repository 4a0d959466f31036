"""What preparing a core needs of a model: `helios_jax.models.source.ModelSource`, seen from here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from helios_jax.aot.text_files import TextFiles
from helios_jax.models.interface import Model
from helios_jax.models.registry import build_model


class Source(Protocol):
    """A model on disk, opened but not read."""

    @property
    def name(self) -> str:
        """Display name; also part of the name of its core's directory in the cache."""

    @property
    def model(self) -> Model:
        """Equations and shapes, no weights."""

    @property
    def num_params(self) -> int:
        """Number of parameters."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Any of these ends an answer."""

    @property
    def bos_token_id(self) -> int | None:
        """Token before a prompt, or None."""

    def config_digest(self) -> str:
        """sha256 of the model configuration."""

    def weights_digest(self) -> str:
        """Cheap fingerprint of the weight files (names, sizes, times), not of every byte."""

    def model_config(self) -> dict[str, Any]:
        """The model configuration as plain JSON values; `model_from_config` makes `model` of it."""

    def load_params(self, dtype: str, put: Callable[[Any], Any], progress: Callable[[int, int], None] | None) -> Any:
        """The weights, leaf by leaf through `put`; `progress(done_bytes, total_bytes)`."""

    def heads(self) -> Source:
        """Its multi-token-prediction heads as a source of their own; only if `interface.heads_of(model)` has them."""

    def text_files(self) -> TextFiles:
        """Where tokenizer, template and configuration lie."""


def model_from_config(config: dict[str, Any]) -> Model:
    """The model of a stored configuration, without its checkpoint.

    Raises:
        CheckpointError: Its family is not registered in this version.
    """
    return build_model(config)
