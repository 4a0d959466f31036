"""What a user chooses about a prepared core, and how the choices become static extents.

`CoreOptions` is what was asked for; `resolve` fills the defaults that depend on the model
and refuses what the model cannot do. Nothing here allocates or touches a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from helios_jax.errors import ConfigError
from helios_jax.models.interface import Model
from helios_jax.scheduler.catalog import MAX_SLOTS

DTYPES = ("float32", "bfloat16", "float16")
PAGE_SIZES = (16, 64)
DEFAULT_MAX_CONTEXT = 2048
DEFAULT_PREFILL_CHUNK = 512
MAX_PAGES = 2**31 - 1  # page ids are int32


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """Options that decide which programs a core holds and how much memory they use.

    Attributes:
        max_slots: Requests that run at the same time, 1 to 64.
        max_context: Tokens of one request, prompt and output, at least 2; None means the
            model's own limit, at most `DEFAULT_MAX_CONTEXT`.
        dtype: Of weights, activations and KV pages: float32, bfloat16 or float16.
        page_size: Tokens of a KV page, 16 or 64.
        num_pages: Usable KV pages; None means enough for every slot at full context, or
            what the memory allows if that is less.
        prefill_chunk: Most prompt tokens of one program; None means `DEFAULT_PREFILL_CHUNK`,
            at most `max_context`.
        memory_utilization: Share of the device's memory (of the host's free memory on CPU)
            that weights, pages and temporaries may take together, in (0, 1].

    Raises:
        ConfigError: Naming the option, what was given and what is allowed.
    """

    max_slots: int = 8
    max_context: int | None = None
    dtype: str = "float32"
    page_size: int = 16
    num_pages: int | None = None
    prefill_chunk: int | None = None
    memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        slots, context = self.max_slots, self.max_context
        _require(_is_int(slots) and 1 <= slots <= MAX_SLOTS, "max_slots", slots, f"an integer in [1, {MAX_SLOTS}]")
        _require(context is None or (_is_int(context) and context >= 2), "max_context", context, "an integer >= 2")
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        _require(_is_int(self.page_size) and self.page_size in PAGE_SIZES, "page_size", self.page_size, "16 or 64")
        pages, chunk, share = self.num_pages, self.prefill_chunk, self.memory_utilization
        ok = pages is None or (_is_int(pages) and 1 <= pages < MAX_PAGES)
        _require(ok, "num_pages", pages, "an integer >= 1")
        _require(chunk is None or (_is_int(chunk) and chunk >= 1), "prefill_chunk", chunk, "an integer >= 1")
        ok = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1
        _require(ok, "memory_utilization", share, "a number in (0, 1]")

    def resolve(self, model: Model) -> CoreOptions:
        """The same options with every default but `num_pages` filled in for `model`.

        Raises:
            ConfigError: `max_context` exceeds the model's, or `prefill_chunk` the context.
        """
        limit = model.max_position_embeddings
        context = self.max_context if self.max_context is not None else min(limit, DEFAULT_MAX_CONTEXT)
        _require(context <= limit, "max_context", context, f"at most {limit}, the model's max_position_embeddings")
        chunk = self.prefill_chunk if self.prefill_chunk is not None else min(context, DEFAULT_PREFILL_CHUNK)
        _require(chunk <= context, "prefill_chunk", chunk, f"at most max_context ({context})")
        return dataclasses.replace(self, max_context=int(context), prefill_chunk=int(chunk))

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values; `CoreOptions(**it)` is equal to `self`."""
        plain = dataclasses.asdict(self)
        return {name: int(value) if isinstance(value, np.integer) else value for name, value in plain.items()}


def options_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were said at all: None means that nothing was.

    Raises:
        ConfigError: One is unknown or out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    known = [field.name for field in dataclasses.fields(CoreOptions)]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"unknown options {', '.join(unknown)}; a core has {', '.join(known)}")
    CoreOptions(**given)
    return given


def conflicts(asked: CoreOptions | Mapping[str, Any], held: CoreOptions) -> list[str]:
    """Options that the caller set to something else than a core holds, as readable lines.

    Args:
        asked: A mapping holds exactly what was set, be it the default. `CoreOptions` do not
            tell: there a value that equals the class default counts as not set.
        held: The core's own.

    Raises:
        ConfigError: An option of a mapping is unknown or out of range.
    """
    if isinstance(asked, CoreOptions):
        defaults = CoreOptions()
        given = {name: value for name, value in vars(asked).items() if value != getattr(defaults, name)}
    else:
        given = options_given(asked)
    return [
        f"{name}: asked {want!r}, the core has {have!r}"
        for name, want in given.items()
        if want != (have := getattr(held, name))
    ]
