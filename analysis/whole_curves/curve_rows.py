"""From a table of rows to one smooth curve a run: split, checked, completed where a run stopped early, smoothed.

A per-step loss is smoothed in windows of progress; a few dozen evaluations are smoothed over neighbours, so that the
noise of one of them does not become a bend of the forecast. What the curves say about a larger run is `shapes.py`.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import median_filter
from scipy.optimize import isotonic_regression

from rungwise.analysis.points import target_flops

Array = NDArray[np.float64]

NOISY_ROWS: Final = 60
"""A curve with more rows is smoothed in windows of `WIDTHS`; a shorter one over `NEIGHBOURS`."""
WIDTHS: Final = (0.025, 0.05, 0.10)
"""Half widths of smoothing windows as shares of the progress reached: narrow where the curve is steep."""
MIN_WINDOW_ROWS: Final = 8
NEIGHBOURS: Final = (3, 5, 8)
"""Rows that a window reaches over where there are few."""
BLEND: Final = 0.3
"""Log progress over which places share their choice of window."""
WIDEST: Final = 0.4
"""Log progress that a window over few rows reaches at most, where that holds its nearest: early, a line bends."""
EXACT_ROWS: Final = 5
"""Up to so many rows are interpolated."""
LIKE: Final = 2.0
"""A wider window is taken while it agrees with the narrower ones within so many of their standard errors."""
MEDIAN_ROWS: Final = 7
OUTLIER: Final = 8.0
LEAST_OUTLIER: Final = 0.02
"""A row is left out whose neighbours' median is 8 standard deviations of noise and 2 % of the curve's range away."""
FINISHED: Final = 0.98
"""Progress a curve must reach to count as a whole run."""
COMPLETABLE: Final = 0.5
"""Progress from which on the other rungs may complete a curve."""
SETTLED: Final = 0.1
"""Progress from which curves are compared with each other: before it the warm-up, counted in steps, has its say."""
RISING: Final = 0.05
"""Rises of a smoothed curve up to this share of its falls are noise: the quantity only falls."""


def split_runs(curves: pd.DataFrame, column: str = "loss", *, finished: float = FINISHED) -> list[pd.DataFrame]:
    """Usable rows by run, ascending in progress; of rows at one progress the last counts.

    Raises:
        ValueError: columns are missing, nothing is usable, or a curve ends before `finished`.
    """
    missing = {"run", "progress", column} - set(curves.columns)
    if missing:
        raise ValueError(f"curves lack columns {sorted(missing)}; give run, flops, tokens, progress and {column}")
    values, progress = curves[column].to_numpy(dtype=float), curves["progress"].to_numpy(dtype=float)
    positive = values > 0 if column == "loss" else np.ones(values.size, dtype=bool)
    usable: Any = curves[np.isfinite(values) & positive & (progress > 0) & (progress <= 1.0 + 1e-6)]
    runs = []
    for name, rows in usable.groupby("run", sort=False):
        rows = rows.sort_values("progress").drop_duplicates("progress", keep="last")
        reached = float(rows["progress"].iloc[-1])
        if reached < finished:
            raise ValueError(f"curve of run {name} ends at progress {reached:.3g}; give finished runs")
        runs.append(rows)
    if not runs:
        raise ValueError(f"curves hold no usable {column}; check the columns progress and {column}")
    return runs


def identity_of(run: pd.DataFrame, column: str = "loss") -> dict[str, Any]:
    """What a run's rows say about the run: its last row without the columns that change along it."""
    changing = ("progress", "step", "tokens_seen", "learning_rate", column)
    return {str(key): value for key, value in run.iloc[-1].items() if key not in changing}


def log_steps_of(record: Mapping[str, Any]) -> float:
    """Log of the optimizer steps of a run, NaN where not known."""
    steps = record.get("steps")
    return math.log(steps) if isinstance(steps, int | float | np.number) and steps > 0 else math.nan


