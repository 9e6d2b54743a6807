"""Figures as Matplotlib objects: no global state, ready for a page 760 pixels wide. Numbers come from the
other modules.

Colours are Okabe and Ito's, told apart by shape and line as well as by hue.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from rungwise.analysis.forecast import Forecast
from rungwise.analysis.laws import PowerLaw

INK: Final = "#22262b"
MUTED: Final = "#6b727b"
GRID: Final = "#e4e7ea"
RUNG: Final = "#0072b2"
FORECAST: Final = "#d55e00"
OUTCOME: Final = "#009e73"
RUNG_SHADES: Final = ("#9ecae1", "#6baed6", "#3f8fc4", "#1f6ba5", "#0b4a7f")
WIDTH_INCHES: Final = 7.6
DPI: Final = 200
"""Twice the page's 100 pixels per inch, for dense screens."""


def ladder_fit_figure(forecast: Forecast, *, outcome: float | None = None, unit: str = "nats per token") -> Figure:
    """Rungs, the forecast's law, the band over floors and the hero's interval; `outcome` is its loss if known."""
    figure, axes = _canvas(4.2)
    flops = np.array([row["flops"] for row in forecast.used])
    loss = np.array([row["loss"] for row in forecast.used])
    hero = float(forecast.target["flops"])
    grid = np.geomspace(flops.min() / 1.3, hero * 1.6, 200)
    low, high = _law_band(flops, loss, forecast, grid)
    axes.fill_between(grid, low, high, color=FORECAST, alpha=0.13, lw=0, label="laws the rungs support")
    law = _forecast_law(forecast)
    axes.plot(grid, law.value(grid), color=FORECAST, lw=1.6, label=_law_text(law))
    axes.plot(flops, loss, "o", color=RUNG, ms=6.5, mec="white", mew=0.8, label="rungs", zorder=4)
    if forecast.low is not None and forecast.high is not None:
        errors = [[forecast.point - forecast.low], [forecast.high - forecast.point]]
        axes.errorbar(
            [hero], [forecast.point], yerr=errors, fmt="D", color=FORECAST, ms=6, mec="white", capsize=5, lw=1.6,
            zorder=5, label=f"hero forecast, {forecast.level:.0%} interval",
        )  # fmt: skip
    if outcome is not None:
        axes.plot([hero], [outcome], "*", color=OUTCOME, ms=12, mec="white", mew=0.8, label="hero outcome", zorder=6)
    _log_compute_axis(axes, float(grid[0]), float(grid[-1]))
    axes.margins(y=0.12)
    axes.set_ylabel(f"final loss ({unit})")
    _label_hero(axes, forecast, hero)
    _legend(axes, "upper right")
    return figure


def trajectory_figure(
    hero: pd.DataFrame | None,
    band: pd.DataFrame,
    *,
    rungs: Mapping[str, pd.DataFrame] | None = None,
    alerts: Iterable[Any] = (),
    metric: str = "train/loss",
    unit: str = "nats per token",
) -> Figure:
    """The hero's loss against its registered band over progress.

    Args:
        hero: columns progress, loss; None before it starts.
        band: columns progress, loss, low, high.
        rungs: the same as `hero` by rung name, smallest first; drawn faint.
        alerts: records with `progress` and `rule`, marked on the axis.
    """
    figure, axes = _canvas(4.2)
    for shade, (name, table) in zip(_shades(len(rungs or {})), (rungs or {}).items(), strict=True):
        progress, loss = _thin(table)
        axes.plot(progress, loss, color=shade, lw=1.1, label=name)
    axes.fill_between(
        band["progress"], band["low"], band["high"], color=FORECAST, alpha=0.2, lw=0, label="registered band"
    )
    axes.plot(band["progress"], band["loss"], color=FORECAST, lw=1.5, ls="--", label="registered forecast")
    if hero is not None and len(hero):
        axes.plot(*_thin(hero), color=INK, lw=1.4, label="hero", zorder=5)
    _mark_alerts(axes, alerts)
    axes.set_xscale("log")
    axes.set_xlim(float(np.min(band["progress"])), 1.0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("progress (share of the run's tokens)")
    axes.set_ylabel(f"{metric} ({unit})")
    shown = [band["low"], band["high"], *(table["loss"] for table in (rungs or {}).values())]
    late = np.concatenate([np.asarray(column, dtype=float) for column in shown])
    axes.set_ylim(float(late.min()) - 0.03 * np.ptp(late), float(np.quantile(late, 0.995)))
    _legend(axes, "upper right")
    return figure


def drops_figure(runs: Mapping[str, pd.DataFrame], *, hero: str = "hero", metric: str = "moe/drop_fraction") -> Figure:
    """Share of assignments dropped over progress, by run; columns progress and `metric`."""
    figure, axes = _canvas(3.4)
    others = {name: table for name, table in runs.items() if name != hero}
    for shade, (name, table) in zip(_shades(len(others)), others.items(), strict=True):
        axes.plot(*_thin(table, metric), color=shade, lw=1.2, label=name)
    if hero in runs:
        axes.plot(*_thin(runs[hero], metric), color=INK, lw=1.5, label=hero)
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel("progress (share of the run's tokens)")
    axes.set_ylabel("dropped assignments")
    _legend(axes, "upper right")
    return figure


def floor_profile_figure(forecast: Forecast, *, unit: str = "nats per token") -> Figure:
    """The hero's forecast as a function of the floor, over how much support each floor has."""
    figure, axes = _canvas(3.6)
    floors, point, low, high, weight = _profile(forecast)
    density = weight / np.gradient(floors)
    share = density / density.max()
    shown = share > 0.005
    label = f"{forecast.level:.0%} interval if that were the floor"
    axes.fill_between(floors, low, high, color=FORECAST, alpha=0.15, lw=0, label=label)
    axes.plot(floors, point, color=FORECAST, lw=1.6, label="forecast if that were the floor")
    if forecast.low is not None and forecast.high is not None:
        axes.axhspan(forecast.low, forecast.high, color=MUTED, alpha=0.10, lw=0)
        axes.axhline(forecast.point, color=MUTED, lw=1.0, ls="--", label=f"reported: {forecast.point:.4g}")
    axes.set_xlim(floors[shown].min(), floors[shown].max())
    margin = 0.08 * (high[shown].max() - low[shown].min())
    axes.set_ylim(low[shown].min() - margin, high[shown].max() + margin)
    support = axes.twinx()
    support.fill_between(floors, 0, share, color=RUNG, alpha=0.18, lw=0, label="support by rungs and prior")
    support.set_ylim(0, 4.0)
    support.set_axis_off()
    axes.set_xlabel(f"floor of the law ({unit})")
    axes.set_ylabel(f"hero's final loss ({unit})")
    _legend(axes, "upper left", also=support)
    return figure


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9, color=MUTED)
    axes.tick_params(which="minor", color=GRID)
    axes.grid(True, color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=INK, size=10)
    axes.yaxis.label.set(color=INK, size=10)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    return figure, axes


