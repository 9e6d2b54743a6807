"""The whole trajectory of a hero from its rungs' curves: loss at equal progress, with a band.

Every run's curve is brought to common progress (share of its own token horizon) and written as log L(p) - log
L(1), its shape. The hero's shape comes from the rungs' by one of `SHAPES`, whichever predicts held-out upper
rungs best from the lower ones; its end comes from `forecast_final`. The band joins the end's interval with
what the shape missed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import special

from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.points import target_flops

Array = NDArray[np.float64]

NOISY_ROWS: Final = 60
"""A curve with more rows is per-step training loss and is smoothed; a shorter one is evaluations, interpolated."""
SMOOTHING: Final = 0.10
"""Half width of the smoothing window as a share of the progress reached: narrow where the curve is steep."""
MIN_WINDOW_ROWS: Final = 8
END_WINDOW_ROWS: Final = 32
SPAN: Final = 2.0
"""A fall is measured from progress p / SPAN to p."""
MEASURED_SHARE: Final = 0.7
"""The least a measured slope error is taken for, as a share of the unmeasured one."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Rung curves on one progress grid: log compute (k,), log loss (k, p), floor and exponent of the final law."""

    log_flops: Array
    log_loss: Array
    floor: float
    exponent: float

    @property
    def shapes(self) -> Array:
        return self.log_loss - self.log_loss[:, -1:]

    def below(self, held: int) -> "Ladder":
        return Ladder(
            log_flops=self.log_flops[:held],
            log_loss=self.log_loss[:held],
            floor=self.floor,
            exponent=self.exponent,
        )


def _same_ratio(ladder: Ladder, _log_flops: float, _log_final: float) -> Array:
    """The top rung's ratio to its own final loss."""
    return ladder.shapes[-1]


def _mean_ratio(ladder: Ladder, _log_flops: float, _log_final: float) -> Array:
    """The rungs' mean ratio."""
    return ladder.shapes.mean(axis=0)


def _ratio_trend(ladder: Ladder, log_flops: float, _log_final: float) -> Array:
    """A line in log compute through the ratios at each progress."""
    x = ladder.log_flops - ladder.log_flops.mean()
    slope = x @ ladder.shapes / (x @ x)
    return ladder.shapes.mean(axis=0) + slope * (log_flops - ladder.log_flops.mean())


def _same_excess(ladder: Ladder, _log_flops: float, log_final: float) -> Array:
    """The top rung's ratio of excess over the floor, on top of the hero's floor."""
    top = np.exp(ladder.log_loss[-1])
    floor = min(ladder.floor, 0.98 * float(top[-1]), 0.98 * math.exp(log_final))
    final = math.exp(log_final)
    return np.log(floor + (final - floor) * (top - floor) / (top[-1] - floor)) - log_final


def _shared_exponent(ladder: Ladder, log_flops: float, _log_final: float) -> Array:
    """L(p, C) = b0(p) + b1(p) C^-alpha at each progress, with the final law's alpha; then as a ratio to its own end."""
    power = np.exp(-ladder.exponent * (ladder.log_flops - ladder.log_flops.mean()))
    loss = np.exp(ladder.log_loss)
    x = power - power.mean()
    slope = x @ loss / (x @ x)
    here = math.exp(-ladder.exponent * (log_flops - float(ladder.log_flops.mean())))
    predicted = loss.mean(axis=0) + slope * (here - power.mean())
    predicted = np.maximum(predicted, 0.2 * loss.min(axis=0))
    return np.log(predicted) - math.log(predicted[-1])


SHAPES: Final[Mapping[str, Callable[[Ladder, float, float], Array]]] = {
    "same_ratio": _same_ratio,
    "mean_ratio": _mean_ratio,
    "ratio_trend": _ratio_trend,
    "same_excess": _same_excess,
    "shared_exponent": _shared_exponent,
}


