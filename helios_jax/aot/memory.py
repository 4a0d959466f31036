"""The memory plan of a core: how many KV pages, and whether everything fits.

1. `measure` sums the bytes of weights and of the device state at a given number of pages.
2. `device_budget` asks the device (or the host, on CPU) what it has.
3. `headroom_bytes` estimates what the largest program of the catalogue needs while it runs.
4. `plan_memory` chooses the pages and refuses, with numbers, what cannot fit.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from helios_jax.aot.abi import Dims
from helios_jax.aot.options import CoreOptions
from helios_jax.aot.programs.logprobs import SCORE_TILE
from helios_jax.errors import ConfigError
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import (
    Catalog,
    ProgramKind,
    ProgramShape,
    ProposalSource,
    packed_rows,
    physical_tokens,
)

FIXED_HEADROOM_BYTES = 64 << 20  # for temporaries that do not grow with a program's rows: tiles of attention, lists
# Temporaries of a program, in multiples of its rows; measured are 2.5 and 7.5 (docs/LOG.md, "Headroom").
ACTIVATION_FACTOR = 3
LOGITS_FACTOR = 8
ROWS_A_SLOT = 4
ROWS_SHARE = 16  # state rows take at most one part in so many of weights and cache, unless somebody asks for more
CGROUP_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
CGROUP_USAGE = pathlib.Path("/sys/fs/cgroup/memory.current")
MEMINFO = pathlib.Path("/proc/meminfo")

AbstractState = Callable[[Model, Dims, str], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of a core's long-lived arrays.

    Attributes:
        params_bytes: Weights in the core's dtype, those of a draft model included.
        page_bytes: One KV page over all layers, keys and values, those of a draft model included.
        state_bytes: The whole device state: pool and slot table. Every program is donated it.
        budget_bytes: What weights and state may take together; None if nobody can say.
        wanted_pages: Usable pages that every slot at full context would need.
    """

    params_bytes: int
    page_bytes: int
    state_bytes: int
    budget_bytes: int | None
    wanted_pages: int


def tree_bytes(tree: Any) -> int:
    """Sum of the bytes of all leaves (arrays or ShapeDtypeStructs)."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def human(count: int) -> str:
    """A byte count for people: 3 significant digits and a binary unit."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"