def complete_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """The curves with those that stopped early continued as the other rungs went on from there, each scaled to it.

    A row at progress 1 (and at the others' progress before) is added to a run that reached 50 to 98 %. Column
    `completion_error`: standard error of the added logs, from how far the others disagree; 0 on rows measured. The
    frame's `attrs` "completed" names each run with the progress it reached and that error.

    Raises:
        ValueError: a curve stops before half of its run, or no other rung finished.
    """
    runs = split_runs(curves, finished=COMPLETABLE)
    whole = [run for run in runs if float(run["progress"].iloc[-1]) >= FINISHED]
    completed, tables = [], []
    for run in runs:
        reached = float(run["progress"].iloc[-1])
        run = run.assign(completion_error=0.0)
        if reached < FINISHED:
            if len(whole) < 2:
                raise ValueError(f"run {run['run'].iloc[0]} stops at {reached:.3g} and fewer than two rungs finished")
            rest, error = _rest(run, whole, reached)
            run = pd.concat([run, rest], ignore_index=True)
            completed.append({"run": str(run["run"].iloc[0]), "reached": reached, "error": error})
        tables.append(run)
    table = pd.concat(tables, ignore_index=True)
    table.attrs["completed"] = completed
    return table


def _rest(run: pd.DataFrame, whole: list[pd.DataFrame], reached: float) -> tuple[pd.DataFrame, float]:
    """Rows from `reached` to 1: the run's smoothed level there times the others' ratio; and its standard error."""
    at = np.append(np.arange(math.ceil(reached / 0.05 + 1e-9) * 0.05, 0.999, 0.05), 1.0)
    at = at[at > reached + 1e-6]
    grid = np.append(reached, at)
    ratios = []
    for other in whole:
        smooth = smooth_curve(other["progress"].clip(upper=1.0), other["loss"], grid)
        ratios.append(smooth - smooth[0])
    ratio = np.array(ratios)
    level = float(smooth_curve(run["progress"], run["loss"], np.array([reached]))[0])
    where = np.array([math.log(target_flops(identity_of(other))) for other in [*whole, run]])
    centred = where[:-1] - where[:-1].mean()
    spread = float(centred @ centred)
    distance = float(where[-1] - where[:-1].mean())
    slope = centred @ ratio / spread if spread > 0 else np.zeros(grid.size)
    # Half of the trend: between "as the others on average" and "as their trend says", either of which may hold.
    middle = ratio.mean(axis=0) + 0.5 * slope * distance
    scatter = float(np.std(ratio[:, -1], ddof=1)) * math.sqrt(1.0 + 1.0 / len(whole))
    own = np.log(run["loss"].to_numpy(dtype=float)) - smooth_curve(run["progress"], run["loss"], run["progress"])
    noise = 1.4826 * float(np.median(np.abs(own))) / math.sqrt(2.0)  # the smoothed end rests on two or three rows
    error = math.hypot(math.hypot(scatter, noise), 0.5 * abs(float(slope[-1]) * distance))
    rows = pd.DataFrame({"progress": at, "loss": np.exp(level + middle[1:]), "completion_error": error})
    return rows.assign(**{key: value for key, value in identity_of(run).items() if key != "completion_error"}), error


def common_grid(runs: list[pd.DataFrame]) -> Array:
    """Progress from the first that all runs have to 1: even in logs early, even in progress later."""
    first = max(max(float(run["progress"].iloc[0]) for run in runs), 1e-3)
    later = np.linspace(0.05, 1.0, 58)
    return np.unique(np.concatenate([np.geomspace(first, 1.0, 60), later[later > first]]))


