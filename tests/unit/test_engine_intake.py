"""Everything that a request can get wrong is refused before the engine hears of it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helios_jax.engine.params import SamplingParams
from helios_jax.errors import RequestError
from helios_jax.testing import EngineRig

VOCAB = 260


@pytest.fixture(scope="module")
def rig():
    rig = EngineRig(start=False, max_slots=2, max_queue=3, max_context=64)
    yield rig
    rig.core.close()


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 1, -1, 2**63])
@pytest.mark.parametrize("field", ["prompt", "logit_bias", "stop_token_ids"])
def test_ids_out_of_the_vocabulary_are_refused(rig: EngineRig, field: str, token: int) -> None:
    """Case V1."""
    params: dict[str, Any] = {"logit_bias": {"logit_bias": {token: 1.0}}, "stop_token_ids": {"stop_token_ids": [token]}}
    prompt = [1, token] if field == "prompt" else [1, 2]
    with pytest.raises(RequestError, match=rf"{field} has token id {token}.*\[0, {VOCAB - 1}\]") as caught:
        rig.submit(prompt, **params.get(field, {}))
    assert (caught.value.param, caught.value.code) == (field, "invalid_token_id")


@pytest.mark.parametrize("prompt", [[], ""])
def test_empty_prompt_is_refused(rig: EngineRig, prompt: Any) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        rig.submit(prompt)


@pytest.mark.parametrize("prompt", [["a"], [1.5], [True], [None]])
def test_prompts_of_other_types_are_refused(rig: EngineRig, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a string or a list of token ids"):
        rig.submit(prompt)


def test_n_beyond_slots_and_queue_is_refused(rig: EngineRig) -> None:
    with pytest.raises(RequestError, match="n is 6, this engine holds at most 5"):
        rig.submit("a", n=6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", 3),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", -0.1), ("repetition_penalty", 0),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("n", 0), ("n", 129), ("max_tokens", -1),
        ("logprobs", 21), ("prompt_logprobs", -1), ("seed", 2**64), ("stop", [""]), ("stop", ["a"] * 17),
        ("logit_bias", {1: 101}), ("logit_bias", dict.fromkeys(range(301), 1.0)), ("logit_bias", {1: math.nan}),
    ],
)  # fmt: skip
def test_sampling_values_out_of_range_name_their_field(field: str, value: Any) -> None:
    """Case V3."""
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_tiny_temperature_and_huge_top_k_are_defined(rig: EngineRig) -> None:
    assert SamplingParams(temperature=1e-9).temperature == 1e-2
    assert SamplingParams(top_k=2**31 - 1).top_k == 2**31 - 1
    assert SamplingParams(top_k=-1).top_k == 0


def test_small_pool_bounds_the_context() -> None:
    rig = EngineRig(start=False, max_context=64, page_size=16, num_pages=2)
    assert rig.assembly.intake.max_context == 32
    with pytest.raises(RequestError, match="33 tokens"):
        rig.submit([1] * 33)
    rig.core.close()


def test_core_without_scored_prefill_says_so() -> None:
    from helios_jax.scheduler.catalog import Catalog, ProgramKind
    from helios_jax.testing import ByteTokenizer, fake_core

    core = fake_core()
    core.catalog = Catalog(tuple(s for s in core.catalog if s.kind is not ProgramKind.SCORED_PREFILL))
    from helios_jax.config import EngineConfig
    from helios_jax.engine.setup import assemble

    intake = assemble(core, EngineConfig(), ByteTokenizer()).intake
    with pytest.raises(RequestError, match="scored-prefill") as caught:
        intake.request("a", SamplingParams(prompt_logprobs=1), request_id="r", sink=None, arrival_ns=0)  # type: ignore[arg-type]
    assert caught.value.param == "prompt_logprobs"


def test_duplicate_request_id_is_refused(rig: EngineRig) -> None:
    rig.submit("a", "same")
    with pytest.raises(RequestError, match="'same' is in use"):
        rig.submit("b", "same")


class _Untouchable(Sequence[int]):
    """Millions of ids that nobody may look at."""

    def __len__(self) -> int:
        return 5_000_000

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an id was read")


def test_too_long_a_prompt_is_refused_before_its_ids_are_read(rig: EngineRig) -> None:
    with pytest.raises(RequestError, match="the prompt has 5000000 tokens") as caught:
        rig.submit(_Untouchable())  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"


def test_ids_are_checked_at_the_speed_of_numpy() -> None:
    """A million ids that fit: an event loop may stall for milliseconds, not for seconds."""
    intake = dataclasses.replace(EngineRig(start=False).assembly.intake)
    ids = [7] * 1_000_000
    started = time.process_time()
    assert intake._are_ids(ids)
    assert not intake._are_ids([*ids, VOCAB])
    assert not intake._are_ids([*ids, True])
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("prompt", [np.array([1, 2]), (1, 2), [np.int32(1), 2], range(1, 3)])
def test_every_kind_of_ids_becomes_python_integers(rig: EngineRig, prompt: Any) -> None:
    request = rig.assembly.intake.request(prompt, SamplingParams(), request_id="r", sink=rig, arrival_ns=0)
    assert request.prompt_token_ids == [1, 2]
    assert {type(token) for token in request.prompt_token_ids} == {int}


@pytest.mark.parametrize("prompt", [np.array([[1]]), np.array([1.5]), np.array(1.5), [[1, 2]], None])
def test_arrays_of_other_shapes_and_types_are_refused(rig: EngineRig, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a string or a list of token ids"):
        rig.submit(prompt)


def test_message_ends_reach_every_output(rig: EngineRig) -> None:
    request = rig.assembly.intake.request(
        [1, 2, 3], SamplingParams(n=2), request_id="r", sink=rig, arrival_ns=0, message_ends=[np.int64(1), 3]
    )
    assert [sequence.spec.message_ends for sequence in request.sequences] == [(1, 3)] * 2
    assert {type(end) for end in request.sequences[0].spec.message_ends} == {int}


@pytest.mark.parametrize("ends", [(0, 2), (2, 2), (2, 1), (4,), (-1,), (1.0,), (True,), ("1",)])
def test_message_ends_that_are_none_are_refused(rig: EngineRig, ends: Any) -> None:
    with pytest.raises(RequestError, match="message_ends must be growing integers from 1 to 3") as caught:
        rig.submit([1, 2, 3], message_ends=ends)
    assert caught.value.param == "message_ends"
