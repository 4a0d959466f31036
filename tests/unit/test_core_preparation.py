"""Preparing and loading: what is kept, what is made again and why, and who may do it when."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from helios_jax.aot.core import core_directory, is_core, load_core, open_core, prepare
from helios_jax.aot.manifest import MANIFEST_NAME, read_manifest, write_manifest
from helios_jax.aot.report import ProgramStatus
from helios_jax.aot.runner import DeviceRunner
from helios_jax.aot.store import LOCK_NAME, is_writable, remove_leftovers
from helios_jax.engine.setup import Target
from helios_jax.errors import ConfigError, CoreError
from helios_jax.scheduler.catalog import ProgramKind
from tests.unit.core_toy import FACTORY, CountingFactory, ToyModel, ToySource, frame, small_options

NUM_PROGRAMS = 7


def make(tmp_path: Path, **options: Any) -> Path:
    """A complete core in `tmp_path / "core"`."""
    prepare(ToySource(tmp_path / "model"), small_options(**options), tmp_path / "core", factory=FACTORY).close()
    return tmp_path / "core"


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != LOCK_NAME)
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def statuses(core: Any) -> set[ProgramStatus]:
    return {line.status for line in core.report}


def test_a_second_prepare_builds_nothing_and_reads_no_checkpoint(tmp_path: Path) -> None:
    source, counting = ToySource(tmp_path / "model"), CountingFactory()
    first = prepare(source, small_options(), tmp_path / "core", factory=counting.factory)
    assert len(counting.built) == NUM_PROGRAMS
    assert statuses(first) == {ProgramStatus.COMPILED}
    assert all(line.reason == "not in the core yet" for line in first.report)
    first.close()
    before = snapshot(tmp_path / "core")
    second = prepare(source, small_options(), tmp_path / "core", factory=counting.factory)
    assert len(counting.built) == NUM_PROGRAMS
    assert statuses(second) == {ProgramStatus.LOADED}
    assert source.loads == 1
    assert second.notes == ()
    second.close()
    assert snapshot(tmp_path / "core") == before


def test_every_load_executes_every_program_and_leaves_a_fresh_state(tmp_path: Path, monkeypatch: Any) -> None:
    ran: list[str] = []
    submit = DeviceRunner.submit

    def spy(self: DeviceRunner, *control: Any) -> Any:
        ran.append(control[0].name)
        return submit(self, *control)

    monkeypatch.setattr(DeviceRunner, "submit", spy)
    root = make(tmp_path, max_context=256, prefill_chunk=128)
    everything = sorted(ran)
    assert len(everything) > 4
    ran.clear()
    with load_core(root, model=ToyModel(), factory=FACTORY) as core:
        assert sorted(ran) == everything
        assert not core.runner._state.runs.any()  # the lanes worked, and what they did is gone


def full_disk(*arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["preparation.write_manifest", "programs_store.write_manifest"])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_disk_that_fills_up_costs_the_next_start_not_this_one(
    tmp_path: Path, monkeypatch: Any, place: str, writes: int
) -> None:
    source, left = ToySource(tmp_path / "model"), [writes]

    def limited(directory: Path, manifest: Any) -> None:
        left[0] -= 1
        (write_manifest if left[0] >= 0 else full_disk)(directory, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(f"helios_jax.aot.{place}", limited)
        with prepare(source, small_options(), tmp_path / "core", factory=FACTORY) as core:
            assert len(core.catalog) == NUM_PROGRAMS
            assert [note for note in core.notes if "No space left" in note] == list(core.notes)
            assert len(core.notes) == 1
            frame(core, core.catalog.of_kind(ProgramKind.DECODE)[0]).wait()
    with prepare(source, small_options(), tmp_path / "core", factory=FACTORY) as core:
        assert core.notes == ()
    with load_core(tmp_path / "core", model=ToyModel(), factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.LOADED}


def test_text_files_that_cannot_be_kept_are_read_from_the_model(tmp_path: Path, monkeypatch: Any) -> None:
    source = ToySource(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr("helios_jax.aot.preparation.copy_text_files", full_disk)
        with prepare(source, small_options(), tmp_path / "core", factory=FACTORY) as core:
            assert core.source_info.text_path == source.directory
            assert len(core.notes) == 1
            assert "No space left" in core.notes[0]
    with pytest.raises(CoreError, match="not prepared to the end"):
        load_core(tmp_path / "core", model=ToyModel(), factory=FACTORY)
    with prepare(source, small_options(), tmp_path / "core", factory=FACTORY) as core:
        assert core.source_info.text_path == tmp_path / "core" / "text"


def test_a_loaded_core_computes_what_the_made_one_did_without_its_model(tmp_path: Path) -> None:
    source = ToySource(tmp_path / "model", value=3.0)
    made = prepare(source, small_options(), tmp_path / "core", factory=FACTORY)
    shape = made.catalog.of_kind(ProgramKind.DECODE)[0]
    outputs = [frame(made, shape).wait()[:2] for _ in range(3)]
    made.close()
    (tmp_path / "model").rename(tmp_path / "gone")
    counting = CountingFactory()
    with load_core(tmp_path / "core", model=ToyModel(), factory=counting.factory) as core:
        assert counting.built == []
        assert [[v.tolist() for v in frame(core, shape).wait()[:2]] for _ in range(3)] == [
            [v.tolist() for v in pair] for pair in outputs
        ]
        assert core.source_info.name == "toy/model"
        assert core.source_info.eos_token_ids == (2,)
        assert core.source_info.text_path == tmp_path / "core" / "text"
        assert json.loads((core.source_info.text_path / "tokenizer.json").read_text()) == {"toy": True}
        assert core.compiles_after_ready() == 0


def test_other_pages_compile_everything_again_and_say_so(tmp_path: Path) -> None:
    root = make(tmp_path)
    with prepare(ToySource(tmp_path / "model"), small_options(num_pages=5), root, factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.COMPILED}
        assert {line.reason for line in core.report} == {"num_pages was 9, is 6"}


def test_another_chunk_keeps_the_programs_that_fit_and_removes_the_others(tmp_path: Path) -> None:
    root = make(tmp_path, max_context=256, prefill_chunk=128)
    options = small_options(max_context=256, prefill_chunk=64)
    with prepare(ToySource(tmp_path / "model"), options, root, factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
    assert not [path.name for path in (root / "programs").iterdir() if "t128" in path.name]
    assert len(read_manifest(root).programs) == NUM_PROGRAMS


def test_changed_weights_are_converted_again_but_programs_stay(tmp_path: Path) -> None:
    root, changed = make(tmp_path), ToySource(tmp_path / "model", value=5.0)
    with prepare(changed, small_options(), root, factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
        assert changed.loads == 1
        shape = core.catalog.of_kind(ProgramKind.DECODE)[0]
        assert frame(core, shape).wait()[1][0] == 5.0


def test_the_page_plan_of_the_first_prepare_is_kept_while_it_fits(tmp_path: Path, monkeypatch: Any) -> None:
    page = 16 * 8 * 4
    monkeypatch.setattr("helios_jax.aot.identity.memory_budget", lambda *_: 6 * page + 500)
    with prepare(ToySource(tmp_path / "model"), small_options(), tmp_path / "core", factory=FACTORY) as core:
        pages = core.dims.num_pages
        assert pages < 9  # capped
    monkeypatch.setattr("helios_jax.aot.identity.memory_budget", lambda *_: 1 << 30)  # more is free now
    with prepare(ToySource(tmp_path / "model"), small_options(), tmp_path / "core", factory=FACTORY) as core:
        assert core.dims.num_pages == pages
        assert statuses(core) == {ProgramStatus.LOADED}
    monkeypatch.setattr("helios_jax.aot.identity.memory_budget", lambda *_: 3 * page)
    with pytest.raises(ConfigError, match="not enough memory"):
        load_core(tmp_path / "core", model=ToyModel(), factory=FACTORY)


def test_a_directory_that_is_not_a_core_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CoreError, match="not empty and holds no core"):
        prepare(ToySource(tmp_path.parent / "model-x"), small_options(), tmp_path, factory=FACTORY)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.txt"}
    with pytest.raises(CoreError, match="not a directory"):
        prepare(ToySource(tmp_path.parent / "model-x"), small_options(), tmp_path / "thesis.txt", factory=FACTORY)
    with pytest.raises(CoreError, match="holds no prepared core"):
        load_core(tmp_path, model=ToyModel(), factory=FACTORY)
    with pytest.raises(CoreError, match="holds no prepared core"):
        load_core(tmp_path / "nowhere", model=ToyModel(), factory=FACTORY)


@pytest.mark.parametrize(
    "files",
    [
        {"manifest.json": '{"name": "my web app"}'},
        {"manifest.json": '{"name": "my web app"}', "programs/decode.py": "years of work"},
        {"manifest.json": "{", "thesis.txt": "years of work"},
        {"manifest.json": '{"format": 1}', "programs/decode-b1-t1.bin": "x", "thesis.txt": "years of work"},
        {"programs/hello.c": "years of work"},
        {"programs/decode-b1-t1.bin": "x", "programs/notes.txt": "years of work"},
        {"text/thesis.txt": "years of work"},
        {"weights/mine.safetensors": "days of training"},
        {"programs": "a file"},
        {".git/config": "[core]"},
    ],
)
def test_somebody_elses_files_are_neither_taken_for_a_core_nor_deleted(tmp_path: Path, files: dict[str, str]) -> None:
    root = tmp_path / "mine"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    before = snapshot(root)
    with pytest.raises(CoreError, match="not empty and holds no core"):
        prepare(ToySource(tmp_path / "model"), small_options(), root, factory=FACTORY)
    assert snapshot(root) == before


def test_a_core_that_lost_its_manifest_is_prepared_again_where_it_is(tmp_path: Path) -> None:
    root = make(tmp_path)
    (root / MANIFEST_NAME).unlink()
    with prepare(ToySource(tmp_path / "model"), small_options(), root, factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.COMPILED}


def test_only_files_named_as_programs_are_removed_from_a_core(tmp_path: Path) -> None:
    root = make(tmp_path)
    mine = [root / "programs" / "notes.txt", root / "readme.md"]
    for path in mine:
        path.write_text("years of work")
    stale = root / "programs" / "prefill-b1-t4096.bin"
    stale.write_bytes(b"of another catalogue")
    prepare(ToySource(tmp_path / "model"), small_options(num_pages=5), root, factory=FACTORY).close()
    assert all(path.exists() for path in mine)
    assert not stale.exists()


def read_only(monkeypatch: Any) -> None:
    """As if every directory were on a read-only mount (permission bits do not stop root)."""
    for module in ("claim", "preparation"):
        monkeypatch.setattr(f"helios_jax.aot.{module}.is_writable", lambda directory: False)


def test_a_read_only_core_is_loaded_and_not_touched(tmp_path: Path, monkeypatch: Any) -> None:
    root = make(tmp_path)
    before = snapshot(root)
    read_only(monkeypatch)
    with load_core(root, model=ToyModel(), factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
    assert snapshot(root) == before


def test_a_read_only_directory_compiles_without_keeping_and_warns(tmp_path: Path, monkeypatch: Any) -> None:
    root = make(tmp_path)
    (root / "programs" / "decode-b1-t1.bin").unlink()
    before = snapshot(root)
    read_only(monkeypatch)
    with load_core(root, model=ToyModel(), factory=FACTORY) as core:
        lines = {line.shape.name: line for line in core.report}
        assert lines["decode-b1-t1"].status is ProgramStatus.COMPILED
        assert any("cannot be written" in note for note in core.notes)
    assert snapshot(root) == before
    empty = tmp_path / "empty"
    empty.mkdir()
    source = ToySource(tmp_path / "model")
    with prepare(source, small_options(), empty, factory=FACTORY) as core:
        assert statuses(core) == {ProgramStatus.COMPILED}
        assert core.source_info.text_path == source.directory
    assert list(empty.iterdir()) == []


def test_a_directory_is_writable_while_another_preparation_sweeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe of one preparation looks like a leftover to the other, which holds the lock."""
    touch = Path.touch

    def touched_and_swept(path: Path, *args: Any, **kwargs: Any) -> None:
        touch(path, *args, **kwargs)
        remove_leftovers(tmp_path)

    monkeypatch.setattr(Path, "touch", touched_and_swept)
    assert is_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_prepares_at_once_share_the_work(tmp_path: Path) -> None:
    counting, cores, errors = CountingFactory(), [], []
    source = ToySource(tmp_path / "model")

    def run() -> None:
        try:
            cores.append(prepare(source, small_options(), tmp_path / "core", factory=counting.factory))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(counting.built) == NUM_PROGRAMS
    assert sorted(tuple(statuses(core)) for core in cores) == [("compiled",), ("loaded",), ("loaded",)]
    for core in cores:
        core.close()


