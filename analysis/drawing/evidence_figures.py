"""Figures of what a forecast rests on: the collapse of its curves, its back-test, and what each rung does to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rungwise.analysis.drawing.figure_style import (
    FORECAST,
    MUTED,
    OUTCOME,
    RUNG,
    RUNG_MARKERS,
    canvas,
    canvases,
    legend,
    log_progress_axis,
    rung_styles,
)
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.points import target_flops
from rungwise.analysis.whole_curves.curve_rows import identity_of, smooth_curve, split_runs

ROWS = 60


def collapse_figure(curves: pd.DataFrame, *, floor: float, first: float = 0.03) -> Figure:
    """Every rung's excess over `floor` as a share of its final excess, and how far each lies from their mean.

    Curves that fall on one another say that the hero's will too; `floor` comes from `forecast_curve`'s "collapse", or
    from the law.

    Raises:
        ValueError: the floor is not below every final loss, or as `forecast_curve` on the curves.
    """
    runs = sorted(split_runs(curves), key=lambda run: target_flops(identity_of(run)))
    start = max(first, *(float(run["progress"].iloc[0]) for run in runs))
    grid = np.geomspace(start, 1.0, ROWS)
    loss = np.exp([smooth_curve(run["progress"].clip(upper=1.0), run["loss"], grid) for run in runs])
    if floor >= loss[:, -1].min():
        raise ValueError(f"floor {floor} must lie below every final loss, {loss[:, -1].min():g} at least")
    share = (loss - floor) / (loss[:, -1:] - floor)
    mean = np.exp(np.log(share).mean(axis=0))
    apart = 100.0 * np.log((floor + (loss[:, -1:] - floor) * mean) / loss)
    figure, (above, below) = canvases(5.0, (2.6, 1.0))
    below.axhline(0.0, color=MUTED, lw=1.0)
    for index, (run, style) in enumerate(zip(runs, rung_styles(len(runs)), strict=True)):
        marks = {"marker": RUNG_MARKERS[index % len(RUNG_MARKERS)], "ms": 4.5, "markevery": (3 * index % 12, 12)}
        above.plot(grid, share[index], **style, **marks, label=str(run["run"].iloc[0]))
        below.plot(grid, apart[index], **style, **marks)
    above.set_yscale("log")
    ticks = [tick for tick in (1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0) if tick <= 1.05 * share.max()]
    above.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    above.minorticks_off()
    above.set_ylabel(f"(L − {floor:.3g}) ÷ (final L − {floor:.3g})")
    below.set_ylabel("mean collapse\nagainst run (% of L)")
    legend(above, "upper right", columns=2 if len(runs) > 4 else 1)
    log_progress_axis(below, start)
    return figure


def backtest_figure(rows: Sequence[Mapping[str, Any]], *, level: float = 0.9) -> Figure:
    """Each held-out run forecast from the smaller ones: error and interval in percent of what was measured.

    Args:
        rows: run or rung, flops, observed, point, low, high (None without an interval), as the back-test has them.
    """
    figure, axes = canvas(0.42 * max(len(rows), 3) + 1.6)
    axes.axvline(0.0, color=OUTCOME, lw=1.6, label="measured")
    places = np.arange(len(rows))[::-1]
    observed = np.array([row["observed"] for row in rows])
    points = 100.0 * (np.array([row["point"] for row in rows]) / observed - 1.0)
    _intervals(axes, places, rows, observed)
    kinds = np.array([_kind(row) for row in rows])
    marks = {"holds it": ("D", FORECAST, 6.5), "misses it": ("X", FORECAST, 9.0), "not known": ("o", MUTED, 6.5)}
    for kind, (marker, color, size) in marks.items():
        if (chosen := kinds == kind).any():
            axes.plot(points[chosen], places[chosen], marker, color=color, ms=size, mec="white", zorder=4,
                      label=f"forecast, {level:.0%} interval {kind}")  # fmt: skip
    axes.set_yticks(places, [_row_name(row) for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("forecast against measured loss (%)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    return figure


def leave_one_out_figure(
    forecast: Forecast, rows: Sequence[Mapping[str, Any]], *, unit: str = "nats per token"
) -> Figure:
    """The hero's forecast with all rungs, and without each of them (`leave_one_rung_out`)."""
    figure, axes = canvas(0.42 * (len(rows) + 1) + 1.6)
    if forecast.low is not None and forecast.high is not None:
        axes.axvspan(
            forecast.low, forecast.high, color=FORECAST, alpha=0.15, lw=0, label=f"{forecast.level:.0%} interval"
        )
    axes.axvline(forecast.point, color=FORECAST, lw=1.6, label=f"all rungs: {forecast.point:.4g}")
    places = np.arange(len(rows))[::-1]
    points = np.array([row["point"] for row in rows])
    _intervals(axes, places, rows, None, color=RUNG)
    axes.plot(points, places, "o", color=RUNG, ms=6.5, mec="white", label="without that rung", zorder=4)
    axes.set_yticks(places, [f"without {row['rung']}" for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(f"hero's final loss ({unit})")
    axes.set_xlim(*_limits(forecast, rows))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    return figure


def _intervals(
    axes: Axes,
    places: np.ndarray,
    rows: Sequence[Mapping[str, Any]],
    observed: np.ndarray | None,
    color: str = FORECAST,
) -> None:
    for index, (place, row) in enumerate(zip(places, rows, strict=True)):
        if row["low"] is None or row["high"] is None:
            continue
        ends = np.array([row["low"], row["high"]])
        ends = ends if observed is None else 100.0 * (ends / observed[index] - 1.0)
        axes.plot(ends, [place, place], color=color, lw=2.0, alpha=0.55, marker="|", ms=9, zorder=3)


def _limits(forecast: Forecast, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """All of it; intervals wider than four times what the points and the forecast's own interval span are cut."""
    own = [value for value in (forecast.low, forecast.high) if value is not None]
    inner = [forecast.point, *own, *(row["point"] for row in rows)]
    reach = 4.0 * max(abs(value - forecast.point) for value in inner)
    ends = [row[key] for row in rows for key in ("low", "high") if row[key] is not None]
    low = max(min([*inner, *ends]), forecast.point - reach)
    high = min(max([*inner, *ends]), forecast.point + reach)
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def _kind(row: Mapping[str, Any]) -> str:
    if row["low"] is None or row["high"] is None:
        return "not known"
    return "holds it" if row["low"] <= row["observed"] <= row["high"] else "misses it"


def _row_name(row: Mapping[str, Any]) -> str:
    name = str(row.get("rung", row.get("run", "")))
    ratio = row.get("extrapolation_ratio")
    return f"{name} ({ratio:.3g}×)" if ratio else name
