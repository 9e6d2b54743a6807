"""The forecast of a hero's final loss from its ladder: a frozen record of the number and of everything it rests on.

`intervals.py` makes the distribution, `fit.py` the constants, `conditions.py` what is taken for granted; here rows
become rungs and the answer is put into words a reader can act on. The trajectory is `curves.py`; `registry.py` freezes.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import numpy as np
import pandas as pd

from rungwise.analysis.conditions import compare_conditions, refuse_ratio
from rungwise.analysis.fit import MIN_RUNGS, FitStatus, UnfitForecast, fit_law
from rungwise.analysis.intervals import FloorProfile, RungMeans, profile_floors
from rungwise.analysis.laws import PowerLaw
from rungwise.analysis.points import target_flops, usable_points
from rungwise.analysis.vocabulary import SCHEMA_VERSION, canonical_json, load_json

FAR_EXTRAPOLATION: Final = 100.0
"""Target over largest rung, in compute, beyond which the forecast is marked."""
GOOD_RMSE: Final = 0.003
"""Nats; floors whose line passes the rungs this closely are all supported by them."""
_PROFILE_ROWS: Final = 61


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A final loss with its interval (nats per token) and its evidence, in plain values, so that it hashes and travels.

    low and high are None when no degree of freedom is left. `curve` rows: metric, progress, loss, low, high.
    """

    metric: str
    target: dict[str, Any]
    point: float
    low: float | None
    high: float | None
    level: float
    half_width: dict[str, float | None]
    laws: list[dict[str, Any]]
    status: str
    degrees_of_freedom: int
    extrapolation_ratio: float
    used: list[dict[str, Any]]
    refused: list[dict[str, str]]
    merged: list[dict[str, str]]
    loss_rule: str
    noise: float | None
    """Relative run-to-run spread of the final loss from repeated seeds; None without repeats."""
    conditions: dict[str, dict[str, Any]]
    warnings: list[str]
    floor: float | None
    floor_reason: str | None
    floor_profile: list[dict[str, float]]
    floor_range: dict[str, float] | None
    curve: list[dict[str, Any]]

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical content, without the hash itself."""
        return hashlib.sha256(canonical_json(self._content()).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The object `ladder forecast --json` prints and the registry stores."""
        return {**self._content(), "hash": self.hash}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a stored hash is not checked here (`registry.py` does).

        Raises:
            ValueError: another schema version, or a key too few or too many.
        """
        if record.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"forecast schema {record.get('schema')!r} is not {SCHEMA_VERSION}; upgrade rungwise or the file"
            )
        content = {key: value for key, value in record.items() if key not in ("schema", "hash")}
        known = {field.name for field in fields(cls)}
        if content.keys() != known:
            raise ValueError(
                f"forecast keys differ by {sorted(content.keys() ^ known)}; the file is not a whole forecast"
            )
        return cls(**content)

    def with_curve(self, table: pd.DataFrame, *, metric: str | None = None) -> Self:
        """The same forecast with the rows of `forecast_curve` for one metric added (replacing that metric's)."""
        name = metric or self.metric
        rows = [row for row in self.curve if row["metric"] != name]
        columns = [key for key in ("progress", "loss", "low", "high", "slope_error") if key in table]
        for row in zip(*(np.asarray(table[key], dtype=float).tolist() for key in columns), strict=True):
            rows.append({"metric": name, **dict(zip(columns, row, strict=True))})
        return replace(self, curve=rows)

    def curve_table(self, metric: str) -> pd.DataFrame | None:
        """Columns progress, loss, low, high of one metric's registered trajectory; None without one."""
        rows = [row for row in self.curve if row["metric"] == metric]
        return pd.DataFrame(rows).drop(columns="metric").sort_values("progress", ignore_index=True) if rows else None

    def _content(self) -> dict[str, Any]:
        return {"schema": SCHEMA_VERSION, **{field.name: getattr(self, field.name) for field in fields(self)}}


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
            become conditions.
        target: the same keys without the loss.
        level: probability the interval is to hold a new run's loss with.
        floor: pins the law's floor, nats; say why in `floor_reason`. None forecasts over all floors the rungs
            allow.
    Raises:
        ValueError: the target lies inside the ladder, tokens per active parameter differ, or an input is bad.
        UnfitForecast: fewer than three usable rungs; carries the two-rung estimate.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level {level} must lie in (0, 1); 0.9 is usual")
    table, refused, merged = usable_points(points)
    flops = target_flops(target)
    rungs, noise = rung_means(table)
    _refuse_target(rungs, flops)
    conditions = compare_conditions(table, target)
    refuse_ratio(conditions)
    free = profile_floors(rungs, math.log(flops))
    profile = free if floor is None else profile_floors(rungs, math.log(flops), floor=floor)
    degrees = rungs.loss.size - (3 if floor is None else 2) + rungs.repeat_degrees
    point = profile.quantile(0.5)
    tails = (0.5 - level / 2, 0.5 + level / 2)
    low, high = (profile.quantile(tail) for tail in tails) if degrees > 0 else (None, None)
    law = law_through(rungs, flops, point=point, profile=profile)
    laws, status = _laws(rungs, flops, law=law, point=point, floor=floor)
    ratio = flops / float(np.exp(rungs.log_flops[-1]))
    warnings = _warnings(ratio, conditions, table, weak=status is not FitStatus.CONVERGED and floor is None)
    if degrees <= 0:
        status = (
            f"no interval: {rungs.loss.size} rungs leave no degree of freedom; add a rung, a repeat or a pinned floor"
        )
    return Forecast(
        metric=str(table["metric"].iloc[0]) if "metric" in table.columns else "loss",
        target={str(key): _plain(value) for key, value in {**target, "flops": flops}.items()},
        point=point,
        low=low,
        high=high,
        level=level,
        half_width=_half_width(point, low, high, law=law, top=float(rungs.loss[-1])),
        laws=laws,
        status=str(status),
        degrees_of_freedom=max(degrees, 0),
        extrapolation_ratio=ratio,
        used=[_used_row(row) for row in table.to_dict("records")],
        refused=refused,
        merged=merged,
        loss_rule=str(table["loss_rule"].iloc[0]) if "loss_rule" in table.columns else "as given",
        noise=noise,
        conditions=conditions,
        warnings=warnings,
        floor=floor,
        floor_reason=floor_reason,
        floor_profile=_profile_rows(free, tails),
        floor_range=_floor_range(free),
        curve=[],
    )


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
    """Forecast each top rung from the rungs below: rung, flops, observed, point, low, high, error, inside."""
    table, _, _ = usable_points(points)
    rungs, _ = rung_means(table)
    computes = np.exp(rungs.log_flops)
    rows = []
    for held in range(MIN_RUNGS, computes.size):
        below = table.query("flops < @computes[@held] * 0.999")
        top = table.query("abs(flops / @computes[@held] - 1) <= 1e-3")
        forecast = forecast_final(below, top.iloc[0].drop("loss").to_dict(), level=level, floor=floor)
        observed = float(rungs.loss[held])
        inside = None if forecast.low is None or forecast.high is None else forecast.low <= observed <= forecast.high
        rows.append(
            {"rung": _name(top), "flops": float(computes[held]), "observed": observed, "point": forecast.point,
             "low": forecast.low, "high": forecast.high, "error": forecast.point - observed, "inside": inside}
        )  # fmt: skip
    return rows


def rung_means(table: pd.DataFrame) -> tuple[RungMeans, float | None]:
    """Mean loss per rung in order of compute, and the relative noise that repeats show (None without repeats).

    Rows belong to one rung when their compute agrees within 0.1 %.
    """
    ordered = table.sort_values("flops")
    flops = ordered["flops"].to_numpy(dtype=float)
    rung = np.concatenate([[0], np.cumsum(np.diff(np.log(flops)) > 1e-3)]) if flops.size else np.empty(0, dtype=int)
    groups = [ordered["loss"].to_numpy(dtype=float)[rung == index] for index in np.unique(rung)]
    computes = [float(np.log(flops[rung == index]).mean()) for index in np.unique(rung)]
    squares = float(sum(np.sum((np.log(group) - np.log(group).mean()) ** 2) for group in groups))
    degrees = sum(group.size - 1 for group in groups)
    means = RungMeans(
        log_flops=np.array(computes),
        loss=np.array([group.mean() for group in groups]),
        repeat_squares=squares,
        repeat_degrees=degrees,
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


def _refuse_target(rungs: RungMeans, flops: float) -> None:
    count = rungs.loss.size
    top = math.exp(rungs.log_flops[-1]) if count else 0.0
    if count < MIN_RUNGS:
        estimate = None
        if count == 2:
            slope, level = np.polyfit(rungs.log_flops, np.log(rungs.loss), 1)
            estimate = float(np.exp(level + slope * math.log(flops)))
        raise UnfitForecast(f"{count} usable rungs cannot carry a forecast; train at least {MIN_RUNGS}", estimate)
    if flops <= top * 1.001:
        raise ValueError(
            f"target flops {flops:.4g} lie inside the ladder (largest rung {top:.4g}); a hero must be larger"
        )


def _warnings(
    ratio: float, conditions: Mapping[str, Mapping[str, Any]], table: pd.DataFrame, *, weak: bool
) -> list[str]:
    found = []
    if ratio > 1.001 * FAR_EXTRAPOLATION:
        found.append(
            f"target is {ratio:.0f}x the largest rung, beyond {FAR_EXTRAPOLATION:.0f}x: its interval is a lower bound"
        )
    if weak:
        found.append("the floor is not identified by these rungs: see floor_profile")
    for name, condition in conditions.items():
        if condition["outside"] and name in table.columns and len(set(table[name])) == 1:
            found.append(f"{name} is {condition['hero']} for the hero and {condition['rungs'][0]} on every rung")
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
        "run",
        "rung",
        "seed",
        "flops",
        "num_params",
        "num_active_params",
        "tokens",
        "loss",
        "config_hash",
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
