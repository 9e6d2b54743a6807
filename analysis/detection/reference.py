"""A registered curve to be read at one progress after another, quickly: the reference of a run under watch."""

import math
from bisect import bisect_right
from typing import Final, NamedTuple, Self

from rungwise.analysis.curves import registered_curve
from rungwise.analysis.forecast import Forecast

_COLUMNS: Final = ("loss", "low", "high", "slope_error")


class Expected(NamedTuple):
    """What a curve says at one progress; `slope` is the loss's change per unit of log progress.

    slope_error: by what share of itself the curve's fall may be wrong.
    """

    loss: float
    low: float
    high: float
    slope_error: float
    slope: float


NOTHING: Final = Expected(loss=0.0, low=-math.inf, high=math.inf, slope_error=0.0, slope=0.0)
"""Where there is no curve, a run is judged by its own past."""


class Reference:
    """One metric's registered curve: straight lines between its rows."""

    def __init__(self, progress: list[float], columns: list[list[float]]):
        self._progress, self._columns = progress, columns

    @classmethod
    def of(cls, forecast: Forecast | None, metric: str) -> Self | None:
        """None where the forecast has no curve of `metric`."""
        curve = registered_curve(forecast, metric)
        if curve is None or len(curve["progress"]) < 2:
            return None
        return cls(curve["progress"].tolist(), [curve[name].tolist() for name in _COLUMNS])

    def at(self, progress: float | None) -> Expected | None:
        """The curve at `progress`; None before it begins, its end after it ends."""
        at = self._progress
        if progress is None or progress < at[0]:
            return None
        progress = min(progress, at[-1])
        right = min(bisect_right(at, progress), len(at) - 1)
        left = right - 1
        share = (progress - at[left]) / (at[right] - at[left])
        values = [column[left] + share * (column[right] - column[left]) for column in self._columns]
        losses = self._columns[0]
        slope = (losses[right] - losses[left]) / math.log(at[right] / max(at[left], 1e-12))
        return Expected._make([*values, slope])
