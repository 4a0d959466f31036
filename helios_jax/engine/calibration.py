"""Calibration of a source's confidence: a logistic map that completed rounds teach.

    p = sigmoid(scale * logit(confidence) + shift)

Identity until taught. The fit is a ridge-penalised logistic regression over the newest
observations, by a few Newton steps from the present parameters; the penalty pulls towards the
identity, so that few or one-sided observations move it little. The parameters travel to the
device in the control vector of the next round.
"""

from __future__ import annotations

import numpy as np

WINDOW = 4096  # newest observations that count
REFIT_EVERY = 64  # new observations before the map is fitted again
PENALTY = 8.0  # in observations: the weight of the prior at the identity
NEWTON_STEPS = 4
EPSILON = 1e-6  # confidences are kept off 0 and 1, where the logit is infinite
MIN_SCALE, MAX_SCALE = 0.05, 20.0  # a map that falls, or a step, is never learnt from noise


def logit(probability: np.ndarray) -> np.ndarray:
    """Log-odds, finite: probabilities are clipped to [1e-6, 1 - 1e-6]."""
    clipped = np.clip(probability, EPSILON, 1.0 - EPSILON)
    return np.log(clipped) - np.log1p(-clipped)


class Calibration:
    """The map of one proposal source."""

    def __init__(self) -> None:
        self.scale, self.shift = 1.0, 0.0
        self._raw: list[float] = []
        self._right: list[bool] = []
        self._new = 0

    def apply(self, confidence: np.ndarray) -> np.ndarray:
        """Calibrated probabilities of raw confidences."""
        return 1.0 / (1.0 + np.exp(-(self.scale * logit(np.asarray(confidence)) + self.shift)))

    def raw_logit(self, calibrated: np.ndarray, mapped: tuple[float, float] | None = None) -> np.ndarray:
        """The raw log-odds behind confidences that the device mapped with `mapped` (None: the present parameters)."""
        scale, shift = mapped or (self.scale, self.shift)
        return (logit(np.asarray(calibrated, np.float64)) - shift) / scale

    def observe(self, raw_logits: np.ndarray, accepted: int) -> None:
        """One lane of a round: the proposals before `accepted` were right, the next one was not.

        Args:
            raw_logits: [judged] log-odds, one of each proposal up to the first rejection.
        """
        self._raw += [float(x) for x in raw_logits]
        self._right += [depth < accepted for depth in range(len(raw_logits))]
        self._new += len(raw_logits)
        if self._new >= REFIT_EVERY:
            del self._raw[:-WINDOW], self._right[:-WINDOW]
            self._new = 0
            self._fit()

    def _fit(self) -> None:
        x, y = np.array(self._raw), np.array(self._right, np.float64)
        features = np.stack([x, np.ones_like(x)], axis=1)
        theta, prior = np.array([self.scale, self.shift]), np.array([1.0, 0.0])
        for _ in range(NEWTON_STEPS):
            p = 1.0 / (1.0 + np.exp(-np.clip(features @ theta, -40.0, 40.0)))
            gradient = features.T @ (p - y) + PENALTY * (theta - prior)
            hessian = (features * (p * (1.0 - p))[:, None]).T @ features + PENALTY * np.eye(2)
            theta = theta - np.linalg.solve(hessian, gradient)
        self.scale, self.shift = float(np.clip(theta[0], MIN_SCALE, MAX_SCALE)), float(np.clip(theta[1], -20.0, 20.0))
