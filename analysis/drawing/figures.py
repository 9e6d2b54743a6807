"""Figures of a forecast and its hero, as Matplotlib objects: no global state. Numbers come from the other modules.

Colours are Okabe and Ito's, told apart by shape and line as well as by hue (`figure_style.py`). What a forecast rests
on is drawn by `evidence_figures.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rungwise.analysis.drawing.figure_style import (
    FORECAST,
    INK,
    MUTED,
    NOWCAST,
    OUTCOME,
    RUNG,
    canvas,
    canvases,
    legend,
    log_compute_axis,
    log_progress_axis,
    rung_styles,
    thinned,
)
from rungwise.analysis.fitting.laws import PowerLaw
from rungwise.analysis.forecast import Forecast

SAME_RATIO: Final = 1.1
"""Tokens per parameter may differ by this factor for rungs to lie on one law in compute."""


def ladder_fit_figure(forecast: Forecast, *, outcome: float | None = None, unit: str = "nats per token") -> Figure:
    """Rungs, the forecast's law, the band over floors and the hero's interval, and below them the residuals.

    `outcome` is the hero's loss if known. Rungs of several ratios of tokens to parameters lie on no one law in compute
    and have no residuals to it.
    """
    flops = np.array([row["flops"] for row in forecast.used])
    loss = np.array([row["loss"] for row in forecast.used])
    on_law = _one_ratio(forecast)
    figure, parts = canvases(5.2, (3.4, 1.0)) if on_law else canvases(4.2, (1.0,))
    axes = parts[0]
    hero = float(forecast.target["flops"])
    grid = np.geomspace(flops.min() / 1.3, max(hero, flops.max()) * 1.6, 200)
    law = _forecast_law(forecast)
    if on_law:
        low, high = _law_band(flops, loss, forecast, grid)
        axes.fill_between(grid, low, high, color=FORECAST, alpha=0.13, lw=0, label="laws the rungs support")
    axes.plot(grid, law.value(grid), color=FORECAST, lw=1.6, label=_law_text(law))
    axes.plot(flops, loss, "o", color=RUNG, ms=6.5, mec="white", mew=0.8, label="rungs", zorder=4)
    _hero_interval(axes, forecast, hero)
    if outcome is not None:
        axes.plot([hero], [outcome], "*", color=OUTCOME, ms=12, mec="white", mew=0.8, label="hero outcome", zorder=6)
    axes.margins(y=0.12)
    axes.set_ylabel(f"final loss ({unit})")
    _label_hero(axes, forecast, hero)
    legend(axes, "upper right")
    if on_law:
        _residuals(parts[1], flops, loss, law)
    log_compute_axis(parts[-1], float(grid[0]), float(grid[-1]))
    return figure


def trajectory_figure(
    hero: pd.DataFrame | None,
    band: pd.DataFrame,
    *,
    rungs: Mapping[str, pd.DataFrame] | None = None,
    alerts: Iterable[Any] = (),
    updated: pd.DataFrame | None = None,
    metric: str = "train/loss",
    unit: str = "nats per token",
    rows: int = 200,
) -> Figure:
    """The hero's loss against its registered bands over progress.

    Args:
        hero: columns progress, loss; None before it starts.
        band: columns progress, loss, low, high, and low_all, high_all if known (`forecast_curve`).
        rungs: the same as `hero` by rung name, smallest first.
        alerts: records with `progress` and `rule`, marked on the axis.
        updated: the nowcast's table, drawn beside the registered one.
        rows: longer curves are drawn as so many medians.
    """
    figure, axes = canvas(4.2)
    tables = rungs or {}
    for style, (name, table) in zip(rung_styles(len(tables)), tables.items(), strict=True):
        axes.plot(*thinned(table, rows=rows), **style, label=name)
    _bands(axes, band)
    if updated is not None:
        at = updated["progress"]
        axes.fill_between(at, updated["low"], updated["high"], color=NOWCAST, alpha=0.30, lw=0, label="nowcast band")
        axes.plot(at, updated["loss"], color=NOWCAST, lw=1.6, ls=(0, (5, 1, 1, 1)), label="nowcast")
    if hero is not None and len(hero):
        axes.plot(*thinned(hero, rows=rows), color=INK, lw=1.5, label="hero", zorder=5)
    _mark_alerts(axes, alerts)
    log_progress_axis(axes, float(np.min(band["progress"])))
    axes.set_ylabel(f"{metric} ({unit})" if unit else metric)
    first = float(np.min(band["progress"]))
    shown = [band["low"], band["high"], *(table["loss"][table["progress"] >= first] for table in tables.values())]
    shown += [] if hero is None else [hero["loss"][hero["progress"] >= first]]
    late = np.concatenate([np.asarray(column, dtype=float) for column in shown])
    late = late[np.isfinite(late)]
    axes.set_ylim(float(late.min()) - 0.03 * np.ptp(late), float(np.quantile(late, 0.995)))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8.5, frameon=False,
                  labelcolor=INK, handlelength=3.0)  # fmt: skip
    return figure


def metric_figure(
    hero: pd.DataFrame | None,
    forecast: pd.DataFrame,
    *,
    rungs: Mapping[str, pd.DataFrame] | None = None,
    metric: str,
    unit: str = "",
) -> Figure:
    """The same for a quantity without a final law; columns progress and `metric`, `forecast` from `forecast_metric`."""
    band = forecast.rename(columns={"value": "loss"})
    named = {name: table.rename(columns={metric: "loss"}) for name, table in (rungs or {}).items()}
    hero = None if hero is None else hero.rename(columns={metric: "loss"})
    return trajectory_figure(hero, band, rungs=named, metric=metric, unit=unit, rows=60)


def drops_figure(runs: Mapping[str, pd.DataFrame], *, hero: str = "hero", metric: str = "moe/drop_fraction") -> Figure:
    """Share of assignments dropped over progress, by run; columns progress and `metric`."""
    figure, axes = canvas(3.4)
    others = {name: table for name, table in runs.items() if name != hero}
    for style, (name, table) in zip(rung_styles(len(others)), others.items(), strict=True):
        axes.plot(*thinned(table, metric), **style, label=name)
    if hero in runs:
        axes.plot(*thinned(runs[hero], metric), color=INK, lw=1.5, label=hero)
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel("progress (share of the run's tokens)")
    axes.set_ylabel("dropped assignments")
    legend(axes, "upper right")
    return figure


def floor_profile_figure(forecast: Forecast, *, unit: str = "nats per token") -> Figure:
    """The hero's forecast as a function of the floor, over how much support each floor has."""
    figure, axes = canvas(3.6)
    floors, point, low, high, weight = _profile(forecast)
    density = weight / np.gradient(floors) if floors.size > 1 else weight
    share = density / density.max()
    shown = share > 0.005
    label = f"{forecast.level:.0%} interval if that were the floor"
    axes.fill_between(floors, low, high, color=FORECAST, alpha=0.15, lw=0, label=label)
    axes.plot(floors, point, color=FORECAST, lw=1.6, label="forecast if that were the floor")
    if forecast.low is not None and forecast.high is not None:
        axes.axhspan(forecast.low, forecast.high, color=MUTED, alpha=0.10, lw=0)
        axes.axhline(forecast.point, color=MUTED, lw=1.0, ls="--", label=f"reported: {forecast.point:.4g}")
    if np.ptp(floors[shown]) > 0:
        axes.set_xlim(floors[shown].min(), floors[shown].max())
    margin = 0.08 * (high[shown].max() - low[shown].min())
    axes.set_ylim(low[shown].min() - margin, high[shown].max() + margin)
    support = axes.twinx()
    support.fill_between(floors, 0, share, color=RUNG, alpha=0.18, lw=0, label="support by rungs and prior")
    support.set_ylim(0, 4.0)
    support.set_axis_off()
    axes.set_xlabel(f"floor of the law ({unit})")
    axes.set_ylabel(f"hero's final loss ({unit})")
    legend(axes, "upper left", also=support)
    return figure


