"""Descend from many starts at once on a robust sum of squares, and say where each start ended.

objective = Σ_rows weight * Huber_delta(residual) + 1/2 |penalty|^2, always a sum: a mean of small Huber terms sinks
below an optimizer's tolerance and stops it at its start. Which residuals is the caller's; nothing here knows a law.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Residuals = Callable[[Array], tuple[Array, Array]]
"""theta (s, p) to residuals (s, n) and their derivatives (s, n, p)."""

MAX_ITERATIONS: Final = 300
_QUIET_ROUNDS: Final = 5
_SETTLED: Final = 1e-11


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Gaussian priors as rows of least squares: (rows @ theta - centre) / width, shapes (m, p), (m,), (m,)."""

    rows: Array
    centre: Array
    width: Array

    def values(self, theta: Array) -> Array:
        return (theta @ self.rows.T - self.centre) / self.width

    @property
    def scaled_rows(self) -> Array:
        return self.rows / self.width[:, None]


NO_PENALTY: Final = Penalty(rows=np.zeros((0, 0)), centre=np.zeros(0), width=np.ones(0))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is minimised: residuals within bounds (p,), row weights broadcast to (s, n), and priors."""

    residuals: Residuals
    lower: Array
    upper: Array
    delta: float
    weights: Array | float = 1.0
    penalty: Penalty = NO_PENALTY

    @property
    def free(self) -> NDArray[np.bool_]:
        return self.upper > self.lower

    def objective(self, theta: Array, residuals: Array) -> Array:
        total = np.sum(self.weights * huber(residuals, self.delta), axis=-1)
        if self.penalty.width.size:
            total = total + 0.5 * np.sum(self.penalty.values(theta) ** 2, axis=-1)
        return total

    def normal_equations(self, theta: Array, residuals: Array, jacobian: Array) -> tuple[Array, Array]:
        """Gradient (s, p) and Gauss-Newton Hessian (s, p, p); rows and columns of held constants are zero."""
        jacobian = jacobian * self.free
        pull = self.weights * np.clip(residuals, -self.delta, self.delta)
        share = self.weights * np.minimum(1.0, self.delta / np.maximum(np.abs(residuals), 1e-300))
        gradient = np.einsum("snj,sn->sj", jacobian, pull)
        hessian = np.einsum("snj,snk->sjk", jacobian * share[..., None], jacobian)
        if self.penalty.width.size:
            rows = self.penalty.scaled_rows * self.free
            gradient = gradient + self.penalty.values(theta) @ rows
            hessian = hessian + rows.T @ rows
        outward = ((theta <= self.lower) & (gradient > 0)) | ((theta >= self.upper) & (gradient < 0))
        held = outward | ~self.free
        hessian = hessian * (~held[:, :, None] & ~held[:, None, :])
        return np.where(held, 0.0, gradient), hessian


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Where the starts ended: theta (s, p), objective (s,), and what a further step would still gain, relative (s,)."""

    theta: Array
    objective: Array
    remaining: Array
    hessian: Array

    @property
    def best(self) -> int:
        return int(np.argmin(self.objective))


def huber(residuals: Array, delta: float) -> Array:
    """r^2 / 2 up to `delta`, then linear, elementwise; infinite `delta` is least squares."""
    size = np.abs(residuals)
    inner = np.minimum(size, delta)
    return inner * (size - 0.5 * inner)


def descend(problem: Problem, theta: Array, *, max_iterations: int = MAX_ITERATIONS) -> Descent:
    """Levenberg-Marquardt on every row of `theta` (s, p) together, until none of them gains."""
    theta = np.clip(theta, problem.lower, problem.upper)
    residuals, jacobian = problem.residuals(theta)
    objective = problem.objective(theta, residuals)
    damping = np.full(len(theta), 1e-3)
    quiet = 0
    for _ in range(max_iterations):
        gradient, hessian = problem.normal_equations(theta, residuals, jacobian)
        trial = np.clip(theta + _damped_step(gradient, hessian, damping), problem.lower, problem.upper)
        new_residuals, new_jacobian = problem.residuals(trial)
        value = problem.objective(trial, new_residuals)
        better = value < objective
        gain = np.where(better, (objective - value) / np.maximum(objective, 1e-300), 0.0)
        theta = np.where(better[:, None], trial, theta)
        residuals = np.where(better[:, None], new_residuals, residuals)
        jacobian = np.where(better[:, None, None], new_jacobian, jacobian)
        objective = np.where(better, value, objective)
        damping = np.clip(np.where(better, damping * 0.2, damping * 5.0), 1e-12, 1e12)
        quiet = quiet + 1 if np.all(gain < _SETTLED) else 0
        if quiet >= _QUIET_ROUNDS:
            break
    gradient, hessian = problem.normal_equations(theta, residuals, jacobian)
    step = _damped_step(gradient, hessian, np.zeros(len(theta)))
    promised = -np.einsum("sj,sj->s", gradient, step)
    return Descent(
        theta=theta,
        objective=objective,
        remaining=np.abs(promised) / np.maximum(objective, 1e-300),
        hessian=hessian,
    )


def _damped_step(gradient: Array, hessian: Array, damping: Array) -> Array:
    index = np.arange(gradient.shape[1])
    diagonal = hessian[:, index, index]
    damped = hessian.copy()
    damped[:, index, index] += damping[:, None] * diagonal + np.where(diagonal > 0, 1e-13 * diagonal, 1.0)
    return -np.linalg.solve(damped, gradient[..., None])[..., 0]
