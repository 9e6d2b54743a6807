"""Bands of a curve forecast: what the final loss and the shape may miss, at one progress and over the whole run.

log L(p) = forecast(p) + f + s(p) z(p): f the miss of the final loss, s(p) the size of the shape's miss, zero at the
end, z a process of unit variance and correlation (1 + d) exp(-d) at distance d in log progress (Matern 3/2), all of it
Student's t with few degrees of freedom. One model serves the pointwise band, the simultaneous band and the nowcast
(`nowcast.py`).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

CORRELATION_LENGTH: Final = 1.0
"""Log progress that is one unit of d."""
DRAWS: Final = 4000


@dataclass(frozen=True, kw_only=True)
class CurveError:
    """Sizes of what a curve forecast may miss, as scales of a Student t with `degrees`; logs of the quantity.

    log_progress, shape (p,), ascending and not widening; final: of the whole level.
    """

    log_progress: Array
    shape: Array
    final: float
    degrees: float

    @classmethod
    def of(cls, log_progress: Array, shape: Array, *, final: float, degrees: float) -> Self:
        """`shape` made never to widen with progress."""
        shrinking = np.maximum.accumulate(shape[::-1])[::-1]
        return cls(log_progress=log_progress, shape=shrinking, final=final, degrees=degrees)

    @property
    def total(self) -> Array:
        return np.hypot(self.final, self.shape)

    def half_width(self, level: float) -> Array:
        """Of the band that holds a new run at one progress with probability `level`, (p,)."""
        return float(special.stdtrit(self.degrees, 0.5 + level / 2)) * self.total

    def covariance(self, at: Array, other: Array) -> Array:
        """Between the misses at two lists of log progress, (a, b)."""
        here, there = (np.interp(x, self.log_progress, self.shape) for x in (at, other))
        distance = np.abs(at[:, None] - other[None, :])
        correlation = (1.0 + distance / CORRELATION_LENGTH) * np.exp(-distance / CORRELATION_LENGTH)
        return self.final**2 + here[:, None] * there[None, :] * correlation

    def simultaneous_factor(self, level: float) -> float:
        """By what the pointwise half width grows so that the whole curve stays inside with probability `level`."""
        places = np.linspace(self.log_progress[0], self.log_progress[-1], 24)
        covariance = self.covariance(places, places)
        size = np.sqrt(np.diag(covariance))
        correlation = covariance / np.outer(size, size) + 1e-9 * np.eye(size.size)
        normal, shared = _draws(size.size, self.degrees)
        furthest = np.abs(normal @ np.linalg.cholesky(correlation).T).max(axis=1) / shared
        factor = float(np.quantile(furthest, level)) / float(special.stdtrit(self.degrees, 0.5 + level / 2))
        return max(factor, 1.0)


@lru_cache(maxsize=8)
def _draws(size: int, degrees: float) -> tuple[Array, Array]:
    """Standard normals (DRAWS, size) and the shared root of chi-square over its degrees, the same on every call."""
    rng = np.random.default_rng(0)
    shared = np.sqrt(rng.chisquare(degrees, DRAWS) / degrees) if math.isfinite(degrees) else np.ones(DRAWS)
    return rng.standard_normal((DRAWS, size)), shared
