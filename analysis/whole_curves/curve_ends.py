"""The final loss that the rungs' own curves forecast: from their smoothed ends, by one law or two.

Where tokens per parameter vary between the runs, two laws can speak: one in parameters and tokens knows all runs, one
in compute, through the runs of the target's own ratio, needs no form for how sizes and tokens trade. Both forecast the
top run of each ratio from the others, and are averaged by how well they did: docs/decisions/curves.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.conditions import MAX_RATIO_SPREAD
from rungwise.analysis.fitting.fit import MIN_RUNGS, fit_law
from rungwise.analysis.fitting.surface import MIN_ROWS, forecast_surface
from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.points import target_flops
from rungwise.analysis.whole_curves.curve_rows import identity_of, smooth_curve
from rungwise.analysis.whole_curves.shapes import Collapse

COLLAPSED: Final = 0.95
"""Share of the variance between ratio curves that one floor must remove to count as the law's floor."""
LEAST_MISS: Final = 1e-3
"""Log error of a forecast from rungs below which a held-out miss is luck."""

Point = dict[str, Any]


def own_final(
    runs: Sequence[pd.DataFrame],
    alike: Sequence[pd.DataFrame],
    target: Mapping[str, Any],
    collapse: Collapse,
    *,
    level: float,
    floor: float | None,
) -> tuple[Forecast, float, float]:
    """Forecast of the curves' own ends, a log error beyond its interval, and the error of its floor, nats.

    Args:
        alike: those of the runs that have the target's tokens per parameter.
    Raises:
        ValueError: as `forecast_final`.
    """
    ends, same = _ends(runs, target), _ends(alike, target)
    if floor is not None or collapse.share < COLLAPSED:
        final, doubt = _joined(ends, same, target, level=level, floor=floor)
        return final, doubt, floor_error(final)
    reason = f"the rungs' whole curves collapse at it ({collapse.share:.1%} of their spread)"
    final, doubt = _joined(ends, same, target, level=level, floor=collapse.floor, floor_reason=reason)
    moved = min(collapse.floor + collapse.error, 0.999 * min(row["loss"] for row in ends))
    other = _joined(ends, same, target, level=level, floor=moved)[0].point
    # The ends alone may want another floor: half of what that would change counts as doubt too.
    law = fit_law([target_flops(row) for row in same], [row["loss"] for row in same]).law
    wanted = 0.5 * math.log(float(law.value(target_flops(target))) / final.point)
    return final, math.hypot(doubt, math.log(other / final.point), wanted), collapse.error


def floor_error(final: Forecast) -> float:
    """Standard deviation of the floor by its profile, nats; 0 where it is pinned."""
    if final.floor is not None or not final.floor_profile:
        return 0.0
    floors, weights = (np.array([row[key] for row in final.floor_profile]) for key in ("floor", "weight"))
    return math.sqrt(float(np.cov(floors, aweights=weights, ddof=0)))


def size_of_target(target: Mapping[str, Any]) -> str:
    """The count of parameters that tokens are compared with."""
    return "num_active_params" if target.get("num_active_params") else "num_params"


def _ends(runs: Sequence[pd.DataFrame], target: Mapping[str, Any]) -> list[Point]:
    """Runs of less compute than the target as points: what each is, and its smoothed loss at the end."""
    end = np.ones(1)
    ends = [
        {**identity_of(run), "loss": float(np.exp(smooth_curve(run["progress"].clip(upper=1.0), run["loss"], end)[0]))}
        for run in runs
    ]
    largest = 0.999 * target_flops(target)  # of another ratio a run may well have cost more
    return [row for row in ends if target_flops(row) < largest] or ends


def _joined(ends: list[Point], same: list[Point], target: Mapping[str, Any], **settings: Any) -> tuple[Forecast, float]:
    """Mean in logs of the two laws' forecasts, their intervals' mean, and the deviation of the two about it."""
    wide = forecast_final(ends, target, **settings)
    share = 0.0 if len(same) == len(ends) else _share_of_ratio(ends, same, size_of_target(target), settings["floor"])
    if share == 0.0:
        return wide, 0.0
    alone = _by_compute(same, target, **settings)
    apart = math.log(alone.point / wide.point)
    point = wide.point * math.exp(share * apart)
    edges = {}
    for key in ("low", "high"):
        widths = [math.log(getattr(each, key) / each.point) for each in (wide, alone)]
        edges[key] = point * math.exp((1.0 - share) * widths[0] + share * widths[1])
    return replace(wide, point=point, **edges), math.sqrt(share * (1.0 - share)) * abs(apart)


def _by_compute(rows: list[Point], target: Mapping[str, Any], **settings: Any) -> Forecast:
    known = [{"run": row["run"], "flops": target_flops(row), "loss": row["loss"]} for row in rows]
    return forecast_final(known, {"flops": target_flops(target)}, **settings)


def _share_of_ratio(ends: list[Point], same: list[Point], size: str, floor: float | None) -> float:
    """Weight of the law through one ratio: one over the squared mean miss of each law on the top runs held out.

    0 where a ratio of `MIN_RUNGS` runs beneath its top run, or the target's own, is missing: nothing judges it then.
    """
    ladders = [rows for rows in _ladders(ends, size) if len(rows) > MIN_RUNGS]
    tops = [rows[-1] for rows in ladders]
    below = [row for row in ends if not any(row is top for top in tops)]
    if not tops or len(_ladders(same, size)[0]) <= MIN_RUNGS or len(below) < MIN_ROWS:
        return 0.0
    names = {"params": size, "tokens": "tokens", "loss": "loss"}
    columns = {name: [row[key] for row in below] for name, key in names.items()}
    columns["flops"] = [target_flops(row) for row in below]
    wide = forecast_surface(columns, [row[size] for row in tops], [row["tokens"] for row in tops], floor=floor).location
    alone = np.log([_by_compute(rows[:-1], rows[-1], floor=floor).point for rows in ladders])
    actual = np.log([row["loss"] for row in tops])
    votes = [1.0 / (float(np.mean(np.abs(each - actual))) + LEAST_MISS) ** 2 for each in (wide, alone)]
    return votes[1] / sum(votes)


def _ladders(ends: list[Point], size: str) -> list[list[Point]]:
    """Runs of one ratio of tokens to parameters each, ascending in compute; of equal compute the last counts."""
    ordered = sorted(ends, key=lambda row: row["tokens"] / row[size])
    ratios = np.log([row["tokens"] / row[size] for row in ordered])
    group = np.concatenate([[0], np.cumsum(np.diff(ratios) > MAX_RATIO_SPREAD)])
    found = []
    for index in np.unique(group):
        rows = {
            round(math.log(target_flops(row)), 3): row for row, at in zip(ordered, group, strict=True) if at == index
        }
        found.append([rows[key] for key in sorted(rows)])
    return found
