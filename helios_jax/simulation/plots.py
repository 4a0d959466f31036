"""Plots as inline SVG text: axes, lines, points, stacked bars. No dependencies, no scripts.

Colours are CSS classes (`c0` ... `c8`, `rule`, `ink`, `grid`), which the page defines for light and dark. Every
number is written with few digits, so equal data give equal text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 46
MAX_POINTS = 1200  # of a line or a cloud; more are thinned evenly
_LOG_STEPS = (1, 2, 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A scale from `low` to `high`, linear or logarithmic."""

    label: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Position of a value, 0 at `low`, 1 at `high`; values outside are drawn at the edge."""
        if self.log:
            value = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            value = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, value))

    def ticks(self) -> list[float]:
        """About five round values."""
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = _LOG_STEPS if len(exponents) < 4 else (1,)
            values = [step * 10.0**exponent for exponent in exponents for step in steps]
            return [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
        step = _round_step((self.high - self.low) / 5.0)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def linear(label: str, values: Sequence[float] | np.ndarray, *, low: float | None = 0.0) -> Axis:
    """A linear axis that holds all values."""
    most = max((float(v) for v in values), default=1.0)
    least = low if low is not None else min((float(v) for v in values), default=0.0)
    return Axis(label=label, low=least, high=most if most > least else least + 1.0)


def logarithmic(label: str, values: Sequence[float] | np.ndarray) -> Axis:
    """A logarithmic axis that holds all positive values."""
    positive = [float(v) for v in values if v > 0]
    low, high = min(positive, default=1.0), max(positive, default=10.0)
    return Axis(label=label, low=low * 0.9, high=high * 1.1 if high * 1.1 > low * 1.8 else low * 1.8, log=True)


def _round_step(rough: float) -> float:
    exponent = math.floor(math.log10(rough)) if rough > 0 else 0
    return next(m * 10.0**exponent for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough * 0.999)


def thinned(values: np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """At most `most` rows, evenly spaced, the first and the last kept."""
    if len(values) <= most:
        return values
    return values[np.round(np.linspace(0, len(values) - 1, most)).astype(np.int64)]


class Figure:
    """One plot; add marks, then `svg()`.

    Args:
        title: For screen readers; the page writes its own heading.
        x, y: The axes.
    """

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._title, self._x, self._y = title, x, y
        self._marks: list[str] = []
        self._legend: list[tuple[str, str]] = []

    def line(self, points: np.ndarray, colour: int, label: str = "") -> None:
        """Connected points [n, 2]; a gap where a value is not finite."""
        for run in _runs(thinned(np.asarray(points, np.float64))):
            path = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in run.tolist())
            self._marks.append(f'<polyline class="line c{colour}" points="{path}"/>')
        self._named(label, f"c{colour}")

    def cloud(self, points: np.ndarray, colour: int, label: str = "") -> None:
        """Separate small points [n, 2]."""
        for x, y in thinned(np.asarray(points, np.float64)).tolist():
            self._marks.append(f'<circle class="dot c{colour}" cx="{self._px(x):.1f}" cy="{self._py(y):.1f}" r="2"/>')
        self._named(label, f"c{colour}")

    def points(self, points: Sequence[tuple[float, float, str]], colour: int) -> None:
        """Large points with a text each that shows on hovering."""
        for x, y, text in points:
            place = f'cx="{self._px(x):.1f}" cy="{self._py(y):.1f}"'
            self._marks.append(f'<circle class="dot c{colour}" {place} r="5"><title>{escape(text)}</title></circle>')

    def bars(self, edges: np.ndarray, heights: np.ndarray, labels: Sequence[str], first_colour: int = 0) -> None:
        """Stacked bars: edges [n + 1], heights [layers, n]."""
        base = np.zeros(len(edges) - 1)
        for layer, (row, label) in enumerate(zip(heights, labels, strict=True)):
            colour = first_colour + layer
            for left, right, low, height in zip(edges[:-1], edges[1:], base, row, strict=True):
                if height > 0:
                    x, y = self._px(left), self._py(low + height)
                    size = f'width="{self._px(right) - x:.1f}" height="{self._py(low) - y:.1f}"'
                    self._marks.append(f'<rect class="bar c{colour}" x="{x:.1f}" y="{y:.1f}" {size}/>')
            base = base + row
            self._named(label, f"c{colour}")

    def limit(self, value: float, label: str, *, vertical: bool) -> None:
        """A dashed line at a value, as for an objective."""
        axis = self._x if vertical else self._y
        if not axis.low <= value <= axis.high:
            return
        at = self._px(value) if vertical else self._py(value)
        ends = (at, TOP, at, HEIGHT - BOTTOM) if vertical else (LEFT, at, WIDTH - RIGHT, at)
        x1, y1, x2, y2 = ends
        if vertical:  # beside the line, on the side that has room
            right = at < WIDTH * 2 / 3
            place = (
                f'class="ink{"" if right else " end"}" x="{at + (4 if right else -4):.1f}" y="{HEIGHT - BOTTOM - 8}"'
            )
        else:
            place = f'class="ink" x="{LEFT + 4}" y="{at - 4:.1f}"'
        self._marks.append(f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        self._marks.append(f"<text {place}>{escape(label)}</text>")

    def svg(self) -> str:
        """The figure with its legend."""
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self._title)}">',
            *self._grid(),
            *self._marks,
            "</svg>",
        ]
        if len(self._legend) > 1:
            keys = "".join(
                f'<span><i class="key {colour}"></i>{escape(label)}</span>' for label, colour in self._legend
            )
            parts.append(f'<p class="legend">{keys}</p>')
        return "\n".join(parts)

    def _named(self, label: str, colour: str) -> None:
        if label and (label, colour) not in self._legend:
            self._legend.append((label, colour))

    def _px(self, value: float) -> float:
        return LEFT + self._x.share(value) * (WIDTH - LEFT - RIGHT)

    def _py(self, value: float) -> float:
        return HEIGHT - BOTTOM - self._y.share(value) * (HEIGHT - TOP - BOTTOM)

    def _grid(self) -> list[str]:
        parts = []
        for value in self._y.ticks():
            at = self._py(value)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
            parts.append(f'<text class="ink end" x="{LEFT - 6}" y="{at + 4:.1f}">{_number(value)}</text>')
        for value in self._x.ticks():
            at = self._px(value)
            parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text class="ink mid" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}">{_number(value)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="ink mid" x="{middle}" y="{HEIGHT - 8}">{escape(self._x.label)}</text>')
        turned = f'transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"'
        parts.append(f'<text class="ink mid" {turned}>{escape(self._y.label)}</text>')
        return parts


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}"
    return f"{value:.6g}"


def _runs(points: np.ndarray) -> list[np.ndarray]:
    """Runs of finite points, at least two long."""
    finite = np.isfinite(points).all(axis=1)
    cuts = np.flatnonzero(np.diff(finite)) + 1
    return [run for run in np.split(points, cuts) if len(run) > 1 and np.isfinite(run[0]).all()]