def _bands(axes: Axes, band: pd.DataFrame) -> None:
    at = band["progress"]
    if {"low_all", "high_all"} <= set(band.columns):
        axes.fill_between(at, band["low_all"], band["high_all"], color=FORECAST, alpha=0.10, lw=0,
                          label="band for the whole curve")  # fmt: skip
    axes.fill_between(at, band["low"], band["high"], color=FORECAST, alpha=0.22, lw=0, label="registered band")
    axes.plot(at, band["loss"], color=FORECAST, lw=1.6, ls=(0, (6, 2)), label="registered forecast")


def _hero_interval(axes: Axes, forecast: Forecast, hero: float) -> None:
    if forecast.low is None or forecast.high is None:
        return
    errors = [[forecast.point - forecast.low], [forecast.high - forecast.point]]
    axes.errorbar(
        [hero], [forecast.point], yerr=errors, fmt="D", color=FORECAST, ms=6, mec="white", capsize=5, lw=1.6,
        zorder=5, label=f"hero forecast, {forecast.level:.0%} interval",
    )  # fmt: skip


def _residuals(axes: Axes, flops: np.ndarray, loss: np.ndarray, law: PowerLaw) -> None:
    residual = 100.0 * (loss / law.value(flops) - 1.0)
    axes.axhline(0.0, color=FORECAST, lw=1.2)
    axes.vlines(flops, 0.0, residual, color=RUNG, lw=1.2)
    axes.plot(flops, residual, "o", color=RUNG, ms=5.5, mec="white", mew=0.8)
    reach = max(float(np.abs(residual).max()) * 1.4, 0.02)
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("residual (%)")


def _one_ratio(forecast: Forecast) -> bool:
    sizes = ("num_active_params", "num_params")
    ratios = [
        row["tokens"] / row[size] for row in forecast.used for size in sizes if row.get(size) and row.get("tokens")
    ]
    known = ratios[:: max(len(ratios) // max(len(forecast.used), 1), 1)] if ratios else []
    return len(known) < 2 or max(known) <= SAME_RATIO * min(known)


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
    for place, alert in enumerate(alerts):  # neighbours' words in two rows
        axes.axvline(alert["progress"], color=FORECAST, lw=1.0, ls=":")
        axes.annotate(alert["rule"], (alert["progress"], 1.0), xycoords=("data", "axes fraction"), fontsize=8,
                      xytext=(0, 9 * (place % 2)), textcoords="offset points", color=FORECAST, ha="center",
                      va="bottom")  # fmt: skip
