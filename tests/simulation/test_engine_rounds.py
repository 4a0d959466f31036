"""The engine over the fake device's rounds: every source of proposals gives the slow reference's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from helios_jax.errors import DeviceError
from helios_jax.scheduler.catalog import Allocation, ProgramKind
from helios_jax.testing import EngineRig, FakeDraft, FakeFrame, expected_tokens, hashed_text

REPEATS = b"one two three one two three one two "


def repeating(tokens: np.ndarray, prompt_len: int, seed: int | None) -> int:
    """A model that mostly repeats itself, so that copies are right now and then."""
    return REPEATS[len(tokens) % len(REPEATS)] if len(tokens) % 11 else hashed_text(tokens, prompt_len, seed)


@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("width", ["adaptive", "fixed", "off"])
@pytest.mark.parametrize("method", ["draft", "copy"])
def test_rounds_give_the_tokens_of_the_slow_reference(method: str, width: str, agreement: float) -> None:
    with EngineRig(
        max_slots=3, spec_method=method, spec_width=width, num_draft_tokens=3, next_token=repeating,
        draft=FakeDraft(agreement), speculative_token_capacity=8,
    ) as rig:  # fmt: skip
        prompts = {f"r{n}": list(REPEATS[: 5 + 7 * n]) for n in range(5)}
        seeds = {name: 7 * len(name) + number if number % 2 else None for number, name in enumerate(prompts)}
        for number, (name, prompt) in enumerate(prompts.items()):
            sampled = {"temperature": 1.0, "seed": seeds[name]} if seeds[name] is not None else {}
            rig.submit(prompt, name, max_tokens=30 + number, **sampled)
        rig.finish(*prompts)
        for number, (name, prompt) in enumerate(prompts.items()):
            expected = expected_tokens(repeating, prompt, 30 + number, seeds[name])
            assert rig.text(name) == bytes(expected).decode()
        assert rig.ledger_problems() == []
        rounds = [f.shape for f in rig.core.runner.frames if f.shape.kind is ProgramKind.SPECULATIVE]
        assert any(shape.proposal_depth for shape in rounds) == (width != "off")


def test_the_fake_device_shares_target_rows_by_confidence() -> None:
    """A device-allocated round of two lanes with three rows: the surer lane gets the third one."""
    from helios_jax.aot.abi import completion_layout, control_layout
    from helios_jax.testing import fake_core

    core = fake_core(max_slots=2, spec_method="copy", num_draft_tokens=3, speculative_token_capacity=8)
    shape = next(
        s for s in core.catalog if s.allocation is Allocation.PREFIX_LIMIT and s.batch_capacity == 2
    )  # fmt: skip
    assert shape.packed_capacity == 4
    init = next(s for s in core.catalog if s.kind is ProgramKind.INITIALIZE and s.batch_capacity == 2)
    ints, floats, fields = control_layout(init, core.dims).new()
    fields["slot"][:] = [0, 1]
    fields["bias_ids"][:] = -1
    core.runner.submit(init, ints, floats).wait()
    core.runner.state.pending[:2] = [65, 66]
    ints, floats, fields = control_layout(shape, core.dims).new()
    fields["slot"][:], fields["limit"][:], fields["calibration"][:] = [0, 1], 4, [1, 0]
    fields["page_table"][:, 0] = [1, 2]
    fields["proposal"][:] = 97
    fields["confidence"][0], fields["confidence"][1] = [0.5, 0.5, 0.5], [0.9, 0.9, 0.4]
    ints, floats, timing = core.runner.submit(shape, ints, floats).wait()
    out = completion_layout(shape, core.dims).split(ints, floats)
    assert timing.device_ns[0] > 0
    assert out["offered"].tolist() == [0, 2]
    np.testing.assert_allclose(out["confidence"][1], [[0.5, 0.25, 0.125], [0.9, 0.81, 0.324]], rtol=1e-6)


@pytest.mark.parametrize("allocation", list(Allocation))
def test_a_round_that_the_device_loses_costs_its_requests_only(allocation: Allocation) -> None:
    """Whoever allocates the rows: a lost round has no sidecar, and those who wait go on."""
    lost = []

    def lose(frame: FakeFrame) -> None:
        shape = frame.shape
        if shape.proposal_depth and shape.allocation is allocation and not lost:
            lost.append(shape)
            raise RuntimeError("lost")

    with EngineRig(
        start=False, max_slots=2, spec_method="draft", num_draft_tokens=5, speculative_token_capacity=6, on_submit=lose,
        spec_width="adaptive", draft=FakeDraft(0.5),
    ) as rig:  # fmt: skip
        names = [rig.submit([97 + n] * 9, max_tokens=60) for n in range(5)]
        rig.engine.start()
        ends = rig.finish(*names)
        failed = [end for end in ends if isinstance(end, Exception)]
        assert lost
        assert 1 <= len(failed) <= 2
        assert all(isinstance(end, DeviceError) for end in failed)
        assert rig.engine.failure is None
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            if not isinstance(end, Exception):
                assert rig.text(name) == bytes(expected_tokens(hashed_text, [97 + number] * 9, 60)).decode()
        assert rig.ledger_problems() == []
