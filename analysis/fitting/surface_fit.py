"""Fit a law in parameters and tokens: starts by variable projection, all descended together, judged afterwards.

For given exponents the floor and both amplitudes are linear, so a grid of exponents is projected at once (non-negative
least squares over the sets of columns that may be active) and its best points are the starts. A pinned floor leaves
the projection: it is taken off the losses, and the amplitudes are solved for what remains. What a fit means
for a run beyond its rows is `surface.py`; a law in compute alone is `fit.py`; resampled fits are `bootstrap.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rungwise.analysis.fitting.descent import NO_PENALTY, Descent, Penalty, Problem, descend
from rungwise.analysis.fitting.fit import FitStatus, UnfitForecast, bounds_hit, starts_agreeing, status_of
from rungwise.analysis.fitting.laws import LAWS, SurfaceLaw

Array = NDArray[np.float64]

HUBER_DELTA: Final = 1e-3
"""Log residual beyond which a row counts linearly: Hoffmann et al. 2022 and every public refit of it."""
EXPONENT_BOUNDS: Final = (1e-3, 3.0)
OUTER_BOUNDS: Final = (0.1, 8.0)
COLLINEAR: Final = 0.05
"""Spread of log N and log D across their common line, in e-folds, below which sizes and tokens are one variable."""
WEAK_SHARE: Final = 0.25
"""An exponent whose standard error exceeds this share of it, or a floor this share of the lowest loss, is weak."""
NAMES: Final = (
    "floor", "size_amplitude", "size_exponent", "token_amplitude", "token_exponent", "outer_exponent",
)  # fmt: skip
_GRID: Final = 14
_NUM_STARTS: Final = 8
_ACTIVE_SETS: Final = tuple(tuple(column for column in range(3) if bits >> column & 1) for bits in range(1, 8))


@dataclass(frozen=True, kw_only=True)
class SurfaceRows:
    """Checked rows, centred in logs: log_params and log_tokens minus their means, and the loss; (n,) each."""

    log_params: Array
    log_tokens: Array
    loss: Array
    centre: tuple[float, float]

    def place(self, params: ArrayLike, tokens: ArrayLike) -> tuple[Array, Array]:
        """Centred logs of other runs."""
        return np.log(np.asarray(params, float)) - self.centre[0], np.log(np.asarray(tokens, float)) - self.centre[1]


@dataclass(frozen=True, kw_only=True)
class SurfaceFit:
    """A fitted surface with the evidence for and against it. Residuals are predicted over observed, log or nats."""

    form: str
    law: SurfaceLaw
    status: FitStatus
    objective: float
    residuals: tuple[float, ...]
    degrees_of_freedom: int
    num_starts: int
    num_starts_agreeing: int
    at_bound: tuple[str, ...]
    weakly_identified: tuple[str, ...]
    errors: dict[str, float]
    """Standard error of each free constant (amplitudes: of their logarithm), from the curvature at the optimum."""
    condition: float
    """Condition number of the Hessian, each constant in units of its own curvature."""
    theta: Array = field(repr=False, compare=False)
    scale: Literal["log", "nats"] = "log"
    """What the residuals are in: log loss, or nats."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json` and the registered forecast."""
        return {
            "form": self.form,
            "formula": LAWS[self.form].formula,
            **self.law.to_dict(),
            "errors": self.errors,
            "status": str(self.status),
            "objective": self.objective,
            f"rmse_{self.scale}": float(np.sqrt(np.mean(np.square(self.residuals)))),
            "degrees_of_freedom": self.degrees_of_freedom,
            "starts": [self.num_starts_agreeing, self.num_starts],
            "at_bound": list(self.at_bound),
            "weakly_identified": list(self.weakly_identified),
            "condition": self.condition,
        }


