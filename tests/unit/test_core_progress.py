"""What people see of a preparation: plain lines in a log, bars on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from helios_jax.aot.progress import COMPILE, NOTE, WEIGHTS, RichProgress


def shown(terminal: bool) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=terminal, width=100, color_system=None)
    with RichProgress(console) as progress:
        for done in range(0, 101):
            progress(WEIGHTS, done << 20, 100 << 20)
        progress(COMPILE, 1, 2, "decode-b1-t1 [0.5 s]")
        progress(NOTE, 0, 0, "the core [serves] without it")
        progress(COMPILE, 2, 2, "decode-b2-t1 0.6 s")
    return buffer.getvalue()


def test_a_log_gets_few_plain_lines() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines == [
        "reading weights: 0 B of 100 MiB",
        "reading weights: 25 MiB of 100 MiB",
        "reading weights: 50 MiB of 100 MiB",
        "reading weights: 75 MiB of 100 MiB",
        "reading weights: 100 MiB of 100 MiB",
        "compiling programs: 1/2 decode-b1-t1 [0.5 s]",
        "the core [serves] without it",
        "compiling programs: 2/2 decode-b2-t1 0.6 s",
    ]


def test_a_terminal_gets_bars_and_the_notes() -> None:
    text = shown(terminal=True)
    assert "100/100" in text
    assert "2/2" in text
    assert "decode-b2-t1 0.6 s" in text
    assert "the core [serves] without it" in text
