"""How long work tells what it is doing.

`Progress` is any callable (stage, done, total, detail); `RichProgress` shows it to a
person: bars on a terminal, plain lines in a log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from helios_jax.aot.memory import human

WEIGHTS = "weights"  # bytes read or converted
LOAD = "load"  # programs read from the core
COMPILE = "compile"  # programs compiled
SAVE = "save"  # bytes of weights written
VERIFY = "verify"  # programs executed once
NOTE = "note"  # a message; done and total are 0

BYTE_STAGES = (WEIGHTS, SAVE)
TITLES = {
    WEIGHTS: "reading weights",
    LOAD: "loading programs",
    COMPILE: "compiling programs",
    SAVE: "saving weights",
    VERIFY: "checking programs",
}
PLAIN_STEPS = 4  # lines that a byte stage prints without a terminal


class Progress(Protocol):
    """Called from one thread at a time; must be quick and must not raise."""

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """`done` of `total` steps (or bytes) of `stage`; `detail` names the step just done."""


def silent(stage: str, done: int, total: int, detail: str = "") -> None:
    """A `Progress` that shows nothing."""


def serialised(progress: Progress) -> Progress:
    """The same, safe to call from several threads."""
    lock = threading.Lock()

    def call(stage: str, done: int, total: int, detail: str = "") -> None:
        with lock:
            progress(stage, done, total, detail)

    return call


class RichProgress:
    """Shows progress on a console (standard error unless given); use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._show: Callable[[str, int, int, str], None]
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, int] = {}
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Bars(*columns, TextColumn("{task.fields[detail]}"), console=self._console)

    def __enter__(self) -> RichProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        if stage == NOTE:
            self._console.print(detail, style="yellow", markup=False, highlight=False)
        elif self._bars is not None:
            self._bar(self._bars, stage, done, total, detail)
        else:
            self._line(stage, done, total, detail)

    def _bar(self, bars: Bars, stage: str, done: int, total: int, detail: str) -> None:
        if stage in BYTE_STAGES:  # MiB, so that the count column stays readable
            done, total = done >> 20, max(1, total >> 20)
            detail = detail or "MiB"
        if stage not in self._tasks:
            self._tasks[stage] = bars.add_task(TITLES.get(stage, stage), total=total, detail="")
        bars.update(self._tasks[stage], completed=done, total=total, detail=escape(detail))

    def _line(self, stage: str, done: int, total: int, detail: str) -> None:
        title = TITLES.get(stage, stage)
        if stage in BYTE_STAGES:
            step = done * PLAIN_STEPS // max(1, total)
            if self._printed.get(stage) == step:
                return
            self._printed[stage] = step
            text = f"{title}: {human(done)} of {human(total)}"
        else:
            text = f"{title}: {done}/{total}"
        self._console.print(f"{text} {detail}".rstrip(), markup=False, highlight=False, soft_wrap=True)
