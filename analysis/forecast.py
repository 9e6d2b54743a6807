"""The forecast of a hero's final loss from its ladder: a frozen record of the number and of everything it rests on.

A ladder at one ratio of tokens to parameters is a law in compute (`intervals.py`, here); runs whose sizes and tokens
vary freely are a law in both (`surface.py`, put into the same record by `surface_record.py`). `conditions.py` says
what is taken for granted, `backtest.py` how the same procedure does on the ladder's own upper rungs, `curves.py` what
the way to the end looks like, and `registry.py` freezes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.conditions import (
    MAX_RATIO_SPREAD,
    compare_conditions,
    ratio_spread,
    recipe_warnings,
    refuse_ratio,
    unstated_conditions,
)
from rungwise.analysis.fitting.fit import MIN_RUNGS, FitStatus, UnfitForecast, fit_law
from rungwise.analysis.fitting.intervals import FloorProfile, RungMeans, mixture_quantile, profile_floors
from rungwise.analysis.fitting.laws import PowerLaw
from rungwise.analysis.fitting.surface_record import NotSurface, forecast_by_surface
from rungwise.analysis.forecast_record import Forecast
from rungwise.analysis.points import target_flops, usable_points
from rungwise.analysis.rows import odd_runs, refuse_other_size, shared_counts
from rungwise.analysis.vocabulary import canonical_json, load_json

__all__ = ["Forecast", "UnfitForecast", "backtest_final", "forecast_final", "law_through", "rung_means"]

FAR_EXTRAPOLATION: Final = 100.0
"""Target over largest rung, in compute, beyond which the forecast is marked."""
GOOD_RMSE: Final = 0.003
"""Nats; floors whose line passes the rungs this closely are all supported by them."""
OTHER_COUNT: Final = "flops_with_head"
"""The second count of compute; where rungs and hero have both, both are fitted."""
_PROFILE_ROWS: Final = 61


def forecast_final(
    points: pd.DataFrame | Sequence[Mapping[str, Any]],
    target: Mapping[str, Any],
    *,
    level: float = 0.9,
    floor: float | None = None,
    floor_reason: str | None = None,
) -> Forecast:
    """Forecast the final loss of a new run at `target` from the ladder's `points`.

    Args:
        points: columns run, flops, num_params, tokens, loss (those known); rung and seed tie repeats; others
            become conditions. More columns, and the other counts of parameters: `rows.py`.
        target: the same keys without the loss.
        level: probability the interval is to hold a new run's loss with.
        floor: pins the floor of every law, nats; say why in `floor_reason`. None forecasts over all floors the
            rungs allow.
    Raises:
        ValueError: the target lies inside the ladder or is given in another count, tokens per active parameter
            differ and no law in both holds, or an input is bad.
        UnfitForecast: fewer than three usable rungs; carries the two-rung estimate.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level {level} must lie in (0, 1); 0.9 is usual")
    columns = set(points.columns) if isinstance(points, pd.DataFrame) else {key for row in points for key in row}
    counts = shared_counts(columns, target)
    table: Any
    table, refused, merged = usable_points(points, size=counts[0] if counts else None)
    _refuse_other_count(columns, target)
    refuse_other_size(columns, target)
    flops = target_flops(target, size=counts[0] if counts else None)
    odd = odd_runs(table) if ratio_spread(compare_conditions(table, target)) <= MAX_RATIO_SPREAD else []
    table = table[~table["run"].astype(str).isin([item["run"] for item in odd])].reset_index(drop=True)
    rungs, noise = rung_means(table)
    _refuse_few(rungs, flops)
    conditions = compare_conditions(table, target)
    free = counts and ratio_spread(conditions) > MAX_RATIO_SPREAD
    _refuse_inside(table, target, flops, sizes=(counts[0], "tokens") if free else ())
    ratio = flops / float(np.exp(rungs.log_flops[-1]))
    common: dict[str, Any] = {
        "metric": str(table["metric"].iloc[0]) if "metric" in table.columns else "loss",
        "target": {str(key): _plain(value) for key, value in {**target, "flops": flops}.items()},
        "level": level,
        "extrapolation_ratio": ratio,
        "used": [_used_row(row) for row in table.to_dict("records")],
        "refused": [*refused, *odd],
        "merged": merged,
        "loss_rule": str(table["loss_rule"].iloc[0]) if "loss_rule" in table.columns else "as given",
        "noise": noise,
        "conditions": conditions,
        "warnings": [*_warnings(ratio, conditions, table), *recipe_warnings(table)],
        "floor": floor,
        "floor_reason": floor_reason,
        "curve": [],
    }
    if ratio_spread(conditions) > MAX_RATIO_SPREAD:
        try:
            return forecast_by_surface(table, target, common, counts=counts)
        except NotSurface as error:
            refuse_ratio(conditions, why=str(error))
    return _forecast_by_compute(table, target, rungs, common)


