"""Plots: ticks are round and inside, points land where the axes say, nothing breaks on poor data."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from helios_jax.simulation.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Figure,
    linear,
    logarithmic,
    thinned,
)


@pytest.mark.parametrize("low", [0.0, 3.0, -20.0])
@pytest.mark.parametrize("span", [1e-6, 0.03, 1.0, 7.0, 250.0, 4e9])
def test_linear_ticks_are_few_round_and_inside(low: float, span: float) -> None:
    axis = Axis(label="x", low=low, high=low + span)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)
    step = ticks[1] - ticks[0]
    mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-4


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.6), (3.0, 80.0), (1.0, 1e6)])
def test_logarithmic_ticks_are_inside(low: float, high: float) -> None:
    axis = Axis(label="x", low=low, high=high, log=True)
    assert axis.ticks()
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in axis.ticks())
    assert axis.share(math.sqrt(low * high)) == pytest.approx(0.5)


def test_axes_hold_their_values_and_survive_none() -> None:
    assert linear("x", [3.0, 8.0]).share(8.0) == 1.0
    axis = logarithmic("x", np.array([0.0, 5.0, 50.0]))
    assert 0 < axis.share(5.0) < axis.share(50.0) < 1
    for empty in (linear("x", []), linear("x", [0.0]), logarithmic("x", []), logarithmic("x", [0.0, 7.0])):
        assert empty.high > empty.low
        assert all(math.isfinite(tick) for tick in empty.ticks())


def figure() -> Figure:
    return Figure("f", Axis(label="x", low=0.0, high=10.0), Axis(label="y", low=0.0, high=1.0))


def test_points_land_where_the_axes_say() -> None:
    plot = figure()
    plot.cloud(np.array([[0.0, 0.0], [10.0, 1.0], [99.0, -5.0]]), 0)
    places = re.findall(r'<circle class="dot c0" cx="([\d.]+)" cy="([\d.]+)"', plot.svg())
    left, right, bottom, top = f"{LEFT:.1f}", f"{WIDTH - RIGHT:.1f}", f"{HEIGHT - BOTTOM:.1f}", f"{TOP:.1f}"
    assert places == [(left, bottom), (right, top), (right, bottom)]  # the last one is outside: drawn at the edge


def test_a_line_breaks_where_nothing_is_known() -> None:
    plot = figure()
    plot.line(np.array([[0, 0], [1, 1], [2, np.nan], [3, 1], [4, 0], [5, np.nan], [6, 1]], np.float64), 1)
    lines = re.findall(r'points="([^"]*)"', plot.svg())
    assert [len(line.split()) for line in lines] == [2, 2]  # a single known point is no line


def test_bars_stack_and_the_legend_names_them() -> None:
    plot = figure()
    plot.bars(np.array([0.0, 5.0, 10.0]), np.array([[0.25, 0.0], [0.5, 1.0]]), ["decode", "<mixed>"])
    svg = plot.svg()
    rects = re.findall(r'<rect class="bar (c\d)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
    assert [rect[0] for rect in rects] == ["c0", "c1", "c1"]
    scale = HEIGHT - TOP - BOTTOM
    assert [float(rect[4]) / scale for rect in rects] == pytest.approx([0.25, 0.5, 1.0], abs=1e-3)
    assert float(rects[1][2]) + float(rects[1][4]) == pytest.approx(float(rects[0][2]), abs=0.11)
    assert "&lt;mixed&gt;" in svg


def test_long_data_is_thinned_and_keeps_its_ends() -> None:
    rows = np.arange(50_000)
    kept = thinned(rows)
    assert len(kept) == MAX_POINTS
    assert (kept[0], kept[-1]) == (0, 49_999)
    assert thinned(rows[:10]).tolist() == list(range(10))


def test_a_limit_outside_is_left_out() -> None:
    plot = figure()
    plot.limit(20.0, "far", vertical=True)
    plot.limit(9.0, "near", vertical=True)
    assert "far" not in plot.svg()
    assert "near" in plot.svg()
