"""Planted corruptions of the acceptance estimates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import State, check_invariants, complete, plan_next
from tests.unit.scheduler_toy import timing
from tests.unit.test_scheduler_sidecars import flying, round_records

Corruption = Callable[[State], State]


def taught_state() -> State:
    """Two of three slots have been through a round of three proposals."""
    state, _, handles = flying()
    state, _ = complete(state, 1, round_records(handles, (3, 1, 2), (3, 3, 4)), timing())
    return state


def column(name: str, index: tuple[int, ...], value: float) -> Corruption:
    def corrupt(state: State) -> State:
        changed = getattr(state.acceptance, name).copy()
        changed[index] = value
        changed.setflags(write=False)
        return dataclasses.replace(state, acceptance=dataclasses.replace(state.acceptance, **{name: changed}))

    return corrupt


def shaped(name: str, change: Callable[[np.ndarray], np.ndarray], *, write: bool = False) -> Corruption:
    def corrupt(state: State) -> State:
        changed = change(getattr(state.acceptance, name)).copy()
        changed.setflags(write=write)
        return dataclasses.replace(state, acceptance=dataclasses.replace(state.acceptance, **{name: changed}))

    return corrupt


CORRUPTIONS: list[tuple[int, str, Corruption]] = [
    (25, "a mean above one", column("accept_mean", (0, 0, 0), 1.5)),
    (25, "a mean that is no number", column("forecast_mean", (0, 1), np.nan)),
    (25, "a weight above the cap", column("accept_weight", (1, 0, 2), 129.0)),
    (25, "a negative weight", column("forecast_weight", (1, 2), -1.0)),
    (25, "a prior outside [0, 1]", column("prior", (0,), 1.1)),
    (25, "a prior that rises", column("prior", (2,), 0.9)),
    (25, "a population without numbers", column("accept_prior", (1, 0), np.nan)),
    (25, "a population of too much weight", column("accept_prior_weight", (0, 2), 129.0)),
    (25, "observations of a slot without history", column("accept_weight", (2, 0, 0), 3.0)),
    (25, "a depth too few", shaped("forecast_mean", lambda c: c[:, :2])),
    (25, "half precision", shaped("accept_mean", lambda c: c.astype(np.float32))),
    (25, "a writeable column", shaped("prior", lambda c: c, write=True)),
]


def test_the_uncorrupted_state_passes() -> None:
    state = taught_state()
    assert plan_next(state) is not None
    check_invariants(state)


@pytest.mark.parametrize(("number", "name", "corrupt"), CORRUPTIONS, ids=[f"{n}-{name}" for n, name, _ in CORRUPTIONS])
def test_planted_corruption_is_found(number: int, name: str, corrupt: Corruption) -> None:
    with pytest.raises(InvariantError, match=f"invariant {number} "):
        check_invariants(corrupt(taught_state()))
