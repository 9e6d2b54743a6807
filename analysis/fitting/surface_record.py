"""A forecast by laws in parameters and tokens, put into the record of `forecast_record.py`.

Where runs and target state parameters both with and without embedding, each count is fitted on its own, with laws and
weights of its own; the forecast is the mixture of the two, so that their disagreement widens the interval, and so is
the floor profile. The law in compute shown is of the first count.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from rungwise.analysis.fitting.fit import FitStatus, UnfitForecast
from rungwise.analysis.fitting.laws import LAWS, PowerLaw
from rungwise.analysis.fitting.surface import MemberForecast, SurfaceForecast, forecast_surface, mixture_quantile
from rungwise.analysis.fitting.surface_fit import fit_surface
from rungwise.analysis.forecast_record import Forecast

FLOORS: Final = 13
"""Floors at which the profile refits the separable law."""


Input = tuple[dict[str, np.ndarray], float, float]
"""Rows in one count of parameters, and the target's parameters and tokens."""


class NotSurface(ValueError):
    """These runs cannot carry a law in parameters and tokens; the message says why."""


def forecast_by_surface(
    table: Any, target: Mapping[str, Any], common: dict[str, Any], *, counts: Sequence[str]
) -> Forecast:
    """Forecast from runs whose sizes and tokens vary; `common` holds the record's fields that no law decides.

    Args:
        counts: the counts of parameters that runs and target share (`rows.shared_counts`).
    Raises:
        NotSurface: sizes or tokens are missing, too few runs, or all on one line in a count.
        ValueError: a pinned floor is not below the lowest loss.
    """
    floor, error = common["floor"], _loss_error(table)
    _refuse_floor(floor, float(table["loss"].min()))
    inputs = _inputs(table, target, counts)
    try:
        found = {
            name: forecast_surface(rows, params, tokens, loss_error=error, floor=floor)
            for name, (rows, params, tokens) in inputs.items()
        }
    except (UnfitForecast, ValueError) as reason:
        raise NotSurface(str(reason)) from reason
    level = float(common["level"])
    tails = (0.5 - level / 2, 0.5 + level / 2)
    low, point, high = (float(mixture_quantile(list(found.values()), at)[0]) for at in (tails[0], 0.5, tails[1]))
    first = next(iter(inputs))
    best = found[first].laws[0].fit
    law = _touching_law(found[first], *inputs[first][1:], float(common["target"]["flops"]), point)
    method = _method(found, inputs, common, tails)
    return Forecast(
        **_with_counts(common, table, found),
        point=point,
        low=low,
        high=high,
        half_width=_half_width(point, low, high, law=law, table=table),
        laws=[
            {"role": "forecast", "form": "power_floor", "floor": law.floor, "amplitude": law.amplitude,
             "exponent": law.exponent, "value": point},
            *(row for name, item in found.items() for row in _member_rows(item, inputs[name], name, len(found))),
        ],
        status=str(best.status),
        degrees_of_freedom=best.degrees_of_freedom,
        floor_profile=_mixed_profile([row["floor_profile"] for row in method["counts"]], low=low, high=high),
        floor_range=None,
        method=method,
    )  # fmt: skip


def _refuse_floor(floor: float | None, lowest: float) -> None:
    if floor is not None and not 0.0 <= floor < lowest:
        raise ValueError(f"floor {floor} must lie in [0, {lowest:g}), below the lowest loss; pin a smaller one")


def _inputs(table: Any, target: Mapping[str, Any], counts: Sequence[str]) -> dict[str, Input]:
    """Rows and target in each count that every run states."""
    if not counts or "tokens" not in table.columns or not target.get("tokens"):
        raise NotSurface(f"{'tokens' if counts else 'num_params'} is not known of runs and target")
    whole = [name for name in counts if np.isfinite(table[name].to_numpy(dtype=float)).all()]
    if not whole:
        raise NotSurface(f"{' and '.join(counts)} is not known of every run; one count must be, so that none are mixed")
    found = {}
    for name in whole:
        rows = {"params": table[name], "tokens": table["tokens"], "loss": table["loss"], "flops": table["flops"]}
        arrays = {key: column.to_numpy(dtype=float) for key, column in rows.items()}
        found[name] = (arrays, float(target[name]), float(target["tokens"]))
    return found


def _with_counts(common: Mapping[str, Any], table: Any, found: Mapping[str, SurfaceForecast]) -> dict[str, Any]:
    """The common fields with the sizes fitted beside each run used, and what the fits warn of."""
    used = [
        row | {name: float(value) for name, value in zip(found, sizes, strict=True) if name not in row}
        for row, sizes in zip(common["used"], table[list(found)].to_numpy(dtype=float), strict=True)
    ]
    weak = dict.fromkeys(text for item in found.values() for text in _weak(item.laws[0].fit.status))
    odd = _odd(table, next(iter(found.values())))
    return {**common, "used": used, "warnings": [*weak, *odd, *common["warnings"]]}


