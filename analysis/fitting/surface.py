"""Forecast runs beyond a set of runs whose sizes and tokens vary freely: several laws, held out, averaged, widened.

Each law of `MEMBERS` is fitted with its priors (`surface_fit.py`) and carries its discrepancy (`discrepancy.py`); two
are fitted beside them as they were published, without either. Laws are weighted by one over their error
on the budgets of most compute, forecast from the rest; the forecast is the weighted mean of log loss, and its variance
the mean of theirs plus the spread between them. A pinned floor is every law's, with and without priors. How the members
and constants were chosen, on training rows alone: docs/decisions/forecast-default.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from rungwise.analysis.fitting.descent import Penalty
from rungwise.analysis.fitting.discrepancy import Linearised, predict
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.fitting.laws import LAWS
from rungwise.analysis.fitting.surface_fit import (
    HUBER_DELTA,
    SurfaceFit,
    SurfaceRows,
    evaluate,
    fit_surface,
    surface_rows,
)

Array = NDArray[np.float64]

MIN_ROWS: Final = 8
FLOOR_PRIOR: Final = (0.6, 0.2)
"""Floor over the lowest loss, centre and width: between 0.4 and 0.8 for language and image models at every public
size (Hoffmann et al. 2022; Henighan et al. 2020)."""
EXPONENT_PRIOR: Final = (0.35, 0.15)
"""Exponents of size and tokens: published separable fits lie between 0.2 and 0.6."""
EXPONENT_GAP: Final = 0.10
"""Size and token exponents differ by about this much: compute-optimal size and tokens grow at nearly equal rates."""
OUTER_PRIOR: Final = 0.30
"""Width of log kappa around 0 (the separable law)."""
ROBUST: Final = 1.345
"""Huber threshold in units of the spread: 95 % efficiency under normal noise."""
MIN_SPREAD: Final = 5e-4
HELD_OUT_SHARE: Final = 1 / 3
INDEPENDENT: Final = 4
"""Laws that the spread between them counts as a sample of: some of the five are one form, fitted twice."""
_FLAT: Final = 100.0
_POOLED: Final = 20_001
"""Quantiles of each forecast that a mixture is read from: probabilities to 5e-5."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One law carried by the forecast; `regular` says whether the priors hold its constants.

    One as published is fitted as those who published it did: Huber threshold `delta` on residuals of this `scale`.
    """

    name: str
    form: str
    regular: bool
    delta: float = HUBER_DELTA
    scale: Literal["log", "nats"] = "log"


MEMBERS: Final = (
    Member(name="chinchilla", form="chinchilla", regular=True),
    Member(name="outer_power", form="outer_power", regular=True),
    Member(name="overtraining", form="overtraining", regular=True),
    Member(name="chinchilla_as_published", form="chinchilla", regular=False),
    Member(name="overtraining_as_published", form="overtraining", regular=False, delta=math.inf, scale="nats"),
)


@dataclass(frozen=True, kw_only=True)
class MemberForecast:
    """One law's fit and what it says at the targets: log loss and its standard deviation, (t,).

    `scale` is None for the law as published: it has no error of its own and takes that of the same law held by priors.
    """

    member: Member
    fit: SurfaceFit
    location: Array
    scale: Array | None


@dataclass(frozen=True, kw_only=True)
class SurfaceForecast:
    """Distribution of the log loss of a new run at each target, and the laws behind it."""

    laws: tuple[MemberForecast, ...]
    weights: Array
    held_out_errors: Array
    """Mean absolute log error of each law on the held-out rows."""
    location: Array
    scale: Array
    """Standard deviation under one law: constants, discrepancy and noise of a new run."""
    form_scale: Array
    """Standard deviation of an unseen law about the mean of these, from the spread between them."""

    def quantile(self, probability: ArrayLike) -> Array:
        """Loss, nats per token, (..., t): normal under one law, Student t between laws."""
        at = np.asarray(probability, dtype=float)[..., None]
        within = special.ndtri(at) * self.scale
        between = special.stdtrit(INDEPENDENT - 1, at) * self.form_scale
        return np.exp(self.location + np.sign(at - 0.5) * np.hypot(within, between))


def mixture_quantile(forecasts: Sequence[SurfaceForecast], probability: float) -> Array:
    """Loss, nats per token, (t,), of the mixture of several forecasts, each counting alike.

    For forecasts of the same runs in two counts of parameters: what they disagree by is part of the interval.
    """
    if len(forecasts) == 1:
        return forecasts[0].quantile(probability)
    steps = (np.arange(_POOLED) + 0.5) / _POOLED
    return np.quantile(np.concatenate([found.quantile(steps) for found in forecasts]), probability, axis=0)


def forecast_surface(
    rows: Mapping[str, ArrayLike],
    params: ArrayLike,
    tokens: ArrayLike,
    *,
    loss_error: ArrayLike = 0.0,
    floor: float | None = None,
) -> SurfaceForecast:
    """Forecast new runs at `params` and `tokens` (t,) from `rows`: params, tokens, loss and optionally flops (n,).

    Args:
        loss_error: relative error of the losses that no scatter shows.
        floor: pins the floor of every law, nats; None leaves it to the rows and its prior.
    Raises:
        ValueError: bad values, a floor not below the lowest loss, or sizes and tokens on one line.
        UnfitForecast: fewer than `MIN_ROWS` rows.
    """
    table = {key: np.asarray(rows[key], dtype=float) for key in ("params", "tokens", "loss")}
    if (count := table["loss"].size) < MIN_ROWS:
        raise UnfitForecast(f"{count} runs cannot carry a law in parameters and tokens; give at least {MIN_ROWS}")
    flops = np.asarray(rows.get("flops", 6.0 * table["params"] * table["tokens"]), dtype=float)
    targets = np.atleast_1d(np.asarray(params, dtype=float)), np.atleast_1d(np.asarray(tokens, dtype=float))
    laws = forecast_members(table, targets, floor=floor)
    errors = held_out_errors(table, flops, floor=floor)
    weights = 1.0 / (errors + 1e-4)
    weights /= weights.sum()
    places = np.array([law.location for law in laws])
    scale_of = {law.member.form: law.scale for law in laws if law.scale is not None}
    scales = np.array([scale_of[law.member.form] for law in laws])
    location = weights @ places
    unseen = (INDEPENDENT + 1) / (INDEPENDENT - 1)  # an unseen law about the mean of those seen
    form = unseen * (weights @ (places - location) ** 2)
    return SurfaceForecast(
        laws=tuple(laws),
        weights=weights,
        held_out_errors=errors,
        location=location,
        scale=np.sqrt(weights @ scales**2 + np.asarray(loss_error, dtype=float) ** 2),
        form_scale=np.sqrt(form),
    )


def held_out_errors(table: Mapping[str, Array], flops: Array, *, floor: float | None = None) -> Array:
    """Mean absolute log error of each member on the rows of most compute, forecast from the others.

    All nan-free: where the lower rows cannot carry a law every member counts alike.
    """
    lower = lower_rows(flops)
    below = {key: column[lower] for key, column in table.items()}
    above = {key: column[~lower] for key, column in table.items()}
    try:
        found = forecast_members(below, (above["params"], above["tokens"]), floor=floor)
    except ValueError:
        return np.ones(len(MEMBERS))
    return np.array([np.mean(np.abs(item.location - np.log(above["loss"]))) for item in found])


def lower_rows(flops: Array) -> NDArray[np.bool_]:
    """Mask of the rows a hold-out fits: up to the quantile of compute that leaves out a third, whole budgets.

    Where the largest budget alone holds more than a third, it is what is left out.
    """
    edge = float(np.quantile(flops, 1.0 - HELD_OUT_SHARE))
    for lower in (flops <= 1.001 * edge, flops < 0.999 * edge):
        if np.sum(~lower) >= 3 and np.sum(lower) >= MIN_ROWS:
            return lower
    lower = np.zeros(flops.size, dtype=bool)
    lower[np.argsort(flops, kind="stable")[: max(int(0.7 * flops.size), MIN_ROWS - 1)]] = True
    return lower


def forecast_members(
    table: Mapping[str, Array], targets: tuple[Array, Array], *, floor: float | None = None
) -> list[MemberForecast]:
    """Every law of `MEMBERS` fitted and predicted at the targets, from one plain fit and its spread."""
    plain = fit_surface(table["params"], table["tokens"], table["loss"], floor=floor)
    spread = robust_spread(plain)
    return [_forecast_member(member, table, targets, plain, spread, floor) for member in MEMBERS]


def robust_spread(plain: SurfaceFit) -> float:
    """Spread of log loss about the plain robust fit: 1.4826 * median |residual|, for the constants spent."""
    count = len(plain.residuals)
    inflate = math.sqrt(count / max(plain.degrees_of_freedom, 1))
    return max(1.4826 * float(np.median(np.abs(plain.residuals))) * inflate, MIN_SPREAD)


def _forecast_member(
    member: Member,
    table: Mapping[str, Array],
    targets: tuple[Array, Array],
    plain: SurfaceFit,
    spread: float,
    floor: float | None,
) -> MemberForecast:
    rows = surface_rows(table["params"], table["tokens"], table["loss"])
    log_params, log_tokens = rows.place(*targets)
    shared = LAWS[member.form].shared_exponent
    if not member.regular:
        fit = plain if member.form == plain.form else _as_published(member, table, floor)
        value = evaluate(fit.theta[None], log_params, log_tokens, shared=shared)[0][0]
        return MemberForecast(member=member, fit=fit, location=np.log(value), scale=None)
    penalty = priors(rows, member, spread, pinned=floor is not None)
    delta = ROBUST * spread
    fit = fit_surface(
        table["params"], table["tokens"], table["loss"], form=member.form, delta=delta, penalty=penalty, floor=floor
    )
    value, jacobian = evaluate(fit.theta[None], rows.log_params, rows.log_tokens, shared=shared)
    value_out, jacobian_out = evaluate(fit.theta[None], log_params, log_tokens, shared=shared)
    free = _free(member.form, pinned=floor is not None)
    residuals = np.log(rows.loss) - np.log(value[0])
    centre, covariance = _prior_about(penalty, fit.theta, free, spread)
    law = Linearised(
        residuals=residuals,
        rows=(jacobian[0] / value[0][:, None])[:, free],
        targets=(jacobian_out[0] / value_out[0][:, None])[:, free],
        prior_mean=centre,
        prior_covariance=covariance,
        spread=spread,
        trust=np.minimum(1.0, ROBUST * spread / np.maximum(np.abs(residuals), 1e-12)) ** 2,
    )
    logs = np.stack([rows.log_params, rows.log_tokens], axis=1)
    mean, scale = predict(law, logs, np.stack([log_params, log_tokens], axis=1))
    return MemberForecast(member=member, fit=fit, location=np.log(value_out[0]) + mean, scale=scale)


def _as_published(member: Member, table: Mapping[str, Array], floor: float | None) -> SurfaceFit:
    options: dict[str, Any] = {"form": member.form, "delta": member.delta, "scale": member.scale, "floor": floor}
    return fit_surface(table["params"], table["tokens"], table["loss"], **options)


def priors(rows: SurfaceRows, member: Member, spread: float, *, pinned: bool = False) -> Penalty:
    """Priors as penalties in units of the objective, which is in squared log loss: widths times the spread.

    A pinned floor needs none of its own.
    """
    lowest = float(rows.loss.min())
    shared, outer = LAWS[member.form].shared_exponent, LAWS[member.form].outer_free
    entries = [
        ([0, 0, 1, 0, 0, 0], EXPONENT_PRIOR[0], EXPONENT_PRIOR[1]),
        *([] if shared else [([0, 0, 0, 0, 1, 0], EXPONENT_PRIOR[0], EXPONENT_PRIOR[1])]),
        *([] if shared else [([0, 0, 1, 0, -1, 0], 0.0, EXPONENT_GAP)]),
        *([([0, 0, 0, 0, 0, 1], 0.0, OUTER_PRIOR)] if outer else []),
        *([] if pinned else [([1, 0, 0, 0, 0, 0], FLOOR_PRIOR[0] * lowest, FLOOR_PRIOR[1] * lowest)]),
    ]
    coefficients, centre, width = (np.array(column, dtype=float) for column in zip(*entries, strict=True))
    return Penalty(rows=coefficients, centre=centre, width=width / spread)


def _prior_about(penalty: Penalty, theta: Array, free: NDArray[np.intp], spread: float) -> tuple[Array, Array]:
    """Mean (p,) and covariance (p, p) of the free constants relative to the optimum, amplitudes all but open."""
    width = penalty.width * spread
    rows = (penalty.rows / width[:, None])[:, free]
    pull = (penalty.centre - penalty.rows @ theta) / width
    open_constants = np.isin(free, (1, 3, 5))
    covariance = np.linalg.inv(rows.T @ rows + np.diag(1e-8 + open_constants / _FLAT**2))
    return covariance @ (rows.T @ pull), covariance


def _free(form: str, *, pinned: bool) -> NDArray[np.intp]:
    shared, outer = LAWS[form].shared_exponent, LAWS[form].outer_free
    return np.array([*([] if pinned else [0]), 1, 2, 3, *([] if shared else [4]), *([5] if outer else [])])