def fit_surface(
    params: ArrayLike,
    tokens: ArrayLike,
    loss: ArrayLike,
    *,
    form: str = "chinchilla",
    delta: float = HUBER_DELTA,
    scale: Literal["log", "nats"] = "log",
    weights: ArrayLike | None = None,
    penalty: Penalty = NO_PENALTY,
    floor: float | None = None,
) -> SurfaceFit:
    """Minimise Σ weight * Huber_delta(residual) over the constants of `form`.

    Args:
        params, tokens, loss: one entry per run, shape (n,), positive.
        delta: Huber threshold in units of the residual; `math.inf` is least squares.
        scale: residual log(L / loss), or L - loss in nats.
        weights: importance of each row; None counts all alike.
        penalty: Gaussian priors on (floor, log A, alpha, log B, beta, log kappa), amplitudes at the geometric mean
            run; their objective is in the units of the sum.
        floor: pins the floor, nats; None leaves it to the form.
    Raises:
        ValueError: unknown form, bad values, or sizes and tokens on one line.
        UnfitForecast: fewer rows than constants.
    """
    if form not in (known := [name for name, row in LAWS.items() if row.surface]):
        raise ValueError(f"form {form!r} is no law in parameters and tokens; use one of {', '.join(known)}")
    rows = surface_rows(params, tokens, loss)
    constants = LAWS[form].num_parameters - int(floor is not None and LAWS[form].floor is None)
    if rows.loss.size < constants:
        raise UnfitForecast(f"{rows.loss.size} rows cannot fix the {constants} constants of {LAWS[form].formula}")
    problem = surface_problem(rows, form=form, delta=delta, scale=scale, weights=weights, penalty=penalty, floor=floor)
    return _record(rows, form, problem, descend(problem, _starts(rows, form, floor)), scale=scale)


def surface_rows(params: ArrayLike, tokens: ArrayLike, loss: ArrayLike) -> SurfaceRows:
    """Rows ready for a fit.

    Raises:
        ValueError: shapes differ, a value is not finite and positive, or log N and log D lie on one line.
    """
    columns = {"params": params, "tokens": tokens, "loss": loss}
    arrays = {name: np.asarray(column, dtype=float) for name, column in columns.items()}
    if len({array.shape for array in arrays.values()}) > 1 or arrays["loss"].ndim != 1:
        raise ValueError(f"shapes {[array.shape for array in arrays.values()]} differ; give one loss per run")
    for name, array in arrays.items():
        if not np.all(np.isfinite(array) & (array > 0)):
            raise ValueError(f"{name} must be finite and positive in every row; drop such rows first")
    logs = np.log([arrays["params"], arrays["tokens"]])
    centre = logs.mean(axis=1)
    rows = SurfaceRows(
        log_params=logs[0] - centre[0],
        log_tokens=logs[1] - centre[1],
        loss=arrays["loss"],
        centre=(float(centre[0]), float(centre[1])),
    )
    if (spread := across_spread(rows.log_params, rows.log_tokens)) < COLLINEAR:
        raise ValueError(
            f"parameters and tokens lie on one line (spread {spread:.2g} e-folds across it): a law in both is not "
            "determined; forecast in compute alone, or add runs at other tokens per parameter"
        )
    return rows


def across_spread(log_params: Array, log_tokens: Array) -> float:
    """Root mean square distance of (log N, log D) from their common line, e-folds."""
    cloud = np.stack([log_params - np.mean(log_params), log_tokens - np.mean(log_tokens)])
    return float(np.linalg.svd(cloud, compute_uv=False)[-1] / math.sqrt(max(cloud.shape[1], 1)))


