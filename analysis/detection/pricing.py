"""What a gap in loss is worth in compute under a registered law, with its range over the floors the rungs allow."""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rungwise.analysis.fitting.laws import PowerLaw
from rungwise.analysis.forecast import Forecast

Array = NDArray[np.float64]

TAIL: Final = 0.05
"""Weight of the floor profile left out at each end of the range."""


class Pricing:
    """Prices gaps against one registered forecast.

    cost = ((L - E + gap) / (L - E))^(1 / alpha) - 1, the compute a gap (nats) at loss L is worth as a share of the run
    """

    def __init__(self, forecast: Forecast):
        law = forecast.laws[0] if forecast.laws else None
        self.law = PowerLaw(*(float(law[key]) for key in ("floor", "amplitude", "exponent"))) if law else None
        self._floors, self._exponents, self._weights = _profile(forecast)

    def cost(self, loss: float, gap: float) -> dict[str, Any]:
        """cost, cost_low and cost_high of a loss `gap` (positive) above `loss`; None where no law tells.

        The range holds the floors of the profile but 5 % of their weight at each end.
        """
        if self.law is None or not gap > 0:
            return {}
        below = self._floors < loss
        factors = (1.0 + gap / (loss - self._floors[below])) ** (1.0 / self._exponents[below]) - 1.0
        low = high = None
        if factors.size > 1:
            order = np.argsort(factors)
            share = np.cumsum(self._weights[below][order])
            low, high = (float(factors[order][np.searchsorted(share, part * share[-1])]) for part in (TAIL, 1 - TAIL))
        cost = self.law.compute_factor(loss, gap) - 1.0
        return {"cost": _finite(cost), "cost_low": _finite(low), "cost_high": _finite(high)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _profile(forecast: Forecast) -> tuple[Array, Array, Array]:
    """Floors of the profile, the exponent each gives from the largest rung to the target, and their weights."""
    rungs = [row for row in forecast.used if row.get("flops") and row.get("loss")]
    target = forecast.target.get("flops")
    if not rungs or not target or not forecast.floor_profile:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    top = max(rungs, key=lambda row: row["flops"])
    floor, point, weight = (
        np.array([row.get(key, math.nan) for row in forecast.floor_profile], dtype=float)
        for key in ("floor", "point", "weight")
    )
    fits = (floor < point) & (point < top["loss"]) & (weight > 0)
    floor, point, weight = floor[fits], point[fits], weight[fits]
    exponent = np.log((top["loss"] - floor) / (point - floor)) / math.log(target / top["flops"])
    return floor, exponent, weight