def smooth_curve(progress: ArrayLike, values: ArrayLike, grid: ArrayLike, *, logs: bool = True) -> Array:
    """Log values (values themselves without `logs`) on `grid`, ascending: local lines in log progress, robust.

    At each place the widest window that agrees with the narrower ones (Lepski's rule): noise is averaged as far as the
    curve's own bends allow. Up to `EXACT_ROWS` rows are interpolated.
    """
    x, y = np.log(np.asarray(progress, dtype=float)), np.asarray(values, dtype=float)
    y = np.log(y) if logs else y
    if x.size <= EXACT_ROWS:
        return np.interp(np.log(grid), x, y)
    noise = _noise(y)
    usual = np.abs(y - median_filter(y, MEDIAN_ROWS, mode="nearest")) <= OUTLIER * noise + LEAST_OUTLIER * np.ptp(y)
    x, y = x[usual], y[usual]
    places = np.log(np.atleast_1d(np.asarray(grid, dtype=float)))
    levels, widest = (
        np.array(column) for column in zip(*(_levels(x, y, float(at), noise) for at in places), strict=True)
    )
    # Neighbouring places share their choice, so that the curve has no steps where the choice changes.
    near = np.maximum(1.0 - (np.abs(places[:, None] - places[None, :]) / BLEND) ** 2, 0.0)
    choice = (near @ widest) / near.sum(axis=1)
    lower = np.minimum(choice.astype(int), levels.shape[1] - 1)
    upper = np.minimum(lower + 1, levels.shape[1] - 1)
    rows = np.arange(places.size)
    return levels[rows, lower] + (choice - lower) * (levels[rows, upper] - levels[rows, lower])


def _noise(y: Array) -> float:
    """Standard deviation of a row's noise, from second differences, robust."""
    return 1.4826 * float(np.median(np.abs(np.diff(y, 2)))) / math.sqrt(6.0)


def _levels(x: Array, y: Array, at: float, noise: float) -> tuple[list[float], int]:
    """The curve at `at` by each window, narrow to wide, and which is the widest that agrees with the narrower ones."""
    levels, widest = [], 0
    low, high, agree = -math.inf, math.inf, True
    for index, width in enumerate(_widths(x, at)):
        level, share = _local_line(x, y, at, width)
        levels.append(level)
        agree = agree and low <= level <= high
        if agree:
            reach = LIKE * noise * share
            low, high, widest = max(low, level - reach), min(high, level + reach), index
    return levels, widest


def _widths(x: Array, at: float) -> list[float]:
    """Half widths of the windows around `at`, ascending, each with enough rows."""
    few = x.size <= NOISY_ROWS
    most = NEIGHBOURS[-1] if few else MIN_WINDOW_ROWS
    place = int(np.searchsorted(x, at))
    distance = np.sort(np.abs(x[max(place - most - 1, 0) : place + most + 2] - at))
    if few:
        widths = [float(distance[min(rows, distance.size - 1)]) + 1e-12 for rows in NEIGHBOURS]
        return [min(width, max(widths[0], WIDEST)) for width in widths]
    return [max(width, float(distance[most]) + 1e-12) for width in WIDTHS]


def _local_line(x: Array, y: Array, at: float, width: float) -> tuple[float, float]:
    """Tricube-weighted line through the points around `at`, at `at`, and the share of a row's noise left in it."""
    first, last = np.searchsorted(x, [at - width, at + width])
    u, v = x[first:last] - at, y[first:last]
    weight = np.maximum(1.0 - (np.abs(u) / width) ** 3, 0.0) ** 3
    weight /= weight.sum()
    centre = float(weight @ u)
    lever = weight * (u - centre)
    spread = float(lever @ u)
    influence = weight - (centre / spread) * lever if spread > 0 else weight
    return float(influence @ v), math.sqrt(float(influence @ influence))


def only_falls(smoothed: Array) -> bool:
    """Whether curves (k, p) rise, all together, by less than `RISING` of what they fall."""
    moves = np.diff(smoothed, axis=-1)
    return bool(moves[moves > 0].sum() <= RISING * -moves[moves < 0].sum())


def falling(values: Array) -> Array:
    """The closest curve, in squares, that never rises."""
    return np.asarray(isotonic_regression(values, increasing=False).x)
