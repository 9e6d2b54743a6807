"""How the forecast does on the ladder's own upper runs: hold them out, forecast them, score error, cover and width.

The same procedure and constants as the forecast of the hero (`forecast.py`), on fewer runs and a shorter way. Where
runs state two counts of compute or of parameters, each is fitted, and what is scored is their mixture, as for the hero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.conditions import MAX_RATIO_SPREAD
from rungwise.analysis.fitting.fit import MIN_RUNGS, UnfitForecast
from rungwise.analysis.fitting.laws import PowerLaw
from rungwise.analysis.fitting.surface import MIN_ROWS, SurfaceForecast, forecast_surface, mixture_quantile
from rungwise.analysis.forecast import backtest_final
from rungwise.analysis.rows import stated_of_all, usable_points

CUTS: Final = (0.5, 2 / 3, 5 / 6)
"""Shares of runs, by compute, from which those of the next share up are forecast."""


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Held-out runs, each with its forecast, and what they say together.

    A row: run, flops, extrapolation_ratio, observed, point, low, high, error (nats), percent, compute_factor, skill
    against copying the largest run below, inside, score, and counts: what each count alone says (count, point, low,
    high, error, inside). `summary` is None where nothing could be held out.
    """

    level: float
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        return {"level": self.level, "rows": self.rows, "summary": self.summary}


def backtest(
    points: pd.DataFrame | Sequence[Mapping[str, Any]], *, level: float = 0.9, floor: float | None = None
) -> Backtest:
    """Forecast every rung above the third from those below it; of free-form runs, each upper share from the lower.

    Raises:
        UnfitForecast: fewer runs than one forecast and one held-out run need.
    """
    table: Any = usable_points(points)[0]
    counts = stated_of_all(table)
    by_surface = bool(counts) and _ratio_varies(table, counts[0])
    if by_surface:
        rows = _held_out_surface(table, counts, level, floor)
    else:
        rows = _held_out_ladder(points, table, level, floor)
    if not rows:
        needed = MIN_ROWS + 3 if by_surface else MIN_RUNGS + 1
        raise UnfitForecast(f"{len(table)} usable runs leave none to hold out; a back-test needs {needed}")
    return Backtest(level=level, rows=rows, summary=_summary(rows, level))


def interval_score(low: float, high: float, observed: float, *, level: float) -> float:
    """Winkler's score: width plus 2 / (1 - level) times what the observation lies outside; less is better.

    >>> interval_score(2.0, 2.2, 2.3, level=0.9)
    2.2
    """
    miss = max(low - observed, observed - high, 0.0)
    return round(high - low + 2.0 / (1.0 - level) * miss, 12)


def _ratio_varies(table: Any, size: str) -> bool:
    if "tokens" not in table.columns:
        return False
    ratio = (table["tokens"].astype(float) / table[size].astype(float)).dropna()
    return bool(len(ratio)) and ratio.max() > ratio.min() * (1.0 + MAX_RATIO_SPREAD)


def _held_out_ladder(points: Any, table: Any, level: float, floor: float | None) -> list[dict[str, Any]]:
    found = []
    for row in backtest_final(points, level=level, floor=floor):
        below = table[table["flops"] < 0.999 * row["flops"]]
        top = float(below["flops"].max())
        copied = float(below.loc[below["flops"] > 0.999 * top, "loss"].mean())
        found.append(_row({**row, "run": row["rung"], "loss": row["observed"]}, (top, copied), row, row["law"], level))
    return found


def _held_out_surface(table: Any, counts: Sequence[str], level: float, floor: float | None) -> list[dict[str, Any]]:
    ordered = table.sort_values("flops", ignore_index=True)
    flops = ordered["flops"].to_numpy(dtype=float)
    edges = [*(float(np.quantile(flops, cut)) * 1.001 for cut in CUTS), math.inf]
    found = []
    for edge, above in pairwise(edges):
        below, held = ordered[flops <= edge], ordered[(flops > edge) & (flops <= above)]
        if len(below) < MIN_ROWS or held.empty or (floor is not None and floor >= below["loss"].min()):
            continue
        forecasts = {name: _forecast_from(below, held, name, floor) for name in counts}
        mixture = _quantiles(list(forecasts.values()), level)
        each = {name: _quantiles([forecast], level) for name, forecast in forecasts.items()}
        top = (float(below["flops"].iloc[-1]), float(below["loss"].iloc[-1]))
        for index, row in enumerate(held.to_dict("records")):
            alone = [{"count": name, **_at(quantiles, index)} for name, quantiles in each.items()]
            best = forecasts[counts[0]].laws[0].fit.law
            law = best.along_compute(float(row[counts[0]]), float(row["tokens"]))
            found.append(_row(row, top, {**_at(mixture, index), "counts": alone}, law, level))
    return found


