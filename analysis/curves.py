"""The whole trajectory of a hero from its rungs' curves: loss at equal progress, with bands.

Every run's curve is brought to common progress (share of its own token horizon). The hero's shape comes from those of
the rungs (`shapes.py`), its end from their ends (`curve_ends.py`), and the bands join what either may miss
(`bands.py`). Rows become curves in `curve_rows.py`; other quantities than losses are `metric_curves.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import special

from rungwise.analysis.conditions import MAX_RATIO_SPREAD
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.points import target_flops
from rungwise.analysis.whole_curves.bands import CurveError
from rungwise.analysis.whole_curves.curve_ends import floor_error, own_final, size_of_target
from rungwise.analysis.whole_curves.curve_rows import (
    SETTLED,
    common_grid,
    falling,
    identity_of,
    log_steps_of,
    only_falls,
    smooth_curve,
    split_runs,
)
from rungwise.analysis.whole_curves.planned import plan_shapes
from rungwise.analysis.whole_curves.shapes import (
    PLAN_ERROR,
    Collapse,
    Ladder,
    ShapeForecast,
    collapse_floor,
    forecast_shape,
    leverage_of,
)

Array = NDArray[np.float64]

SPAN: Final = 2.0
"""A fall is measured from progress p / SPAN to p."""
MEASURED_SHARE: Final = 0.7
"""The least a measured slope error is taken for, as a share of the unmeasured one."""


def forecast_curve(
    curves: pd.DataFrame,
    target: Mapping[str, Any],
    *,
    progress: ArrayLike | None = None,
    level: float = 0.9,
    final: Forecast | None = None,
    floor: float | None = None,
    schedule: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Forecast loss along a new run at `target`: progress, loss, low, high, low_all, high_all, slope_error.

    low and high hold the run at one progress with probability `level`, low_all and high_all all of it at once. The
    loss never rises where the rungs' only fall. slope_error: by what share of itself the curve's fall up to there may
    be wrong, at most 1 (then the curve says nothing but that the loss falls).

    Args:
        curves: columns run, flops, num_params, tokens (final), steps, progress in (0, 1], loss, learning_rate (those
            known); per-step training loss or sparse evaluations. Runs of one compute are averaged. Non-finite losses
            are left out. Where tokens per parameter vary, shapes come from the runs that have the target's.
        progress: where to forecast; default 40 values from the rungs' first common point to 1.
        final: forecast of the same metric's final loss; None makes one from the curves' own ends, with the floor at
            which the curves collapse where they do.
        floor: pins the law's floor where `final` is made here, nats.
        schedule: the target's planned learning_rate by progress; with the rungs' own learning rates and steps it adds
            the law of schedules, which alone counts where the target's schedule is another.
    Raises:
        ValueError: a curve does not reach its end (`complete_curves` continues it), `progress` lies outside the rungs',
            or as `forecast_final`.
    The frame's `attrs`: "shape" (the heaviest candidate), "weights" and "errors" (each candidate's held-out miss, log
    units), "collapse" (floor, error and share), "steps_ratio" (target over the largest rung, None if not known),
    "degrees" of freedom of the band.
    """
    everything = split_runs(curves)
    runs = _of_ratio(everything, target)
    grid = common_grid(runs)
    weight = np.where(grid >= SETTLED, np.gradient(grid), 0.0)
    smoothed = np.array([smooth_curve(run["progress"].clip(upper=1.0), run["loss"], grid) for run in runs])
    ladder, rungs = _by_compute(runs, smoothed, weight / weight.sum())
    log_flops, log_steps = math.log(target_flops(target)), log_steps_of(target)
    collapse = collapse_floor(ladder.log_loss, ladder.weight)
    collapse = replace(collapse, error=math.sqrt(leverage_of(ladder, log_flops, log_steps)) * collapse.error)
    if final is None:
        final, doubt, of_floor = own_final(everything, runs, target, collapse, level=level, floor=floor)
    else:
        doubt, of_floor = 0.0, floor_error(final)
    if final.low is None or final.high is None:
        raise ValueError(f"no band: {final.status}")
    plan = plan_shapes(rungs, schedule, target, grid)
    final = replace(final, **{key: math.exp(plan.shift) * getattr(final, key) for key in ("point", "low", "high")})
    doubt = math.hypot(math.hypot(doubt, _completion(runs, log_flops)), PLAN_ERROR * plan.shift)
    law = final.laws[0]
    ladder = replace(ladder, floor=law["floor"], exponent=law["exponent"], planned=plan.shapes)
    log_final = math.log(final.point)
    shape = forecast_shape(
        ladder, log_flops=log_flops, log_steps=log_steps, log_final=log_final, floor_error=of_floor,
        only=("schedule_law",) if plan.changed else None,
    )  # fmt: skip
    middle = log_final + shape.shape
    if only_falls(ladder.log_loss):
        middle = falling(middle)
        middle += log_final - middle[-1]
    error = _curve_error(shape, final, grid, level=level, doubt=doubt)
    table = _table(middle, error, final, grid, level=level)
    table["slope_error"] = _slope_error(ladder, shape, grid, level)
    table.attrs.update(_evidence(shape, collapse, error, ladder, log_steps))
    return _at_wanted(table, progress, grid)


