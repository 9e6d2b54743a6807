"""The best size at one compute: a parabola in log parameters through runs of one budget.

Only a vertex inside the sizes tried is an optimum. How optima move with compute is a law in compute (`fit.py`); a
parabola is biased for a curve that is none, so a law in parameters and tokens (`surface_fit.py`) is the better guide.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rungwise.analysis.fitting.fit import UnfitForecast


@dataclass(frozen=True, kw_only=True)
class IsoFlop:
    """loss = curvature * log(params)^2 + ...; optimum and loss are None where the parabola has none inside."""

    curvature: float
    optimum: float | None
    loss: float | None
    status: str
    odd: float | None
    """Parameters of the run that lies most above its neighbours, where the parabola does not open upward."""


def fit_isoflop(params: ArrayLike, loss: ArrayLike) -> IsoFlop:
    """Parabola through the runs of one budget, by least squares.

    Raises:
        ValueError: values that are not finite and positive.
        UnfitForecast: fewer than three sizes.

    >>> round(fit_isoflop([5e6, 1.2e7, 2.8e7, 5e7], [1.538, 1.51, 1.516, 1.537]).optimum / 1e7, 2)
    1.59
    """
    sizes, losses = np.asarray(params, dtype=float), np.asarray(loss, dtype=float)
    if not np.all(np.isfinite(sizes) & np.isfinite(losses) & (sizes > 0) & (losses > 0)):
        raise ValueError("params and loss must be finite and positive in every row; drop such rows first")
    if np.unique(sizes).size < 3:
        raise UnfitForecast(f"{np.unique(sizes).size} sizes; a parabola needs at least 3")
    order = np.argsort(sizes)
    x, y = np.log(sizes[order]), losses[order]
    curvature, slope, level = (float(value) for value in np.polyfit(x - x.mean(), y, 2))
    if curvature <= 0:
        chord = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        odd = float(sizes[order][1 + int(np.argmax(y[1:-1] - chord))])
        status = f"the parabola opens downward: no optimum; the run of {odd:.3g} parameters lies above its neighbours"
        return IsoFlop(curvature=curvature, optimum=None, loss=None, status=status, odd=odd)
    vertex = -slope / (2.0 * curvature)
    optimum = float(np.exp(vertex + x.mean()))
    if not x[0] <= vertex + x.mean() <= x[-1]:
        status = f"the vertex {optimum:.3g} lies outside the sizes tried: no optimum; add sizes on that side"
        return IsoFlop(curvature=curvature, optimum=None, loss=None, status=status, odd=None)
    best = level - slope**2 / (4.0 * curvature)
    return IsoFlop(
        curvature=curvature, optimum=optimum, loss=best, status="an optimum inside the sizes tried", odd=None
    )
