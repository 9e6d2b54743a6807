"""The interval for a new run at the target, from a handful of rungs whose law nobody knows.

For one floor E and one bend the law is a straight line in log C:

    log(L - E) = level - alpha * log(C / C_top) + log(m + (1 - m) * (C / C_top)^-Delta)

and the prediction for a new run is Student's t. Delta = 0 is a single power law; Delta > 0 is a sum of two, the faster
one holding the share 1 - m of the excess at the top rung. Four rungs identify neither floor nor bend, so the forecast
is a mixture of those predictions over a grid of both, weighted by

    marginal likelihood of the rungs given (E, Delta, m)   x   priors on E / lowest loss, alpha and the bend,

point = median of the mixture, interval = its equal-tailed quantiles. A pinned floor leaves the one Student t of a
single power law. How the priors were chosen, by simulation: docs/decisions/forecast-default.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

PRIOR_SHAPE: Final = (2.0, 2.0)
"""Beta shape of E / lowest loss: neither zero nor the lowest loss itself, otherwise open."""
NOISE_PRIOR: Final = 0.003
"""How far a rung lies off its law, relative: 0.015-0.2 % from run to run in public repeats, up to 0.5 % from a recipe
off its optimum. Counts as one observation."""
NOISE_PRIOR_DEGREES: Final = 1.0
SLOPE_PRIOR: Final = (0.12, 0.8)
"""Median and log spread of alpha, the exponent in compute of the slower power: 0.05 to 0.3 in public ladders."""
BENDS: Final = ((0.0, 1.0), *((delta, share) for delta in (0.1, 0.2, 0.35, 0.5) for share in (0.3, 0.5, 0.7)))
"""(Delta, m) carried; the single power law has the weight of all the others together."""
_GRID: Final = 121
_HIGHEST: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class RungMeans:
    """What the interval needs of the ladder: one mean per rung, and what its repeats say about noise.

    `repeat_squares` is the pooled sum of squared deviations of log loss within rungs, with `repeat_degrees`
    degrees of freedom; `loss_error` the standard error of a corrected mean, nats (None: no rung is corrected).
    """

    log_flops: Array
    loss: Array
    repeat_squares: float = 0.0
    repeat_degrees: int = 0
    loss_error: Array | None = None


@dataclass(frozen=True, kw_only=True)
class FloorProfile:
    """The forecast as a function of floor and bend.

    floors (g,), rmse of the rungs about the single power law of each floor, nats (g,); weights, location, scale and
    degrees (b, g): weight, and centre, scale and degrees of the Student t of log(L - E) for a new run. Row 0 is the
    single power law.
    """

    floors: Array
    rmse: Array
    bend_weights: Array
    location: Array
    scale: Array
    degrees: Array

    @property
    def weights(self) -> Array:
        """Weight of each floor, over all bends, (g,)."""
        return self.bend_weights.sum(axis=0)

    @property
    def bent(self) -> float:
        """Weight of the sums of two powers together."""
        return float(self.bend_weights[1:].sum())

    @property
    def points(self) -> Array:
        """Forecast of the single power law for each floor, nats (g,)."""
        return self.floors + np.exp(self.location[0])

    def quantile(self, probability: float) -> float:
        """Quantile of the mixture, nats."""
        return mixture_quantile([self], probability)

    def quantile_of(self, index: int, probability: float) -> float:
        """The same for one floor's single power law alone."""
        spread = special.stdtrit(self.degrees[0, index], probability) * self.scale[0, index]
        return float(self.floors[index] + np.exp(np.minimum(self.location[0, index] + spread, np.log(_HIGHEST))))

    def components(self) -> tuple[Array, ...]:
        """Floor, location, scale, degrees and weight of every Student t whose weight counts, (k,) each."""
        kept = self.bend_weights > 1e-7 * self.bend_weights.max()
        floors = np.broadcast_to(self.floors, kept.shape)
        return tuple(column[kept] for column in (floors, self.location, self.scale, self.degrees, self.bend_weights))

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


def mixture_quantile(profiles: Sequence[FloorProfile], probability: float) -> float:
    """Quantile of an even mixture of profiles (the same ladder in several counts), nats, by bisection."""
    parts = [profile.components() for profile in profiles]
    floors, location, scale, degrees, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
    weights = weights / weights.sum()

    def cumulative(loss: float) -> float:
        above = loss > floors
        standard = (np.log(np.where(above, loss - floors, 1.0)) - location) / scale
        return float(weights @ np.where(above, special.stdtr(degrees, standard), 0.0))

    low, high = 0.0, 1.0
    while cumulative(high) < probability:
        low, high = high, 2.0 * high
        if high > _HIGHEST:
            return _HIGHEST
    for _ in range(44):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if cumulative(middle) < probability else (low, middle)
    return 0.5 * (low + high)