def _half_width(point: float, low: float, high: float, *, law: PowerLaw, table: Any) -> dict[str, float | None]:
    nats = 0.5 * (high - low)
    factor = law.compute_factor(point, nats)
    top = float(table["loss"].iloc[int(np.argmax(table["flops"]))])
    return {
        "nats": nats,
        "percent": 100.0 * nats / point,
        "compute_factor": factor if math.isfinite(factor) else None,
        "of_fall": nats / (top - point) if top > point else None,
    }


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


def _member_rows(found: SurfaceForecast, at: Input, count: str, num_counts: int) -> list[dict[str, Any]]:
    """The laws fitted in one count; with several counts a role names its own, and weights sum to one over all."""
    suffix = f" in {count}" if num_counts > 1 else ""
    pairs = zip(found.laws, found.weights, strict=True)
    return [_member_row(item, float(weight) / num_counts, at, suffix) for item, weight in pairs]


def _member_row(item: MemberForecast, weight: float, at: Input, suffix: str) -> dict[str, Any]:
    tangent = item.fit.law.along_compute(*at[1:])
    surface = item.fit.to_dict()
    return {
        "role": item.member.name + suffix,
        "form": item.member.form,
        "formula": LAWS[item.member.form].formula,
        "floor": tangent.floor,
        "amplitude": tangent.amplitude,
        "exponent": tangent.exponent,
        "weight": weight,
        "status": surface["status"],
        "surface": surface,
        "value": float(np.exp(item.location[0])),
    }


def _profile(at: Input, *, half: float, pinned: float | None) -> list[dict[str, float]]:
    """The separable law's forecast for each of a range of floors, a pinned one among them, weighted by its fit."""
    rows, params, tokens = at
    lowest = float(rows["loss"].min())
    free = fit_surface(rows["params"], rows["tokens"], rows["loss"])
    found = []
    floors = np.linspace(0.3, 0.95, FLOORS) * lowest
    for floor in floors if pinned is None else np.unique([*floors, pinned]):
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


def _mixed_profile(profiles: Sequence[list[dict[str, float]]], *, low: float, high: float) -> list[dict[str, float]]:
    """The even mixture of the counts' profiles, which share their floors: each floor's points by its weights.

    The half width is that of the forecast itself, to which the counts' disagreement belongs.
    """
    half = math.log(high / low) / 2
    found = []
    for rows in zip(*profiles, strict=True):
        weights = np.array([row["weight"] for row in rows]) + 1e-300
        point = float(np.average([row["point"] for row in rows], weights=weights))
        rmse = float(np.sqrt(np.average([row["rmse"] ** 2 for row in rows], weights=weights)))
        found.append(
            {"floor": rows[0]["floor"], "point": point, "low": point * math.exp(-half), "high": point * math.exp(half),
             "rmse": rmse, "weight": float(np.mean([row["weight"] for row in rows]))}
        )  # fmt: skip
    return found


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


def _method(
    found: Mapping[str, SurfaceForecast],
    inputs: Mapping[str, Input],
    common: Mapping[str, Any],
    tails: tuple[float, float],
) -> dict[str, Any]:
    """How the number was made; weights, held-out errors and the share of the form are of the first count."""
    first = next(iter(found.values()))
    names = [item.member.name for item in first.laws]
    return {
        "law": "parameters and tokens",
        "interval": "discrepancy process under each law, Student t between laws"
        + (", mixture of the counts" if len(found) > 1 else ""),
        "counts": [_of_count(name, item, inputs[name], common, tails) for name, item in found.items()],
        "weights": dict(zip(names, first.weights.tolist(), strict=True)),
        "held_out_errors": dict(zip(names, first.held_out_errors.tolist(), strict=True)),
        "form_share": float(first.form_scale[0] ** 2 / (first.form_scale[0] ** 2 + first.scale[0] ** 2)),
        "evidence": f"the target has {common['extrapolation_ratio']:.3g} times the compute of the largest run",
    }


def _of_count(
    name: str, found: SurfaceForecast, at: Input, common: Mapping[str, Any], tails: tuple[float, float]
) -> dict[str, Any]:
    """One count's own forecast, and that forecast as a function of the floor."""
    low, point, high = (float(found.quantile(probability)[0]) for probability in (tails[0], 0.5, tails[1]))
    profile = _profile(at, half=math.log(high / low) / 2, pinned=common["floor"])
    return {"count": name, "point": point, "low": low, "high": high, "floor_profile": profile}
