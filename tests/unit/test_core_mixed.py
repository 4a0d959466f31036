"""Mixed programs in a core: the option, the catalogue with its check value, what a load leaves out, memory, inspect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from helios_jax.aot.core import load_core, prepare
from helios_jax.aot.identity import core_catalog, loaded_shapes, memory_budget
from helios_jax.aot.memory import FIXED_HEADROOM_BYTES, headroom_bytes
from helios_jax.aot.options import CoreOptions, conflicts, load_options
from helios_jax.aot.report import ProgramStatus, inspect_caption, inspect_core
from helios_jax.cli import core_options, main, parser
from helios_jax.errors import ConfigError
from helios_jax.models.interface import AttentionSpec
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProgramShape, ProposalSource
from helios_jax.scheduler.extents import check_shape
from tests.unit.core_toy import FACTORY, ToyModel, ToySource, small_options

MIXED = ProgramKind.MIXED


def of(method: str, **changes: Any) -> CoreOptions:
    """Resolved options of a toy's core with mixed programs."""
    draft = {"draft_model": "toy/draft"} if method == "draft" else {}
    given = {"spec_method": method, "max_slots": 4, "max_context": 256, "mixed_prefill": True} | draft | changes
    model = ToyModel(max_position_embeddings=8192)
    return CoreOptions(**given).resolve(model, model if method == "draft" else None)


def joint(options: CoreOptions) -> tuple[ProgramShape, ...]:
    return core_catalog(options).of_kind(MIXED)


# ---- the option


