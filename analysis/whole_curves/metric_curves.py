"""Curves of what has no final law, such as gradient norm and drop fraction, forecast for a larger run with a band.

Rungs are compared at equal progress, or at equal phase of their schedules where the learning rates are known: a warm-up
of a fixed number of steps is a different share of each run. Copying the next smaller run is the bar; means and more or
less shrunk trends of neighbours are candidates beside it, each judged on the upper rungs forecast from the lower ones.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.points import target_flops
from rungwise.analysis.whole_curves.bands import CurveError
from rungwise.analysis.whole_curves.curve_rows import common_grid, smooth_curve, split_runs

Array = NDArray[np.float64]

SAME_RATE: Final = 0.1
"""Peak learning rates within 10 % are alike; where smaller runs have the target's, they alone are used."""
TREND_RUNS: Final = 16
HELD: Final = 6
"""At most so many upper rungs are held out."""
SIZES: Final = ("flops", "num_active_params", "num_params")
WARMUP_SHARE: Final = 0.999
"""The warm-up ends where the rate first reaches this share of its peak."""


def _nearest(count: int) -> Callable[[Array, Array, float], Array]:
    """Mean of the nearest `count` smaller runs; one is a copy of the next smaller."""
    return lambda _x, rows, _at: rows[-count:].mean(axis=0)


def _trend(shrinkage: float) -> Callable[[Array, Array, float], Array]:
    """The mean of the nearest four moved along a line in log size x through the nearest `TREND_RUNS`.

    slope = sum(x y) / (sum(x^2) + shrinkage), x and y from their means: a trend through runs of nearly one size is
    hardly believed. Units of x^2; the scatter of runs about the line over the variance expected of its slope.
    """

    def candidate(x: Array, rows: Array, at: float) -> Array:
        some, curves = x[-TREND_RUNS:], rows[-TREND_RUNS:]
        centred = some - some.mean()
        slope = (centred @ curves) / (float(centred @ centred) + shrinkage)
        return rows[-4:].mean(axis=0) + slope * (at - x[-4:].mean())

    return candidate


CANDIDATES: Final[Mapping[str, Callable[[Array, Array, float], Array]]] = {
    "copy": _nearest(1),
    "mean_of_2": _nearest(2),
    "mean_of_4": _nearest(4),
    **{f"trend_shrunk_{shrinkage:g}": _trend(shrinkage) for shrinkage in (1.0, 0.3, 0.1, 0.02)},
}
"""From a copy to all but the whole trend; how they were chosen: docs/decisions/curves.md."""


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """Smoothed curves of one column, smallest run first: log size (k,), rows (k, p), log peak rates (k,) or NaN."""

    size: Array
    rows: Array
    rate: Array
    grid: Array

    def forecasts(self, below: int, at: float, rate: float) -> Array:
        """Each candidate's curve (candidates, p) at log size `at` from the lowest `below` runs.

        Only those of the same peak rate are used, where there are any.
        """
        alike = np.abs(self.rate[:below] - rate) <= SAME_RATE
        used = np.flatnonzero(alike) if alike.any() else np.arange(below)
        return np.array([candidate(self.size[used], self.rows[used], at) for candidate in CANDIDATES.values()])


