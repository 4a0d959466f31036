"""What a core must be: the manifest that this process would write, and what differs from the stored one."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

from helios_jax.aot.abi import Dims
from helios_jax.aot.compile import ProgramFactory
from helios_jax.aot.fingerprint import current_fingerprint, differences, helios_version
from helios_jax.aot.manifest import MANIFEST_NAME, Manifest, SourceInfo, read_manifest
from helios_jax.aot.memory import MemoryPlan, device_budget, plan_memory
from helios_jax.aot.options import CoreOptions
from helios_jax.aot.source import Source
from helios_jax.errors import ConfigError, CoreError
from helios_jax.models.interface import Model
from helios_jax.scheduler.catalog import Catalog, serving_catalog


def expected_manifest(
    source: Source, asked: CoreOptions, stored: Manifest | None, factory: ProgramFactory
) -> tuple[Manifest, MemoryPlan]:
    """The manifest, without files, of the core of `source`; `stored` is the directory's earlier one.

    Raises:
        ConfigError: An option is out of range for the model or the memory.
    """
    options = asked.resolve(source.model)
    dims, plan = plan_pages(source.model, asked, options, stored, source.config_digest(), factory)
    manifest = Manifest(
        helios_version=helios_version(),
        fingerprint=current_fingerprint(),
        source=source_info(source),
        asked=asked,
        options=options,
        dims=dims,
        memory={name: value for name, value in dataclasses.asdict(plan).items() if name != "budget_bytes"},
        catalog=core_catalog(options).shapes,
    )
    return manifest, plan


def reopened_manifest(stored: Manifest, model: Model, factory: ProgramFactory) -> tuple[Manifest, MemoryPlan]:
    """The manifest, without programs, of a stored core in this process.

    Raises:
        ConfigError: Its pages do not fit what is free now.
    """
    pages = dataclasses.replace(stored.options, num_pages=stored.dims.num_pages - 1)
    _, plan = plan_memory(model, pages, factory.abstract_state, memory_budget(pages))
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


def core_catalog(options: CoreOptions) -> Catalog:
    assert options.prefill_chunk is not None
    return serving_catalog(max_slots=options.max_slots, prefill_chunk=options.prefill_chunk)


def memory_budget(options: CoreOptions) -> int | None:
    return device_budget(options.memory_utilization)


def plan_pages(
    model: Model,
    asked: CoreOptions,
    resolved: CoreOptions,
    stored: Manifest | None,
    config_digest: str,
    factory: ProgramFactory,
) -> tuple[Dims, MemoryPlan]:
    """The memory plan; that of an earlier prepare with the same options while it still fits.

    Free memory differs from start to start: without this, the number of pages, and with it
    every program, would too.
    """
    budget = memory_budget(resolved)
    if stored is not None and stored.asked == asked and stored.source.config_digest == config_digest:
        pages = dataclasses.replace(resolved, num_pages=stored.dims.num_pages - 1)
        with contextlib.suppress(ConfigError):
            return plan_memory(model, pages, factory.abstract_state, budget)
    return plan_memory(model, resolved, factory.abstract_state, budget)


def why_rejected(stored: Manifest, manifest: Manifest) -> str:
    """Why the stored programs cannot serve `manifest`; "" when they can."""
    lines = differences(stored.fingerprint, manifest.fingerprint)
    if stored.source.config_digest != manifest.source.config_digest:
        lines.append("the core is of another model")
    if stored.options.dtype != manifest.options.dtype:
        lines.append(f"dtype was {stored.options.dtype}, is {manifest.options.dtype}")
    for field in dataclasses.fields(Dims):
        old, new = getattr(stored.dims, field.name), getattr(manifest.dims, field.name)
        if old != new:
            lines.append(f"{field.name} was {old}, is {new}")
    return "; ".join(lines)


def same_weights(stored: Manifest, manifest: Manifest) -> bool:
    """Whether converting again would give what is stored (same files, dtype and converter)."""
    return (
        stored.source.weights_digest == manifest.source.weights_digest
        and stored.source.config_digest == manifest.source.config_digest
        and stored.options.dtype == manifest.options.dtype
        and stored.fingerprint.get("sources") == manifest.fingerprint.get("sources")
    )