def _of_ratio(runs: list[pd.DataFrame], target: Mapping[str, Any]) -> list[pd.DataFrame]:
    """The runs with the target's tokens per (active) parameter, where that is known of all."""
    size = size_of_target(target)
    if not target.get(size) or not target.get("tokens") or any(not {size, "tokens"} <= set(run) for run in runs):
        return runs
    wanted = float(target["tokens"]) / float(target[size])
    ratios = [float(run["tokens"].iloc[-1]) / float(run[size].iloc[-1]) for run in runs]
    alike = [run for run, ratio in zip(runs, ratios, strict=True) if abs(math.log(ratio / wanted)) <= MAX_RATIO_SPREAD]
    if len(alike) < 3:
        raise ValueError(
            f"{len(alike)} rungs have the target's {wanted:.4g} tokens per parameter; a curve needs at least 3 of them"
        )
    return alike


def _by_compute(runs: list[pd.DataFrame], smoothed: Array, weight: Array) -> tuple[Ladder, list[pd.DataFrame]]:
    """Rungs of one compute averaged, in order of compute, and the first run of each."""
    log_flops = np.array([math.log(target_flops(identity_of(run))) for run in runs])
    log_steps = np.array([log_steps_of(identity_of(run)) for run in runs])
    order = np.argsort(log_flops, kind="stable")
    rung = np.concatenate([[0], np.cumsum(np.diff(log_flops[order]) > 1e-3)])
    members = [order[rung == index] for index in np.unique(rung)]
    if len(members) < 3:
        raise UnfitForecast(f"{len(members)} rungs cannot carry a curve with a band; train at least 3")
    ladder = Ladder(
        log_flops=np.array([log_flops[group].mean() for group in members]),
        log_steps=np.array([log_steps[group].mean() for group in members]),
        log_loss=np.array([smoothed[group].mean(axis=0) for group in members]),
        weight=weight,
        floor=0.0,
        exponent=0.0,
        planned=np.full((len(members), weight.size), math.nan),
    )
    return ladder, [runs[group[0]] for group in members]


def _completion(runs: list[pd.DataFrame], log_target: float) -> float:
    """Log error of the target's end from rungs whose curves were continued: through a line in log compute."""
    if "completion_error" not in runs[0]:
        return 0.0
    x = np.array([math.log(target_flops(identity_of(run))) for run in runs])
    errors = np.array([float(run["completion_error"].iloc[-1]) for run in runs])
    reach = 1.0 / x.size + (x - x.mean()) * (log_target - x.mean()) / np.sum((x - x.mean()) ** 2)
    return float(np.linalg.norm(reach * errors))


def _curve_error(shape: ShapeForecast, final: Forecast, grid: Array, *, level: float, doubt: float) -> CurveError:
    """Scales of what the curve may miss: of the shape from held-out misses, of the end from its interval."""
    degrees = float(max(len(shape.misses), 1))
    quantile = float(special.stdtrit(degrees, 0.5 + level / 2))
    alike = np.sqrt(np.mean(shape.squares / shape.held_leverage[:, None], axis=0))
    assert final.low is not None
    assert final.high is not None
    half = 0.5 * math.log(final.high / final.low)
    return CurveError.of(
        np.log(grid),
        np.hypot(alike * math.sqrt(shape.leverage), shape.disagreement),
        final=math.hypot(half / quantile, doubt),
        degrees=degrees,
    )


def _table(middle: Array, error: CurveError, final: Forecast, grid: Array, *, level: float) -> pd.DataFrame:
    """Bands around the middle; the end keeps the final forecast's own, lopsided interval, or widens it evenly."""
    assert final.low is not None
    assert final.high is not None
    half = error.half_width(level)
    shape = np.sqrt(np.maximum(half**2 - half[-1] ** 2, 0.0))
    below, above = math.log(final.point / final.low), math.log(final.high / final.point)
    stretch = half[-1] / (0.5 * (below + above))
    below, above = below * stretch, above * stretch
    factor = error.simultaneous_factor(level)
    down, up = np.hypot(below, shape), np.hypot(above, shape)
    columns = {"low": -down, "high": up, "low_all": -factor * down, "high_all": factor * up}
    return pd.DataFrame(
        {"progress": grid, "loss": np.exp(middle), **{k: np.exp(middle + v) for k, v in columns.items()}}
    )


def _slope_error(ladder: Ladder, shape: ShapeForecast, grid: Array, level: float) -> Array:
    measured = _band(_fall_errors(ladder, shape.misses, grid), level)
    return np.clip(measured, MEASURED_SHARE * unmeasured_slope_error(grid), 1.0)


def _evidence(
    shape: ShapeForecast, collapse: Collapse, error: CurveError, ladder: Ladder, log_steps: float
) -> dict[str, Any]:
    ratio = math.exp(log_steps - float(ladder.log_steps[-1]))
    return {
        "shape": max(shape.weights, key=lambda name: shape.weights[name]),
        "weights": shape.weights,
        "errors": shape.errors,
        "collapse": {"floor": collapse.floor, "error": collapse.error, "share": collapse.share},
        "steps_ratio": ratio if math.isfinite(ratio) else None,
        "degrees": error.degrees,
    }


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


def _at_wanted(table: pd.DataFrame, progress: ArrayLike | None, grid: Array) -> pd.DataFrame:
    if progress is None:
        wanted = np.geomspace(grid[0], 1.0, 40)
    else:
        wanted = np.atleast_1d(np.asarray(progress, dtype=float))
        if wanted.min() < grid[0] * (1 - 1e-9) or wanted.max() > 1.0 + 1e-9:
            raise ValueError(
                f"progress {wanted.min():g} to {wanted.max():g} must lie within the rungs' [{grid[0]:.4g}, 1]"
            )
    columns = {
        str(key): np.interp(np.log(wanted), np.log(grid), table[key]) for key in table.columns if key != "progress"
    }
    result = pd.DataFrame({"progress": wanted, **columns})
    result.attrs.update(table.attrs)
    return result
