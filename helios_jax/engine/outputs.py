"""What the Python API and the server receive, with the names that vLLM's users know."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of one token: natural log, rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # the chosen token first, then the alternatives by rank


@dataclasses.dataclass
class CompletionOutput:
    """One of the `n` outputs of a request (or its delta, see `OutputKind`)."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token id or string that ended it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestMetrics:
    """Host times of a request, ns on the monotonic clock; 0 until they happened."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    preemptions: int = 0  # how often its sequences gave up their pages to others


@dataclasses.dataclass
class RequestOutput:
    """Everything known of a request, or what is new since the last one (DELTA)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # first entry None, as in vLLM
    num_cached_tokens: int | None = None  # prompt tokens restored, not computed; None without prefix caching, or before
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
