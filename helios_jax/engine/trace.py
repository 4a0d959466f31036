"""One JSON line a frame: which program ran for whom, at what price, for how long."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import IO, Any

from helios_jax.errors import ConfigError
from helios_jax.scheduler.types import ExecutionTiming, ScheduledPlan

log = logging.getLogger("helios_jax.engine")


class TraceWriter:
    """Appends frame records to a file; flushes each line, so a crash loses none.

    A trace is worth less than the requests it is about: the first line that cannot be written
    (a full disk) is logged and ends the trace, not the engine.

    Fields: fence, kind, shape, b, d, w, p, prompt (the capacities B/D/W/P of its shape, and the prompt tokens
    of a mixed one), lanes (number), prompt_row (of a mixed frame, -1 without one), slots, tokens (that went
    in), emits (lanes that sample), requests (ids by lane), estimated_ns, observation_age_ns (of the
    estimate, null without one), device_ns (one a rank), wall_ns, queued, value_rate, log_scale, reason,
    exploration_credit_ns (that paid for a probe, else 0), host_ns (engine thread outside the device
    call), now_ns.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        try:
            self._file: IO[str] | None = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ConfigError(f"the trace file {path} cannot be written: {error.strerror}") from error

    def frame(
        self, fence: int, plan: ScheduledPlan, requests: list[str], timing: ExecutionTiming, host_ns: int, now_ns: int
    ) -> None:
        """Write the line of one completed frame; nothing once a write has failed."""
        if self._file is None:
            return
        record: dict[str, Any] = {
            "fence": fence,
            "kind": str(plan.shape.kind),
            "shape": plan.shape.name,
            "b": plan.shape.batch_capacity,
            "d": plan.shape.proposal_depth,
            "w": plan.shape.token_capacity,
            "p": plan.shape.packed_capacity,
            "prompt": plan.shape.prefill_capacity,
            "lanes": len(plan.lanes),
            "prompt_row": plan.prompt_row,
            "slots": [lane.handle.slot for lane in plan.lanes],
            "tokens": sum(lane.length for lane in plan.lanes),
            "emits": sum(lane.emits for lane in plan.lanes),
            "requests": requests,
            "estimated_ns": int(plan.estimated_duration_ns),
            "observation_age_ns": plan.observation_age_ns,
            "device_ns": [int(ns) for ns in timing.device_ns],
            "wall_ns": int(timing.wall_ns),
            "queued": timing.queued,
            "value_rate": float(plan.selection_value_rate()),
            "log_scale": float(plan.selection_log_scale()),
            "reason": str(plan.reason),
            "exploration_credit_ns": plan.exploration_credit_ns,
            "host_ns": int(host_ns),
            "now_ns": int(now_ns),
        }
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            log.error("the trace %s ends at frame %d, serving goes on: %s", self._path, fence, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file, whatever its last buffer says. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