def surface_problem(
    rows: SurfaceRows,
    *,
    form: str,
    delta: float,
    scale: Literal["log", "nats"] = "log",
    weights: ArrayLike | None = None,
    penalty: Penalty = NO_PENALTY,
    observed: Array | None = None,
    floor: float | None = None,
) -> Problem:
    """The descent's problem; `observed` (s, n) replaces the losses of each start (resampled fits)."""
    row = LAWS[form]
    lowest = float(rows.loss.min())
    floor = row.floor if floor is None else floor
    if floor is not None and not 0.0 <= floor < lowest:
        raise ValueError(f"floor {floor} must lie in [0, {lowest:g}), below the lowest loss; pin a smaller one")
    bounds = np.array([(0.0, 0.999 * lowest), (-60, 60), EXPONENT_BOUNDS, (-60, 60), EXPONENT_BOUNDS, (0.0, 0.0)])
    if floor is not None:
        bounds[0] = floor
    if row.shared_exponent:
        bounds[4] = 0.0
    if row.outer_free:
        bounds[5] = np.log(OUTER_BOUNDS)
    target = rows.loss if observed is None else observed
    log_target = np.log(target)

    def residuals(theta: Array) -> tuple[Array, Array]:
        value, jacobian = evaluate(theta, rows.log_params, rows.log_tokens, shared=row.shared_exponent)
        if scale == "nats":
            return value - target, jacobian
        return np.log(value) - log_target, jacobian / value[..., None]

    return Problem(
        residuals=residuals,
        lower=bounds[:, 0],
        upper=bounds[:, 1],
        delta=delta,
        weights=1.0 if weights is None else np.asarray(weights, dtype=float),
        penalty=penalty,
    )


def evaluate(theta: Array, log_params: Array, log_tokens: Array, *, shared: bool) -> tuple[Array, Array]:
    """Loss (s, n) and derivatives (s, n, 6) by (floor, log A, alpha, log B, beta, log kappa), centred logs."""
    floor, size_level, alpha, token_level, beta, log_outer = (theta[:, index : index + 1] for index in range(6))
    beta = alpha if shared else beta
    size = np.exp(np.clip(size_level - alpha * log_params, -80.0, 80.0))
    data = np.exp(np.clip(token_level - beta * log_tokens, -80.0, 80.0))
    outer, inner = np.exp(log_outer), size + data
    excess = inner**outer
    slope = outer * excess / inner
    by_beta = -slope * data * log_tokens
    by_alpha = -slope * size * log_params + (by_beta if shared else 0.0)
    columns = (
        np.ones_like(inner), slope * size, by_alpha, slope * data,
        np.zeros_like(inner) if shared else by_beta, outer * excess * np.log(inner),
    )  # fmt: skip
    return floor + excess, np.stack(columns, axis=-1)


def law_at(theta: Array, rows: SurfaceRows, form: str) -> SurfaceLaw:
    """The law in parameters and tokens themselves, undoing the centring."""
    floor, size_level, alpha, token_level, beta, log_outer = (float(value) for value in theta)
    beta = alpha if LAWS[form].shared_exponent else beta
    size = math.exp(size_level + alpha * rows.centre[0])
    return SurfaceLaw(floor, size, alpha, math.exp(token_level + beta * rows.centre[1]), beta, math.exp(log_outer))


def _starts(rows: SurfaceRows, form: str, floor: float | None) -> Array:
    """The best points of a grid of exponents, the linear constants of each solved under their signs."""
    grid = np.geomspace(0.05, 1.2, _GRID)
    pairs = np.array([(a, b) for a in grid for b in grid]).T
    if LAWS[form].shared_exponent:
        pairs = np.tile(np.geomspace(0.03, 1.5, 4 * _GRID), (2, 1))
    pinned = LAWS[form].floor if floor is None else floor
    linear, misfit = project(rows, pairs, pinned)
    order = np.argsort(misfit)[:_NUM_STARTS]
    floors = linear[order, 0] if pinned is not None else np.minimum(linear[order, 0], 0.95 * rows.loss.min())
    levels = np.log(np.maximum(linear[order, 1:], 1e-9))
    columns = (floors, levels[:, 0], pairs[0, order], levels[:, 1], pairs[1, order], np.zeros(order.size))
    return np.stack(columns, axis=1)


