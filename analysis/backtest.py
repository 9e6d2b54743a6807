"""How the forecast does on the ladder's own upper runs: hold them out, forecast them, score error, cover and width.

The same procedure and constants as the forecast of the hero (`forecast.py`), on fewer runs and a shorter way.
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
from rungwise.analysis.fitting.surface import MIN_ROWS, forecast_surface
from rungwise.analysis.forecast import backtest_final
from rungwise.analysis.rows import usable_points

CUTS: Final = (0.5, 2 / 3, 5 / 6)
"""Shares of runs, by compute, from which those of the next share up are forecast."""


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Held-out runs, each with its forecast, and what they say together.

    A row: run, flops, extrapolation_ratio, observed, point, low, high, error (nats), percent, compute_factor, skill
    against copying the largest run below, inside, score. `summary` is None where nothing could be held out.
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
    by_surface = _ratio_varies(table)
    rows = _held_out_surface(table, level, floor) if by_surface else _held_out_ladder(points, table, level, floor)
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


def _ratio_varies(table: Any) -> bool:
    size = "num_active_params" if "num_active_params" in table.columns else "num_params"
    if size not in table.columns or "tokens" not in table.columns:
        return False
    ratio = (table["tokens"].astype(float) / table[size].astype(float)).dropna()
    return bool(len(ratio)) and ratio.max() > ratio.min() * (1.0 + MAX_RATIO_SPREAD)


def _held_out_ladder(points: Any, table: Any, level: float, floor: float | None) -> list[dict[str, Any]]:
    found = []
    for row in backtest_final(points, level=level, floor=floor):
        below = table[table["flops"] < 0.999 * row["flops"]]
        top = float(below["flops"].max())
        copied = float(below.loc[below["flops"] > 0.999 * top, "loss"].mean())
        law = row.get("law")
        found.append(_row(row["rung"], row["flops"], top, copied, row["observed"], row, law, level))
    return found


def _held_out_surface(table: Any, level: float, floor: float | None) -> list[dict[str, Any]]:
    size = "num_active_params" if "num_active_params" in table.columns else "num_params"
    ordered = table.sort_values("flops", ignore_index=True)
    flops = ordered["flops"].to_numpy(dtype=float)
    edges = [*(float(np.quantile(flops, cut)) * 1.001 for cut in CUTS), math.inf]
    found = []
    for edge, above in pairwise(edges):
        below, held = ordered[flops <= edge], ordered[(flops > edge) & (flops <= above)]
        if len(below) < MIN_ROWS or held.empty or (floor is not None and floor >= below["loss"].min()):
            continue
        rows = {"params": below[size], "tokens": below["tokens"], "loss": below["loss"], "flops": below["flops"]}
        sizes, tokens = (held[name].to_numpy(dtype=float) for name in (size, "tokens"))
        forecast = forecast_surface(rows, sizes, tokens, floor=floor)
        low, point, high = (forecast.quantile(at) for at in (0.5 - level / 2, 0.5, 0.5 + level / 2))
        top = below.iloc[-1]
        for index, row in enumerate(held.to_dict("records")):
            at = {"point": float(point[index]), "low": float(low[index]), "high": float(high[index])}
            law = forecast.laws[0].fit.law.along_compute(float(row[size]), float(row["tokens"]))
            found.append(
                _row(
                    row["run"],
                    row["flops"],
                    float(top["flops"]),
                    float(top["loss"]),
                    float(row["loss"]),
                    at,
                    law,
                    level,
                )
            )
    return found


def _row(
    run: Any, flops: float, top: float, copied: float, observed: float, at: Mapping[str, Any], law: Any, level: float
) -> dict[str, Any]:
    point, low, high = float(at["point"]), at["low"], at["high"]
    error = point - observed
    factor = law.compute_factor(max(observed, law.floor * 1.0001), abs(error)) if isinstance(law, PowerLaw) else None
    judged: dict[str, Any] = {"inside": None, "score": None}
    if low is not None and high is not None:
        judged = {"inside": bool(low <= observed <= high), "score": interval_score(low, high, observed, level=level)}
    return {
        "run": str(run),
        "flops": float(flops),
        "extrapolation_ratio": float(flops) / top,
        "observed": observed,
        "point": point,
        "low": low,
        "high": high,
        "error": error,
        "percent": 100.0 * error / observed,
        "compute_factor": factor if factor is not None and math.isfinite(factor) else None,
        "skill": 1.0 - abs(error) / abs(copied - observed) if copied != observed else None,
        **judged,
    }


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
    }
