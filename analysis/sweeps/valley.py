"""A loss around its lowest value: a skewed parabola over the log of what was swept, and how sure its parts are.

Legend: x = log of the swept value (learning rate or batch). Near its lowest point m the loss is
L(x) = a + c · shape(x − m, s) with shape(u, s) = 2 (e^(su) − su − 1) / s², which is u² at s = 0: losses rise faster
above the best learning rate than below it, how much faster nobody knows, and a plain parabola puts that into m.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]

SKEW_PRIOR: Final = 1.0
"""Standard deviation of s about 0: at 1 the loss a factor two above the optimum rises 1.6 times as much as below."""
MODEL_EXCESS: Final = 0.05
"""Excess over the lowest loss, relative, at which the curve's own error has grown to that of a run."""
NOISE_PRIOR: Final = 0.004
"""Spread of a final loss from run to run, relative; counts as one observation."""
NOISE_PRIOR_DEGREES: Final = 1.0
HUBER_WIDTH: Final = 1.5
"""Standard deviations beyond which a residual counts linearly, where there are enough of them to tell."""
_ENOUGH_TO_TELL: Final = 3.0
CURVE_DEGREES: Final = 4
"""Constants of the curve: what residuals lose in degrees of freedom."""
_PLACES: Final = 241
_SKEWS: Final = 15
_DRAWS: Final = 4000


class Noise(NamedTuple):
    """What other sweeps say about the spread of a final loss: Σ of squared relative residuals, and their degrees."""

    squares: float = 0.0
    degrees: float = 0.0


class Points(NamedTuple):
    """The runs of one sweep that did not diverge; x = log value − centre."""

    x: Array
    y: Array
    centre: float
    diverges_from: float | None

    @classmethod
    def checked(
        cls, values: ArrayLike, losses: ArrayLike, diverged: ArrayLike | None, *, level: float = 0.9
    ) -> "Points":
        value, loss = np.asarray(values, dtype=float), np.asarray(losses, dtype=float)
        bad = np.zeros(value.shape, dtype=bool) if diverged is None else np.asarray(diverged, dtype=bool)
        if value.ndim != 1 or not value.shape == loss.shape == bad.shape:
            raise ValueError(f"values {value.shape}, losses {loss.shape} and diverged {bad.shape} differ in shape")
        if not np.all(np.isfinite(value) & (value > 0)):
            raise ValueError(f"values {value.tolist()} must be finite and positive; a sweep is over their logarithm")
        if not 0.0 < level < 1.0:
            raise ValueError(f"level {level} must lie in (0, 1); 0.9 is usual")
        stable = ~bad & np.isfinite(loss)
        if not stable.any():
            return cls(np.empty(0), np.empty(0), 0.0, float(value.min()) if value.size else None)
        above = value[~stable & (value > value[stable].max())]
        x = np.log(value[stable])
        centre = float(x[np.argmin(loss[stable])])
        return cls(x - centre, loss[stable], centre, float(above.min()) if above.size else None)

    @property
    def num_values(self) -> int:
        return np.unique(self.x).size

    @property
    def lowest(self) -> float:
        return float(self.means()[1].min())

    def value(self, x: float) -> float:
        """Inverse of `x`."""
        return math.exp(float(x) + self.centre)

    def means(self) -> tuple[Array, Array]:
        """Each value once, and the mean loss of its runs."""
        x, group = np.unique(self.x, return_inverse=True)
        return x, np.bincount(group, weights=self.y) / np.bincount(group)

    def covers(self, recipe: float) -> bool:
        """Whether a value lies among the stable ones, rounding apart."""
        where = math.log(recipe) - self.centre
        return bool(self.x.min() - 1e-4 <= where <= self.x.max() + 1e-4)


def shape(u: ArrayLike, skew: ArrayLike) -> Array:
    """2 (e^(su) − su − 1) / s²: a parabola of curvature 2 at u = 0 that rises faster on the side where s·u > 0."""
    u, skew = np.asarray(u, dtype=float), np.asarray(skew, dtype=float)
    small = np.abs(skew * u) < 1e-4
    safe = np.where(small, 1.0, skew)
    return np.where(small, u**2 * (1 + skew * u / 3), 2 * (np.expm1(safe * u) - safe * u) / safe**2)


