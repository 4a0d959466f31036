"""One JSON line a frame: which program ran for whom, at what price, for how long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from helios_jax.errors import ConfigError
from helios_jax.scheduler.types import ExecutionTiming, ScheduledPlan


class TraceWriter:
    """Appends frame records to a file; flushes each line, so a crash loses none.

    Fields: fence, kind, shape, lanes (number), slots, tokens (that went in), emits (lanes that
    sample), requests (ids by lane), estimated_ns, device_ns (one a rank), wall_ns, queued,
    value_rate, log_scale, reason, host_ns (engine thread outside the device call), now_ns.
    """

    def __init__(self, path: Path | str) -> None:
        try:
            self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ConfigError(f"the trace file {path} cannot be written: {error.strerror}") from error

    def frame(
        self, fence: int, plan: ScheduledPlan, requests: list[str], timing: ExecutionTiming, host_ns: int, now_ns: int
    ) -> None:
        """Write the line of one completed frame."""
        record: dict[str, Any] = {
            "fence": fence,
            "kind": str(plan.shape.kind),
            "shape": plan.shape.name,
            "lanes": len(plan.lanes),
            "slots": [lane.handle.slot for lane in plan.lanes],
            "tokens": sum(lane.length for lane in plan.lanes),
            "emits": sum(lane.emits for lane in plan.lanes),
            "requests": requests,
            "estimated_ns": int(plan.estimated_duration_ns),
            "device_ns": [int(ns) for ns in timing.device_ns],
            "wall_ns": int(timing.wall_ns),
            "queued": timing.queued,
            "value_rate": float(plan.selection_value_rate()),
            "log_scale": float(plan.selection_log_scale()),
            "reason": str(plan.reason),
            "host_ns": int(host_ns),
            "now_ns": int(now_ns),
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
