"""Pieces of the server by themselves: error bodies, log-probabilities, counters of any form, outcomes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import msgspec
import pytest

from helios_jax.engine.outputs import Logprob
from helios_jax.errors import CapacityError, ConfigError, DeviceError, InvariantError, RequestError, UnavailableError
from helios_jax.server.context import Phase, ServerContext, ServerLimits
from helios_jax.server.errors import ClientGone, describe_error, from_decode_error
from helios_jax.server.gate import outcome_of
from helios_jax.server.metrics import scheduler_families
from helios_jax.server.protocol import UNSUPPORTED, CompletionRequest, refuse_unsupported
from helios_jax.server.record import Outcome, RequestRecord, request_id_from
from helios_jax.server.replies import MIN_LOGPROB, completion_logprobs, finite
from helios_jax.server.run import bind
from helios_jax.server.streaming import event


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("wrong", param="n"), 400),
        (CapacityError("full"), 429),
        (UnavailableError("later"), 503),
        (ClientGone("left"), 503),
        (DeviceError("lost"), 500),
        (InvariantError("bug"), 500),
        (ValueError("secret"), 500),
    ],
)
def test_every_error_has_a_status_and_a_body(error: Exception, status: int) -> None:
    reply = describe_error(error, "req-1")
    body = msgspec.json.decode(reply.body)["error"]
    assert reply.status == status
    assert set(body) == {"message", "type", "param", "code"}
    assert ("req-1" in body["message"]) == (status == 500)
    assert (body["type"] == "server_error") == isinstance(error, DeviceError)
    assert "secret" not in body["message"]
    assert ("retry-after" in reply.headers) == isinstance(error, (CapacityError, UnavailableError))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "n": "x"}', "n"),
        (b'{"prompt": ["a", true]}', "prompt[1]"),
        (b'{"prompt": "a", "stream_options": {"include_usage": 3}}', "stream_options.include_usage"),
        (b"{}", "prompt"),
        (b"[1]", None),
        (b"{", None),
    ],
)
def test_decode_errors_name_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(msgspec.DecodeError) as raised:
        msgspec.json.decode(body, type=CompletionRequest)
    error = from_decode_error(raised.value)
    assert (error.param or "").startswith(param or "")
    assert "$" not in str(error)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, -1e9])
def test_finite_is_json(value: float) -> None:
    assert finite(value) == MIN_LOGPROB
    assert finite(-1.5) == -1.5


def test_two_ids_with_one_text_keep_the_likelier_value() -> None:
    entry = {5: Logprob(-0.1, 1, "a"), 6: Logprob(-3.0, 2, "a")}
    logprobs = completion_logprobs([None, entry], "héad", [2, 6])
    assert logprobs.tokens == ["héad", "a"]
    assert logprobs.top_logprobs == [None, {"a": -0.1}]
    assert logprobs.text_offset == [2, 6]


def test_every_unsupported_field_is_a_field() -> None:
    assert set(UNSUPPORTED) <= set(CompletionRequest.__struct_fields__)
    for name, neutral in UNSUPPORTED.items():
        for value in neutral:
            refuse_unsupported(CompletionRequest(prompt="a", **{name: value}))
        with pytest.raises(RequestError, match=name):
            refuse_unsupported(CompletionRequest(prompt="a", **{name: {"asks": "for something"}}))


@dataclasses.dataclass
class CountersRecord:
    executions_total: dict[str, int]
    pages_free: int


class CountersTuple(NamedTuple):
    executions_total: dict[str, int]
    pages_free: int


COUNTS: dict[str, int] = {"ordinary": 3, "discovery": 1}


@pytest.mark.parametrize(
    "counters",
    [
        CountersRecord(COUNTS, 7),
        CountersTuple(COUNTS, 7),
        {"flare_scheduler_executions_total": COUNTS, "flare_scheduler_pages_free": 7},
    ],
)
def test_counters_of_any_form_get_the_names_of_the_specification(counters: Any) -> None:
    samples = {(s.name, s.labels.get("reason")): s.value for f in scheduler_families(counters) for s in f.samples}
    assert samples == {
        ("flare_scheduler_executions_total", "ordinary"): 3,
        ("flare_scheduler_executions_total", "discovery"): 1,
        ("flare_scheduler_pages_free", None): 7,
    }
    assert list(scheduler_families(None)) == []


def test_growing_totals_are_counters_and_kinds_are_kinds() -> None:
    counters = {
        "requests_admitted": 4,
        "requests_finished": {"stop": 2},
        "used_tokens_by_kind": {"prefill": 9},
        "slots_total": 8,
        "frames_in_flight": 1,
    }
    families = list(scheduler_families(counters))
    samples = {(f.type, s.name, *s.labels.items()): s.value for f in families for s in f.samples}
    assert samples == {
        ("counter", "flare_scheduler_requests_admitted_total"): 4,
        ("counter", "flare_scheduler_requests_finished_total", ("reason", "stop")): 2,
        ("counter", "flare_scheduler_used_tokens_by_kind_total", ("kind", "prefill")): 9,
        ("gauge", "flare_scheduler_slots_total"): 8,
        ("gauge", "flare_scheduler_frames_in_flight"): 1,
    }


@pytest.mark.parametrize(
    ("status", "complete", "outcome"),
    [
        (200, True, Outcome.FINISHED),
        (400, True, Outcome.REFUSED),
        (429, True, Outcome.REFUSED),
        (503, True, Outcome.REFUSED),
        (500, True, Outcome.FAILED),
        (200, False, Outcome.FAILED),
        (0, False, Outcome.FAILED),
    ],
)
def test_outcomes(status: int, complete: bool, outcome: Outcome) -> None:
    record = RequestRecord("id", "POST", "/v1/completions", True, status=status, response_complete=complete)
    assert outcome_of(record) is outcome


def test_what_the_engine_had_taken_is_not_refused() -> None:
    record = RequestRecord("id", "POST", "/v1/completions", True, status=503, response_complete=True, accepted=True)
    assert outcome_of(record) is Outcome.FAILED
    record.status = 429  # full: the engine raises it instead of taking the request
    assert outcome_of(record) is Outcome.REFUSED


def test_a_request_id_cannot_forge_a_log_line() -> None:
    assert request_id_from("good-1.2") == "good-1.2"
    for bad in ("", "a b", "a\nb", "x" * 129, "é"):
        assert request_id_from(bad) != bad


def test_an_event_is_one_data_line() -> None:
    body = msgspec.json.encode({"text": "a\nb\r\n\u2028"})
    assert event(body).count(b"\n") == 2
    assert event(body).endswith(b"\n\n")


@pytest.mark.parametrize(
    "wrong", [{"max_body_bytes": 0}, {"max_in_flight": 0}, {"drain_timeout_s": -1}, {"body_timeout_s": 0}]
)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerLimits(**wrong)


@pytest.mark.parametrize("port", [-1, 65536, 2**32 + 80])
def test_a_port_out_of_range_is_named_before_it_is_used(port: int) -> None:
    with pytest.raises(ConfigError, match=f"{port}: --port must be in"):
        bind("127.0.0.1", port)


def test_phases_only_go_forward() -> None:
    context = ServerContext(None)
    context.begin_drain()
    assert context.phase is Phase.DRAINING
    assert context.unready_reason() != ""
    context.close()
