"""A sweep drawn: loss against learning rate, one panel a rung, one line a batch, horizon and setting."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from rungwise.analysis.drawing.figure_style import DPI, GRID, INK, MUTED, WIDTH_INCHES
from rungwise.analysis.sweeps.valley import shape

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, told apart by marker too."""
MARKERS: Final = "osD^vP*"


def sweep_figure(result: Mapping[str, Any]) -> Figure:
    """Measured losses, the fitted valley, its lowest point with interval, the recipe's rate, and what diverged.

    Args:
        result: what `ladder sweep --json` prints.
    """
    rungs = list(dict.fromkeys(row["rung"] for row in result["optima"]))
    columns = 1 if len(rungs) == 1 else 2
    height = math.ceil(len(rungs) / columns)
    figure = Figure(figsize=(WIDTH_INCHES, 3.4 * height + 0.5), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(height, columns, squeeze=False)
    for axes, rung in zip(grid.ravel(), rungs, strict=False):
        _panel(axes, rung, result)
    for axes in grid.ravel()[len(rungs) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("held-out loss (nats per token)", color=INK, size=9)
    _legend(figure, result)
    return figure


def _panel(axes: Axes, rung: str, result: Mapping[str, Any]) -> None:
    rows = [row for row in result["optima"] if row["rung"] == rung]
    styles = _styles(result)
    top, bottom = _limits(rows)
    recipes = {row["optimum"]["recipe"] for row in rows}
    for index, row in enumerate(rows):
        colour, marker = styles[_line_name(row, result)]
        recipe = row["optimum"]["recipe"]
        axes.axvline(recipe, color=MUTED if len(recipes) == 1 else colour, lw=1.0, ls=":", zorder=2)
        points = {"ms": 5, "mec": "white", "mew": 0.6, "lw": 0.8 if row["optimum"]["curvature"] is None else 0.0}
        axes.plot(row["values"], row["losses"], marker + "-", color=colour, zorder=4, **points)
        _valley(axes, row["optimum"], colour)
        _lowest(axes, row["optimum"], colour, bottom, top)
        cells = [cell for cell in result["cells"] if cell["diverged"] and _same_line(cell, row)]
        rates = [cell["learning_rate"] for cell in cells]
        axes.plot(
            rates,
            np.full(len(rates), top - 0.05 * (1 + index) * (top - bottom)),
            "x",
            color=colour,
            ms=8,
            mew=2,
            zorder=6,
        )
    axes.set_ylim(bottom, top)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_title(rung, loc="left", color=INK, size=10)
    axes.set_xlabel("peak learning rate", color=INK, size=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(which="both", colors=INK, labelsize=8, color=MUTED)
    axes.grid(True, color=GRID, lw=0.7)
    axes.set_axisbelow(True)


def _valley(axes: Axes, optimum: Mapping[str, Any], colour: str) -> None:
    """The most probable curve, from the smallest stable rate to the largest."""
    if optimum["curvature"] is None:
        return
    rate = np.geomspace(optimum["smallest"], optimum["largest"], 120)
    loss = optimum["loss"] + optimum["curvature"] * shape(np.log(rate / optimum["value"]), optimum["skew"])
    axes.plot(rate, loss, color=colour, lw=1.2, alpha=0.8, zorder=3)


def _lowest(axes: Axes, optimum: Mapping[str, Any], colour: str, bottom: float, top: float) -> None:
    """Optimum and interval below the curve; an open side ends in an arrow at the edge of what was swept."""
    if optimum["value"] is None:
        return
    low = optimum["smallest"] if optimum["low"] is None else optimum["low"]
    high = optimum["largest"] if optimum["high"] is None else optimum["high"]
    level = optimum["loss"] - 0.04 * (top - bottom)
    axes.plot([low, high], [level, level], color=colour, lw=2.2, solid_capstyle="butt", zorder=5)
    if optimum["low"] is None:
        axes.plot([low], [level], "<", color=colour, ms=6, zorder=5)
    if optimum["high"] is None:
        axes.plot([high], [level], ">", color=colour, ms=6, zorder=5)
    if not optimum["at_edge"]:
        axes.plot([optimum["value"]], [level], "|", color=colour, ms=11, mew=2.2, zorder=5)


def _limits(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Top and bottom: all that did not diverge, but not more than a nat above the lowest."""
    losses = np.array([loss for row in rows for loss in row["losses"]] or [0.0, 1.0])
    top = min(float(losses.max()), float(losses.min()) + 1.0)
    room = max(top - float(losses.min()), 0.01)
    return top + 0.12 * room, float(losses.min()) - 0.14 * room


def _line_name(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What tells a line from the others: only what the grid varies."""
    grid = result["grid"]
    words = [f"{axis} ×{row[axis]:g}" for axis in ("batch", "horizon") if len(grid[axis]) > 1]
    words += [f"{field}={value}" for field, value in row["set"].items() if len(grid["set"][field]) > 1]
    return ", ".join(words)


def _styles(result: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys(_line_name(row, result) for row in result["optima"])
    return {
        name: (COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)])
        for index, name in enumerate(names)
    }


def _same_line(cell: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return all(cell[key] == row[key] for key in ("rung", "set", "batch", "horizon"))


def _legend(figure: Figure, result: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, lw=1.2, ms=5, label=name)
        for name, (colour, marker) in _styles(result).items()
        if name
    ]
    plain = {"color": MUTED, "lw": 0}
    handles += [
        Line2D(
            [], [], color=MUTED, lw=2.2, marker="|", ms=11, mew=2.2, label=f"optimum, {result['level']:.0%} interval"
        ),
        Line2D([], [], color=MUTED, lw=1.0, ls=":", label="recipe's rate"),
    ]
    if any(row["optimum"]["low"] is None or row["optimum"]["high"] is None for row in result["optima"]):
        handles.append(Line2D([], [], **plain, marker=">", ms=6, label="optimum may lie further on"))
    if any(cell["diverged"] for cell in result["cells"]):
        handles.append(Line2D([], [], **plain, marker="x", ms=8, mew=2, label="diverged"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False, labelcolor=INK)
