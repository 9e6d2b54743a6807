"""How figures look: one canvas 760 pixels wide, Okabe and Ito's colours, lines and markers that differ without colour.

The figures themselves are `figures.py` (forecast and hero) and `evidence_figures.py` (why to believe them).
"""

from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

INK: Final = "#22262b"
MUTED: Final = "#6b727b"
GRID: Final = "#e4e7ea"
RUNG: Final = "#0072b2"
FORECAST: Final = "#d55e00"
OUTCOME: Final = "#009e73"
NOWCAST: Final = "#cc79a7"
RUNG_SHADES: Final = ("#86b9dd", "#56a0d3", "#2f82bd", "#1a629d", "#0b4a7f")
RUNG_LINES: Final[tuple[Any, ...]] = ((0, (1, 1.2)), (0, (4, 1.4)), (0, (6, 1.4, 1, 1.4)), (0, (9, 2)), "-")
RUNG_MARKERS: Final = ("o", "s", "^", "v", "P", "X", "D")
WIDTH_INCHES: Final = 7.6
DPI: Final = 200
"""Twice the page's 100 pixels per inch, for dense screens."""


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure with one axes."""
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    dress(axes)
    return figure, axes


def canvases(height: float, ratios: tuple[float, ...]) -> tuple[Figure, list[Axes]]:
    """A figure with axes below one another that share their x."""
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    parts = figure.subplots(len(ratios), 1, sharex=True, gridspec_kw={"height_ratios": ratios})
    for axes in parts:
        dress(axes)
    return figure, list(parts)


def dress(axes: Axes) -> None:
    """Spines, ticks and grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9, color=MUTED)
    axes.tick_params(which="minor", color=GRID)
    axes.grid(True, color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=INK, size=10)
    axes.yaxis.label.set(color=INK, size=10)
    axes.yaxis.set_major_locator(MaxNLocator(6))


def legend(axes: Axes, place: Any, *, also: Axes | None = None, columns: int = 1) -> None:
    """Entries in the order drawn (Matplotlib lists error bars last)."""
    handles, labels = axes.get_legend_handles_labels()
    if also is not None:
        more = also.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    if "hero outcome" in labels:
        last = labels.index("hero outcome")
        handles.append(handles.pop(last))
        labels.append(labels.pop(last))
    axes.legend(
        handles,
        labels,
        loc=place,
        ncols=columns,
        fontsize=8.5,
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
        labelcolor=INK,
        handlelength=3.0,
    )


def log_compute_axis(axes: Axes, low: float, high: float) -> None:
    """Compute from `low` to `high` FLOPs."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = np.log10(high / low)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2.5 else (1.0, 3.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power_text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("training compute (FLOPs)")


def log_progress_axis(axes: Axes, low: float) -> None:
    """Progress from `low` to the end, in percent."""
    axes.set_xscale("log")
    axes.set_xlim(low, 1.0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("progress (share of the run's tokens)")


def power_text(value: float) -> str:
    """A number as a power of ten."""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    factor = value / 10.0**exponent
    text = f"10^{{{exponent}}}"
    return f"${text}$" if abs(factor - 1) < 1e-6 else rf"${factor:.0f}\times{text}$"


def rung_styles(count: int) -> list[dict[str, Any]]:
    """A line for each rung, smallest first: lighter and more broken, darker and whole."""
    if not count:
        return []
    places = [round(place) for place in np.linspace(0, len(RUNG_SHADES) - 1, count)]
    return [{"color": RUNG_SHADES[place], "ls": RUNG_LINES[place], "lw": 1.2} for place in places]


def thinned(table: pd.DataFrame, column: str = "loss", rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Progress and values, per-step noise reduced to medians of equal groups of rows."""
    progress, values = (np.asarray(table[name], dtype=float) for name in ("progress", column))
    known = np.isfinite(progress) & np.isfinite(values)
    progress, values = progress[known], values[known]
    if progress.size <= 1.5 * rows:
        return progress, values
    groups = np.array_split(np.arange(progress.size), rows)
    return np.array([progress[g].mean() for g in groups]), np.array([np.median(values[g]) for g in groups])
