"""The forecast updated by the hero's own first part, beside the registered one, which it never changes.

The registered curve and its band are a distribution over curves (`bands.py`): a miss of the whole level, and a miss of
the shape that vanishes at the end. The part already run conditions it: where the run has stood, and how it has moved,
pull the rest of the curve and the final loss, as far as the band says that early misses carry over to the end. A run
far outside its band widens what is left of it; one well inside does not narrow the scale, because values along one
curve are one witness. Where misses are as the band's model has them, nominal 90 % therefore holds 97 %; on twelve
held-out public curves, whose misses are not, it held 88 % (benchmarks/trajectory.py).
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special

from rungwise.analysis.detection.pricing import Pricing
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.whole_curves.bands import CurveError
from rungwise.analysis.whole_curves.curve_rows import falling, smooth_curve

Array = NDArray[np.float64]

BINS_PER_DOUBLING: Final = 2
"""The run so far is told in so many values for each doubling of progress."""
MAX_BINS: Final = 12
LEAST_NOISE: Final = 5e-4
"""Relative error of one such value: evaluations share their data, and misses wiggle within a bin."""
DEGREES: Final = 2.0
"""Of the registered band's Student t: a ladder of four holds out two rungs."""
POINTS: Final = 60
HELD_AGAINST: Final = 2
"""Rungs that the first held-out one is forecast from: a band has as many degrees as rungs beyond them."""
MARKS: Final = (0.1, 0.2, 0.4, 0.6, 0.8)
"""Shares of a run at which a nowcast is kept for the record."""
MARK_SLACK: Final = 0.005
"""Share by which an evaluation may come after a mark and still count: steps are whole."""


class TooShort(ValueError):
    """No row of the run so far lies where its registered curve does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Nowcast:
    """What the run so far makes of its registered curve.

    updated: columns progress, loss, low, high, low_all, high_all from `progress` to 1; registered: the curve as it was.
    surprise: root mean square of the run so far in units of the band's own scale; 1 is as expected.
    """

    progress: float
    updated: pd.DataFrame
    registered: pd.DataFrame
    surprise: float
    level: float

    @property
    def final(self) -> dict[str, float]:
        """Loss, low and high at the end, updated."""
        return {key: float(self.updated[key].iloc[-1]) for key in ("loss", "low", "high")}

    @property
    def registered_final(self) -> dict[str, float]:
        return {key: float(self.registered[key].iloc[-1]) for key in ("loss", "low", "high")}

    @property
    def width_ratio(self) -> float:
        """Width of the final loss's interval over the registered one, in logs; above 1 the run has surprised."""
        after, before = (math.log(end["high"] / end["low"]) for end in (self.final, self.registered_final))
        return after / before

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"progress": self.progress, "final": self.final, "registered": self.registered_final,
                "width_ratio": self.width_ratio, "surprise": self.surprise, "level": self.level}  # fmt: skip


def nowcast_forecast(forecast: Forecast, observed: pd.DataFrame, *, metric: str | None = None) -> Nowcast:
    """The nowcast of a registered forecast, which stays as it is: of its final loss, or of another registered curve.

    Args:
        observed: columns progress (share of the forecast's horizon), loss: of the same metric, and no other.
    Raises:
        ValueError: the forecast has no such curve, or as `nowcast`.
    """
    name = metric or forecast.metric
    curve = forecast.curve_table(name)
    if curve is None:
        known = ", ".join(dict.fromkeys(row["metric"] for row in forecast.curve)) or "none"
        raise ValueError(f"the forecast has no curve of {name} to update; its curves are: {known}")
    rungs = len({round(math.log(row["flops"]), 3) for row in forecast.used})
    return nowcast(curve, observed, level=forecast.level, degrees=float(max(rungs - HELD_AGAINST, 1)))


def nowcast_history(
    forecast: Forecast, observed: pd.DataFrame, *, metric: str | None = None, marks: Iterable[float] = MARKS
) -> list[Nowcast]:
    """The nowcasts there would have been at shares of the run, those that the run has passed; each knows its own part.

    Raises:
        ValueError: the forecast has no such curve.
    """
    progress = observed["progress"].to_numpy(dtype=float)
    passed = [mark for mark in marks if mark <= progress.max(initial=0.0)]
    made = []
    for last in dict.fromkeys(float(progress[progress <= mark + MARK_SLACK].max()) for mark in passed):
        seen: Any = observed[progress <= last]
        with suppress(TooShort):
            made.append(nowcast_forecast(forecast, seen, metric=metric))
    return made


def worth_in_compute(forecast: Forecast, loss: float) -> dict[str, float | None]:
    """Compute at which the registered law has `loss` where it is forecast to have its point, over the hero's.

    compute_factor = ((point - E) / (loss - E))^(1 / alpha): below 1 the run does as one of less compute would. Its low
    and high are over the floors that the rungs allow; None where no law or no floor below the loss tells.
    """
    names = ("compute_factor", "compute_factor_low", "compute_factor_high")
    gap = loss - forecast.point
    if gap == 0.0:
        return dict.fromkeys(names, 1.0)
    cost = Pricing(forecast).cost(min(loss, forecast.point), abs(gap))
    factor, low, high = (
        None if cost.get(key) is None else 1.0 + cost[key] for key in ("cost", "cost_low", "cost_high")
    )
    if gap > 0:
        factor, low, high = (each and 1.0 / each for each in (factor, high, low))
    return dict(zip(names, (factor, low, high), strict=True))