def forecast_metric(
    curves: pd.DataFrame,
    target: Mapping[str, Any],
    column: str,
    *,
    progress: ArrayLike | None = None,
    level: float = 0.9,
    schedule: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Forecast `column` along a new run at `target`: columns progress, value, low, high, low_all, high_all.

    Positive quantities are forecast in logs, others (drop fractions with zeros) as they are and never below the least.

    Args:
        curves: columns run, progress in (0, 1], `column`, one of flops, num_active_params, num_params, and
            learning_rate if known.
        schedule: the target's planned learning_rate by progress.
    Raises:
        ValueError: columns are missing, a curve does not reach its end, or `progress` lies outside the rungs'.
        UnfitForecast: fewer than three rungs.
    The frame's `attrs` hold "weights" and "errors" of each candidate (held-out root mean square, in the units fitted).
    """
    runs = split_runs(curves, column)
    size = _size_column(runs, target)
    runs = sorted((_in_phase(run, schedule) for run in runs), key=lambda run: _size_of(run, size))
    if len(runs) < 3:
        raise UnfitForecast(f"{len(runs)} rungs of {column} cannot carry a band; give at least 3")
    grid = common_grid(runs)
    logs = all(bool((run[column] > 0).all()) for run in runs)
    known = _Runs(
        size=np.log([_size_of(run, size) for run in runs]),
        rows=np.array([smooth_curve(run["progress"].clip(upper=1.0), run[column], grid, logs=logs) for run in runs]),
        rate=np.array([_peak_rate(run) for run in runs]),
        grid=grid,
    )
    at = math.log(target_flops(target) if size == "flops" else float(target[size]))
    middle, error, evidence = _forecast(known, at, math.nan if schedule is None else _peak_rate(schedule))
    half, factor = error.half_width(level), error.simultaneous_factor(level)
    edges = {"value": 0.0 * half, "low": -half, "high": half, "low_all": -factor * half, "high_all": factor * half}
    wanted = np.geomspace(grid[0], 1.0, 40) if progress is None else np.atleast_1d(np.asarray(progress, dtype=float))
    if wanted.min() < grid[0] * (1 - 1e-9) or wanted.max() > 1.0 + 1e-9:
        raise ValueError(f"progress {wanted.min():g} to {wanted.max():g} must lie within the rungs' [{grid[0]:.4g}, 1]")
    least = min(float(np.min(run[column])) for run in runs)
    shown = {key: np.interp(np.log(wanted), np.log(grid), middle + edge) for key, edge in edges.items()}
    shown = {key: np.exp(row) if logs else np.maximum(row, least) for key, row in shown.items()}
    table = pd.DataFrame({"progress": wanted, **shown})
    table.attrs.update(evidence)
    return table


def _forecast(runs: _Runs, at: float, rate: float) -> tuple[Array, CurveError, dict[str, Any]]:
    """Average of the candidates by what they missed on the upper rungs, and how far a new run may lie from it."""
    held = range(max(2, len(runs.size) - HELD), len(runs.size))
    x = runs.size
    weight = np.gradient(runs.grid) / np.gradient(runs.grid).sum()
    misses = np.array([runs.forecasts(h, float(x[h]), float(runs.rate[h])) - runs.rows[h] for h in held])
    squares = np.mean(misses**2 @ weight, axis=0)
    scores = -min(len(held), 2) * np.log(squares + 1e-12)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    stack = runs.forecasts(len(x), at, rate)
    middle = weights @ stack
    combined = np.einsum("c,hcp->hp", weights, misses)
    # A miss grows with the distance beyond the next smaller run, as a walk does.
    scale = max(1.0, (at - float(x[-1])) / float(np.mean([x[h] - x[h - 1] for h in held])))
    size = np.sqrt(np.mean(combined**2, axis=0) * scale + weights @ (stack - middle) ** 2)
    size = np.maximum.accumulate(size[::-1])[::-1]
    shape = np.sqrt(np.maximum(size**2 - size[-1] ** 2, 0.0))
    error = CurveError.of(np.log(runs.grid), shape, final=float(size[-1]), degrees=float(len(held)))
    evidence = {"weights": dict(zip(CANDIDATES, weights.tolist(), strict=True)),
                "errors": dict(zip(CANDIDATES, np.sqrt(squares).tolist(), strict=True))}  # fmt: skip
    return middle, error, evidence


def _size_column(runs: list[pd.DataFrame], target: Mapping[str, Any]) -> str:
    """What the rungs differ in most: compute on a ladder, parameters among runs of one compute."""
    known = [name for name in SIZES if target.get(name) and all(name in run for run in runs)]
    if not known:
        raise ValueError(f"curves and target share none of {', '.join(SIZES)}; give one")
    return max(known, key=lambda name: float(np.ptp(np.log([_size_of(run, name) for run in runs]))))


def _size_of(run: pd.DataFrame, size: str) -> float:
    return float(run[size].to_numpy(dtype=float)[-1])


def _peak_rate(table: pd.DataFrame) -> float:
    return math.log(float(np.max(table["learning_rate"]))) if "learning_rate" in table else math.nan


def _in_phase(run: pd.DataFrame, schedule: pd.DataFrame | None) -> pd.DataFrame:
    """Progress stretched so that the warm-up ends where the target's does."""
    if schedule is None or "learning_rate" not in run:
        return run
    own, wanted = _warmup_end(run), _warmup_end(schedule)
    if not (0.0 < own < 0.9 and 0.0 < wanted < 0.9):
        return run
    progress = run["progress"].to_numpy(dtype=float)
    return run.assign(progress=np.interp(progress, [0.0, own, 1.0], [0.0, wanted, 1.0]))


def _warmup_end(table: pd.DataFrame) -> float:
    rate = table["learning_rate"].to_numpy(dtype=float)
    return float(table["progress"].to_numpy(dtype=float)[int(np.argmax(rate >= WARMUP_SHARE * rate.max()))])
