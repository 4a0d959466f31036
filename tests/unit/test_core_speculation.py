"""Speculation in a core: options that go together, a modest catalogue, a draft model beside the model."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helios_jax.aot.claim import claim
from helios_jax.aot.compile import ProgramFactory
from helios_jax.aot.core import core_directory, load_core, open_core, prepare
from helios_jax.aot.identity import core_catalog
from helios_jax.aot.manifest import DRAFT_WEIGHTS_DIR, MANIFEST_NAME, read_manifest
from helios_jax.aot.memory import make_dims, plan_memory
from helios_jax.aot.options import CoreOptions, conflicts, load_options
from helios_jax.aot.report import ProgramStatus, inspect_caption, inspect_core
from helios_jax.aot.speculation import default_rows, widths
from helios_jax.cli import main
from helios_jax.errors import ConfigError, CoreError
from helios_jax.scheduler.catalog import Allocation, Catalog, ProgramKind, ProgramShape, ProposalSource
from tests.unit import core_toy
from tests.unit.core_toy import WIDTH, ToyModel, ToySource, frame, small_options

SPECULATIVE = ProgramKind.SPECULATIVE
WEIGHTS_BYTES = WIDTH * WIDTH * 4


def of(method: str, **changes: Any) -> CoreOptions:
    """Resolved options of a toy's core with `method`, one proposal unless `changes` say otherwise."""
    draft = {"draft_model": "toy/draft"} if method == "draft" else {}
    options = CoreOptions(**({"spec_method": method, "max_slots": 2, "max_context": 64} | draft | changes))
    return options.resolve(ToyModel(), ToyModel() if method == "draft" else None)


def rounds(options: CoreOptions) -> tuple[ProgramShape, ...]:
    return core_catalog(options).of_kind(SPECULATIVE)


