"""What is written down when the engine stops itself: enough to replay what it was doing."""

from __future__ import annotations

import collections
import json
import os
import pickle
import time
import traceback
from pathlib import Path
from typing import Any

MAX_EVENTS = 256  # recent events kept in memory


class EventLog:
    """The last `MAX_EVENTS` things that the engine thread did."""

    def __init__(self) -> None:
        self._events: collections.deque[tuple[int, str, object]] = collections.deque(maxlen=MAX_EVENTS)

    def note(self, now_ns: int, what: str, detail: object) -> None:
        """Remember one event; the detail (a value, never changed) is formatted only if it is ever dumped."""
        self._events.append((now_ns, what, detail))

    def lines(self) -> list[str]:
        return [f"{now_ns} {what} {detail}" for now_ns, what, detail in self._events]


def dump(directory: Path, error: BaseException, events: EventLog, state: Any, summary: dict[str, Any]) -> Path | None:
    """Write error, summary and recent events (JSON) and the scheduler's state (pickle beside it).

    Prompts are part of the state: both files are readable by their owner only.

    Returns:
        The JSON file, or None when nothing could be written; the cause is then lost to the disk
        but still part of the answer that every waiting request gets.
    """
    stem = f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    record = {
        "error": "".join(traceback.format_exception(error)),
        "summary": summary,
        "events": events.lines(),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{stem}.json"
        _write(path, json.dumps(record, indent=1, default=str).encode())
        _write(directory / f"{stem}.state.pickle", pickle.dumps(state))
    except (OSError, pickle.PicklingError):
        return None
    return path


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