def test_the_option_is_a_truth_value_and_needs_two_slots() -> None:
    for value in (None, 1, "yes"):
        with pytest.raises(ConfigError, match=r"mixed_prefill must be True or False"):
            CoreOptions(mixed_prefill=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_slots must be at least 2 with mixed_prefill, got 1"):
        of("none", max_slots=1)


def test_the_command_line_says_yes_no_or_nothing() -> None:
    for words, value in ((["--mixed-prefill"], True), (["--no-mixed-prefill"], False), ([], None)):
        assert core_options(parser().parse_args(["serve", *words]))["mixed_prefill"] is value
        assert core_options(parser().parse_args(["prepare", "--out", "x", *words]))["mixed_prefill"] is value


def test_options_survive_json_and_those_without_do_not_mention_it() -> None:
    for options in (of("none"), of("copy"), of("none", mixed_prefill=False)):
        plain = json.loads(json.dumps(options.to_json()))
        assert CoreOptions(**plain) == options
        assert ("mixed_prefill" in plain) == options.mixed_prefill


# ---- the catalogue


def test_the_check_value_of_the_specification() -> None:
    """Four requests, chunks of 4096, five draft tokens, six target rows: 22 speculative and 20 ordinary programs."""
    options = of(
        "draft",
        max_context=8192,
        prefill_chunk=4096,
        num_draft_tokens=5,
        speculative_token_capacity=6,
    )
    shapes = joint(options)
    ordinary = [shape for shape in shapes if shape.proposal_source is ProposalSource.NONE]
    rounds = [shape for shape in shapes if shape.proposal_source is ProposalSource.LEARNED]
    assert (len(rounds), len(ordinary), len(shapes)) == (22, 20, 42)
    assert {(s.batch_capacity, s.token_capacity, s.prefill_capacity) for s in rounds if s.proposal_depth} == {
        (2, 2, 512), (2, 3, 512)
    }  # fmt: skip
    assert len({s.prefill_capacity for s in ordinary}) == 10


@pytest.mark.parametrize("method", ["none", "copy", "draft"])
@pytest.mark.parametrize(("slots", "chunk", "depth", "rows"), [(2, 64, 1, None), (4, 100, 7, 16), (5, 250, 8, None)])
def test_every_shape_is_legal_and_follows_the_rule(method: str, slots: int, chunk: int, depth: int, rows: Any) -> None:
    changes = {} if method == "none" else {"num_draft_tokens": depth, "speculative_token_capacity": rows}
    options = of(method, max_slots=slots, prefill_chunk=chunk, **changes)
    shapes = joint(options)
    plain = set(core_catalog(of(method, max_slots=slots, prefill_chunk=chunk, mixed_prefill=False, **changes)))
    assert set(core_catalog(options)) - plain == set(shapes)
    assert plain <= set(core_catalog(options))
    batches = [b for b in (2, 4, 8) if b < 2 * slots]
    buckets = sorted({*[p for p in (64, 128) if p < chunk], -(-chunk // 64) * 64})
    worst = {p: max(Fraction(p, buckets[0]), Fraction(buckets[-1], p)) for p in buckets}
    middle = min(buckets, key=lambda p: (worst[p], p))
    expected = {(b, 1, p, ProposalSource.NONE) for b in batches for p in buckets}
    if method != "none":
        source = ProposalSource.COPY if method == "copy" else ProposalSource.LEARNED
        most = options.speculative_token_capacity or 0
        wide = {(b, w, middle, source) for b in batches for w in range(2, min(depth, 7) + 2) if b * w <= most}
        expected |= wide | ({(b, 1, p, source) for b in batches for p in buckets} if method == "draft" else set())
    assert {(s.batch_capacity, s.token_capacity, s.prefill_capacity, s.proposal_source) for s in shapes} == expected
    for shape in shapes:
        check_shape(shape)
        whole = shape.prefill_capacity + (shape.batch_capacity - 1) * shape.token_capacity
        assert (shape.packed_capacity, shape.proposal_depth) == (whole, shape.token_capacity - 1)


# ---- what a load leaves out


def test_a_core_with_mixed_programs_can_be_loaded_without_them_and_not_the_other_way_round() -> None:
    held = of("copy", num_draft_tokens=3)
    assert conflicts({"mixed_prefill": False}, held) == conflicts({"mixed_prefill": True}, held) == []
    assert load_options({}, held) == load_options({"mixed_prefill": True}, held) == held
    assert load_options(CoreOptions(), held) == held  # the class default says nothing
    less = load_options({"mixed_prefill": False}, held)
    assert not any(shape.kind is MIXED for shape in loaded_shapes(core_catalog(held).shapes, less))
    without = of("copy", mixed_prefill=False)
    assert conflicts({"mixed_prefill": True}, without) == ["mixed_prefill: asked True, the core has False"]
    both = load_options({"spec_method": "none", "mixed_prefill": False}, held)
    assert both == of("none", mixed_prefill=False, prefill_chunk=held.prefill_chunk)


def test_a_load_takes_the_mixed_programs_of_its_own_decoding() -> None:
    for method in ("copy", "draft"):
        held = of(method, num_draft_tokens=3)
        everything = core_catalog(held).shapes

        def loaded(asked: Mapping[str, Any], held: Any = held, everything: Any = everything) -> set[ProgramShape]:
            return {s for s in loaded_shapes(everything, load_options(asked, held)) if s.kind is MIXED}

        plain = {shape for shape in joint(held) if shape.proposal_source is ProposalSource.NONE}
        assert loaded({"spec_method": "none"}) == plain
        with_rounds = loaded({})
        narrow = {shape for shape in with_rounds if shape.token_capacity == 1}
        if method == "copy":  # nothing to keep: plain decoding is the narrow round
            assert narrow == plain
        else:  # all of them keep the draft context
            assert {shape.proposal_source for shape in with_rounds} == {ProposalSource.LEARNED}
        assert {shape.proposal_depth for shape in loaded({"num_draft_tokens": 1})} == {0, 1}
        fewer = loaded({"speculative_token_capacity": 4})
        wide = {(shape.batch_capacity, shape.token_capacity) for shape in fewer if shape.proposal_depth}
        assert wide == {(2, 2)}


# ---- a core of the toy


def test_prepare_load_and_inspect_hold_the_same_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = small_options(mixed_prefill=True, spec_method="copy", num_draft_tokens=1)
    root = tmp_path / "core"
    planned = set(joint(options.resolve(ToyModel())))
    with prepare(ToySource(tmp_path / "model"), options, root, factory=FACTORY) as core:
        assert set(core.catalog.of_kind(MIXED)) == planned
        assert {line.status for line in core.report} == {ProgramStatus.COMPILED}
    rows = [row for row in inspect_core(root) if row.kind == MIXED]
    assert {row.name for row in rows} == {shape.name for shape in planned}
    assert {row.prefill_capacity for row in rows} == {64}
    assert "mixed programs: 2, a prompt chunk of up to 64 tokens, 66 packed rows at most" in inspect_caption(root)
    main(["inspect", str(root)])
    shown = "".join(capsys.readouterr().out.split())
    assert all(row.name in shown for row in rows)

    with load_core(root, model=ToyModel(), factory=FACTORY) as core:
        assert {line.status for line in core.report} == {ProgramStatus.LOADED}
        assert core.options.mixed_prefill
    with load_core(root, model=ToyModel(), factory=FACTORY, options={"mixed_prefill": False}) as core:
        assert not core.supports(MIXED)
        assert core.supports(ProgramKind.SPECULATIVE)
        assert not core.options.mixed_prefill
    with load_core(root, model=ToyModel(), factory=FACTORY, options={"spec_method": "none"}) as core:
        assert [shape.name for shape in core.catalog.of_kind(MIXED)] == ["mixed-b2-t1-p65-f64"]


def test_mixed_programs_are_added_to_a_core_without_compiling_it_again(tmp_path: Path) -> None:
    source, root = ToySource(tmp_path / "model"), tmp_path / "core"
    prepare(source, small_options(), root, factory=FACTORY).close()
    with prepare(source, small_options(mixed_prefill=True), root, factory=FACTORY) as core:
        compiled = {line.shape.kind for line in core.report if line.status is ProgramStatus.COMPILED}
        assert compiled == {MIXED}


# ---- memory


class Wide(ToyModel):
    """Large enough that a prompt chunk of 4096 tokens needs more than the least headroom."""

    def abstract_params(self, dtype: Any) -> Any:
        import jax

        return {"layer": jax.ShapeDtypeStruct((1024, 4096), dtype)}


def test_headroom_includes_the_largest_packed_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Wide(max_position_embeddings=8192, attention_layers=(AttentionSpec(0, 1, 1, 8, 1.0),))
    options = CoreOptions(max_slots=4, max_context=8192, prefill_chunk=4096)
    plain, mixed = (
        core_catalog(o.resolve(model)) for o in (options, CoreOptions(**vars(options) | {"mixed_prefill": True}))
    )
    row = 4 * (1024 + 4096)
    grown = headroom_bytes(mixed, model) - headroom_bytes(plain, model)
    assert 3 * row <= grown < 4 * 3 * row  # three more rows, at a multiple of what a layer reads and writes for each
    assert headroom_bytes(Catalog(()), model) == FIXED_HEADROOM_BYTES
    monkeypatch.setattr("helios_jax.aot.identity.device_budget", lambda share, headroom: int(1e9 * share) - headroom)
    budgets = [
        memory_budget(o.resolve(model), model, None)
        for o in (options, CoreOptions(**vars(options) | {"mixed_prefill": True}))
    ]
    assert budgets[0] is not None
    assert budgets[1] is not None
    assert budgets[0] - budgets[1] == grown