def _prepare_until_killed(base: str) -> None:
    """In a child: prepares, and stops for ever after the third program was stored."""
    done = 0

    def progress(stage: str, count: int, total: int, detail: str = "") -> None:
        nonlocal done
        done = max(done, count if stage == "compile" else 0)
        if done >= 3:
            (Path(base) / "reached").touch()
            time.sleep(600)

    prepare(ToySource(Path(base) / "model"), small_options(), Path(base) / "core", progress, factory=FACTORY)


def test_a_killed_prepare_is_continued(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_prepare_until_killed, args=(str(tmp_path),))
    child.start()
    while not (tmp_path / "reached").exists():
        assert child.is_alive(), "the child ended before it reached the third program"
        time.sleep(0.02)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    (tmp_path / "core" / "programs" / ".tmp-half").write_bytes(b"half a file")
    (tmp_path / "core" / ".tmp-dir").mkdir()
    assert not read_manifest(tmp_path / "core").complete
    source, counting = ToySource(tmp_path / "model"), CountingFactory()
    with prepare(source, small_options(), tmp_path / "core", factory=counting.factory) as core:
        assert len(core.catalog) == NUM_PROGRAMS
        assert len(counting.built) <= NUM_PROGRAMS - 3
        assert source.loads == 0  # the weights had been kept
    assert read_manifest(tmp_path / "core").complete
    assert not list((tmp_path / "core").rglob(".tmp-*"))