def _read_int(path: pathlib.Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit from here
        return None


def host_free_bytes() -> int | None:
    """Memory that this process could still take without swapping, or None if unknown."""
    free: list[int] = []
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass  # not Linux: no bound from here
    limit, used = _read_int(CGROUP_LIMIT), _read_int(CGROUP_USAGE)
    if limit is not None and used is not None:
        free.append(max(0, limit - used))
    return min(free) if free else None


def headroom_bytes(catalog: Catalog, model: Model, draft: Draft | None = None) -> int:
    """Memory that stays free for the temporaries of the largest program of the catalogue."""
    return FIXED_HEADROOM_BYTES + max((temporary_bytes(shape, model, draft) for shape in catalog), default=0)


def temporary_bytes(shape: ProgramShape, model: Model, draft: Draft | None = None) -> int:
    """Estimated temporaries of one execution that grow with its rows, before the program has been compiled.

    A packed token costs a multiple of what a layer reads and writes for it, a row that meets the
    vocabulary a multiple of its logits, both in float32: 16-bit products are computed so on CPU.
    """
    width = max(_layer_width(each) for each in (model, draft) if each is not None)
    drawn = shape.proposal_depth * shape.batch_capacity if shape.proposal_source is ProposalSource.LEARNED else 0
    logits = LOGITS_FACTOR * _vocabulary_rows(shape) + 2 * drawn
    return 4 * (ACTIVATION_FACTOR * width * physical_tokens(shape) + logits * model.vocab_size)


def _layer_width(model: Draft) -> int:
    """Numbers that the products of one layer, the widest on average, read and write for a token."""
    leaves = (leaf.shape[-2:] for leaf in jax.tree.leaves(model.abstract_params("float32")) if leaf.ndim >= 2)
    inner = sum(sum(extents) for extents in leaves if model.vocab_size not in extents)
    return -(-inner // max(1, len(model.attention_layers)))


def _vocabulary_rows(shape: ProgramShape) -> int:
    """Rows of logits that exist at a time."""
    match shape.kind:
        case ProgramKind.SPECULATIVE | ProgramKind.MIXED:
            return packed_rows(shape)
        case ProgramKind.SCORED_PREFILL:
            return shape.batch_capacity + SCORE_TILE
        case ProgramKind.INITIALIZE | ProgramKind.SNAPSHOT | ProgramKind.RESTORE:
            return 0
        case _:
            return shape.batch_capacity


def device_budget(utilization: float, headroom: int) -> int | None:
    """Bytes that weights and state may take: a share of the device (free host memory on CPU), less `headroom`.

    What the device already holds for others is subtracted; None where no source tells.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        free = host_free_bytes()
        return None if free is None else int(free * utilization) - headroom
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return None
    return int(limit * utilization) - int(stats.get("bytes_in_use", 0)) - headroom


def _per_slot(options: CoreOptions) -> int:
    """Pages of a whole context and of what a draft model may write behind it."""
    assert options.max_context is not None
    return -(-(options.max_context + options.draft_extent) // options.page_size)


def make_dims(model: Model, options: CoreOptions, usable_pages: int) -> Dims:
    """Static extents for resolved `options`; one more page than usable, page 0 is scratch.

    A page table covers the whole context and what a draft model may write behind it.
    """
    return Dims(
        slots=options.max_slots,
        pages_per_slot=_per_slot(options),
        num_pages=usable_pages + 1,
        page_size=options.page_size,
        vocab_size=model.vocab_size,
        state_rows=options.state_rows or 0,
    )


def default_rows(model: Model, options: CoreOptions, abstract_state: AbstractState, draft: Draft | None = None) -> int:
    """State rows of resolved `options` where nothing was said.

    `ROWS_A_SLOT` a slot: the turns of conversations that wait for their users, besides those that run. What a row
    takes depends on the model (a page of the cache, and recurrent state where there is some), so they are no more
    than a part of weights and cache can be, none if not a single one is. Free memory does not matter: with it the
    number, and with it every program, would differ from start to start.
    """
    pages = options.num_pages if options.num_pages is not None else options.max_slots * _per_slot(options)
    dims = make_dims(model, dataclasses.replace(options, state_rows=0), pages)
    params, without, _ = measure(model, dims, options.dtype, abstract_state, draft)
    one, two = (
        tree_bytes(abstract_state(model, dataclasses.replace(dims, state_rows=rows), options.dtype)) for rows in (1, 2)
    )
    return min(ROWS_A_SLOT * options.max_slots, (params + without) // (ROWS_SHARE * max(1, two - one)))


def measure(
    model: Model, dims: Dims, dtype: str, abstract_state: AbstractState, draft: Draft | None = None
) -> tuple[int, int, int]:
    """(weights, state at `dims`, one page) in bytes, from the abstract trees alone; see `plan_memory`."""
    state = tree_bytes(abstract_state(model, dims, dtype))
    one_more = tree_bytes(abstract_state(model, dataclasses.replace(dims, num_pages=dims.num_pages + 1), dtype))
    params = sum(tree_bytes(each.abstract_params(dtype)) for each in (model, draft) if each is not None)
    return params, state, one_more - state


def plan_memory(
    model: Model,
    options: CoreOptions,
    abstract_state: AbstractState,
    budget_bytes: int | None,
    draft: Draft | None = None,
) -> tuple[Dims, MemoryPlan]:
    """Chooses the number of pages for resolved `options`.

    Args:
        abstract_state: Of a core with `draft`, if there is one.
        budget_bytes: What weights and state may take together; None = unknown, no cap.
        draft: The draft model, whose weights and cache take memory too.

    Raises:
        ConfigError: The pages asked for do not fit, or not even one request of full
            context does. The message has the numbers and what to change.
    """
    per_slot = make_dims(model, options, 1).pages_per_slot
    wanted = options.max_slots * per_slot
    usable = options.num_pages if options.num_pages is not None else wanted
    params, state, page = measure(model, make_dims(model, options, usable), options.dtype, abstract_state, draft)
    if budget_bytes is not None and params + state > budget_bytes:
        fixed = params + state - usable * page
        fitting = max(0, (budget_bytes - fixed) // page)
        least = options.num_pages if options.num_pages is not None else per_slot
        if fitting < least:
            raise ConfigError(_does_not_fit(options, params, fixed, page, least, fitting, budget_bytes))
        usable, state = fitting, state - (usable - fitting) * page
    dims = make_dims(model, options, usable)
    plan = MemoryPlan(
        params_bytes=params, page_bytes=page, state_bytes=state, budget_bytes=budget_bytes, wanted_pages=wanted
    )
    return dims, plan


def _does_not_fit(
    options: CoreOptions, params: int, fixed: int, page: int, pages: int, fitting: int, budget: int
) -> str:
    asked = "num_pages" if options.num_pages is not None else f"one request of max_context {options.max_context}"
    return (
        f"not enough memory: {human(params)} of weights, {human(fixed - params)} of {_tables(options)}"
        f" and {pages} KV pages of {human(page)} ({asked}) need {human(fixed + pages * page)};"
        f" {human(max(0, budget))} may be used (memory_utilization {options.memory_utilization:g}),"
        f" room for {fitting} pages:"
        " lower num_pages, max_context or max_slots, or use a 16-bit dtype"
    )


def _tables(options: CoreOptions) -> str:
    rows = options.state_rows
    return f"slot tables and {rows} state_rows" if rows else "slot tables"