def _forecast_by_compute(table: Any, target: Mapping[str, Any], rungs: RungMeans, common: dict[str, Any]) -> Forecast:
    """The record of a ladder at one ratio of tokens to parameters."""
    flops, floor, level = float(common["target"]["flops"]), common["floor"], common["level"]
    free = profile_floors(rungs, math.log(flops))
    profile = free if floor is None else profile_floors(rungs, math.log(flops), floor=floor)
    profiles = {"flops": profile, **_other_count(table, target, floor)}
    degrees = rungs.loss.size - (3 if floor is None else 2) + rungs.repeat_degrees
    tails = (0.5 - level / 2, 0.5 + level / 2)
    point = mixture_quantile(list(profiles.values()), 0.5)
    low, high = (mixture_quantile(list(profiles.values()), tail) for tail in tails) if degrees > 0 else (None, None)
    law = law_through(rungs, flops, point=point, profile=profile)
    laws, fitted = _laws(rungs, flops, law=law, point=point, floor=floor)
    warnings = list(common["warnings"])
    if fitted is not FitStatus.CONVERGED and floor is None:
        warnings.insert(0, "the floor is not identified by these rungs: see floor_profile")
    status = str(fitted)
    if degrees <= 0:
        status = (
            f"no interval: {rungs.loss.size} rungs leave no degree of freedom; add a rung, a repeat or a pinned floor"
        )
    common = {**common, "warnings": warnings}
    return Forecast(
        **common,
        point=point,
        low=low,
        high=high,
        half_width=_half_width(point, low, high, law=law, top=float(rungs.loss[-1])),
        laws=laws,
        status=status,
        degrees_of_freedom=max(degrees, 0),
        floor_profile=_profile_rows(free, tails),
        floor_range=_floor_range(free),
        method=_method(rungs, profiles, common, tails),
    )


def _other_count(table: Any, target: Mapping[str, Any], floor: float | None) -> dict[str, FloorProfile]:
    """The same ladder by compute with the head, where rungs and hero state it."""
    if OTHER_COUNT not in table.columns or not target.get(OTHER_COUNT):
        return {}
    counted = table.assign(flops=table[OTHER_COUNT].astype(float))
    if not np.all(np.isfinite(counted["flops"]) & (counted["flops"] > 0)) or "flops" not in target:
        return {}
    rungs, _ = rung_means(counted)
    if rungs.loss.size < MIN_RUNGS or float(target[OTHER_COUNT]) <= float(np.exp(rungs.log_flops[-1])):
        return {}
    return {OTHER_COUNT: profile_floors(rungs, math.log(float(target[OTHER_COUNT])), floor=floor)}


def _method(
    rungs: RungMeans, profiles: Mapping[str, FloorProfile], common: Mapping[str, Any], tails: tuple[float, float]
) -> dict[str, Any]:
    """How the number was made, and how far the ladder itself can test it."""
    computes = np.exp(rungs.log_flops)
    reach = float(computes[-1] / computes[MIN_RUNGS - 1]) if computes.size > MIN_RUNGS else 1.0
    counts = [
        {"count": name, "point": profile.quantile(0.5), "low": profile.quantile(tails[0]),
         "high": profile.quantile(tails[1]), "bent": profile.bent}
        for name, profile in profiles.items()
    ]  # fmt: skip
    return {
        "law": "compute",
        "interval": "Student t" if common["floor"] is not None else "mixture of Student t over floors and bends",
        "counts": counts,
        "evidence_ratio": reach,
        "evidence": (
            f"the target has {common['extrapolation_ratio']:.3g} times the compute of the largest rung; the ladder's "
            f"own back-test reaches {reach:.3g} times, and beyond that these runs give no evidence"
        ),
        "unstated": unstated_conditions(common["conditions"]),
    }


