"""Fault scenarios S4, S5 and S6: foreign, damaged and incomplete cores, and programs that do not compile."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helios_jax.aot import fingerprint
from helios_jax.aot.compile import Compiler
from helios_jax.aot.core import PreparedCore, load_core, prepare
from helios_jax.aot.manifest import MANIFEST_NAME, read_manifest
from helios_jax.aot.report import ProgramStatus, inspect_core
from helios_jax.errors import CoreError
from helios_jax.scheduler.catalog import ProgramKind
from tests.unit.core_toy import FACTORY, CountingFactory, ToyModel, ToySource, failing, frame, small_options

PROGRAM = "programs/decode-b1-t1.bin"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One complete core; tests work on copies of it."""
    base = tmp_path_factory.mktemp("faults")
    prepare(ToySource(base / "model"), small_options(), base / "core", factory=FACTORY).close()
    return base / "core"


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "core")
    return tmp_path / "core"


def load(root: Path, factory: Any = FACTORY) -> PreparedCore:
    return load_core(root, model=ToyModel(), factory=factory)


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((root / MANIFEST_NAME).read_text())
    change(data)
    (root / MANIFEST_NAME).write_text(json.dumps(data))


def works(core: PreparedCore) -> bool:
    """Every program of the catalogue runs, and nothing is compiled by running it."""
    for shape in core.catalog:
        frame(core, shape).wait()
    return core.compiles_after_ready() == 0


def reasons(core: PreparedCore) -> dict[str, str]:
    return {line.shape.name: line.reason for line in core.report if line.status is not ProgramStatus.LOADED}


# S4: written by another version, for another CPU, with other flags


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("jaxlib", "0.4.1", "jaxlib was 0.4.1, is "),
        ("jax", "9.9.9", "jax was 9.9.9, is "),
        ("XLA_FLAGS", "--xla_cpu_fast=1", "XLA_FLAGS was --xla_cpu_fast=1, is "),
        ("backend", "tpu", "backend was tpu, is cpu"),
        ("device_count", "8", "device_count was 8, is "),
        ("sources", "0" * 64, "the sources of the programs changed"),
        ("unknown_to_us", "x", "unknown_to_us was x, is unset"),
    ],
)
def test_a_foreign_core_is_recompiled_with_the_reason(root: Path, entry: str, value: str, reason: str) -> None:
    edit(root, lambda data: data["fingerprint"].update({entry: value}))
    counting = CountingFactory()
    with load(root, counting.factory) as core:
        assert len(counting.built) == len(core.catalog) == 7
        assert all(text.startswith(reason) for text in reasons(core).values())
        assert works(core)
    with load(root) as core:  # and kept for the next start
        assert reasons(core) == {}


