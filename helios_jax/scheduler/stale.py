"""Which stale program a funded timing refresh may run instead of the ordinary winner.

The budget is `refresh`'s; this reads a decision's columns. Source: specification, "Funded
timing refresh".
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler import cost
from helios_jax.scheduler.candidates import Candidates, Decision


def stale_alternatives(decision: Decision, candidates: Candidates, winner: int) -> np.ndarray:
    """The candidates among which ordinary ranking chooses a timing refresh; none is all False.

    Every feasible candidate whose submitted program is measured, stale and not the winner's own
    (that one refreshes itself by ordinary service) is an alternative. The programs neither
    observed nor attempted for longest come first: an attempt whose timing was invalid does not
    make the estimate fresh, but sends the program to the back of the queue.

    Args:
        winner: Row of the ordinary winner, which is determinate.

    Returns:
        bool [C].
    """
    state, costs = decision.state, decision.state.costs
    first = candidates.first
    is_stale = cost.stale(costs, state.now_ns, state.policy.estimate_ttl_ns)[first]
    eligible = candidates.known & is_stale & (first != first[winner])
    if not eligible.any():
        return eligible
    since_ns = np.maximum(costs.observed_ns, costs.attempted_ns)[first]
    oldest: np.ndarray = eligible & (since_ns == since_ns[eligible].min())
    return oldest
