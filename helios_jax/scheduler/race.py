"""Which pairs are worth a search: a bound of their score against the best candidate so far.

Pairs of a prerequisite and an inference are many, and for one kind of inference they usually lose
together: a few sums bound all of their scores at once. A whole kind is left out or none of it,
because the filter of padding compares pairs of one kind, and what it discards depends on what is
there. Where losers matter as well (a timing refresh) there is no race.
"""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.candidates import Candidates, Decision, decode_values, prompt_rows, scores
from helios_jax.scheduler.joint import prefix_sums
from helios_jax.scheduler.packed import PromptRows, usable_tokens
from helios_jax.scheduler.pruning import ROUNDING
from helios_jax.scheduler.sequences import Stage, terminal_values


class Race:
    """The best score so far, and bounds for what is still to come."""

    def __init__(self, decision: Decision) -> None:
        self._decision, self._least = decision, -np.inf
        self._unseen: list[Candidates] = []
        self._streams: tuple[np.ndarray, np.ndarray] | None = None

    def saw(self, found: list[Candidates]) -> None:
        """Candidates entered the race; only measured ones have a score to beat."""
        self._unseen += found

    @property
    def least(self) -> float:
        """Score that a candidate must reach to win, -inf while nothing measured competes."""
        for block in self._unseen:
            rates = scores(block, self._decision.values.waiting)
            self._least = max(self._least, float(rates.max(where=block.known, initial=-np.inf)))
        self._unseen = []
        return self._least

    def is_lost(self, stage: Stage, following: np.ndarray, prompts: np.ndarray) -> bool:
        """Whether no pair of a program of the stage and one of `following` can reach the best score.

        Args:
            following: int64 [Q] programs of one kind.
            prompts: int64 [n] slots of the prompts that may take part.
        """
        decision, nobody = self._decision, not len(following)
        first_ms, rest_ms = decision.duration_ms[stage.programs][:, None], decision.duration_ms[following]
        if nobody or self.least == -np.inf or not (first_ms.all() and rest_ms.all()):  # the unmeasured always compete
            return False
        total_ms = first_ms + rest_ms
        rows = prompt_rows(decision, prompts) if len(prompts) else None
        if decision.state.programs.delivers[following[0]]:
            value = self._deliveries(following, rows, total_ms)
        else:
            value = self._prefills(following, rows) + np.zeros(total_ms.shape)
        if len(stage.terminal):
            times = (np.broadcast_to(ms, total_ms.shape).ravel() for ms in (first_ms, rest_ms))
            value += terminal_values(decision, stage.terminal, *times).sum(axis=1).reshape(total_ms.shape)
        gain, loss = value / total_ms, 0.5 * total_ms * decision.values.waiting
        return float((gain - loss + ROUNDING * (gain + loss)).max()) < self.least

    def _deliveries(self, following: np.ndarray, rows: PromptRows | None, total_ms: np.ndarray) -> np.ndarray:
        """Bound of decoding and mixed programs: the best streams and the best prompt; float64 [F, Q]."""
        programs = self._decision.state.programs
        lanes, prices = self._sums()
        count = np.minimum(programs.batch[following], len(prices) - 1)
        value = lanes[programs.lane_class[following], count] + prices[count] * total_ms
        if rows is not None:
            usable = usable_tokens(rows.remaining, programs.prompt[following], None)
            worth = usable * rows.token_value + np.where(usable == rows.remaining, rows.bonus, 0.0)
            value += worth.max(axis=1)
        return value

    def _prefills(self, following: np.ndarray, rows: PromptRows | None) -> np.ndarray:
        """Bound of prefill programs: tokens are filled up with prompts by their value per token; float64 [Q]."""
        if rows is None:
            return np.zeros(len(following))
        programs = self._decision.state.programs
        density = rows.token_value + rows.bonus / rows.remaining
        order = (-density).argsort()
        tokens = np.concatenate([[0], rows.remaining[order].cumsum()])
        value = np.concatenate([[0.0], (rows.remaining * density)[order].cumsum()])
        return np.interp(programs.tokens[following], tokens, value)

    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums of the largest worths of streams at the start, [classes, n + 1], and of their age prices, [n + 1]."""
        if self._streams is None:
            decision = self._decision
            slots = np.flatnonzero(decision.state.requests.streams)
            worth = decode_values(decision, slots, np.zeros(1))
            worth = worth + decision.values.output_token[slots] * (decision.tokens[:, slots] - 1.0)
            worth = -np.sort(-np.where(decision.rows[:, slots] > 0, worth, 0.0), axis=1)
            prices = -np.sort(-decision.values.age_price[slots])
            self._streams = prefix_sums(worth), prefix_sums(prices[None])[0]
        return self._streams
