"""A forecast by laws in parameters and tokens, put into the record of `forecast_record.py`."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rungwise.analysis.fit import FitStatus, UnfitForecast
from rungwise.analysis.forecast_record import Forecast
from rungwise.analysis.laws import LAWS, PowerLaw
from rungwise.analysis.surface import MemberForecast, SurfaceForecast, forecast_surface
from rungwise.analysis.surface_fit import fit_surface

FLOORS: Final = 13
"""Floors at which the profile refits the separable law."""


class NotSurface(ValueError):
    """These runs cannot carry a law in parameters and tokens; the message says why."""


def forecast_by_surface(table: Any, target: Mapping[str, Any], common: dict[str, Any], *, size: str) -> Forecast:
    """Forecast from runs whose sizes and tokens vary; `common` holds the record's fields that no law decides.

    Raises:
        NotSurface: sizes or tokens are missing, too few runs, all on one line, or a floor is pinned.
    """
    rows, params, tokens = _columns(table, target, size)
    if common["floor"] is not None:
        raise NotSurface("a floor can be pinned in a law in compute alone")
    error = _loss_error(table)
    try:
        found = forecast_surface(rows, params, tokens, loss_error=error)
    except (UnfitForecast, ValueError) as reason:
        raise NotSurface(str(reason)) from reason
    level = float(common["level"])
    low, point, high = (float(found.quantile(at)[0]) for at in (0.5 - level / 2, 0.5, 0.5 + level / 2))
    law = _touching_law(found, params, tokens, float(common["target"]["flops"]), point)
    nats = 0.5 * (high - low)
    factor = law.compute_factor(point, nats)
    top = float(table["loss"].iloc[int(np.argmax(table["flops"]))])
    best = found.laws[0].fit
    common = {**common, "warnings": [*_weak(best.status), *_odd(table, found), *common["warnings"]]}
    return Forecast(
        **common,
        point=point,
        low=low,
        high=high,
        half_width={
            "nats": nats, "percent": 100.0 * nats / point, "compute_factor": factor if math.isfinite(factor) else None,
            "of_fall": nats / (top - point) if top > point else None,
        },
        laws=[
            {"role": "forecast", "form": "power_floor", "floor": law.floor, "amplitude": law.amplitude,
             "exponent": law.exponent, "value": point},
            *(_member_row(*pair, params, tokens) for pair in zip(found.laws, found.weights, strict=True)),
        ],
        status=str(best.status),
        degrees_of_freedom=best.degrees_of_freedom,
        floor_profile=_profile(rows, params, tokens, half=math.log(high / low) / 2),
        floor_range=None,
        method=_method(found, common),
    )  # fmt: skip


def _columns(table: Any, target: Mapping[str, Any], size: str) -> tuple[dict[str, np.ndarray], float, float]:
    for name in (size, "tokens"):
        if name not in table.columns or not target.get(name):
            raise NotSurface(f"{name} is not known of runs and target")
    rows = {"params": table[size], "tokens": table["tokens"], "loss": table["loss"], "flops": table["flops"]}
    arrays = {key: column.to_numpy(dtype=float) for key, column in rows.items()}
    return arrays, float(target[size]), float(target["tokens"])


def _loss_error(table: Any) -> float:
    """Root mean square of the stated relative errors of corrected runs."""
    if "loss_error" not in table.columns:
        return 0.0
    share = table["loss_error"].fillna(0.0).to_numpy(dtype=float) / table["loss"].to_numpy(dtype=float)
    return float(np.sqrt(np.mean(share**2)))


def _touching_law(found: SurfaceForecast, params: float, tokens: float, flops: float, point: float) -> PowerLaw:
    """The power law in compute through the forecast point, with the laws' mean floor and exponent there."""
    tangents = [item.fit.law.along_compute(params, tokens) for item in found.laws]
    floor = min(float(found.weights @ [law.floor for law in tangents]), 0.98 * point)
    exponent = float(found.weights @ [law.exponent for law in tangents])
    return PowerLaw(floor, math.exp(math.log(point - floor) + exponent * math.log(flops)), exponent)


def _member_row(item: MemberForecast, weight: float, params: float, tokens: float) -> dict[str, Any]:
    tangent = item.fit.law.along_compute(params, tokens)
    surface = item.fit.to_dict()
    return {
        "role": item.member.name,
        "form": item.member.form,
        "formula": LAWS[item.member.form].formula,
        "floor": tangent.floor,
        "amplitude": tangent.amplitude,
        "exponent": tangent.exponent,
        "weight": float(weight),
        "status": surface["status"],
        "surface": surface,
        "value": float(np.exp(item.location[0])),
    }


def _profile(rows: Mapping[str, np.ndarray], params: float, tokens: float, *, half: float) -> list[dict[str, float]]:
    """The separable law's forecast for each of a range of floors, weighted by how well it then fits."""
    lowest = float(rows["loss"].min())
    free = fit_surface(rows["params"], rows["tokens"], rows["loss"])
    found = []
    for floor in np.linspace(0.3, 0.95, FLOORS) * lowest:
        fit = fit_surface(rows["params"], rows["tokens"], rows["loss"], floor=float(floor))
        found.append((float(floor), fit, float(fit.law.value(params, tokens))))
    scale = max(free.objective / max(free.degrees_of_freedom, 1), 1e-12)
    misfit = np.array([fit.objective for _, fit, _ in found])
    weight = np.exp(-(misfit - misfit.min()) / scale)
    weight /= weight.sum()
    return [
        {"floor": floor, "point": point, "low": point * math.exp(-half), "high": point * math.exp(half),
         "rmse": float(np.sqrt(np.mean((np.expm1(fit.residuals) * rows["loss"]) ** 2))), "weight": float(share)}
        for (floor, fit, point), share in zip(found, weight, strict=True)
    ]  # fmt: skip


def _weak(status: FitStatus) -> list[str]:
    return [] if status is FitStatus.CONVERGED else [f"the laws are {status}"]


def _odd(table: Any, found: SurfaceForecast) -> list[str]:
    """Runs the robust fit hardly believes: more than five spreads off."""
    residuals = np.array(found.laws[0].fit.residuals)
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    odd = np.flatnonzero(np.abs(residuals) > 5.0 * max(spread, 1e-4))
    order = odd[np.argsort(-np.abs(residuals[odd]))]
    names = ", ".join(f"{table['run'].iloc[index]} ({-residuals[index]:+.1%})" for index in order[:5])
    return [f"{odd.size} runs lie far off the law of the others and hardly count: {names}"] if odd.size else []


def _method(found: SurfaceForecast, common: Mapping[str, Any]) -> dict[str, Any]:
    names = [item.member.name for item in found.laws]
    return {
        "law": "parameters and tokens",
        "interval": "discrepancy process under each law, Student t between laws",
        "weights": dict(zip(names, found.weights.tolist(), strict=True)),
        "held_out_errors": dict(zip(names, found.held_out_errors.tolist(), strict=True)),
        "form_share": float(found.form_scale[0] ** 2 / (found.form_scale[0] ** 2 + found.scale[0] ** 2)),
        "evidence": f"the target has {common['extrapolation_ratio']:.3g} times the compute of the largest run",
    }
