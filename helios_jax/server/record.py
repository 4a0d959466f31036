"""RequestRecord: what is measured and logged of one HTTP request, from its arrival."""

from __future__ import annotations

import enum
import re
import time
import uuid
from dataclasses import dataclass, field

_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")
NS_PER_S = 1e9


class Outcome(enum.Enum):
    """How a request ended; exactly one each, so that the counters reconcile with the arrivals."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # the client went away
    REFUSED = "refused"  # theirs, or no room: 4xx and 503 before anything was generated
    FAILED = "failed"  # accepted, but not answered to its end


@dataclass
class RequestRecord:
    """One request; times are ns on the monotonic clock."""

    request_id: str
    method: str
    path: str
    is_generation: bool
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    status: int = 0
    accepted: bool = False  # given to an engine that took work: from here on an unavailable engine is a failure
    response_started: bool = False
    response_complete: bool = False
    outcome: Outcome | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    first_token_ns: int = 0

    @property
    def seconds(self) -> float:
        return (time.monotonic_ns() - self.arrival_ns) / NS_PER_S

    @property
    def ttft_seconds(self) -> float:
        """Arrival of the HTTP request to its first token; 0 without one."""
        return max(self.first_token_ns - self.arrival_ns, 0) / NS_PER_S if self.first_token_ns else 0.0

    def log_line(self) -> str:
        """One line of key=value pairs."""
        parts = [f"{self.method} {self.path}", f"status={self.status}", f"id={self.request_id}"]
        if self.is_generation:
            outcome = self.outcome.value if self.outcome else "?"
            parts += [f"outcome={outcome}", f"prompt_tokens={self.prompt_tokens}"]
            parts.append(f"completion_tokens={self.completion_tokens}")
            if self.cached_tokens:
                parts.append(f"cached_tokens={self.cached_tokens}")
            if self.finish_reasons:
                parts.append(f"finish={','.join(self.finish_reasons)}")
            if self.first_token_ns:
                parts.append(f"ttft_ms={self.ttft_seconds * 1e3:.1f}")
        parts.append(f"ms={self.seconds * 1e3:.1f}")
        return " ".join(parts)


def request_id_from(header: str) -> str:
    """The client's x-request-id if it can be logged as it is, else a new one."""
    return header if _SANE_ID.fullmatch(header) else f"req-{uuid.uuid4().hex}"