def _legend(axes: Axes, place: Any, *, also: Axes | None = None) -> None:
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
        fontsize=8.5,
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
        labelcolor=INK,
    )


def _log_compute_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = np.log10(high / low)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2.5 else (1.0, 3.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("training compute (FLOPs)")


def _power_text(value: float) -> str:
    exponent = int(np.floor(np.log10(value) + 1e-9))
    factor = value / 10.0**exponent
    text = f"10^{{{exponent}}}"
    return f"${text}$" if abs(factor - 1) < 1e-6 else rf"${factor:.0f}\times{text}$"


def _law_text(law: PowerLaw) -> str:
    amplitude, _, power = f"{law.amplitude:.4g}".partition("e+")
    factor = rf"{amplitude}\times10^{{{int(power)}}}" if power else amplitude
    return rf"$L = {law.floor:.3f} + {factor}\,C^{{-{law.exponent:.3f}}}$"


def _forecast_law(forecast: Forecast) -> PowerLaw:
    constants = forecast.laws[0]
    return PowerLaw(*(float(constants[key]) for key in ("floor", "amplitude", "exponent")))


def _law_band(
    flops: np.ndarray, loss: np.ndarray, forecast: Forecast, grid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Envelope of the rungs' lines over the central floors of the profile, weighted as the forecast weights them."""
    floors, _, _, _, weight = _profile(forecast)
    mass = np.cumsum(weight) - 0.5 * weight
    tail = 0.5 - forecast.level / 2
    bounds = [float(np.interp(at, mass, floors)) for at in (tail, 1.0 - tail)]
    bounds = bounds if forecast.floor is None else [forecast.floor] * 2
    curves = []
    for floor in np.linspace(bounds[0], bounds[1], 9):
        slope, level = np.polyfit(np.log(flops), np.log(loss - min(floor, 0.999 * loss.min())), 1)
        curves.append(floor + np.exp(level + slope * np.log(grid)))
    return np.min(curves, axis=0), np.max(curves, axis=0)


def _profile(forecast: Forecast) -> tuple[np.ndarray, ...]:
    """Floor, point, low, high and weight of the registered profile."""
    rows = forecast.floor_profile
    return tuple(np.array([row[key] for row in rows]) for key in ("floor", "point", "low", "high", "weight"))


def _label_hero(axes: Axes, forecast: Forecast, hero: float) -> None:
    text = f"{forecast.point:.3f}"
    if forecast.low is not None and forecast.high is not None:
        text += f"\n[{forecast.low:.3f}, {forecast.high:.3f}]"
    axes.annotate(text, (hero, forecast.point), xytext=(-10, -6), textcoords="offset points", ha="right", va="top",
                  fontsize=9, color=FORECAST)  # fmt: skip


def _mark_alerts(axes: Axes, alerts: Iterable[Any]) -> None:
    for alert in alerts:
        axes.axvline(alert["progress"], color=FORECAST, lw=1.0, ls=":")
        axes.annotate(alert["rule"], (alert["progress"], 1.0), xycoords=("data", "axes fraction"), fontsize=8,
                      color=FORECAST, ha="center", va="bottom")  # fmt: skip


def _shades(count: int) -> list[str]:
    return [RUNG_SHADES[round(index)] for index in np.linspace(0, len(RUNG_SHADES) - 1, count)] if count else []


def _thin(table: pd.DataFrame, column: str = "loss", rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Progress and values, per-step noise reduced to medians of equal groups of rows."""
    progress, values = (np.asarray(table[name], dtype=float) for name in ("progress", column))
    known = np.isfinite(progress) & np.isfinite(values)
    progress, values = progress[known], values[known]
    if progress.size <= 1.5 * rows:
        return progress, values
    groups = np.array_split(np.arange(progress.size), rows)
    return np.array([progress[g].mean() for g in groups]), np.array([np.median(values[g]) for g in groups])
