"""What a device says of proposals, checked before anything learns from it: confidence and survival sidecars."""

from __future__ import annotations

import numpy as np

from helios_jax.errors import InvariantError

TOLERANCE = 1e-5  # rounding allowed to float32 running products of the device


def checked_confidence(confidence: np.ndarray, lanes: np.ndarray, produced: int) -> np.ndarray:
    """The sidecar as float64, every produced prefix of every lane being a valid probability.

    Raises:
        InvariantError: Wrong shape, a value outside [0, 1] or not finite, or a rising joint probability.
    """
    planes = _numbers(confidence, "confidence sidecar")
    if planes.ndim != 3 or planes.shape[0] != 2 or planes.shape[1] != len(lanes) or planes.shape[2] < produced:
        raise InvariantError(
            f"the confidence sidecar must be [2, {len(lanes)}, >= {produced}], it is {list(planes.shape)}"
        )
    covered = np.broadcast_to(lanes[:, None], (len(lanes), produced))
    values = planes[:, :, :produced]
    valid = (values >= -TOLERANCE) & (values <= 1.0 + TOLERANCE)  # NaN compares false
    if not (valid | ~covered).all():
        slot = int(np.argwhere(~(valid | ~covered))[0, 1])
        raise InvariantError(f"the confidence of slot {slot} is not made of probabilities: {values[:, slot].tolist()}")
    _check_falling(values[1], covered, "joint confidence", partial=False)
    return planes


def checked_survival(rows: np.ndarray, offered: np.ndarray) -> np.ndarray:
    """The survival rows as float64, each number of an offered prefix being a probability that does not rise.

    Raises:
        InvariantError: Wrong shape, a value outside [0, 1] or infinite, or a rising row.
    """
    values = _numbers(rows, "survival sidecar")
    most = int(offered.max(initial=0))
    if values.ndim != 2 or len(values) != len(offered) or values.shape[1] < most:
        raise InvariantError(f"survival rows must be [{len(offered)}, >= {most}], they are {list(values.shape)}")
    covered = np.arange(1, values.shape[1] + 1) <= offered[:, None]
    _check_falling(values, covered, "survival", partial=True)
    return values


def _check_falling(values: np.ndarray, covered: np.ndarray, what: str, *, partial: bool) -> None:
    """Covered values are probabilities that never rise along a row; with `partial` NaN covers nothing."""
    numbers = covered & ~np.isnan(values) if partial else covered
    lowest = np.minimum.accumulate(np.where(numbers, values, np.inf), axis=-1)
    valid = (values >= -TOLERANCE) & (values <= 1.0 + TOLERANCE) & (values <= lowest + TOLERANCE)
    if (numbers & ~valid).any():
        row = int(np.argwhere(numbers & ~valid)[0, 0])
        raise InvariantError(f"the {what} of slot {row} must fall within [0, 1], it is {values[row].tolist()}")


def _numbers(values: object, what: str) -> np.ndarray:
    """float64 of what a device reported.

    Raises:
        InvariantError: It is not an array of numbers.
    """
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InvariantError(f"the {what} is not an array of numbers: {error}") from error
