"""The forecast again without each rung: which of them it hangs on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rungwise.analysis.fitting.fit import MIN_RUNGS, UnfitForecast
from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.rows import usable_points


def leave_one_rung_out(
    points: pd.DataFrame | Sequence[Mapping[str, Any]],
    target: Mapping[str, Any],
    *,
    level: float = 0.9,
    floor: float | None = None,
) -> list[dict[str, Any]]:
    """Point, low and high of the target without each rung, smallest first; `rung` names what was left out.

    Runs of one compute (within 0.1 %) are one rung and leave together.

    Raises:
        UnfitForecast: leaving one out leaves too few.
    """
    table: Any = usable_points(points)[0]
    table = table.sort_values("flops", ignore_index=True)
    rung = np.append(0, np.cumsum(np.diff(np.log(table["flops"].to_numpy(dtype=float))) > 1e-3))
    if rung[-1] + 1 <= MIN_RUNGS:
        raise UnfitForecast(f"{rung[-1] + 1} rungs leave fewer than {MIN_RUNGS} without one of them; train another")
    rows = []
    for index in range(int(rung[-1]) + 1):
        out, kept = table[rung == index], table[rung != index]
        made = forecast_final(kept.reset_index(drop=True), target, level=level, floor=floor)
        name = out["rung" if "rung" in out.columns else "run"].iloc[0]
        rows.append({"rung": str(name), "flops": float(out["flops"].iloc[0]), "point": made.point, "low": made.low,
                     "high": made.high})  # fmt: skip
    return rows