class Posterior:
    """Of the optimum's place m and the skew s, on a grid of shape (places, skews); everything relative to the lowest
    loss, so that sweeps share their noise."""

    def __init__(self, points: Points, noise: Noise):
        self.lowest = points.lowest
        self.x, self.y = points.x, points.y / self.lowest
        self.noise = noise
        step = float(np.ptp(points.x)) / (points.num_values - 1)
        self.places = np.linspace(points.x.min() - step, points.x.max() + step, _PLACES)
        self.skews = SKEW_PRIOR * np.linspace(-2.5, 2.5, _SKEWS)
        self.shapes = shape(self.x - self.places[:, None, None], self.skews[:, None])
        self.degrees = self.x.size - 2 + noise.degrees + NOISE_PRIOR_DEGREES
        values, means = points.means()
        excess = means[np.searchsorted(values, points.x)] / self.lowest - 1.0
        trust = 1.0 / (1.0 + excess / MODEL_EXCESS) ** 2
        self._solve(trust)
        if self.x.size - CURVE_DEGREES + noise.degrees >= _ENOUGH_TO_TELL:
            for _ in range(8):
                self._solve(trust * self._huber(trust))

    def _solve(self, weight: Array) -> None:
        """Weighted least squares in (a, c) for every (m, s), and the weight of each."""
        z, y = self.shapes, self.y
        total = weight.sum()
        z_mean, y_mean = z @ weight / total, float(y @ weight / total)
        z_spread = np.maximum(((z - z_mean[..., None]) ** 2) @ weight, 1e-300)
        self.c = ((z - z_mean[..., None]) * (y - y_mean)) @ weight / z_spread
        self.a = y_mean - self.c * z_mean
        self.residual = y - self.a[..., None] - self.c[..., None] * z
        self.squares = self.residual**2 @ weight
        outside = self.noise.squares + NOISE_PRIOR_DEGREES * NOISE_PRIOR**2
        self.scale = np.sqrt((self.squares + outside) / self.degrees)
        self.z_mean, self.z_spread, self.total = z_mean, z_spread, total
        log_weight = (
            -0.5 * np.log(z_spread)
            - self.degrees * np.log(self.scale)
            + np.log(np.maximum(special.stdtr(self.degrees, self.c * np.sqrt(z_spread) / self.scale), 1e-300))
            - 0.5 * (self.skews / SKEW_PRIOR) ** 2
        )
        self.weights = np.exp(log_weight - log_weight.max())
        self.weights /= self.weights.sum()

    @property
    def best(self) -> tuple[int, int]:
        """Place and skew of the largest weight."""
        place, skew = np.unravel_index(int(np.argmax(self.weights)), self.weights.shape)
        return int(place), int(skew)

    @property
    def best_squares(self) -> float:
        return float(self.squares[self.best])

    def _huber(self, trust: Array) -> Array:
        """Weights that cut residuals of the best curve beyond HUBER_WIDTH of a spread no single outlier can raise."""
        residual = self.residual[self.best] * np.sqrt(trust)
        own = max(self.x.size - CURVE_DEGREES, 0)
        median = 1.4826 * float(np.median(np.abs(residual))) * math.sqrt(residual.size / max(own, 1))
        outside = self.noise.squares + NOISE_PRIOR_DEGREES * NOISE_PRIOR**2
        spread = math.sqrt((own * median**2 + outside) / (own + self.noise.degrees + NOISE_PRIOR_DEGREES))
        return np.minimum(1.0, HUBER_WIDTH * spread / np.maximum(np.abs(residual), 1e-300))

    def quantile(self, probability: float) -> float:
        """Quantile of m."""
        mass = self.weights.sum(axis=1)
        return float(np.interp(probability, np.cumsum(mass) - 0.5 * mass, self.places))

    def spread(self) -> float:
        """Standard deviation of m."""
        mass = self.weights.sum(axis=1)
        mean = float(mass @ self.places)
        return math.sqrt(float(mass @ (self.places - mean) ** 2))

    def draws(self, recipe: float) -> tuple[Array, Array, Array]:
        """Loss at the optimum, loss lost at the recipe's x, and c: drawn from the posterior, fixed seed, nats."""
        random = np.random.default_rng(0)
        edges = np.cumsum(self.weights.ravel())
        chosen = np.searchsorted(edges, (np.arange(_DRAWS) + 0.5) / _DRAWS * edges[-1])
        place, skew = np.unravel_index(np.minimum(chosen, edges.size - 1), self.weights.shape)
        at = (place, skew)
        positive = special.stdtr(self.degrees, self.c[at] * np.sqrt(self.z_spread[at]) / self.scale[at])
        uniform = 1.0 - positive * random.random(_DRAWS)  # of c, given that it is positive
        stretch = special.stdtrit(self.degrees, np.clip(uniform, 1e-12, 1 - 1e-12))
        c = np.maximum(self.c[at] + stretch * self.scale[at] / np.sqrt(self.z_spread[at]), 0.0)
        middle = special.stdtrit(self.degrees, random.random(_DRAWS)) * self.scale[at] / math.sqrt(self.total)
        a = self.a[at] + (self.c[at] - c) * self.z_mean[at] + middle
        lost = c * shape(recipe - self.places[place], self.skews[skew])
        return self.lowest * a, self.lowest * lost, self.lowest * c
