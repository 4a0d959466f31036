"""What a core must be: the manifest that this process would write, and what differs from the stored one."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from helios_jax.aot.abi import Dims
from helios_jax.aot.compile import ProgramFactory
from helios_jax.aot.fingerprint import current_fingerprint, differences, helios_version
from helios_jax.aot.manifest import MANIFEST_NAME, DraftInfo, Manifest, SourceInfo, read_manifest
from helios_jax.aot.memory import MemoryPlan, default_rows, device_budget, headroom_bytes, plan_memory
from helios_jax.aot.options import CoreOptions, conflicts, load_options
from helios_jax.aot.source import Source
from helios_jax.aot.speculation import joint_shapes, reduced, round_shapes
from helios_jax.errors import ConfigError, CoreError
from helios_jax.models.interface import Draft, Model
from helios_jax.scheduler.catalog import Catalog, ProgramShape, copy_shapes, serving_catalog


def expected_manifest(
    source: Source, asked: CoreOptions, stored: Manifest | None, factory: ProgramFactory, draft: Source | None = None
) -> tuple[Manifest, MemoryPlan]:
    """The manifest, without files, of the core of `source`; `stored` is the directory's earlier one.

    Args:
        factory: Of a core with `draft`, if there is one.
        draft: The draft model's source.

    Raises:
        ConfigError: An option is out of range for the models or the memory.
    """
    draft_model = draft.model if draft is not None else None
    options = asked.resolve(source.model, draft_model)
    info, draft_facts = source_info(source), draft_info(draft) if draft is not None else None
    same = stored is not None and stored.asked == asked and not _other_models(stored, info, draft_facts)
    if options.state_rows is None:
        rows = default_rows(source.model, options, factory.abstract_state, draft_model)
        options = dataclasses.replace(options, state_rows=rows)
    dims, plan = plan_pages(source.model, draft_model, options, stored if same else None, factory)
    manifest = Manifest(
        helios_version=helios_version(),
        fingerprint=current_fingerprint(),
        source=info,
        draft=draft_facts,
        asked=asked,
        options=options,
        dims=dims,
        memory={name: value for name, value in dataclasses.asdict(plan).items() if name != "budget_bytes"},
        catalog=core_catalog(options).shapes,
    )
    return manifest, plan


def reopened_manifest(
    stored: Manifest, model: Model, factory: ProgramFactory, draft: Draft | None = None
) -> tuple[Manifest, MemoryPlan]:
    """The manifest, without programs, of a stored core in this process.

    Raises:
        ConfigError: Its pages do not fit what is free now.
    """
    pages = dataclasses.replace(stored.options, num_pages=stored.dims.num_pages - 1)
    _, plan = plan_memory(model, pages, factory.abstract_state, memory_budget(pages, model, draft), draft)
    manifest = dataclasses.replace(
        stored, fingerprint=current_fingerprint(), helios_version=helios_version(), programs=(), failed=()
    )
    return manifest, plan


def stored_manifest(root: pathlib.Path) -> tuple[Manifest | None, str]:
    """The manifest of an earlier prepare; or None and why there is nothing to keep."""
    if not (root / MANIFEST_NAME).exists():
        return None, ""
    try:
        return read_manifest(root), ""
    except CoreError as error:
        return None, str(error)


def source_info(source: Source) -> SourceInfo:
    return SourceInfo(
        name=source.name,
        family=source.model.family,
        config_digest=source.config_digest(),
        weights_digest=source.weights_digest(),
        num_params=source.num_params,
        eos_token_ids=tuple(int(i) for i in source.eos_token_ids),
        bos_token_id=source.bos_token_id,
        text_kind=source.text_files().kind,
        model_config=source.model_config(),
    )


def draft_info(draft: Source) -> DraftInfo:
    return DraftInfo(
        name=draft.name,
        family=draft.model.family,
        config_digest=draft.config_digest(),
        weights_digest=draft.weights_digest(),
        num_params=draft.num_params,
        model_config=draft.model_config(),
    )


def core_catalog(options: CoreOptions) -> Catalog:
    """Every program of a core with these resolved options: plain ones, whatever the method, rounds, and mixed ones.

    The one list that memory is planned by, that is compiled, and that `inspect` shows.
    """
    assert options.prefill_chunk is not None
    plain = (
        *serving_catalog(max_slots=options.max_slots, prefill_chunk=options.prefill_chunk),
        *(copy_shapes(options.max_slots) if options.state_rows else ()),
    )
    rounds = round_shapes(
        method=options.spec_method,
        max_slots=options.max_slots,
        draft_tokens=options.num_draft_tokens or 0,
        token_capacity=options.speculative_token_capacity or 0,
    )
    if not options.mixed_prefill:
        return Catalog((*plain, *rounds))
    joint = joint_shapes(
        method=options.spec_method,
        max_slots=options.max_slots,
        prefill_chunk=options.prefill_chunk,
        draft_tokens=options.num_draft_tokens or 0,
        token_capacity=options.speculative_token_capacity or 0,
    )
    return Catalog((*plain, *rounds, *joint))


def loaded_options(root: pathlib.Path, stored: Manifest, asked: CoreOptions | Mapping[str, Any] | None) -> CoreOptions:
    """The options under which a stored core is loaded; see `options.load_options`.

    Raises:
        ConfigError: What was asked for is not what the core holds, nor a part of it.
    """
    asked = asked if asked is not None else {}
    if lines := conflicts(asked, stored.options):
        raise ConfigError(f"{root} was prepared with other options ({'; '.join(lines)}): leave them out, or prepare")
    options = load_options(asked, stored.options)
    if options == stored.options or options.spec_method == "none":
        return options
    depths = {shape.proposal_depth for shape in loaded_shapes(stored.catalog, options)}
    if options.num_draft_tokens not in depths:
        there = sorted({(s.proposal_depth, s.packed_capacity) for s in stored.catalog if s.proposal_depth})
        raise ConfigError(
            f"{root} has no rounds of num_draft_tokens {options.num_draft_tokens} within speculative_token_capacity"
            f" {options.speculative_token_capacity}; it has (tokens, rows) {', '.join(map(str, there))}"
        )
    return options


def loaded_shapes(catalog: tuple[ProgramShape, ...], options: CoreOptions) -> tuple[ProgramShape, ...]:
    """The shapes of a core's catalogue that a load with `options` brings into memory."""
    return reduced(
        catalog,
        method=options.spec_method,
        draft_tokens=options.num_draft_tokens,
        token_capacity=options.speculative_token_capacity,
        mixed=options.mixed_prefill,
        copies=bool(options.state_rows),
    )