def profile_floors(rungs: RungMeans, log_target: float, *, floor: float | None = None) -> FloorProfile:
    """Student-t forecasts of a new run at `log_target` (log FLOPs) for every floor and bend, with their weights.

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
        return _profile(rungs, log_target, np.array([float(floor)]), bends=BENDS[:1], prior_degrees=0.0)
    share = (np.arange(_GRID) + 0.5) / _GRID
    share = share * (2.0 - share)  # finer towards the lowest loss, where forecasts change fastest
    floors = lowest * np.append(0.0, share)
    return _profile(rungs, log_target, floors, bends=BENDS, prior_degrees=NOISE_PRIOR_DEGREES)


def _profile(
    rungs: RungMeans,
    log_target: float,
    floors: Array,
    *,
    bends: Sequence[tuple[float, float]],
    prior_degrees: float,
) -> FloorProfile:
    count = rungs.loss.size
    x = rungs.log_flops - rungs.log_flops.mean()
    spread, distance = float(x @ x), log_target - float(rungs.log_flops.mean())
    from_top = rungs.log_flops - rungs.log_flops.max()
    log_excess = np.log(rungs.loss - floors[:, None])
    bend, bend_out = (
        _log_bend(np.array(bends), at) for at in (from_top, np.array([log_target - rungs.log_flops.max()]))
    )
    excess = log_excess[None] - bend[:, None, :]  # (bends, floors, rungs)
    level, slope = excess.mean(axis=2), excess @ x / spread
    misfit = excess - level[..., None] - slope[..., None] * x
    # One relative error of the loss is this many units of log(L - E): the geometric mean over the rungs.
    stretch = np.exp(np.mean(np.log(rungs.loss) - log_excess, axis=1))
    squares = np.sum(misfit**2, axis=2) / stretch**2
    variance, degrees = _noise(rungs, squares, prior_degrees)
    leverage = 1.0 / count + x * distance / spread
    scale = stretch**2 * variance * (1.0 + float(leverage @ leverage))
    if rungs.loss_error is not None:
        scale = scale + np.sum((leverage * rungs.loss_error / (rungs.loss - floors[:, None])) ** 2, axis=1)
    line = log_excess - misfit[0]
    return FloorProfile(
        floors=floors,
        rmse=np.sqrt(np.mean((floors[:, None] + np.exp(line) - rungs.loss[None, :]) ** 2, axis=1)),
        bend_weights=_weights(rungs, floors, squares, slope),
        location=level + slope * distance + bend_out,
        scale=np.maximum(np.sqrt(scale), 1e-12),
        degrees=degrees,
    )


def _log_bend(bends: Array, from_top: Array) -> Array:
    """log(m + (1 - m) * (C / C_top)^-Delta), (b, n)."""
    delta, share = bends[:, :1], bends[:, 1:]
    return np.log(share + (1.0 - share) * np.exp(-delta * from_top))


def _noise(rungs: RungMeans, squares: Array, prior_degrees: float) -> tuple[Array, Array]:
    """Relative variance of a run about its law and its degrees of freedom, repeats pooled where the form fits."""
    degrees = np.full(squares.shape, rungs.loss.size - 2 + prior_degrees)
    total = squares + prior_degrees * NOISE_PRIOR**2
    if rungs.repeat_degrees:
        pooled = total / degrees < 4.0 * rungs.repeat_squares / rungs.repeat_degrees  # else the form misfits
        total = total + np.where(pooled, rungs.repeat_squares, 0.0)
        degrees = degrees + np.where(pooled, rungs.repeat_degrees, 0)
    return total / degrees, degrees


def _weights(rungs: RungMeans, floors: Array, squares: Array, slope: Array) -> Array:
    """Marginal likelihood of the rungs (line and noise integrated out) times priors, (b, g), summing to one."""
    if floors.size == 1:
        return np.ones((1, 1))
    degrees = rungs.loss.size - 2 + rungs.repeat_degrees + NOISE_PRIOR_DEGREES
    total = squares + rungs.repeat_squares + NOISE_PRIOR_DEGREES * NOISE_PRIOR**2
    share = floors / float(rungs.loss.min())
    a, b = PRIOR_SHAPE
    falling = slope < -1e-4
    log_slope = np.log(np.where(falling, -slope, 1.0) / SLOPE_PRIOR[0]) / SLOPE_PRIOR[1]
    with np.errstate(divide="ignore"):
        log_weight = -0.5 * degrees * np.log(total) + (a - 1) * np.log(share) + (b - 1) * np.log1p(-share)
        log_weight = log_weight + np.log(np.gradient(floors))
    log_weight = log_weight - 0.5 * log_slope**2
    log_weight[1:] -= np.log(max(len(log_weight) - 1, 1))
    log_weight = np.where(falling, log_weight, -np.inf)
    if not np.any(np.isfinite(log_weight)):
        raise ValueError("the loss does not fall with compute over these rungs; a law needs a falling loss")
    weight = np.exp(log_weight - log_weight.max())
    return weight / weight.sum()