def project(rows: SurfaceRows, pairs: Array, floor: float | None) -> tuple[Array, Array]:
    """Non-negative (floor, A, B) (g, 3) of least relative squares for each pair of exponents, and the squares (g,).

    A `floor` given is kept: Σ ((A * N^-alpha + B * D^-beta - (L - E)) / L)^2 is least over A and B alone.
    """
    size = np.exp(-pairs[0][:, None] * rows.log_params)
    data = np.exp(-pairs[1][:, None] * rows.log_tokens)
    columns = np.stack([np.full_like(size, 1.0 if floor is None else 0.0), size, data], axis=1) / rows.loss
    remaining = 1.0 - (floor or 0.0) / rows.loss
    gram, right = np.einsum("gin,gjn->gij", columns, columns), (columns * remaining).sum(axis=2)
    whole = float(np.sum(remaining**2))
    best, squares = np.zeros((pairs.shape[1], 3)), np.full(pairs.shape[1], whole)
    for active in _ACTIVE_SETS:
        if floor is not None and 0 in active:
            continue
        chosen = list(active)
        matrix = gram[:, chosen][:, :, chosen]
        ridge = 1e-12 * np.einsum("gii->gi", matrix).max(axis=1)[:, None, None] * np.eye(len(chosen))
        solved = np.linalg.solve(matrix + ridge, right[:, chosen][..., None])[..., 0]
        value = whole - np.sum(solved * right[:, chosen], axis=1)
        better = np.all(solved >= 0, axis=1) & (value < squares)
        squares = np.where(better, value, squares)
        full = np.zeros_like(best)
        full[:, chosen] = solved
        best = np.where(better[:, None], full, best)
    if floor is not None:
        best[:, 0] = floor
    return best, squares


def _record(
    rows: SurfaceRows, form: str, problem: Problem, found: Descent, *, scale: Literal["log", "nats"]
) -> SurfaceFit:
    best = found.best
    theta = found.theta[best]
    residuals = problem.residuals(theta[None])[0][0]
    at_bound = bounds_hit(theta, problem, NAMES)
    degrees = rows.loss.size - int(problem.free.sum())
    errors, condition = _errors(problem, found, residuals, degrees)
    law = law_at(theta, rows, form)
    limits = {"floor": WEAK_SHARE * float(rows.loss.min())}
    limits |= {name: WEAK_SHARE * getattr(law, name) for name in ("size_exponent", "token_exponent")}
    weak = tuple(name for name, limit in limits.items() if errors.get(name, 0.0) > limit)
    otherwise = FitStatus.WEAK_SURFACE if weak else FitStatus.CONVERGED
    status = status_of(found, at_bound=at_bound, degrees=degrees, otherwise=otherwise)
    return SurfaceFit(
        form=form,
        law=law,
        status=status,
        objective=float(found.objective[best]),
        residuals=tuple(float(value) for value in residuals),
        degrees_of_freedom=degrees,
        num_starts=len(found.theta),
        num_starts_agreeing=starts_agreeing(found.objective),
        at_bound=at_bound,
        weakly_identified=weak,
        errors=errors,
        condition=condition,
        theta=theta,
        scale=scale,
    )


def _errors(problem: Problem, found: Descent, residuals: Array, degrees: int) -> tuple[dict[str, float], float]:
    """Standard errors by the sandwich of a robust fit (Huber 1981, section 7.6), and the scaled condition number."""
    free = np.flatnonzero(problem.free)
    theta = found.theta[found.best]
    jacobian = problem.residuals(theta[None])[1][0][:, free]
    inside = np.abs(residuals) <= problem.delta
    pull = np.clip(residuals, -problem.delta, problem.delta)
    share = max(float(np.mean(inside)), 1.0 / residuals.size)
    gram = jacobian.T @ jacobian
    if problem.penalty.width.size:
        rows = problem.penalty.scaled_rows[:, free]
        gram = gram + share * rows.T @ rows
    units = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    condition = float(np.linalg.cond(gram / np.outer(units, units)))
    if degrees <= 0:
        return {}, condition
    variance = float(np.sum(pull**2)) / degrees / share**2
    covariance = np.linalg.pinv(gram) * variance
    spread = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return {NAMES[index]: float(value) for index, value in zip(free, spread, strict=True)}, condition