def memory_budget(options: CoreOptions, model: Model, draft: Draft | None) -> int | None:
    """What weights and state may take beside the temporaries of the programs; None if nobody can say."""
    return device_budget(options.memory_utilization, headroom_bytes(core_catalog(options), model, draft))


def plan_pages(
    model: Model, draft: Draft | None, resolved: CoreOptions, same: Manifest | None, factory: ProgramFactory
) -> tuple[Dims, MemoryPlan]:
    """The memory plan; that of `same`, an earlier prepare with the same options, while it still fits.

    Free memory differs from start to start: without this, the number of pages, and with it
    every program, would too.
    """
    budget = memory_budget(resolved, model, draft)
    if same is not None:
        pages = dataclasses.replace(resolved, num_pages=same.dims.num_pages - 1)
        with contextlib.suppress(ConfigError):
            return plan_memory(model, pages, factory.abstract_state, budget, draft)
    return plan_memory(model, resolved, factory.abstract_state, budget, draft)


def why_rejected(stored: Manifest, manifest: Manifest) -> str:
    """Why the stored programs cannot serve `manifest`; "" when they can."""
    lines = differences(stored.fingerprint, manifest.fingerprint)
    lines += _other_models(stored, manifest.source, manifest.draft)
    if stored.options.dtype != manifest.options.dtype:
        lines.append(f"dtype was {stored.options.dtype}, is {manifest.options.dtype}")
    for field in dataclasses.fields(Dims):
        old, new = getattr(stored.dims, field.name), getattr(manifest.dims, field.name)
        if old != new:
            lines.append(f"{field.name} was {old}, is {new}")
    return "; ".join(lines)


def _other_models(stored: Manifest, source: SourceInfo, draft: DraftInfo | None) -> list[str]:
    """How the models' configurations differ from the stored ones; their weights do not matter to a program."""
    lines = []
    if stored.source.config_digest != source.config_digest:
        lines.append("the core is of another model")
    if (stored.draft and stored.draft.config_digest) != (draft and draft.config_digest):
        old, new = (f"draft model {info.name}" if info else "no draft model" for info in (stored.draft, draft))
        lines.append(f"the core has {old}, wanted is {new}" if old != new else f"{new} has another configuration")
    return lines


def same_weights(stored: Manifest, manifest: Manifest) -> bool:
    """Whether converting again would give what is stored (same files, dtype and converter)."""
    return _same_files(stored, manifest, stored.source, manifest.source)


def same_draft_weights(stored: Manifest, manifest: Manifest) -> bool:
    """`same_weights` of the draft models; False without one."""
    if stored.draft is None or manifest.draft is None:
        return False
    return _same_files(stored, manifest, stored.draft, manifest.draft)


def _same_files(stored: Manifest, manifest: Manifest, old: SourceInfo | DraftInfo, new: SourceInfo | DraftInfo) -> bool:
    return (
        old.weights_digest == new.weights_digest
        and old.config_digest == new.config_digest
        and stored.options.dtype == manifest.options.dtype
        and stored.fingerprint.get("sources") == manifest.fingerprint.get("sources")
    )
