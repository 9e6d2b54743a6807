"""Loss under any learning-rate schedule: the multi-power law, its gradient, and a fit that says how far to trust it.

Legend: eta learning rate, s optimizer step, S(s) the sum of eta up to s, warm-up included.

    L(s) = L0 + A S(s)^-alpha - B sum_k (eta_{k-1} - eta_k) (1 - (1 + C eta_k^-gamma S_k(s))^-beta)

S_k(s) is the sum of eta from step k to s. The sum runs over every change of eta, the warm-up's rise included: it adds
about B times the peak rate to L0, and constants fitted without it are not comparable with the published ones.
Source: Luo et al. 2025, "A Multi-Power Law for Loss Curve Prediction Across Learning Rate Schedules".
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from rungwise.analysis.fitting.fit import HUBER_DELTA, FitStatus

Array = NDArray[np.float64]

PRIOR: Final = (1.0, 0.5, 0.5)
"""C, beta and gamma before any evidence, each within a factor e: two or three schedules leave them to trade freely."""
MIN_ROWS: Final = 12
MAX_NODES: Final = 256
"""Stretches of steps that one schedule is reduced to; more of them move no loss by 1e-4."""
WARMUP_NODES: Final = 16
_LOG: Final = np.array([False, True, True, True, True, True, True])
_LOWER: Final = np.array([0.0, *np.log([1e-6, 1e-2, 1e-3, 1e-4, 1e-2, 1e-2])])
_UPPER: Final = np.array([100.0, *np.log([1e6, 5.0, 1e6, 1e6, 5.0, 3.0])])
_STARTS: Final = tuple((alpha, rate, 0.6, gamma) for alpha in (0.3, 0.6) for rate in (0.5, 5.0) for gamma in (0.4, 0.8))
_PRIOR_AT: Final = [4, 5, 6]
_AGREEING: Final = 1e-3
_GRADIENT_TOLERANCE: Final = 1e-5


@dataclass(frozen=True, eq=False)
class Schedule:
    """A learning rate over steps, straight between nodes; step and rate are (nodes,), rates not negative."""

    step: Array
    rate: Array

    @classmethod
    def of(cls, step: ArrayLike, rate: ArrayLike, *, warmup: float = 0.0) -> Self:
        """From rows of a run; up to `warmup` steps of a straight rise from zero are put before the first row.

        Raises:
            ValueError: lengths differ, steps do not ascend, or a rate is negative or not finite.
        """
        steps, rates = np.asarray(step, dtype=float), np.asarray(rate, dtype=float)
        if steps.ndim != 1 or steps.shape != rates.shape or steps.size < 2:
            raise ValueError(f"step {steps.shape} and rate {rates.shape} must be rows of one schedule, two at least")
        if not (np.all(np.diff(steps) > 0) and np.all(np.isfinite(rates) & (rates >= 0)) and rates.max() > 0):
            raise ValueError("a schedule needs ascending steps and finite learning rates, not negative, not all zero")
        start = min(warmup, float(steps[0]))
        if start > 0:
            ramp = np.arange(WARMUP_NODES) / WARMUP_NODES
            steps, rates = np.append(start * ramp, steps), np.append(float(rates[0]) * ramp, rates)
        return cls(steps, rates)

    def summed(self, step: ArrayLike) -> Array:
        """S(s), the sum of the rate from step 0; outside the nodes the first and the last rate hold."""
        at = np.asarray(step, dtype=float)
        first = self.rate[0] * self.step[0]
        parts = 0.5 * (self.rate[1:] + self.rate[:-1]) * np.diff(self.step)
        sums = first + np.append(0.0, np.cumsum(parts))
        inside = np.clip(at, self.step[0], self.step[-1])
        left = np.clip(np.searchsorted(self.step, inside, side="right") - 1, 0, self.step.size - 2)
        past = inside - self.step[left]
        slope = (self.rate[left + 1] - self.rate[left]) / (self.step[left + 1] - self.step[left])
        total = sums[left] + self.rate[left] * past + 0.5 * slope * past**2
        return (
            total + self.rate[-1] * np.maximum(at - self.step[-1], 0.0) - self.rate[0] * (inside - at) * (at < inside)
        )

    def changes(self) -> tuple[Array, Array, Array]:
        """(eta_{k-1} - eta_k, eta_k, S before step k) for each change; the first rate is a change from zero."""
        keep = np.arange(self.step.size)
        if keep.size > MAX_NODES:
            cost = np.abs(np.diff(self.rate, prepend=0.0)) + self.rate.max() / keep.size
            share = np.cumsum(cost) / cost.sum()
            last = np.searchsorted(share, np.arange(1, MAX_NODES + 1) / MAX_NODES - 1e-12)
            keep = np.unique(np.concatenate([[0], np.maximum(last - 1, 0), last]))
        rate, step = self.rate[keep], self.step[keep]
        before = np.append(step[0], 0.5 * (step[1:] + step[:-1]))
        drop = -np.diff(rate, prepend=0.0)
        moved = np.abs(drop) > 1e-9 * self.rate.max()
        return drop[moved], np.maximum(rate[moved], 1e-9 * self.rate.max()), self.summed(before[moved])


@dataclass(frozen=True)
class ScheduleLaw:
    """The seven constants; loss in nats per token, learning rates as the trainer states them."""

    floor: float
    amplitude: float
    alpha: float
    drop: float
    rate: float
    beta: float
    gamma: float

    def value(self, schedule: Schedule, step: ArrayLike) -> Array:
        """Loss at `step` under `schedule`, nats per token, same shape."""
        at = np.asarray(step, dtype=float)
        return self._terms(_Rows.of(schedule, at.ravel()))[0].reshape(at.shape)

    def gradient(self, schedule: Schedule, step: ArrayLike) -> Array:
        """Derivatives by the seven constants in their order, on a new last axis of length 7."""
        at = np.asarray(step, dtype=float)
        return self._terms(_Rows.of(schedule, at.ravel()))[1].reshape(*at.shape, 7)

    def _terms(self, rows: "_Rows") -> tuple[Array, Array]:
        excess = self.amplitude * rows.summed**-self.alpha
        travelled = self.rate * rows.rate**-self.gamma * rows.since
        log_one = np.log1p(travelled)
        left = np.exp(-self.beta * log_one)
        steep = rows.change * self.beta * left * travelled / (1.0 + travelled)
        annealed = (rows.change * (1.0 - left)).sum(axis=1)
        by_beta = (rows.change * left * log_one).sum(axis=1)
        columns = (
            np.ones_like(excess),
            excess / self.amplitude,
            -np.log(rows.summed) * excess,
            -annealed,
            -self.drop * steep.sum(axis=1) / self.rate,
            -self.drop * by_beta,
            self.drop * (steep * np.log(rows.rate)).sum(axis=1),
        )
        return self.floor + excess - self.drop * annealed, np.stack(columns, axis=-1)


@dataclass(frozen=True, eq=False)
class _Rows:
    """What the law needs of a schedule at each row: sums (rows,), and changes and sums since them (rows, changes)."""

    summed: Array
    change: Array
    rate: Array
    since: Array

    @classmethod
    def of(cls, schedule: Schedule, step: Array) -> Self:
        change, rate, before = schedule.changes()
        summed = schedule.summed(step)
        since = summed[:, None] - before
        return cls(np.maximum(summed, 1e-300), np.where(since > 0, change, 0.0), rate, np.maximum(since, 0.0))


@dataclass(frozen=True, kw_only=True)
class ScheduleFit:
    """A fitted law with the evidence for and against it."""

    law: ScheduleLaw
    status: FitStatus
    rmse_log: float
    """Root mean square of log(predicted / observed)."""
    gradient: float
    """Largest scaled gradient at the solution; near zero where the fit has converged."""
    condition: float
    """Of the Jacobian with unit columns: above 1e4 some constants trade against each other."""
    num_starts: int
    num_starts_agreeing: int
    at_bound: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        constants = dict(zip(_NAMES, astuple(self.law), strict=True))
        evidence = {"rmse_log": self.rmse_log, "gradient": self.gradient, "condition": self.condition}
        starts = {"starts": [self.num_starts_agreeing, self.num_starts], "at_bound": list(self.at_bound)}
        return {**constants, "status": str(self.status), **evidence, **starts}


_NAMES: Final = ("floor", "amplitude", "alpha", "drop", "rate", "beta", "gamma")


def fit_schedule_law(
    runs: Sequence[tuple[Schedule, ArrayLike, ArrayLike]], *, delta: float = HUBER_DELTA, num_starts: int = 8
) -> ScheduleFit:
    """Minimise the sum of Huber_delta(log L - log loss) over all rows of `runs`, one model size, several schedules.

    Neighbouring rows of a curve miss together, so a sum over rows knows less than it seems: a first fit measures the
    misses' size and how many rows they last, and the second weighs `PRIOR` by them.

    Args:
        runs: (schedule, steps, losses) each; two schedules that differ after warm-up separate A from B.
        delta: Huber threshold on the log residual.
        num_starts: 1 to 8 descents; their agreement is reported.
    Raises:
        ValueError: too few rows, or a loss that is not finite and positive.
    """
    rows = [_Rows.of(schedule, np.asarray(step, dtype=float)) for schedule, step, _ in runs]
    log_loss = np.concatenate([np.log(_checked(loss)) for _, _, loss in runs]) if runs else np.empty(0)
    if log_loss.size < MIN_ROWS:
        raise ValueError(f"{log_loss.size} rows cannot carry seven constants; give at least {MIN_ROWS}")

    problem = _Problem(rows, log_loss, delta)
    free = problem.solve([problem.start(*start) for start in _STARTS[:: -(-len(_STARTS) // num_starts)]], weight=0.0)
    best = min(free, key=lambda result: result.cost)
    weight = _prior_weight(problem.residuals(best.x)[0], [np.size(loss) for _, _, loss in runs])
    return problem.record(problem.solve([result.x for result in free], weight=weight), weight)


@dataclass(frozen=True, eq=False)
class _Problem:
    """theta: the floor, then logs of the other six constants."""

    rows: list[_Rows]
    log_loss: Array
    delta: float

    def law(self, theta: Array) -> ScheduleLaw:
        return ScheduleLaw(*np.where(_LOG, np.exp(theta * _LOG), theta).tolist())

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        """Log residuals (rows,) and their derivatives (rows, 7)."""
        parts = [self.law(theta)._terms(each) for each in self.rows]
        value = np.concatenate([part[0] for part in parts])
        jacobian = np.concatenate([part[1] for part in parts]) * np.where(_LOG, np.exp(theta * _LOG), 1.0)
        safe = np.maximum(value, 1e-3)
        return np.log(safe) - self.log_loss, np.where(value[:, None] > 1e-3, jacobian / safe[:, None], 0.0)

    def start(self, alpha: float, rate: float, beta: float, gamma: float) -> Array:
        """The floor and both amplitudes by least squares for given exponents: variable projection's one step."""
        loss = np.exp(self.log_loss)
        law = ScheduleLaw(0.0, 1.0, alpha, 1.0, rate, beta, gamma)
        basis = np.concatenate([law._terms(each)[1] for each in self.rows])[:, [0, 1, 3]]
        floor, amplitude, drop = np.linalg.lstsq(basis / loss[:, None], np.ones_like(loss), rcond=None)[0]
        floor = float(np.clip(floor, 0.05 * loss.min(), 0.98 * loss.min()))
        logs = np.log([max(amplitude, 0.05), alpha, max(drop, 1.0), rate, beta, gamma])
        return np.clip(np.append(floor, logs), _LOWER + 1e-6, _UPPER - 1e-6)

    def solve(self, starts: list[Array], *, weight: float) -> list[Any]:
        """One descent from each start; `weight` squared is what a factor e away from `PRIOR` costs."""
        pull = np.zeros((3, 7))
        pull[np.arange(3), _PRIOR_AT] = weight

        def values(theta: Array) -> Array:
            return np.append(self.residuals(theta)[0], weight * (theta[_PRIOR_AT] - np.log(PRIOR)))

        def slopes(theta: Array) -> Array:
            return np.concatenate([self.residuals(theta)[1], pull])

        options: dict[str, Any] = {
            "jac": slopes, "bounds": (_LOWER, _UPPER), "loss": "huber", "f_scale": self.delta, "x_scale": "jac",
            "max_nfev": 100, "ftol": 1e-10, "xtol": 1e-10, "gtol": 1e-12,
        }  # fmt: skip
        return [least_squares(values, np.clip(start, _LOWER, _UPPER), **options) for start in starts]

    def record(self, solved: list[Any], weight: float) -> ScheduleFit:
        best = min(solved, key=lambda result: result.cost)
        agreeing = int(sum(result.cost <= best.cost * (1.0 + _AGREEING) for result in solved))
        residual, jacobian = self.residuals(best.x)
        size = np.sqrt((jacobian**2).sum(axis=0))
        touching = (best.x <= _LOWER + 1e-6) | (best.x >= _UPPER - 1e-6)
        slope = jacobian.T @ (np.minimum(1.0, self.delta / np.maximum(np.abs(residual), 1e-300)) * residual)
        slope[_PRIOR_AT] += weight**2 * (best.x[_PRIOR_AT] - np.log(PRIOR))
        scaled = np.abs(slope) / np.maximum(np.hypot(size, weight) * math.sqrt(2.0 * best.cost), 1e-300)
        gradient = float(np.max(np.where(touching, 0.0, scaled)))
        at_bound = tuple(name for name, hit in zip(_NAMES, touching, strict=True) if hit)
        status = FitStatus.CONVERGED
        if gradient > _GRADIENT_TOLERANCE and best.cost > 1e-18:
            status = FitStatus.NOT_CONVERGED
        elif at_bound:
            status = FitStatus.AT_BOUND
        return ScheduleFit(
            law=self.law(best.x),
            status=status,
            rmse_log=float(np.sqrt(np.mean(residual**2))),
            gradient=gradient,
            condition=float(np.linalg.cond(jacobian / np.maximum(size, 1e-300))),
            num_starts=len(solved),
            num_starts_agreeing=agreeing,
            at_bound=at_bound,
        )


def _prior_weight(residual: Array, counts: list[int]) -> float:
    """Root of the misses' variance times the rows that each of them lasts (twice the summed autocorrelation)."""
    variance = float(np.mean(residual**2))
    covered = 0.0
    for part in np.split(residual, np.cumsum(counts)[:-1]):
        size = part.size
        products = np.array([part[: size - lag] @ part[lag:] for lag in range(size // 4 + 1)]) / size
        ends = np.flatnonzero(products <= 0.0)
        positive = products[: int(ends[0]) if ends.size else products.size]
        covered += size * (2.0 * positive.sum() - products[0])
    return math.sqrt(max(covered / residual.size, variance))


def _checked(loss: ArrayLike) -> Array:
    values = np.asarray(loss, dtype=float)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError("loss must be finite and positive in every row; drop the others first")
    return values