def test_another_cpus_features_are_named(root: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        features = data["fingerprint"]["cpu_features"].split()
        data["fingerprint"]["cpu_features"] = " ".join(sorted([*features[1:], "avx9000"]))

    edit(root, change)
    with load(root) as core:
        assert {"CPU features differ (missing here: avx9000" in text for text in reasons(core).values()} == {True}
        assert works(core)


def test_two_differences_give_two_reasons() -> None:
    current = fingerprint.current_fingerprint()
    assert fingerprint.differences(current, current) == []
    stored = current | {"jax": "1", "jaxlib": "2"}
    assert len(fingerprint.differences(stored, current)) == 2


def test_flags_are_part_of_the_fingerprint_whatever_their_order(monkeypatch: Any) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--a=1  --b=2")
    first = fingerprint.current_fingerprint()
    monkeypatch.setenv("XLA_FLAGS", "--b=2 --a=1")
    assert fingerprint.differences(first, fingerprint.current_fingerprint()) == []
    monkeypatch.setenv("XLA_FLAGS", "--b=3 --a=1")
    assert fingerprint.differences(first, fingerprint.current_fingerprint()) == [
        "XLA_FLAGS was --a=1 --b=2, is --a=1 --b=3"
    ]


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("flags\t\t: sse2 avx2 ibrs fma avx512_vnni\nflags\t\t: other\n", "avx2 avx512_vnni fma sse2"),
        ("Features\t: fp asimd bf16\n", "asimd bf16 fp"),
    ],
)
def test_cpu_features_are_those_that_shape_code(tmp_path: Path, monkeypatch: Any, text: str, features: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(fingerprint, "CPUINFO", tmp_path / "cpuinfo")
    assert fingerprint.cpu_features() == features
    monkeypatch.setattr(fingerprint, "CPUINFO", tmp_path / "absent")
    assert fingerprint.cpu_features()


# S5: damaged


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "bytes, the manifest says"),
        (flip, "was changed"),
        (empty, "has 0 bytes"),
        (Path.unlink, "cannot be read"),
    ],
)
def test_a_damaged_program_is_compiled_again_alone(root: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(root / PROGRAM)
    counting = CountingFactory()
    with load(root, counting.factory) as core:
        assert counting.built == ["decode-b1-t1"]
        assert reason in reasons(core)["decode-b1-t1"]
        assert works(core)
    with load(root) as core:
        assert reasons(core) == {}


def test_a_file_that_is_not_the_manifests_is_never_deserialised(root: Path, monkeypatch: Any) -> None:
    flip(root / PROGRAM)
    loaded: list[str] = []
    original = Compiler.load

    def spy(self: Compiler, shape: Any, payload: bytes) -> Any:
        loaded.append(shape.name)
        return original(self, shape, payload)

    monkeypatch.setattr(Compiler, "load", spy)
    load(root).close()
    assert len(loaded) == 6
    assert "decode-b1-t1" not in loaded


def test_a_payload_with_the_right_digest_but_the_wrong_program_is_compiled_again(root: Path) -> None:
    def swap(data: dict[str, Any]) -> None:
        by_name = {entry["file"]: entry for entry in data["programs"]}
        other = by_name["programs/decode-b2-t1.bin"]
        by_name[PROGRAM].update({name: other[name] for name in ("file", "file_bytes", "sha256")})

    edit(root, swap)
    with load(root) as core:
        assert "takes other arguments" in reasons(core)["decode-b1-t1"]
        assert works(core)


def test_garbage_with_the_right_digest_is_compiled_again(root: Path) -> None:
    from helios_jax.aot.store import sha256_bytes

    garbage = b"not a pickle at all"
    (root / PROGRAM).write_bytes(garbage)

    def bless(data: dict[str, Any]) -> None:
        entry = next(e for e in data["programs"] if e["file"] == PROGRAM)
        entry.update(file_bytes=len(garbage), sha256=sha256_bytes(garbage))

    edit(root, bless)
    with load(root) as core:
        assert "cannot be loaded" in reasons(core)["decode-b1-t1"]
        assert works(core)


def test_a_stored_program_that_fails_its_check_is_discarded(root: Path, monkeypatch: Any) -> None:
    original = Compiler.load

    def broken(self: Compiler, shape: Any, payload: bytes) -> Any:
        def call(*arguments: Any) -> Any:
            raise RuntimeError("NOT_FOUND: Function fusion not found")

        loaded = original(self, shape, payload)
        return dataclasses.replace(loaded, call=call) if shape.name == "decode-b1-t1" else loaded

    monkeypatch.setattr(Compiler, "load", broken)
    with pytest.raises(CoreError, match=r"decode-b1-t1 failed: NOT_FOUND.*start again") as error:
        load(root)
    assert one_line(error)
    with load(root) as core:
        assert reasons(core) == {"decode-b1-t1": "not in the core yet"}
        assert works(core)


def test_a_program_missing_in_the_manifest_is_compiled(root: Path) -> None:
    edit(root, lambda data: data.update(programs=[e for e in data["programs"] if e["file"] != PROGRAM]))
    with load(root) as core:
        assert reasons(core) == {"decode-b1-t1": "not in the core yet"}
        assert works(core)


def one_line(error: pytest.ExceptionInfo[CoreError]) -> bool:
    return "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"format": 1}', b'{"format": 99}', b'{"format": 1, "programs": 3}'],
)
def test_a_damaged_manifest_is_one_clear_line_and_prepare_repairs_it(root: Path, content: bytes) -> None:
    (root / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CoreError, match="prepare the core again") as error:
        load(root)
    assert one_line(error)
    with pytest.raises(CoreError):
        inspect_core(root)
    with prepare(ToySource(root.parent / "model"), small_options(), root, factory=FACTORY) as core:
        assert works(core)
        assert len(set(reasons(core).values())) == 1
        assert "manifest.json" in reasons(core)["decode-b1-t1"]
    load(root).close()


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", ""])
def test_a_manifest_cannot_point_outside_its_core(root: Path, path: str) -> None:
    edit(root, lambda data: data["programs"][0].update(file=path))
    with pytest.raises(CoreError, match="leaves the core"):
        load(root)