def forecast_curve(
    curves: pd.DataFrame,
    target: Mapping[str, Any],
    *,
    progress: ArrayLike | None = None,
    level: float = 0.9,
    final: Forecast | None = None,
    floor: float | None = None,
) -> pd.DataFrame:
    """Forecast loss along a new run at `target`: columns progress, loss, low, high, slope_error.

    slope_error: by what share of itself the curve's fall up to there may be wrong, at most 1 (then the curve
    says nothing but that the loss falls).

    Args:
        curves: columns run, flops, num_params, tokens (final), progress in (0, 1], loss; per-step training
            loss or sparse
            evaluations. Runs of one compute are averaged. Non-finite losses are left out.
        progress: where to forecast; default 40 values from the rungs' first common point to 1.
        final: forecast of the same metric's final loss; None makes one from the curves' own ends.
        floor: pins the law's floor where `final` is made here, nats.
    Raises:
        ValueError: a curve does not reach its end, `progress` lies outside the rungs', or as
            `forecast_final`.
    The frame's `attrs` hold the shape chosen ("shape") and each candidate's held-out error ("errors", log
    units).
    """
    runs = _split_runs(curves)
    first = max(float(run["progress"].iloc[0]) for run in runs)
    grid = np.geomspace(max(first, 1e-3), 1.0, 80)
    smoothed = np.array([smooth_curve(run["progress"], run["loss"], grid) for run in runs])
    if final is None:
        ends = [{**_identity(run), "loss": float(np.exp(row[-1]))} for run, row in zip(runs, smoothed, strict=True)]
        final = forecast_final(ends, target, level=level, floor=floor)
    if final.low is None or final.high is None:
        raise ValueError(f"no band: {final.status}")
    law = final.laws[0]
    ladder = _by_compute(runs, smoothed, floor=law["floor"], exponent=law["exponent"])
    errors, misses = _held_out(ladder)
    name = min(errors, key=lambda key: errors[key])
    log_final = math.log(final.point)
    shape = SHAPES[name](ladder, math.log(target_flops(target)), log_final)
    spread = _band(misses[name], level)
    middle = np.exp(log_final + shape)
    low = np.exp(log_final + shape - np.hypot(math.log(final.point / final.low), spread))
    high = np.exp(log_final + shape + np.hypot(math.log(final.high / final.point), spread))
    wanted = _wanted(progress, grid)
    measured = _band(_fall_errors(ladder, misses[name], grid), level)
    slope = np.clip(measured, MEASURED_SHARE * unmeasured_slope_error(grid), 1.0)
    columns = {key: np.interp(np.log(wanted), np.log(grid), values) for key, values in
               (("loss", middle), ("low", low), ("high", high), ("slope_error", slope))}  # fmt: skip
    table = pd.DataFrame({"progress": wanted, **columns})
    table.attrs.update(shape=name, errors=errors)
    return table


def unmeasured_slope_error(progress: ArrayLike) -> Array:
    """Slope error of a curve that came without one: 0.25 / progress, within [0.35, 1].

    Runs of one family differ in shape early: of the fall that its ladder forecast, the public Marin hero left
    out half between 5 and 40 % of training, and this project's first hero half between 15 and 40 %.
    """
    return np.clip(0.25 / np.maximum(np.asarray(progress, dtype=float), 1e-9), 0.35, 1.0)


def registered_curve(forecast: Forecast | None, metric: str) -> dict[str, Array] | None:
    """Columns of one metric's registered trajectory, for `at_progress`; None without one."""
    table = forecast.curve_table(metric) if forecast else None
    if table is None:
        return None
    curve = {str(key): table[key].to_numpy(dtype=float) for key in table}
    return {"slope_error": unmeasured_slope_error(curve["progress"]), **curve}


def at_progress(curve: Mapping[str, Array], progress: float) -> dict[str, float]:
    """Loss, low, high and slope error of a registered curve at one progress."""
    return {key: float(np.interp(min(progress, 1.0), curve["progress"], values)) for key, values in curve.items()}


def smooth_curve(progress: ArrayLike, loss: ArrayLike, grid: Array) -> Array:
    """Log loss on `grid`: local lines in log progress for per-step curves, interpolation for sparse ones."""
    x, y = np.log(np.asarray(progress, dtype=float)), np.log(np.asarray(loss, dtype=float))
    if x.size <= NOISY_ROWS:
        return np.interp(np.log(grid), x, y)
    return np.array([_local_line(x, y, float(at)) for at in np.log(grid)])


def _local_line(x: Array, y: Array, at: float) -> float:
    """Tricube-weighted line through the points around `at`, at `at`; two passes, the second without outliers."""
    distance = np.abs(x - at)
    rows = END_WINDOW_ROWS if at > -1e-9 else MIN_WINDOW_ROWS
    width = max(SMOOTHING, float(np.partition(distance, rows)[rows]) + 1e-12)
    near = distance < width
    u, v = x[near] - at, y[near]
    weight = (1.0 - (distance[near] / width) ** 3) ** 3
    for _ in range(2):
        total, centre = weight.sum(), float(weight @ u) / weight.sum()
        spread = float(weight @ (u - centre) ** 2)
        slope = float(weight @ ((u - centre) * v)) / spread if spread > 0 else 0.0
        level = float(weight @ v) / total - slope * centre
        residual = np.abs(v - level - slope * u)
        weight = weight * (residual <= 5.0 * max(float(np.median(residual)), 1e-9))
    return level