def test_a_core_without_weights_is_not_loaded(tmp_path: Path) -> None:
    root = make(tmp_path)
    data = json.loads((root / MANIFEST_NAME).read_text())
    data["weights"] = []
    (root / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(CoreError, match="not prepared to the end"):
        load_core(root, model=ToyModel(), factory=FACTORY)


def test_open_core_prepares_once_in_the_cache_and_then_loads(tmp_path: Path, monkeypatch: Any) -> None:
    counting, source = CountingFactory(), ToySource(tmp_path / "model")
    monkeypatch.setattr("helios_jax.aot.preparation.default_factory", lambda: counting.factory)
    monkeypatch.setattr("helios_jax.aot.preparation.model_from_config", lambda config: ToyModel(**config))
    for expected in (ProgramStatus.COMPILED, ProgramStatus.LOADED):
        with open_core(source, small_options(), tmp_path / "cache") as core:
            assert statuses(core) == {expected}
            root = core.directory
    assert root == core_directory(source, small_options().resolve(source.model), tmp_path / "cache")
    assert is_core(root)
    assert root.name.startswith("toy-model-")
    with open_core(root) as core:
        assert statuses(core) == {ProgramStatus.LOADED}
    with pytest.raises(ConfigError, match="max_slots: asked 3, the core has 2"):
        open_core(root, small_options(max_slots=3))
    with pytest.raises(ConfigError, match="page_size: asked 64, the core has 16"):
        open_core(root, {"page_size": 64, "dtype": None})
    with pytest.raises(ConfigError, match="max_slots: asked 8, the core has 2"):  # 8 is the default
        Target(core=root, options={"max_slots": 8, "dtype": None}).open()
    with pytest.raises(ConfigError, match="max_slots: asked 8, the core has 2"):
        Target(model=root, options={"max_slots": 8}).open()
    with Target(core=root, options={"max_slots": 2, "dtype": None}).open() as core:
        assert statuses(core) == {ProgramStatus.LOADED}
    other = core_directory(source, small_options(max_slots=3).resolve(source.model), tmp_path / "cache")
    assert other != root


def test_jaxs_own_cache_does_not_spoil_a_core(tmp_path: Path) -> None:
    """An executable out of jax's persistent cache cannot be stored; so none is taken from there."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    old = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        for core in ("first", "second"):
            prepare(ToySource(tmp_path / "model"), small_options(), tmp_path / core, factory=FACTORY).close()
            jax.clear_caches()
        assert jax.config.jax_enable_compilation_cache
        with load_core(tmp_path / "second", model=ToyModel(), factory=FACTORY) as core:
            assert statuses(core) == {ProgramStatus.LOADED}
            for shape in core.catalog:
                frame(core, shape).wait()
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
