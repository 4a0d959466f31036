"""The one process that tries grammars out before this process compiles them (see `grammar_worker`).

Life: 1. started with the first grammar; 2. answers one after the other; 3. killed when an answer does
not come in time, and started again with the next grammar; 4. ends with this process, whose end of the
pipe it reads.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from helios_jax.errors import CapacityError, UnavailableError

WORKER = Path(__file__).with_name("grammar_worker.py")
START_TIMEOUT_S = 60.0  # imports, on a machine that has other things to do


class TooSlow(Exception):
    """The answer did not come in time; the process was killed."""


class Died(Exception):
    """The process ended without an answer: a stack or memory limit, or a failure of the library."""


class GrammarProcess:
    """Asks the worker; safe to use from several threads, one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, str]:
        """The worker's answer.

        Raises:
            TooSlow: Not within `timeout_s` seconds.
            Died: The worker did not survive it.
            CapacityError: Others' grammars have kept the worker busy for twice that time.
            UnavailableError: The worker does not start.
        """
        if not self._lock.acquire(timeout=2 * timeout_s):
            raise CapacityError("too many grammars are being compiled; try again later")
        try:
            worker = self._worker if self._worker and self._worker.poll() is None else self._start()
            assert worker.stdin is not None
            try:
                worker.stdin.write(json.dumps(question).encode() + b"\n")
                worker.stdin.flush()
            except BrokenPipeError as error:
                raise Died from error
            return self._read(worker, timeout_s)
        except (TooSlow, Died):
            self._kill()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Kill the worker; the next question starts another one."""
        with self._lock:
            self._kill()

    def _start(self) -> subprocess.Popen[bytes]:
        self._kill()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._worker = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the server
        )
        try:
            self._read(self._worker, START_TIMEOUT_S)
        except (TooSlow, Died) as error:
            self._kill()
            raise UnavailableError("the process that compiles grammars does not start") from error
        return self._worker

    def _read(self, worker: subprocess.Popen[bytes], timeout_s: float) -> dict[str, str]:
        """One line of the worker."""
        assert worker.stdout is not None
        deadline, data = time.monotonic() + timeout_s, b""
        poll = select.poll()  # select itself cannot wait for descriptors from 1024 on
        poll.register(worker.stdout, select.POLLIN)
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TooSlow
            piece = os.read(worker.stdout.fileno(), 1 << 16)
            if not piece:
                raise Died
            data += piece
        return json.loads(data)

    def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was still to be written has no reader
                    continue


PROCESS = GrammarProcess()  # of this process: grammars of all engines need the same