def _forecast_from(below: Any, held: Any, size: str, floor: float | None) -> SurfaceForecast:
    """The held-out runs from those below them, in one count of parameters."""
    rows = {"params": below[size], "tokens": below["tokens"], "loss": below["loss"], "flops": below["flops"]}
    sizes, tokens = (held[name].to_numpy(dtype=float) for name in (size, "tokens"))
    return forecast_surface(rows, sizes, tokens, floor=floor)


def _quantiles(forecasts: Sequence[SurfaceForecast], level: float) -> dict[str, np.ndarray]:
    tails = {"point": 0.5, "low": 0.5 - level / 2, "high": 0.5 + level / 2}
    return {name: mixture_quantile(forecasts, probability) for name, probability in tails.items()}


def _at(quantiles: Mapping[str, np.ndarray], index: int) -> dict[str, float]:
    return {name: float(values[index]) for name, values in quantiles.items()}


def _row(
    held: Mapping[str, Any], top: tuple[float, float], at: Mapping[str, Any], law: PowerLaw, level: float
) -> dict[str, Any]:
    """One held-out run beside its forecast `at`; `top` is compute and loss of the largest run below."""
    flops, observed, copied = float(held["flops"]), float(held["loss"]), top[1]
    point, low, high = float(at["point"]), at["low"], at["high"]
    error = point - observed
    factor = law.compute_factor(max(observed, law.floor * 1.0001), abs(error))
    return {
        "run": str(held["run"]),
        "flops": flops,
        "extrapolation_ratio": flops / top[0],
        "observed": observed,
        "point": point,
        "low": low,
        "high": high,
        "error": error,
        "percent": 100.0 * error / observed,
        "compute_factor": factor if math.isfinite(factor) else None,
        "skill": 1.0 - abs(error) / abs(copied - observed) if copied != observed else None,
        "inside": _inside(low, high, observed),
        "score": None if low is None or high is None else interval_score(low, high, observed, level=level),
        "counts": [_judged(count, observed) for count in at["counts"]],
    }


def _judged(count: Mapping[str, Any], observed: float) -> dict[str, Any]:
    """What one count alone says, beside what was measured."""
    low, high = count["low"], count["high"]
    return {
        "count": count["count"],
        "point": count["point"],
        "low": low,
        "high": high,
        "error": count["point"] - observed,
        "inside": _inside(low, high, observed),
    }


def _inside(low: float | None, high: float | None, observed: float) -> bool | None:
    return None if low is None or high is None else bool(low <= observed <= high)


def _summary(rows: list[dict[str, Any]], level: float) -> dict[str, Any]:
    judged = [row for row in rows if row["inside"] is not None]
    skills = [row["skill"] for row in rows if row["skill"] is not None]
    return {
        "held_out": len(rows),
        "largest_ratio": max(row["extrapolation_ratio"] for row in rows),
        "mean_abs_percent": float(np.mean([abs(row["percent"]) for row in rows])),
        "median_skill": float(np.median(skills)) if skills else None,
        "nominal": level,
        "covered": float(np.mean([row["inside"] for row in judged])) if judged else None,
        "mean_width": float(np.mean([row["high"] - row["low"] for row in judged])) if judged else None,
        "mean_score": float(np.mean([row["score"] for row in judged])) if judged else None,
        "counts": _by_count(rows),
    }


def _by_count(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Error and coverage of each count on its own: count, mean_abs_percent, covered."""
    found: dict[str, list[tuple[float, bool | None]]] = {}
    for row in rows:
        for item in row["counts"]:
            percent = 100.0 * abs(item["error"]) / row["observed"]
            found.setdefault(item["count"], []).append((percent, item["inside"]))
    return [
        {
            "count": name,
            "mean_abs_percent": float(np.mean([percent for percent, _ in pairs])),
            "covered": float(np.mean(judged)) if (judged := [hit for _, hit in pairs if hit is not None]) else None,
        }
        for name, pairs in found.items()
    ]
