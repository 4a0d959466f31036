"""Invariant of the acceptance estimates and forecasts (see `invariants`)."""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.speculation import MAX_WEIGHT, NUM_SOURCES
from helios_jax.scheduler.state import FREE, State


def estimates(state: State) -> str | None:
    """Means are probabilities, weights within the cap, the prior falls with depth, nothing is writeable.

    A slot that was never occupied still has what it began with.
    """
    known, slots = state.acceptance, state.limits.slots
    depth = max(shape.proposal_depth for shape in state.catalog)
    shapes = {
        "accept_mean": (slots, NUM_SOURCES, depth),
        "accept_weight": (slots, NUM_SOURCES, depth),
        "forecast_mean": (slots, depth),
        "forecast_weight": (slots, depth),
        "prior": (depth,),
        "accept_prior": (NUM_SOURCES, depth),
        "accept_prior_weight": (NUM_SOURCES, depth),
    }
    for name, shape in shapes.items():
        column = getattr(known, name)
        if column.shape != shape or column.dtype != np.float64 or column.flags.writeable:
            return f"{name} is {column.dtype} {column.shape}, writeable {column.flags.writeable}; it must be {shape}"
        most = MAX_WEIGHT if name.endswith("weight") else 1.0
        if not ((column >= 0.0) & (column <= most)).all():
            return f"{name} holds {column.min()} to {column.max()}, the range is 0 to {most}"
    if (np.diff(known.prior) > 1e-12).any():
        return f"the population prior rises: {known.prior}"
    unused = (state.requests.phase == FREE) & (state.requests.generation == 0)
    if (known.accept_weight[unused] != 2.0).any() or (known.forecast_weight[unused] != 2.0).any():
        return f"slots {np.flatnonzero(unused)} were never occupied and have observations"
    return None