def _laws(
    rungs: RungMeans, flops: float, *, law: PowerLaw, point: float, floor: float | None
) -> tuple[list[dict[str, Any]], FitStatus]:
    """The law the forecast goes by, the robust best fit and the floorless control; and the fit's status."""
    rows = [{"role": "forecast", "form": "power_floor", **_constants(law), "value": point}]
    best = fit_law(np.exp(rungs.log_flops), rungs.loss, floor=floor)
    control = fit_law(np.exp(rungs.log_flops), rungs.loss, form="power")
    for role, fit in (("best_fit", best), ("control", control)):
        rows.append({"role": role, **fit.to_dict(), "value": float(fit.law.value(flops))})
    return rows, best.status


def backtest_final(points: pd.DataFrame, *, level: float = 0.9, floor: float | None = None) -> list[dict[str, Any]]:
    """Forecast each top rung from those below: rung, flops, observed, point, low, high, error, inside, law, counts."""
    table: Any = usable_points(points)[0]
    rungs, _ = rung_means(table)
    computes = np.exp(rungs.log_flops)
    rows = []
    for held in range(MIN_RUNGS, computes.size):
        below = table[table["flops"] < computes[held] * 0.999]
        top = table[np.abs(table["flops"] / computes[held] - 1.0) <= 1e-3]
        forecast = forecast_final(below, top.iloc[0].drop("loss").to_dict(), level=level, floor=floor)
        observed = float(rungs.loss[held])
        inside = None if forecast.low is None or forecast.high is None else forecast.low <= observed <= forecast.high
        alone = (forecast.method or {}).get("counts", [])
        counts = alone if inside is not None else [{**count, "low": None, "high": None} for count in alone]
        rows.append(
            {"rung": _name(top), "flops": float(computes[held]), "observed": observed, "point": forecast.point,
             "low": forecast.low, "high": forecast.high, "error": forecast.point - observed, "inside": inside,
             "counts": counts,
             "law": PowerLaw(*(float(forecast.laws[0][key]) for key in ("floor", "amplitude", "exponent")))}
        )  # fmt: skip
    return rows


def rung_means(table: Any) -> tuple[RungMeans, float | None]:
    """Mean loss per rung in order of compute, and the relative noise that repeats show (None without repeats).

    Rows belong to one rung when their compute agrees within 0.1 %.
    """
    ordered = table.sort_values("flops")
    flops = ordered["flops"].to_numpy(dtype=float)
    rung = np.concatenate([[0], np.cumsum(np.diff(np.log(flops)) > 1e-3)]) if flops.size else np.empty(0, dtype=int)
    members = [rung == index for index in np.unique(rung)]
    groups = [ordered["loss"].to_numpy(dtype=float)[member] for member in members]
    squares = float(sum(np.sum((np.log(group) - np.log(group).mean()) ** 2) for group in groups))
    degrees = sum(group.size - 1 for group in groups)
    errors = None
    if "loss_error" in ordered.columns:
        stated = ordered["loss_error"].fillna(0.0).to_numpy(dtype=float)
        errors = np.array([math.sqrt(float(np.sum(stated[member] ** 2))) / member.sum() for member in members])
    means = RungMeans(
        log_flops=np.array([float(np.log(flops[member]).mean()) for member in members]),
        loss=np.array([group.mean() for group in groups]),
        repeat_squares=squares,
        repeat_degrees=degrees,
        loss_error=errors,
    )
    return means, math.sqrt(squares / degrees) if degrees else None


def law_through(rungs: RungMeans, flops: float, *, point: float, profile: FloorProfile) -> PowerLaw:
    """The straight line in (log C, log(L - E)) whose floor makes it pass through the forecast point."""
    floor = float(profile.floors[0])
    if profile.floors.size > 1:
        order = np.argsort(profile.points)
        floor = float(np.interp(point, profile.points[order], profile.floors[order]))
    floor = min(floor, 0.999 * float(rungs.loss.min()))
    slope, level = np.polyfit(rungs.log_flops, np.log(rungs.loss - floor), 1)
    return PowerLaw(floor, float(np.exp(level)), float(-slope))


def _refuse_other_count(columns: set[str], target: Mapping[str, Any]) -> None:
    """Compute with and without the head are never compared.

    Raises:
        ValueError: one side states only the one count, the other only the other.
    """
    for mine, other in (("flops", OTHER_COUNT), (OTHER_COUNT, "flops")):
        if mine in columns and other not in columns and other in target and mine not in target:
            raise ValueError(
                f"the rungs' compute is {mine} and the target's {other}; give both in the same count, or both counts"
            )