def nowcast(
    registered: pd.DataFrame, observed: pd.DataFrame, *, level: float = 0.9, degrees: float = DEGREES
) -> Nowcast:
    """Update a registered trajectory by the rows of the run so far.

    Args:
        registered: columns progress, loss, low, high (`forecast_curve`, or `Forecast.curve_table`), a band of `level`.
        observed: columns progress, loss of the hero, per-step or evaluations, the same metric.
        degrees: of freedom of the registered band (`forecast_curve`'s attrs have it).
    Raises:
        ValueError: columns are missing.
        TooShort: no observed row lies where the registered curve does.
    """
    for name, table, needed in (("registered", registered, {"progress", "loss", "low", "high"}),
                                ("observed", observed, {"progress", "loss"})):  # fmt: skip
        if missing := needed - set(table.columns):
            raise ValueError(f"{name} lacks columns {sorted(missing)}; give {', '.join(sorted(needed))}")
    curve: Any = registered.sort_values("progress")
    log_progress = np.log(curve["progress"].to_numpy(dtype=float))
    log_loss = np.log(curve["loss"].to_numpy(dtype=float))
    error = _error_of(curve, log_progress, level=level, degrees=degrees)
    losses = observed["loss"].to_numpy(dtype=float)
    rows: Any = observed[np.isfinite(losses) & (losses > 0)]
    rows = rows.sort_values("progress")
    rows = rows[(rows["progress"] >= curve["progress"].iloc[0] * (1 - 1e-9)) & (rows["progress"] <= 1.0 + 1e-6)]
    if not len(rows):
        raise TooShort(f"observed rows end before the registered curve begins, at {curve['progress'].iloc[0]:.3g}")
    at, miss, noise = _told(rows, log_progress, log_loss)
    now = float(rows["progress"].iloc[-1])
    ahead = np.unique(
        np.append(np.linspace(math.log(min(now, 1.0)), 0.0, POINTS), log_progress[log_progress > math.log(now)])
    )
    shift, covariance, surprise = _condition(error, at, miss, noise, ahead)
    quantile = float(special.stdtrit(degrees, 0.5 + level / 2))
    half = quantile * np.sqrt(np.maximum(np.diag(covariance), 1e-12))
    middle = np.interp(ahead, log_progress, log_loss) + shift
    if np.all(np.diff(log_loss) <= 1e-9):
        middle = falling(middle)
    factor = max(error.simultaneous_factor(level), 1.0)
    edges = {"loss": 0.0 * half, "low": -half, "high": half, "low_all": -factor * half, "high_all": factor * half}
    updated = pd.DataFrame({"progress": np.exp(ahead), **{key: np.exp(middle + edge) for key, edge in edges.items()}})
    return Nowcast(progress=now, updated=updated, registered=registered, surprise=surprise, level=level)


def _error_of(curve: pd.DataFrame, log_progress: Array, *, level: float, degrees: float) -> CurveError:
    """Scales of level and shape that the registered band shows: at the end there is no miss of shape."""
    half = 0.5 * np.log(curve["high"].to_numpy(dtype=float) / curve["low"].to_numpy(dtype=float))
    total = np.maximum(half / float(special.stdtrit(degrees, 0.5 + level / 2)), 1e-7)
    shape = np.sqrt(np.maximum(total**2 - total[-1] ** 2, 0.0))
    return CurveError.of(log_progress, shape, final=float(total[-1]), degrees=degrees)


def _told(rows: pd.DataFrame, log_progress: Array, log_loss: Array) -> tuple[Array, Array, Array]:
    """The run so far as a few values: log progress, log miss of the registered curve, and the miss's own error."""
    x = np.log(np.minimum(rows["progress"].to_numpy(dtype=float), 1.0))
    miss = np.log(rows["loss"].to_numpy(dtype=float)) - np.interp(x, log_progress, log_loss)
    own = np.exp(miss)
    scatter = (
        miss - smooth_curve(np.exp(x), own, np.exp(x))
        if x.size <= 500
        else np.diff(miss, prepend=miss[0]) / math.sqrt(2)
    )
    noise = 1.4826 * float(np.median(np.abs(scatter)))
    width = max(math.log(2.0) / BINS_PER_DOUBLING, (x[-1] - x[0]) / MAX_BINS)
    group = np.floor((x[-1] - x) / width + 1e-9).astype(int)
    told = []
    for index in np.unique(group)[::-1]:
        own_rows = group == index
        error = math.hypot(LEAST_NOISE, noise / math.sqrt(own_rows.sum()))
        told.append((x[own_rows].mean(), np.median(miss[own_rows]), error))
    at, values, errors = (np.array(column) for column in zip(*told, strict=True))
    return at, values, errors


def _condition(error: CurveError, at: Array, miss: Array, noise: Array, ahead: Array) -> tuple[Array, Array, float]:
    """Mean and covariance of the miss ahead given the misses so far, and their size in the band's units.

    As for a Student-t process, except that a quiet beginning neither narrows the scale nor adds degrees of freedom:
    values along one curve are one witness to how far such curves miss.
    """
    known = error.covariance(at, at) + np.diag(noise**2)
    across = error.covariance(ahead, at)
    gain = np.linalg.solve(known, across.T).T
    distance = float(miss @ np.linalg.solve(known, miss))
    stretch = (error.degrees + distance) / (error.degrees + at.size)
    covariance = error.covariance(ahead, ahead) - gain @ across.T
    return gain @ miss, max(stretch, 1.0) * covariance, math.sqrt(distance / at.size)
