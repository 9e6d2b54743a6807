"""The interval for a new run at the target, from a handful of rungs whose floor nobody knows.

For one floor E the law is a straight line in (log C, log(L - E)) and the prediction for a new run is
Student's t. The floor is not identified by four rungs, so the forecast is a mixture of those predictions over
a grid of floors, weighted by

    marginal likelihood of the rungs given E   x   prior on E / lowest loss,

point = median of the mixture, interval = its equal-tailed quantiles. A pinned floor leaves the one Student t.
The prior (`PRIOR_SHAPE`) and the noise a rung has at least (`NOISE_PRIOR`) were chosen by simulation:
docs/log.md.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

PRIOR_SHAPE: Final = (2.0, 2.0)
"""Beta shape of E / lowest loss: neither zero nor the lowest loss itself, otherwise open."""
NOISE_PRIOR: Final = 0.0015
"""Run-to-run spread of a final loss, relative: 0.015-0.2 % in public repeats. Counts as one observation."""
NOISE_PRIOR_DEGREES: Final = 1.0
_GRID: Final = 241


@dataclass(frozen=True, kw_only=True)
class RungMeans:
    """What the interval needs of the ladder: one mean per rung, and what its repeats say about noise.

    `repeat_squares` is the pooled sum of squared deviations of log loss within rungs, with `repeat_degrees`
    degrees of freedom.
    """

    log_flops: Array
    loss: Array
    repeat_squares: float = 0.0
    repeat_degrees: int = 0


@dataclass(frozen=True, kw_only=True)
class FloorProfile:
    """The forecast as a function of the floor; every array has one entry per floor.

    location, scale: centre and scale of the Student t of log(L - E) for a new run; rmse: of the rungs, nats.
    """

    floors: Array
    weights: Array
    location: Array
    scale: Array
    degrees: Array
    rmse: Array

    @property
    def points(self) -> Array:
        """Forecast for each floor, nats."""
        return self.floors + np.exp(self.location)

    def quantile(self, probability: float) -> float:
        """Quantile of the mixture, nats, by bisection."""
        spread = special.stdtrit(self.degrees, probability) * self.scale
        ends = self.floors + np.exp(self.location + spread)
        low, high = float(ends.min()), float(ends.max())
        for _ in range(60):
            middle = 0.5 * (low + high)
            if self._cumulative(middle) < probability:
                low = middle
            else:
                high = middle
        return 0.5 * (low + high)

    def quantile_of(self, index: int, probability: float) -> float:
        """The same for one floor alone."""
        spread = special.stdtrit(self.degrees[index], probability) * self.scale[index]
        return float(self.floors[index] + np.exp(self.location[index] + spread))

    def _cumulative(self, loss: float) -> float:
        above = loss > self.floors
        excess = np.where(above, loss - self.floors, 1.0)
        standard = (np.log(excess) - self.location) / self.scale
        return float(np.sum(self.weights * np.where(above, special.stdtr(self.degrees, standard), 0.0)))

    def floors_within(self, rmse: float) -> tuple[float, float] | None:
        """Range of floors whose line misses the rungs by at most `rmse` nats; None when there is none."""
        good = np.flatnonzero(self.rmse <= rmse)
        if not good.size:
            return None
        return self._crossing(good[0], -1, rmse), self._crossing(good[-1], +1, rmse)

    def _crossing(self, inside: int, direction: int, rmse: float) -> float:
        outside = inside + direction
        if not 0 <= outside < self.floors.size:
            return float(self.floors[inside])
        share = (rmse - self.rmse[inside]) / (self.rmse[outside] - self.rmse[inside])
        return float(self.floors[inside] + share * (self.floors[outside] - self.floors[inside]))


def profile_floors(rungs: RungMeans, log_target: float, *, floor: float | None = None) -> FloorProfile:
    """Student-t forecasts of a new run at `log_target` (log FLOPs) for every floor, with the floors' weights.

    Args:
        floor: pins the floor (one entry, weight one, no prior of any kind); None profiles 0 <= E < lowest
            loss.
    Raises:
        ValueError: fewer than three rungs, or a pinned floor at or above the lowest loss.
    """
    if rungs.loss.size < 3:
        raise ValueError(f"rungs {rungs.loss.size} are too few for an interval; give at least 3")
    lowest = float(rungs.loss.min())
    if floor is not None:
        if not 0.0 <= floor < lowest:
            raise ValueError(f"floor {floor} must lie in [0, {lowest:g}), below the lowest loss; pin a smaller one")
        return _profile(rungs, log_target, np.array([float(floor)]), prior_degrees=0.0)
    share = (np.arange(_GRID) + 0.5) / _GRID
    share = share * (2.0 - share)  # finer towards the lowest loss, where forecasts change fastest
    return _profile(rungs, log_target, lowest * np.append(0.0, share), prior_degrees=NOISE_PRIOR_DEGREES)


def _profile(rungs: RungMeans, log_target: float, floors: Array, *, prior_degrees: float) -> FloorProfile:
    count = rungs.loss.size
    x = rungs.log_flops - rungs.log_flops.mean()
    spread = float(x @ x)
    excess = np.log(rungs.loss - floors[:, None])
    level, slope = excess.mean(axis=1), excess @ x / spread
    line = level[:, None] + slope[:, None] * x
    squares = np.sum((excess - line) ** 2, axis=1)
    # One relative error of the loss is this many units of log(L - E): the geometric mean over the rungs.
    stretch = np.exp(np.mean(np.log(rungs.loss) - excess, axis=1))
    degrees = np.full(floors.size, count - 2 + prior_degrees)
    total = squares / stretch**2 + prior_degrees * NOISE_PRIOR**2
    if rungs.repeat_degrees:
        pooled = (
            total / degrees
        ) < 4.0 * rungs.repeat_squares / rungs.repeat_degrees  # else the form misfits: no pooling
        total = total + np.where(pooled, rungs.repeat_squares, 0.0)
        degrees = degrees + np.where(pooled, rungs.repeat_degrees, 0)
    distance = log_target - float(rungs.log_flops.mean())
    scale = stretch * np.sqrt(total / degrees * (1.0 + 1.0 / count + distance**2 / spread))
    rmse = np.sqrt(np.mean((floors[:, None] + np.exp(line) - rungs.loss[None, :]) ** 2, axis=1))
    return FloorProfile(
        floors=floors,
        weights=_weights(rungs, floors, squares / stretch**2),
        location=level + slope * distance,
        scale=np.maximum(scale, 1e-12),
        degrees=degrees,
        rmse=rmse,
    )


def _weights(rungs: RungMeans, floors: Array, squares: Array) -> Array:
    """Marginal likelihood of the rungs (line and noise integrated out) times prior, per floor, summing to one."""
    if floors.size == 1:
        return np.ones(1)
    degrees = rungs.loss.size - 2 + rungs.repeat_degrees + NOISE_PRIOR_DEGREES
    total = squares + rungs.repeat_squares + NOISE_PRIOR_DEGREES * NOISE_PRIOR**2
    share = floors / float(rungs.loss.min())
    a, b = PRIOR_SHAPE
    with np.errstate(divide="ignore"):
        log_weight = -0.5 * degrees * np.log(total) + (a - 1) * np.log(share) + (b - 1) * np.log1p(-share)
    width = np.gradient(floors)
    weight = np.exp(log_weight - log_weight.max()) * width
    return weight / weight.sum()
