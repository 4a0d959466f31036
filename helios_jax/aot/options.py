"""What a user chooses about a prepared core, and how the choices become static extents.

`CoreOptions` is what was asked for; `resolve` fills the defaults that depend on the model
and refuses what the model cannot do. Nothing here allocates or touches a device.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from helios_jax.aot.speculation import (
    DEFAULT_DRAFT_TOKENS,
    MAX_DRAFT_TOKENS,
    MAX_ROWS,
    METHODS,
    default_rows,
)
from helios_jax.errors import ConfigError
from helios_jax.models.interface import Draft, Model, heads_of, recurrent_layers_of
from helios_jax.scheduler.catalog import MAX_SLOTS

DTYPES = ("float32", "bfloat16", "float16")
PAGE_SIZES = (16, 64)
DEFAULT_MAX_CONTEXT = 2048
DEFAULT_PREFILL_CHUNK = 512
MAX_PAGES = 2**31 - 1  # page ids are int32
MAX_STATE_ROWS = 4096
SPECULATION = ("spec_method", "draft_model", "num_draft_tokens", "speculative_token_capacity")


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
        spec_method: Where proposals of speculative rounds come from: "none" (no rounds), "copy" (what
            followed the same tokens earlier in the request), "draft" (a smaller model), "mtp" (the
            model's own multi-token-prediction heads).
        draft_model: Name, directory, GGUF file or hub id of the draft model; with "draft" only.
        num_draft_tokens: D, most proposals a request and round, 1 to 8; None means 7 for copy, 5 for
            draft, 3 for mtp.
        speculative_token_capacity: R, most target rows of one round over all requests (each has one for
            its pending token and one a proposal); None means what every slot needs at full width, as a
            power of two up to 256. Wider rounds than R allows are not in the core.
        mixed_prefill: Whether the core also holds mixed programs: a prompt chunk and decoding requests in
            one execution. At least two slots.
        state_rows: State rows, each of which keeps what a prompt or conversation left behind for those that
            begin with the same tokens; 0 = no such reuse, and no programs for it. None means four a slot, or
            what a sixteenth of weights and cache hold if that is less; see `memory.default_rows`.

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
    spec_method: str = "none"
    draft_model: str | None = None
    num_draft_tokens: int | None = None
    speculative_token_capacity: int | None = None
    mixed_prefill: bool = False
    state_rows: int | None = None

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
        mixed = self.mixed_prefill
        _require(isinstance(mixed, bool), "mixed_prefill", mixed, "True or False")
        rows = self.state_rows
        ok = rows is None or (_is_int(rows) and 0 <= rows <= MAX_STATE_ROWS)
        _require(ok, "state_rows", rows, f"an integer in [0, {MAX_STATE_ROWS}]")
        self._check_speculation_ranges()

    def _check_speculation_ranges(self) -> None:
        if isinstance(self.draft_model, os.PathLike):
            object.__setattr__(self, "draft_model", os.fspath(self.draft_model))
        method, draft = self.spec_method, self.draft_model
        _require(method in METHODS, "spec_method", method, f"one of {', '.join(METHODS)}")
        _require(draft is None or (isinstance(draft, str) and draft != ""), "draft_model", draft, "a name or path")
        depth, rows = self.num_draft_tokens, self.speculative_token_capacity
        ok = depth is None or (_is_int(depth) and 1 <= depth <= MAX_DRAFT_TOKENS)
        _require(ok, "num_draft_tokens", depth, f"an integer in [1, {MAX_DRAFT_TOKENS}]")
        ok = rows is None or (_is_int(rows) and 2 <= rows <= MAX_ROWS)
        _require(ok, "speculative_token_capacity", rows, f"an integer in [2, {MAX_ROWS}]")

    @property
    def draft_extent(self) -> int:
        """Cache positions behind a lane's last target row that a round may write: the draft model's proposals."""
        return 0 if self.spec_method in ("none", "copy") else self.num_draft_tokens or 0

    def check_method(self) -> None:
        """Whether the options of speculation go together.

        Raises:
            ConfigError: One of them says nothing without another, or is missing beside it.
        """
        if self.spec_method == "draft" and self.draft_model is None:
            raise ConfigError("spec_method 'draft' needs draft_model: name a smaller model of the same vocabulary")
        if self.spec_method != "draft" and self.draft_model is not None:
            raise ConfigError(f"draft_model {self.draft_model!r} needs spec_method 'draft', got {self.spec_method!r}")
        for name in ("num_draft_tokens", "speculative_token_capacity"):
            if self.spec_method == "none" and (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name} {value} needs a spec_method: copy, draft or mtp; got 'none'")

    def resolve(self, model: Model, draft: Draft | None = None) -> CoreOptions:
        """The same options with every default but `num_pages` and `state_rows` filled in for `model`.

        Args:
            draft: The draft model, with `spec_method` "draft"; the heads with "mtp".

        Raises:
            ConfigError: `max_context` exceeds the model's or the draft model's, `prefill_chunk` the context,
                or the options of speculation do not fit each other, the model or the draft model.
        """
        limit = model.max_position_embeddings
        context = self.max_context if self.max_context is not None else min(limit, DEFAULT_MAX_CONTEXT)
        _require(context <= limit, "max_context", context, f"at most {limit}, the model's max_position_embeddings")
        chunk = self.prefill_chunk if self.prefill_chunk is not None else min(context, DEFAULT_PREFILL_CHUNK)
        _require(chunk <= context, "prefill_chunk", chunk, f"at most max_context ({context})")
        few = self.mixed_prefill and self.max_slots < 2
        _require(not few, "max_slots", self.max_slots, "at least 2 with mixed_prefill")
        resolved = dataclasses.replace(self, max_context=int(context), prefill_chunk=int(chunk))
        return resolved._resolve_speculation(model, draft)

    def _resolve_speculation(self, model: Model, draft: Draft | None) -> CoreOptions:
        self.check_method()
        method = self.spec_method
        if method == "none":
            return self
        if method == "mtp" and heads_of(model) is None:
            raise ConfigError(
                f"spec_method 'mtp' needs multi-token-prediction heads, which this {model.family} model has not:"
                " use copy, or draft with a smaller model"
            )
        if method == "draft":
            self._check_draft(model, draft)
        depth = int(self.num_draft_tokens or DEFAULT_DRAFT_TOKENS[method])
        rows = int(self.speculative_token_capacity or default_rows(self.max_slots, depth))
        allowed = f"at least {depth + 1}, one request with its num_draft_tokens ({depth}) and its pending token"
        _require(rows > depth, "speculative_token_capacity", rows, allowed)
        return dataclasses.replace(self, num_draft_tokens=depth, speculative_token_capacity=rows)

    def _check_draft(self, model: Model, draft: Draft | None) -> None:
        if draft is None:
            raise ConfigError(f"draft_model {self.draft_model!r} has not been opened")
        if draft.vocab_size != model.vocab_size:
            raise ConfigError(
                f"draft_model {self.draft_model!r} has a vocabulary of {draft.vocab_size} tokens and the model one of"
                f" {model.vocab_size}: a draft model needs the model's own vocabulary"
            )
        if recurrent_layers_of(draft):
            raise ConfigError(
                f"draft_model {self.draft_model!r} has recurrent layers, whose state a round could not take back:"
                " use one of attention layers alone, or spec_method mtp where the model has heads"
            )
        assert self.max_context is not None
        if self.max_context > draft.max_position_embeddings:
            raise ConfigError(
                f"draft_model {self.draft_model!r} has a context of {draft.max_position_embeddings} tokens, max_context"
                f" is {self.max_context}: set max_context to {draft.max_position_embeddings} or less, or use another"
            )

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values; `CoreOptions(**it)` is equal to `self`.

        Speculation and mixed programs are left out where there are none, state rows where nothing was said: the
        names of such cores do not depend on them.
        """
        plain = dataclasses.asdict(self)
        if not self.mixed_prefill:
            del plain["mixed_prefill"]
        if self.state_rows is None:
            del plain["state_rows"]
        if self.spec_method == "none":
            plain = {name: value for name, value in plain.items() if name not in SPECULATION}
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
    checked = CoreOptions(**given)  # a path has become a string
    return {name: getattr(checked, name) for name in given}