def _split_runs(curves: pd.DataFrame) -> list[pd.DataFrame]:
    missing = {"run", "progress", "loss"} - set(curves.columns)
    if missing:
        raise ValueError(f"curves lack columns {sorted(missing)}; give run, flops, tokens, progress and loss")
    usable = curves.query("0 < loss < inf and progress > 0")
    runs = []
    for name, rows in usable.groupby("run", sort=False):
        rows = rows.sort_values("progress").drop_duplicates("progress", keep="last")
        if rows["progress"].iloc[-1] < 0.98:
            raise ValueError(
                f"curve of run {name} ends at progress {rows['progress'].iloc[-1]:.3g}; give finished runs"
            )
        runs.append(rows)
    if not runs:
        raise ValueError("curves hold no finite positive loss; check the columns progress and loss")
    return runs


def _identity(run: pd.DataFrame) -> dict[str, Any]:
    return {str(key): value for key, value in run.iloc[-1].items() if key not in ("progress", "loss", "step")}


def _by_compute(runs: list[pd.DataFrame], smoothed: Array, *, floor: float, exponent: float) -> Ladder:
    log_flops = np.array([math.log(target_flops(_identity(run))) for run in runs])
    order = np.argsort(log_flops)
    rung = np.concatenate([[0], np.cumsum(np.diff(log_flops[order]) > 1e-3)])
    members = [order[rung == index] for index in np.unique(rung)]
    return Ladder(
        log_flops=np.array([log_flops[group].mean() for group in members]),
        log_loss=np.array([smoothed[group].mean(axis=0) for group in members]),
        floor=floor,
        exponent=exponent,
    )


def _held_out(ladder: Ladder) -> tuple[dict[str, float], dict[str, Array]]:
    """Root mean square miss of each shape on upper rungs forecast from the lower ones, and the misses (held, p)."""
    errors, misses = {}, {}
    for name, shape in SHAPES.items():
        rows = []
        for held in range(2, ladder.log_flops.size):
            log_final = float(ladder.log_loss[held, -1])
            rows.append(shape(ladder.below(held), float(ladder.log_flops[held]), log_final) - ladder.shapes[held])
        misses[name] = np.array(rows)
        errors[name] = float(np.sqrt(np.mean(misses[name] ** 2)))
    return errors, misses


def _fall_errors(ladder: Ladder, misses: Array, grid: Array) -> Array:
    """By how much of the larger one the forecast and the held-out rung's own fall differ, (held, p), 0 to 1.

    Log units, each fall from p / SPAN to p. Before the first full span as there, and in the last tenth as at its
    start: at its end a smoothed curve is at its noisiest.
    """
    at = np.log(np.clip(grid, min(grid[0] * SPAN, 0.9), 0.9))

    def fall(shape: Array) -> Array:
        return np.interp(at - math.log(SPAN), np.log(grid), shape) - np.interp(at, np.log(grid), shape)

    actual = ladder.shapes[2:]
    pairs = [(fall(shape + miss), fall(shape)) for shape, miss in zip(actual, misses, strict=True)]
    return np.array([np.abs(one - other) / np.maximum(np.maximum(one, other), 1e-9) for one, other in pairs]).clip(0, 1)


def _band(misses: Array, level: float) -> Array:
    """Half width that held-out misses (held, p) support at `level`: Student t, never widening with progress."""
    held = misses.shape[0]
    size = np.sqrt(np.mean(misses**2, axis=0))
    size = np.maximum.accumulate(size[::-1])[::-1]
    return float(special.stdtrit(held, 0.5 + level / 2)) * size


def _wanted(progress: ArrayLike | None, grid: Array) -> Array:
    if progress is None:
        return np.geomspace(grid[0], 1.0, 40)
    wanted = np.atleast_1d(np.asarray(progress, dtype=float))
    if wanted.min() < grid[0] * (1 - 1e-9) or wanted.max() > 1.0 + 1e-9:
        raise ValueError(f"progress {wanted.min():g} to {wanted.max():g} must lie within the rungs' [{grid[0]:.4g}, 1]")
    return wanted