@pytest.mark.parametrize("place", ["weights", "text"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damaged_weights_or_text_are_refused_by_load_and_repaired_by_prepare(
    root: Path, place: str, damage: Callable[[Path], None]
) -> None:
    files = [path for path in (root / place).rglob("*") if path.is_file() and path.stat().st_size > 7]
    damage(max(files, key=lambda path: path.stat().st_size))
    with pytest.raises(CoreError, match="prepare the core again from its model") as error:
        load(root)
    assert one_line(error)
    assert place in str(error.value)
    with prepare(ToySource(root.parent / "model"), small_options(), root, factory=FACTORY) as core:
        assert reasons(core) == {}
        assert works(core)
    load(root).close()


# S6: a program does not compile


def test_an_optional_program_that_does_not_compile_is_left_out(tmp_path: Path) -> None:
    source = ToySource(tmp_path / "model")
    with prepare(source, small_options(), tmp_path / "core", factory=failing(ProgramKind.SCORED_PREFILL)) as core:
        assert not core.supports(ProgramKind.SCORED_PREFILL)
        assert core.supports(ProgramKind.PREFILL)
        lines = {line.shape.name: line for line in core.report}
        missing = lines["scored_prefill-b1-t64"]
        assert missing.status is ProgramStatus.MISSING
        assert "the compiler ran out of registers" in missing.reason
        assert any("serves without it" in note for note in core.notes)
        assert works(core)
    rows = {row.name: row.problem for row in inspect_core(tmp_path / "core")}
    assert "did not compile" in rows["scored_prefill-b1-t64"]
    counting = CountingFactory()
    with load_core(tmp_path / "core", model=ToyModel(), factory=counting.factory) as core:
        assert counting.built == []  # not tried for minutes at every start
        assert not core.supports(ProgramKind.SCORED_PREFILL)
    with prepare(source, small_options(), tmp_path / "core", factory=counting.factory) as core:
        assert counting.built == ["scored_prefill-b1-t64"]  # but an explicit prepare tries again
        assert core.supports(ProgramKind.SCORED_PREFILL)


@pytest.mark.parametrize("kind", [ProgramKind.DECODE, ProgramKind.PREFILL, ProgramKind.INITIALIZE])
def test_a_required_program_that_does_not_compile_ends_the_preparation(tmp_path: Path, kind: ProgramKind) -> None:
    with pytest.raises(CoreError, match=f"program {kind}.*ran out of registers") as error:
        prepare(ToySource(tmp_path / "model"), small_options(), tmp_path / "core", factory=failing(kind))
    assert one_line(error)
    with prepare(ToySource(tmp_path / "model"), small_options(), tmp_path / "core", factory=FACTORY) as core:
        assert works(core)


def test_inspect_reads_only_the_manifest_and_file_sizes(root: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Compiler, "load", None)
    rows = inspect_core(root)
    manifest = read_manifest(root)
    assert {row.name for row in rows} == {shape.name for shape in manifest.catalog}
    assert all(row.problem == "" and row.file_bytes > 0 and row.donated_bytes > 0 for row in rows)
    truncate(root / PROGRAM)
    (root / "programs/decode-b2-t1.bin").unlink()
    problems = {row.name: row.problem for row in inspect_core(root) if row.problem}
    assert set(problems) == {"decode-b1-t1", "decode-b2-t1"}
    assert problems["decode-b2-t1"] == "file is missing"