def _refuse_few(rungs: RungMeans, flops: float) -> None:
    count = rungs.loss.size
    if count >= MIN_RUNGS:
        return
    estimate = None
    if count == 2:
        slope, level = np.polyfit(rungs.log_flops, np.log(rungs.loss), 1)
        estimate = float(np.exp(level + slope * math.log(flops)))
    raise UnfitForecast(f"{count} usable rungs cannot carry a forecast; train at least {MIN_RUNGS}", estimate)


def _refuse_inside(table: Any, target: Mapping[str, Any], flops: float, *, sizes: Sequence[str]) -> None:
    """A forecast is of a run beyond the ladder: in compute, or where `sizes` vary freely in one of them."""
    if any(float(target[key]) > 1.001 * float(table[key].astype(float).max()) for key in sizes):
        return
    top = float(table["flops"].max())
    if flops <= top * 1.001:
        raise ValueError(
            f"target flops {flops:.4g} lie inside the ladder (largest rung {top:.4g}); a hero must be larger"
        )


def _warnings(ratio: float, conditions: Mapping[str, Mapping[str, Any]], table: Any) -> list[str]:
    found = []
    if ratio > 1.001 * FAR_EXTRAPOLATION:
        found.append(
            f"target is {ratio:.0f}x the largest rung, beyond {FAR_EXTRAPOLATION:.0f}x: its interval is a lower bound"
        )
    for name, condition in conditions.items():
        same = name in table.columns and len(set(table[name])) == 1
        if condition["outside"] and (same or name == "epochs"):
            rungs = f"{condition['rungs'][0]} on every rung" if same else f"{condition['rungs']} on the rungs"
            found.append(f"{name} is {condition['hero']} for the hero and {rungs}")
    return found


def _half_width(
    point: float, low: float | None, high: float | None, *, law: PowerLaw, top: float
) -> dict[str, float | None]:
    if low is None or high is None:
        return dict.fromkeys(("nats", "percent", "compute_factor", "of_fall"))
    nats = 0.5 * (high - low)
    factor = law.compute_factor(point, nats)
    return {
        "nats": nats,
        "percent": 100.0 * nats / point,
        "compute_factor": factor if math.isfinite(factor) else None,
        "of_fall": nats / (top - point) if top > point else None,
    }


def _profile_rows(profile: FloorProfile, tails: tuple[float, float]) -> list[dict[str, float]]:
    chosen = np.unique(np.linspace(0, profile.floors.size - 1, _PROFILE_ROWS).astype(int))
    owner = np.searchsorted((chosen[1:] + chosen[:-1]) / 2, np.arange(profile.floors.size))
    weights = np.bincount(owner, weights=profile.weights, minlength=chosen.size)
    return [
        {"floor": float(profile.floors[index]), "point": float(profile.points[index]),
         "low": profile.quantile_of(index, tails[0]), "high": profile.quantile_of(index, tails[1]),
         "rmse": float(profile.rmse[index]), "weight": float(weight)}
        for index, weight in zip(chosen, weights, strict=True)
    ]  # fmt: skip


def _floor_range(profile: FloorProfile) -> dict[str, float] | None:
    floors = profile.floors_within(GOOD_RMSE)
    if floors is None:
        return None
    points = np.interp(floors, profile.floors, profile.points)
    return {"rmse": GOOD_RMSE, "floor_low": floors[0], "floor_high": floors[1],
            "point_low": float(points.min()), "point_high": float(points.max())}  # fmt: skip


def _constants(law: PowerLaw) -> dict[str, float]:
    return {"floor": law.floor, "amplitude": law.amplitude, "exponent": law.exponent}


def _used_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    keys = (
        *("run", "rung", "seed", "flops", "flops_with_head", "num_params", "num_active_params", "tokens", "loss"),
        *("loss_error", "config_hash"),
    )
    return {key: _plain(row[key]) for key in keys if key in row and _plain(row[key]) is not None}


def _name(rows: pd.DataFrame) -> str:
    return str(rows["rung" if "rung" in rows.columns else "run"].iloc[0])


def _plain(value: Any) -> Any:
    """A JSON value: numpy scalars unwrapped, NaN and other missing values None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float | int | str | bool | None.__class__):
        return value
    return load_json(canonical_json(value))