def conflicts(asked: CoreOptions | Mapping[str, Any], held: CoreOptions) -> list[str]:
    """Options that the caller set to something that a core does not hold, as readable lines.

    Args:
        asked: A mapping holds exactly what was set, be it the default. `CoreOptions` do not
            tell: there a value that equals the class default counts as not set.
        held: The core's own.

    Raises:
        ConfigError: An option of a mapping is unknown or out of range.
    """
    return [
        f"{name}: asked {want!r}, the core has {have!r}"
        for name, want in _set(asked).items()
        if want != (have := getattr(held, name)) and not _leaves_out(name, want, have)
    ]


def load_options(asked: CoreOptions | Mapping[str, Any], held: CoreOptions) -> CoreOptions:
    """The options under which a core is loaded: its own, less the programs that it shall not load.

    Args:
        asked: As in `conflicts`, and without any.

    Raises:
        ConfigError: See `conflicts` and `CoreOptions.check_method`.
    """
    chosen = _set(asked)
    given = {name: value for name, value in chosen.items() if name in SPECULATION}
    less = {name: chosen[name] for name in ("mixed_prefill", "state_rows") if name in chosen}
    held = dataclasses.replace(held, **less)
    if given.get("spec_method") == "none":
        dataclasses.replace(CoreOptions(), **given).check_method()
        return dataclasses.replace(held, **{name: getattr(CoreOptions(), name) for name in SPECULATION})
    return dataclasses.replace(held, **given)


def _set(asked: CoreOptions | Mapping[str, Any]) -> dict[str, Any]:
    """The options that were set at all; see `conflicts`."""
    if not isinstance(asked, CoreOptions):
        return options_given(asked)
    defaults = CoreOptions()
    return {name: value for name, value in vars(asked).items() if value != getattr(defaults, name)}


def _leaves_out(name: str, want: Any, have: Any) -> bool:
    """Whether a load can give `want` of what a core has by not loading some of its programs."""
    if name == "spec_method":
        return want == "none"
    if name == "mixed_prefill":
        return want is False
    if name == "state_rows":
        return want == 0
    return name in ("num_draft_tokens", "speculative_token_capacity") and have is not None and want < have