# ---- options


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("spec_method", "ngram", "one of none, copy, draft, mtp"),
        ("spec_method", None, "one of none"),
        ("draft_model", "", "a name or path"),
        ("draft_model", 7, "a name or path"),
        ("num_draft_tokens", 0, "[1, 8]"),
        ("num_draft_tokens", 9, "[1, 8]"),
        ("num_draft_tokens", True, "[1, 8]"),
        ("num_draft_tokens", 2.0, "[1, 8]"),
        ("speculative_token_capacity", 1, "[2, 576]"),
        ("speculative_token_capacity", 577, "[2, 576]"),
        ("speculative_token_capacity", "64", "[2, 576]"),
    ],
)
def test_a_value_out_of_range_names_itself_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        CoreOptions(**{name: value})
    assert all(part in str(error.value) for part in (name, allowed, repr(value)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_method": "draft"}, "'draft' needs draft_model"),
        ({"draft_model": "smollm2"}, "draft_model 'smollm2' needs spec_method 'draft', got 'none'"),
        ({"draft_model": "smollm2", "spec_method": "copy"}, "needs spec_method 'draft', got 'copy'"),
        ({"num_draft_tokens": 3}, "num_draft_tokens 3 needs a spec_method"),
        ({"speculative_token_capacity": 8}, "speculative_token_capacity 8 needs a spec_method"),
        ({"spec_method": "mtp"}, "multi-token-prediction heads, which this toy model has not"),
        ({"spec_method": "copy", "num_draft_tokens": 7, "speculative_token_capacity": 7}, "at least 8, one request"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        CoreOptions(**given).resolve(ToyModel())
    assert message in str(error.value)


def test_a_draft_model_needs_the_models_vocabulary_and_context() -> None:
    options = CoreOptions(spec_method="draft", draft_model="other", max_context=256)
    with pytest.raises(ConfigError, match=r"'other' has a vocabulary of 33 tokens and the model one of 32"):
        options.resolve(ToyModel(), ToyModel(vocab_size=33))
    with pytest.raises(ConfigError, match=r"'other' has a context of 255 tokens, max_context is 256"):
        options.resolve(ToyModel(), ToyModel(max_position_embeddings=255))
    assert options.resolve(ToyModel(), ToyModel(max_position_embeddings=256)).num_draft_tokens == 5


def test_defaults_follow_method_and_slots() -> None:
    assert (of("copy").num_draft_tokens, of("copy").speculative_token_capacity) == (7, 16)
    assert (of("draft").num_draft_tokens, of("draft").speculative_token_capacity) == (5, 16)
    assert [default_rows(slots, 7) for slots in (1, 2, 3, 8, 32, 64)] == [8, 16, 32, 64, 256, 256]
    assert of("none") == CoreOptions(max_slots=2, max_context=64).resolve(ToyModel())
    with_path = CoreOptions(spec_method="draft", draft_model=pathlib.PurePosixPath("models/small"))  # type: ignore[arg-type]
    assert with_path.draft_model == "models/small"


def test_options_survive_json_and_those_without_speculation_do_not_mention_it() -> None:
    for options in (of("copy", num_draft_tokens=3), of("draft"), of("none"), CoreOptions()):
        assert CoreOptions(**json.loads(json.dumps(options.to_json()))) == options
    assert not any("spec" in name or "draft" in name for name in of("none").to_json())


def test_only_a_draft_model_writes_behind_the_ceiling_of_a_lane() -> None:
    assert [of(method).draft_extent for method in ("none", "copy", "draft")] == [0, 0, 5]
    # 64 tokens fill 4 pages of 16; 5 proposals from the last position need a fifth
    assert [make_dims(ToyModel(), of(method), 9).pages_per_slot for method in ("copy", "draft")] == [4, 5]


def test_the_weights_of_the_draft_model_are_in_the_memory_plan() -> None:
    plain = plan_memory(ToyModel(), of("copy"), core_toy.abstract_state, None)[1]
    drafted = plan_memory(ToyModel(), of("draft"), core_toy.abstract_state, None, ToyModel())[1]
    assert (plain.params_bytes, drafted.params_bytes) == (WEIGHTS_BYTES, 2 * WEIGHTS_BYTES)


# ---- catalogue


def test_widths_are_few_and_end_with_the_whole() -> None:
    assert [widths(depth) for depth in range(1, 9)] == [
        (2,), (2, 3), (2, 4), (2, 5), (2, 4, 6), (2, 4, 7), (2, 4, 8), (2, 4, 9),
    ]  # fmt: skip


@pytest.mark.parametrize(("method", "extra"), [("none", 0), ("copy", 18), ("draft", 22)])
def test_the_default_catalogue_is_the_plain_one_and_a_modest_number_of_rounds(method: str, extra: int) -> None:
    plain = set(core_catalog(of("none", max_slots=8)))
    whole = set(core_catalog(of(method, max_slots=8)))
    assert plain <= whole
    assert len(whole - plain) == extra
    assert all(shape.kind is SPECULATIVE for shape in whole - plain)


@pytest.mark.parametrize("method", ["copy", "draft"])
@pytest.mark.parametrize("slots", [1, 2, 5, 8, 64])
@pytest.mark.parametrize(("depth", "rows"), [(1, None), (3, None), (7, None), (8, 16), (5, 24), (5, 6)])
def test_every_round_is_inside_the_envelope(method: str, slots: int, depth: int, rows: int | None) -> None:
    options = of(method, max_slots=slots, num_draft_tokens=depth, speculative_token_capacity=rows)
    most, found = options.speculative_token_capacity or 0, rounds(options)
    source = ProposalSource.COPY if method == "copy" else ProposalSource.LEARNED
    wide = [shape for shape in found if shape.proposal_depth]
    narrow = [shape.batch_capacity for shape in found if not shape.proposal_depth]
    buckets = [b for b in (1, 2, 4, 8, 16, 32, 64) if b < 2 * slots]
    assert narrow == ([] if method == "copy" else buckets)  # plain decode is the narrow round of copies
    for shape in wide:
        b, w, d, p = shape.batch_capacity, shape.token_capacity, shape.proposal_depth, shape.packed_capacity
        assert d == w - 1
        assert b < p <= min(b * w, most)
        assert shape.proposal_source is source
        assert p == b * w or w == depth + 1  # ragged ones have the full width
    rectangles = {
        (s.batch_capacity, s.token_capacity) for s in wide if s.packed_capacity == s.batch_capacity * s.token_capacity
    }
    assert rectangles == {(b, w) for b in buckets for w in widths(depth) if b * w <= most}
    for b in buckets:
        ragged = [s for s in wide if s.batch_capacity == b and s.packed_capacity < b * s.token_capacity]
        sizes = {a: [s.packed_capacity for s in ragged if s.allocation is a] for a in Allocation}
        assert sizes[Allocation.QUERY_LENGTH] == sizes[Allocation.PREFIX_LIMIT]
        if b > 1 and depth > 1 and most >= 2 * b:
            assert 2 * b in sizes[Allocation.PREFIX_LIMIT]
        if b > 1 and b < most < b * (depth + 1):
            assert most in sizes[Allocation.PREFIX_LIMIT]


# ---- what a load may leave out


def test_a_load_may_ask_for_less_speculation_but_not_for_more() -> None:
    held = of("copy", num_draft_tokens=3)
    for asked in ({"spec_method": "none"}, {"num_draft_tokens": 1}, {"speculative_token_capacity": 4}):
        assert conflicts(asked, held) == []
    assert conflicts({"num_draft_tokens": 4}, held) == ["num_draft_tokens: asked 4, the core has 3"]
    assert conflicts({"speculative_token_capacity": 16}, held) == [
        "speculative_token_capacity: asked 16, the core has 8"
    ]
    assert conflicts({"spec_method": "draft"}, held) == ["spec_method: asked 'draft', the core has 'copy'"]
    assert conflicts({"spec_method": "copy"}, of("none")) == ["spec_method: asked 'copy', the core has 'none'"]
    assert conflicts({"num_draft_tokens": 1}, of("none")) == ["num_draft_tokens: asked 1, the core has None"]
    assert load_options({"spec_method": "none"}, held) == of("none", prefill_chunk=held.prefill_chunk)
    assert load_options({"num_draft_tokens": 1}, held) == dataclasses.replace(held, num_draft_tokens=1)
    drafted = of("draft")
    assert conflicts({"draft_model": pathlib.PurePosixPath("toy/draft")}, drafted) == []
    assert conflicts({"draft_model": "other"}, drafted) == ["draft_model: asked 'other', the core has 'toy/draft'"]
    assert load_options({}, held) == load_options(CoreOptions(), held) == held
    with pytest.raises(ConfigError, match="num_draft_tokens 1 needs a spec_method"):
        load_options({"spec_method": "none", "num_draft_tokens": 1}, held)


# ---- cores of toys


def _drafted_program(shape: ProgramShape, model: Any, dims: Any, dtype: str, draft: Any = None) -> Any:
    """`core_toy.build_program`; with a draft model it adds the draft's scale too."""
    inner = core_toy.build_program(shape, model, dims, dtype)

    def program(params: Any, state: Any, ints: Any, floats: Any, bits: Any = None) -> Any:
        if draft is not None:
            both = params["target"]["model"]["scale"] + params["draft"]["model"]["scale"]
            params = {"model": {"scale": both}}
        return inner(params, state, ints, floats)

    return program


def _state_of(model: Any, dims: Any, dtype: str, draft: Any = None) -> Any:
    return core_toy.abstract_state(model, dims, dtype)


def _new_state_of(model: Any, dims: Any, dtype: str, draft: Any = None) -> Any:
    return core_toy.new_state(model, dims, dtype)


FACTORY = ProgramFactory(_drafted_program, _state_of, _new_state_of)
COPY: Mapping[str, Any] = {"spec_method": "copy", "num_draft_tokens": 3}
DRAFT: Mapping[str, Any] = {"spec_method": "draft", "draft_model": "toy/draft", "num_draft_tokens": 1, "max_slots": 1}


def prepared_in(place: Path, options: Mapping[str, Any]) -> None:
    """A complete core in `place / "core"`: the model adds 3, a draft model 0.5."""
    draft = ToySource(place / "draft", value=0.5) if options.get("draft_model") else None
    source = ToySource(place / "model", value=3.0)
    prepare(source, small_options(**options), place / "core", draft=draft, factory=FACTORY).close()


@pytest.fixture(scope="module")
def copy_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("copy")
    prepared_in(place, COPY)
    return place


@pytest.fixture(scope="module")
def draft_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("draft")
    prepared_in(place, DRAFT)
    return place


def copied(place: Path, tmp_path: Path) -> Path:
    """A core of one's own, with its checkpoints beside it."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    return tmp_path / "core"


def load(root: Path, options: Mapping[str, Any] | None = None) -> Any:
    return load_core(root, options=options, model=ToyModel(), draft=ToyModel(), factory=FACTORY)


def load_plain(root: Path, options: Mapping[str, Any] | None = None) -> Any:
    return load_core(root, options=options, model=ToyModel(), factory=FACTORY)


def first_page(core: Any) -> float:
    """What one decode of slot 0 added to its page."""
    shape = core.catalog.of_kind(ProgramKind.DECODE)[0]
    return float(frame(core, shape).wait()[1][0])


def statuses(core: Any) -> set[ProgramStatus]:
    return {line.status for line in core.report}


def test_a_core_with_rounds_loads_them_all_and_inspect_shows_them(
    copy_core: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(copy_core, tmp_path)
    with load_plain(root) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
        assert len(core.catalog.of_kind(SPECULATIVE)) == 6
        assert core.catalog == Catalog(read_manifest(root).catalog)
        assert core.options.spec_method == "copy"
        assert core.draft is None
        assert core.limits.draft_extent == 0
    rows = {row.name: row for row in inspect_core(root) if row.kind == SPECULATIVE}
    assert set(rows) == {shape.name for shape in read_manifest(root).catalog if shape.kind is SPECULATIVE}
    assert all(row.argument_bytes > 0 for row in rows.values())
    wide = rows["speculative-b2-t4-d3-p4-copy"]
    assert (wide.proposal_depth, wide.packed_capacity) == (3, 4)
    main(["inspect", str(root)])
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in rows)
    assert "speculation:copy,atmost3proposals,8targetrowsaround" in shown


def test_the_draft_model_is_in_manifest_weights_and_params_and_needs_no_checkpoint_later(
    draft_core: Path, tmp_path: Path
) -> None:
    root = copied(draft_core, tmp_path)
    manifest = read_manifest(root)
    assert manifest.draft is not None
    assert manifest.draft.model_config == ToySource(tmp_path / "draft").model_config()
    assert {Path(file.path).parts[0] for file in manifest.draft_weights} == {DRAFT_WEIGHTS_DIR}
    assert manifest.memory["params_bytes"] == 2 * WEIGHTS_BYTES
    caption = "speculation: draft by toy/model, 64 parameters, at most 1 proposals, 2 target rows a round"
    assert inspect_caption(root) == caption
    for name in ("model", "draft"):
        (tmp_path / name).rename(tmp_path / f"{name}-gone")
    with load(root) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
        assert sorted(core.params) == ["draft", "target"]
        assert core.draft == ToyModel()
        assert core.limits.draft_extent == 1
        assert first_page(core) == 3.5


def test_a_changed_draft_checkpoint_brings_new_weights_and_keeps_the_programs(draft_core: Path, tmp_path: Path) -> None:
    root = copied(draft_core, tmp_path)
    model, draft = ToySource(tmp_path / "model", value=3.0), ToySource(tmp_path / "draft", value=0.25)
    with prepare(model, small_options(**DRAFT), root, draft=draft, factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
        assert (model.loads, draft.loads) == (0, 1)
        assert first_page(core) == 3.25
    with prepare(model, small_options(**DRAFT), root, draft=draft, factory=FACTORY):
        assert (model.loads, draft.loads) == (0, 1)


def test_another_draft_configuration_compiles_again_and_says_why(draft_core: Path, tmp_path: Path) -> None:
    root = copied(draft_core, tmp_path)
    draft = ToySource(tmp_path / "other", value=0.5, model=ToyModel(max_position_embeddings=400))
    model = ToySource(tmp_path / "model", value=3.0)
    with prepare(model, small_options(**DRAFT), root, draft=draft, factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.COMPILED}
        assert all("draft model toy/model has another configuration" in line.reason for line in core.report)
    with prepare(model, small_options(), root, factory=FACTORY) as core:
        assert all(
            "the core has draft model toy/model, wanted is no draft model" in line.reason for line in core.report
        )
        assert first_page(core) == 3.0
    assert not (root / DRAFT_WEIGHTS_DIR).exists()
    assert read_manifest(root).draft is None


def test_copy_rounds_are_added_to_a_plain_core_without_compiling_it_again(tmp_path: Path) -> None:
    prepared_in(tmp_path, {"max_slots": 1})
    with prepare(
        ToySource(tmp_path / "model", 3.0), small_options(**COPY, max_slots=1), tmp_path / "core", factory=FACTORY
    ) as core:
        compiled = {line.shape.kind for line in core.report if line.status is ProgramStatus.COMPILED}
        assert compiled == {SPECULATIVE}


def test_a_load_drops_rounds_and_the_core_keeps_them(copy_core: Path, tmp_path: Path) -> None:
    root = copied(copy_core, tmp_path)
    with load_plain(root, {"spec_method": "none"}) as core:
        assert not core.supports(SPECULATIVE)
        assert core.options == small_options().resolve(ToyModel())
        assert first_page(core) == 3.0
    with load_plain(root, {"num_draft_tokens": 1}) as core:
        assert {shape.proposal_depth for shape in core.catalog.of_kind(SPECULATIVE)} == {1}
    with load_plain(root, {"speculative_token_capacity": 4}) as core:
        shapes = core.catalog.of_kind(SPECULATIVE)
        assert max(shape.packed_capacity for shape in shapes) == 4
        assert Allocation.PREFIX_LIMIT in {shape.allocation for shape in shapes}
    with pytest.raises(ConfigError, match=r"no rounds of num_draft_tokens 2 .* it has \(tokens, rows\) \(1, 2\)"):
        load_plain(root, {"num_draft_tokens": 2})
    with pytest.raises(ConfigError, match=r"no rounds of num_draft_tokens 3 within speculative_token_capacity 2"):
        load_plain(root, {"speculative_token_capacity": 2})
    with pytest.raises(ConfigError, match="num_draft_tokens: asked 5, the core has 3"):
        open_core(root, {"num_draft_tokens": 5})
    with load_plain(root) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
        assert len(core.catalog.of_kind(SPECULATIVE)) == 6


def test_speculation_off_leaves_the_draft_models_core_its_decode(draft_core: Path, tmp_path: Path) -> None:
    with load(copied(draft_core, tmp_path), {"spec_method": "none"}) as core:
        assert not core.supports(SPECULATIVE)
        assert core.limits.draft_extent == 0
        assert first_page(core) == 3.5


@dataclasses.dataclass(frozen=True)
class HeadedToy(ToyModel):
    """A toy with multi-token-prediction heads, which are a toy too."""

    @property
    def mtp(self) -> ToyModel:
        return ToyModel()


class HeadedSource(ToySource):
    """A checkpoint of it: the model adds 3, the heads 0.75."""

    def heads(self) -> ToySource:
        return ToySource(self.directory, value=0.75)


def test_a_models_own_heads_are_kept_like_a_draft_model(tmp_path: Path) -> None:
    options = small_options(spec_method="mtp", num_draft_tokens=1, max_slots=1)
    source = HeadedSource(tmp_path / "model", 3.0, HeadedToy())
    prepare(source, options, tmp_path / "core", factory=FACTORY).close()
    with load_core(tmp_path / "core", model=HeadedToy(), factory=FACTORY) as core:  # the heads come with the model
        assert statuses(core) == {ProgramStatus.LOADED}
        assert core.limits.draft_extent == 1
        assert {shape.proposal_source for shape in core.catalog.of_kind(SPECULATIVE)} == {ProposalSource.LEARNED}
        assert first_page(core) == 3.75


def test_a_draft_of_another_vocabulary_leaves_no_directory_behind(tmp_path: Path) -> None:
    draft = ToySource(tmp_path / "draft", model=ToyModel(vocab_size=64))
    with pytest.raises(ConfigError, match="a draft model needs the model's own vocabulary"):
        prepare(ToySource(tmp_path / "model"), small_options(**DRAFT), tmp_path / "core", draft=draft, factory=FACTORY)
    assert not (tmp_path / "core").exists()


def test_the_directory_of_a_core_depends_on_both_checkpoints(tmp_path: Path) -> None:
    model = ToySource(tmp_path / "model")
    drafts = [None, ToySource(tmp_path / "a", value=1.0), ToySource(tmp_path / "b", value=2.0)]
    names = {core_directory(model, small_options(**DRAFT), tmp_path, draft) for draft in drafts}
    assert len(names) == 3
    assert core_directory(model, small_options(**COPY), tmp_path) != core_directory(model, small_options(), tmp_path)


def test_damaged_draft_weights_are_read_again_or_refused(draft_core: Path, tmp_path: Path) -> None:
    root = copied(draft_core, tmp_path)
    victim = root / max(read_manifest(root).draft_weights, key=lambda file: file.bytes).path
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CoreError, match=f"{DRAFT_WEIGHTS_DIR}.* prepare the core again"):
        load(root)
    draft = ToySource(tmp_path / "draft", value=0.5)
    with prepare(
        ToySource(tmp_path / "model", 3.0), small_options(**DRAFT), root, draft=draft, factory=FACTORY
    ) as core:
        assert draft.loads == 1
        assert first_page(core) == 3.5
    load(root).close()


def test_a_core_that_lost_its_manifest_is_still_known_as_ours(draft_core: Path, tmp_path: Path) -> None:
    root = copied(draft_core, tmp_path)
    (root / MANIFEST_NAME).unlink()
    assert (root / DRAFT_WEIGHTS_DIR).is_dir()
    assert claim(root)
    (root / DRAFT_WEIGHTS_DIR / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    (root / DRAFT_WEIGHTS_DIR / "_METADATA").unlink(missing_ok=True)
    with pytest.raises(CoreError, match="is not empty and holds no core"):  # somebody's directory of that name
        claim(root)


def test_a_manifest_from_before_speculation_is_still_read(copy_core: Path, tmp_path: Path) -> None:
    root = copied(copy_core, tmp_path)
    data = json.loads((root / MANIFEST_NAME).read_text())
    del data["draft"], data["draft_weights"]
    (root / MANIFEST_NAME).write_text(json.dumps(data))
    assert read_manifest(root).draft is None
    with load_plain(root) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
