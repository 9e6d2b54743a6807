"""Refit a law to resampled runs, all draws at once, and count the draws that came to nothing.

Three ways to resample: `residual` (fitted loss times a resampled residual), `wild` (each run's own residual with a
random sign, where noise differs from run to run) and `pair` (runs with replacement). What is drawn is the uncertainty
of the constants under one law; form and extrapolation are `surface.py` and `intervals.py`.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rungwise.analysis.fitting.descent import descend
from rungwise.analysis.fitting.fit import STILL_FALLING
from rungwise.analysis.fitting.laws import LAWS, SurfaceLaw
from rungwise.analysis.fitting.surface_fit import (
    COLLINEAR,
    HUBER_DELTA,
    SurfaceRows,
    across_spread,
    evaluate,
    fit_surface,
    law_at,
    surface_problem,
    surface_rows,
)

Array = NDArray[np.float64]
Kind = Literal["residual", "pair", "wild"]

MIN_SPARE: Final = 3
"""Runs beyond the constants below which resampling says nothing."""
_CHUNK: Final = 125
_ITERATIONS: Final = 80


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Constants of the draws that stand, (draws, 6) on centred logs, and how many did not stand, by reason."""

    kind: Kind
    form: str
    theta: Array
    degenerate: dict[str, int]
    rows: SurfaceRows
    residuals: Array
    """Centred log residuals of the fit to all runs, for the noise of a new one."""

    @property
    def laws(self) -> list[SurfaceLaw]:
        return [law_at(theta, self.rows, self.form) for theta in self.theta]

    def errors(self) -> dict[str, float]:
        """Standard deviation of each constant over the draws."""
        laws = self.laws
        return {name: float(np.std([getattr(law, name) for law in laws])) for name in SurfaceLaw.__dataclass_fields__}

    def quantile(
        self, params: ArrayLike, tokens: ArrayLike, probability: float, *, new_run: bool = True, seed: int = 0
    ) -> Array:
        """Quantile of the loss at each target (t,): of a new run with its noise, or of the curve alone."""
        log_params, log_tokens = self.rows.place(np.atleast_1d(params), np.atleast_1d(tokens))
        shared = LAWS[self.form].shared_exponent
        loss = evaluate(self.theta, log_params, log_tokens, shared=shared)[0]
        if new_run:
            rng = np.random.default_rng(seed)
            loss = loss * np.exp(rng.choice(self.residuals, size=loss.shape))
        return np.quantile(loss, probability, axis=0)


def bootstrap_surface(
    params: ArrayLike,
    tokens: ArrayLike,
    loss: ArrayLike,
    *,
    kind: Kind = "residual",
    form: str = "chinchilla",
    draws: int = 400,
    delta: float = HUBER_DELTA,
    seed: int = 0,
) -> Bootstrap:
    """Refit `form` to `draws` resamples, each descending from the fit to all runs.

    Raises:
        ValueError: unknown kind, or too few runs to resample.
    """
    if kind not in ("residual", "pair", "wild"):
        raise ValueError(f"kind {kind!r} is unknown; use residual, pair or wild")
    rows = surface_rows(params, tokens, loss)
    constants = LAWS[form].num_parameters
    if rows.loss.size < constants + MIN_SPARE:
        raise ValueError(f"{rows.loss.size} runs are too few to resample {constants} constants; use Student t")
    fit = fit_surface(params, tokens, loss, form=form, delta=delta)
    rng = np.random.default_rng(seed)
    predicted = np.log(rows.loss) + np.array(fit.residuals)
    spare = np.sqrt(rows.loss.size / (rows.loss.size - constants))
    residuals = -np.array(fit.residuals) * spare
    residuals = residuals - np.median(residuals)
    kept, lost = [], {"not_converged": 0, "at_bound": 0, "collinear": 0}
    for start in range(0, draws, _CHUNK):
        count = min(_CHUNK, draws - start)
        observed, weights = _resample(kind, rng, count, predicted, residuals, rows.loss)
        problem = surface_problem(rows, form=form, delta=delta, weights=weights, observed=observed)
        found = descend(problem, np.tile(fit.theta, (count, 1)), max_iterations=_ITERATIONS)
        touching = np.any(((found.theta <= problem.lower) | (found.theta >= problem.upper)) & problem.free, axis=1)
        flat = _collinear(rows, weights) if kind == "pair" else np.zeros(count, dtype=bool)
        moving = (found.remaining > STILL_FALLING) & ~touching & ~flat
        lost["collinear"] += int(flat.sum())
        lost["at_bound"] += int((touching & ~flat).sum())
        lost["not_converged"] += int(moving.sum())
        kept.append(found.theta[~flat & ~touching & ~moving])
    return Bootstrap(kind=kind, form=form, theta=np.concatenate(kept), degenerate=lost, rows=rows, residuals=residuals)


def _resample(
    kind: Kind, rng: np.random.Generator, count: int, predicted: Array, residuals: Array, loss: Array
) -> tuple[Array, Array]:
    """Losses (count, n) and weights (count, n) of the draws."""
    shape = (count, loss.size)
    if kind == "pair":
        return np.broadcast_to(loss, shape), rng.multinomial(
            loss.size, np.full(loss.size, 1 / loss.size), count
        ).astype(float)
    noise = rng.choice(residuals, size=shape) if kind == "residual" else residuals * rng.choice([-1.0, 1.0], size=shape)
    return np.exp(predicted + noise), np.ones(shape)


def _collinear(rows: SurfaceRows, weights: Array) -> NDArray[np.bool_]:
    """Draws whose distinct runs are too few or lie on one line."""
    flat = []
    for weight in weights:
        drawn = weight > 0
        few = drawn.sum() < len(("floor", "A", "alpha", "B", "beta"))
        flat.append(few or across_spread(rows.log_params[drawn], rows.log_tokens[drawn]) < COLLINEAR)
    return np.array(flat)
