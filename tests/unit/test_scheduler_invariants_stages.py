"""Planted corruptions of images, windows, boundaries and copies (see `test_scheduler_invariants`)."""

from __future__ import annotations

import dataclasses

import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import State, check_invariants
from helios_jax.scheduler.invariants_stages import image_windows, streams
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import decoding_state, request
from tests.unit.test_scheduler_invariants import Corruption, column
from tests.unit.test_scheduler_stages import WINDOWED, Run, capturing, spans, stage_state


def reached(base: str) -> State:
    """The first request in the named stage: of several windows, of one, or ended."""
    if base == "terminal":
        return capturing().until(Phase.TERMINAL).state
    if base == "one window":
        return Run(stage_state(rows=1), request(20, 2, image_spans=spans((2, 6)))).until(Phase.VISION).state
    return Run(stage_state(rows=1), WINDOWED).until(Phase[base.upper()]).state


def spec(**changes: object) -> Corruption:
    return lambda state: dataclasses.replace(
        state, specs=(dataclasses.replace(state.specs[0], **changes), *state.specs[1:])
    )


def moved(*third: int) -> Corruption:
    """The third image lies elsewhere."""
    return spec(image_spans=spans((2, 6), (6, 10), third, (20, 24), (26, 28)))  # type: ignore[arg-type]


CORRUPTIONS: list[tuple[int, str, str, Corruption]] = [
    (22, "a window larger than the storage", "vision", column("window_images", 0, 3)),
    (22, "a window that ends too early", "vision", column("window_images", 0, 1)),
    (22, "an image that was not encoded", "prompt", column("images_done", 0, 1)),
    (22, "an image split", "snapshot", moved(11, 16)),
    (22, "an image consumed before it was encoded", "snapshot", moved(10, 12)),
    (23, "a chunk into the next window", "prompt", column("boundary", 0, 20)),
    (23, "a chunk that would split an image", "prompt", column("boundary", 0, 4)),
    (23, "a chunk past the system part", "prompt", spec(system_end=11)),
    (24, "a further window without a private row", "one window", spec(image_spans=spans((2, 6), (10, 18)))),
    (24, "a copy without a row", "snapshot", moved(13, 16)),
    (24, "a prompt at the end of its window", "snapshot", column("phase", 0, int(Phase.PROMPT))),
    (24, "a window restored early", "vision", column("restore_row", 0, 1)),
    (24, "a running request that has ended", "vision", column("terminal_ns", 0, 1)),
    (24, "an end without its time", "terminal", column("terminal_ns", 0, 0)),
    (24, "an end in the future", "terminal", column("terminal_ns", 0, 2**60)),
]


@pytest.mark.parametrize("base", sorted({base for _, _, base, _ in CORRUPTIONS}))
def test_the_uncorrupted_states_pass(base: str) -> None:
    check_invariants(reached(base))


@pytest.mark.parametrize(
    ("number", "base", "corrupt"),
    [pytest.param(number, base, corrupt, id=f"{number}-{name}") for number, name, base, corrupt in CORRUPTIONS],
)
def test_planted_corruption_is_found(number: int, base: str, corrupt: Corruption) -> None:
    with pytest.raises(InvariantError, match=f"invariant {number} "):
        check_invariants(corrupt(reached(base)))


def test_windows_are_whole_images_that_fit() -> None:
    images = spans((0, 3), (3, 6), (6, 8), (9, 17), (17, 18))
    assert image_windows(request(20, 1, image_spans=images), 8) == [(0, 3), (3, 4), (4, 5)]
    assert image_windows(request(20, 1, image_spans=images, restored_len=4), 8) == [(1, 3), (3, 4), (4, 5)]
    assert image_windows(request(20, 1), 8) == [(0, 0)]


@pytest.mark.parametrize("phase", [Phase.INITIALIZE, Phase.RESTORE, Phase.EXTERNAL, Phase.VISION, Phase.PROMPT])
def test_a_stream_stages_away_from_decoding_is_found(phase: Phase) -> None:
    """Earlier invariants catch these by their lengths; this one says what prices rely on."""
    state, handles = decoding_state()
    assert streams(state) is None
    corrupt = column("phase", handles[0].slot, int(phase))(state)
    assert f"is in {phase.name}, stages away" in (streams(corrupt) or "")
    with pytest.raises(InvariantError):
        check_invariants(corrupt)


def test_a_stream_with_a_further_window_is_found() -> None:
    state, handles = decoding_state()
    snapshot = column("phase", handles[0].slot, int(Phase.SNAPSHOT))(state)
    assert streams(snapshot) is None
    assert "has output with 5 of 5" in (streams(spec(image_spans=spans((2, 4)))(snapshot)) or "")
    assert "has output with 4 of 5" in (streams(column("consumed_len", handles[0].slot, 4)(snapshot)) or "")
