"""Fit a law to (compute, loss) points: many starts, robust, and a record that says how far to trust it.

Variable projection places every start (the floor and amplitude are linear once the exponent is given), then
all starts descend together by damped Gauss-Newton on the Huber objective. Convergence is judged here, by the
gradient and by how many starts agree. What the constants mean for a new run is `intervals.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rungwise.analysis.fitting.descent import Descent, Problem, descend
from rungwise.analysis.fitting.laws import LAWS, PowerLaw

Array = NDArray[np.float64]

MIN_RUNGS: Final = 3
HUBER_DELTA: Final = 0.01
"""Log residuals beyond 1 % count linearly: ten times the run-to-run spread of a final loss."""
EXPONENT_BOUNDS: Final = (1e-3, 4.0)
WEAK_FLOOR_ERROR: Final = 0.02
"""A floor whose standard error exceeds this share of the lowest loss is not identified."""
STILL_FALLING: Final = 1e-6
"""A further step that would gain more than this share of the objective: not converged, whatever ended the descent."""
_NUM_STARTS: Final = 24


class FitStatus(StrEnum):
    """What a reader should know first; the value is the message."""

    CONVERGED = "converged"
    WEAK = "converged, but the points do not identify the floor: read the forecast as a function of it"
    WEAK_SURFACE = "converged, but the rows do not identify every constant: read the forecast, not the constants"
    AT_BOUND = "a constant lies on its bound: the points do not have the curvature of this law"
    EXACT = "as many constants as rungs: the residuals are zero by construction"
    NOT_CONVERGED = "no start reached a stationary point: do not use these constants"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted law with the evidence for and against it. Residuals are log(predicted / observed)."""

    form: str
    law: PowerLaw
    status: FitStatus
    objective: float
    residuals: tuple[float, ...]
    degrees_of_freedom: int
    num_starts: int
    num_starts_agreeing: int
    at_bound: tuple[str, ...]
    weakly_identified: bool
    floor_error: float | None
    """Standard error of the floor, nats; None when it is pinned or has no degree of freedom."""
    floor_pinned: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json` and the registered forecast."""
        return {
            "form": self.form,
            "formula": LAWS[self.form].formula,
            "floor": self.law.floor,
            "amplitude": self.law.amplitude,
            "exponent": self.law.exponent,
            "floor_pinned": self.floor_pinned,
            "floor_error": self.floor_error,
            "status": str(self.status),
            "rmse_log": float(np.sqrt(np.mean(np.square(self.residuals)))),
            "degrees_of_freedom": self.degrees_of_freedom,
            "starts": [self.num_starts_agreeing, self.num_starts],
            "at_bound": list(self.at_bound),
            "weakly_identified": self.weakly_identified,
        }


class UnfitForecast(ValueError):
    """The points cannot carry a forecast; `.estimate` is the number one would have got (nats), None without any."""

    def __init__(self, message: str, estimate: float | None = None):
        super().__init__(message)
        self.estimate = estimate


def fit_law(
    flops: ArrayLike,
    loss: ArrayLike,
    *,
    form: str = "power_floor",
    floor: float | None = None,
    delta: float = HUBER_DELTA,
) -> Fit:
    """Minimise Σ Huber_delta(log L(C) - log loss) over the constants of `form`.

    The sum, never the mean: a mean of small Huber terms sinks below an optimizer's tolerance and stops it at
    its start.

    Args:
        flops, loss: one entry per rung, shape (n,), positive.
        floor: pins the floor, nats; None leaves it to the form.
        delta: Huber threshold on the log residual.
    Raises:
        ValueError: unknown form, bad values, or a pinned floor at or above the lowest loss.
        UnfitForecast: fewer than three distinct computes.
    """
    flops, loss = _checked_points(flops, loss)
    if form not in (known := [name for name, row in LAWS.items() if not row.surface]):
        raise ValueError(f"form {form!r} is no law in compute; use one of {', '.join(known)}")
    pinned = LAWS[form].floor if floor is None else floor
    lowest = float(loss.min())
    if pinned is not None and not 0.0 <= pinned < lowest:
        raise ValueError(f"floor {pinned} must lie in [0, {lowest:g}), below the lowest loss; pin a smaller one")
    problem = _PowerProblem(np.log(flops), np.log(loss), pinned=pinned, delta=delta)
    return problem.record(form, descend(problem.descent, problem.starts()))


def bounds_hit(theta: Array, problem: Problem, names: Sequence[str]) -> tuple[str, ...]:
    """Names of the free constants that lie on a bound."""
    touching = ((theta <= problem.lower + 1e-9) | (theta >= problem.upper - 1e-9)) & problem.free
    return tuple(name for name, hit in zip(names, touching, strict=True) if hit)


def status_of(found: Descent, *, at_bound: tuple[str, ...], degrees: int, otherwise: FitStatus) -> FitStatus:
    """What to say first of the best start: the gravest of what holds, `otherwise` where nothing does.

    Args:
        degrees: of freedom that the constants leave.
    """
    if found.remaining[found.best] > STILL_FALLING and found.objective[found.best] > 1e-20:
        return FitStatus.NOT_CONVERGED
    if at_bound:
        return FitStatus.AT_BOUND
    return FitStatus.EXACT if degrees <= 0 else otherwise


def starts_agreeing(objective: Array) -> int:
    """How many starts ended at the lowest objective, within a millionth of it."""
    return int(np.sum(objective <= objective.min() * (1 + 1e-6) + 1e-12))


def _checked_points(flops: ArrayLike, loss: ArrayLike) -> tuple[Array, Array]:
    flops, loss = np.asarray(flops, dtype=float), np.asarray(loss, dtype=float)
    if flops.ndim != 1 or flops.shape != loss.shape:
        raise ValueError(f"flops {flops.shape} and loss {loss.shape} differ; give one loss per compute")
    for name, values in (("flops", flops), ("loss", loss)):
        if not np.all(np.isfinite(values) & (values > 0)):
            raise ValueError(f"{name} {values.tolist()} must be finite and positive; drop such rows first")
    distinct = np.unique(flops).size
    if distinct < MIN_RUNGS:
        raise UnfitForecast(f"{distinct} usable rungs; a law needs at least {MIN_RUNGS}")
    return flops, loss


class _PowerProblem:
    """Points in logs, centred: theta = (floor, log amplitude at the geometric mean compute, exponent), (starts, 3)."""

    def __init__(self, log_flops: Array, log_loss: Array, *, pinned: float | None, delta: float):
        self.centre = float(log_flops.mean())
        self.x = log_flops - self.centre
        self.log_loss = log_loss
        self.pinned = pinned
        lowest = float(np.exp(log_loss.min()))
        floor_bounds = (0.0, 0.999 * lowest) if pinned is None else (pinned, pinned)
        bounds = np.array([floor_bounds, (-40.0, 40.0), EXPONENT_BOUNDS])
        self.descent = Problem(residuals=self.residuals, lower=bounds[:, 0], upper=bounds[:, 1], delta=delta)

    def starts(self) -> Array:
        """Exponents spread over the plausible range, floor and amplitude solved linearly for each."""
        exponent = np.geomspace(0.01, 1.5, _NUM_STARTS)
        loss = np.exp(self.log_loss)
        power = np.exp(-exponent[:, None] * self.x) / loss  # columns over loss: relative residuals
        one = 1.0 / loss
        if self.pinned is None:
            s11, s12, s22 = one @ one, power @ one, np.sum(power**2, axis=1)
            b1, b2 = one.sum(), power.sum(axis=1)
            floor = (b1 * s22 - b2 * s12) / np.maximum(s11 * s22 - s12**2, 1e-300)
            floor = np.clip(floor, self.descent.lower[0], 0.98 * self.descent.upper[0])
        else:
            floor = np.full_like(exponent, self.pinned)
        amplitude = np.sum(power * (1.0 - floor[:, None] * one), axis=1) / np.sum(power**2, axis=1)
        return np.stack([floor, np.log(np.maximum(amplitude, 1e-12)), exponent], axis=1)

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        """Log residuals (starts, n) and their derivatives (starts, n, 3)."""
        excess = np.exp(theta[:, 1:2] - theta[:, 2:3] * self.x)
        predicted = theta[:, :1] + excess
        jacobian = np.stack([np.ones_like(excess), excess, -self.x * excess], axis=-1) / predicted[..., None]
        return np.log(predicted) - self.log_loss, jacobian

    def record(self, form: str, found: Descent) -> Fit:
        best = found.best
        theta = found.theta[best]
        residuals = self.residuals(found.theta[best : best + 1])[0][0]
        floor, log_amplitude, exponent = (float(value) for value in theta)
        at_bound = bounds_hit(theta, self.descent, ("floor", "amplitude", "exponent"))
        degrees = len(residuals) - int(self.descent.free.sum())
        floor_error = self._floor_error(found.theta[best : best + 1], degrees)
        lowest = float(np.exp(self.log_loss.min()))
        weak = self.pinned is None and (floor_error is None or floor_error > WEAK_FLOOR_ERROR * lowest)
        otherwise = FitStatus.WEAK if weak else FitStatus.CONVERGED
        status = status_of(found, at_bound=at_bound, degrees=degrees, otherwise=otherwise)
        return Fit(
            form=form,
            law=PowerLaw(floor, float(np.exp(log_amplitude + exponent * self.centre)), exponent),
            status=status,
            objective=float(found.objective[best]),
            residuals=tuple(float(value) for value in residuals),
            degrees_of_freedom=degrees,
            num_starts=len(found.theta),
            num_starts_agreeing=starts_agreeing(found.objective),
            at_bound=at_bound,
            weakly_identified=weak,
            floor_error=floor_error,
            floor_pinned=self.pinned is not None,
        )

    def _floor_error(self, theta: Array, degrees: int) -> float | None:
        if self.pinned is not None or degrees <= 0:
            return None
        residuals, jacobian = self.residuals(theta)
        variance = max(float(np.sum(residuals**2)) / degrees, 1e-6)  # not below 0.1 % run-to-run noise
        covariance = np.linalg.pinv(jacobian[0].T @ jacobian[0]) * variance
        return float(np.sqrt(max(covariance[0, 0], 0.0)))
