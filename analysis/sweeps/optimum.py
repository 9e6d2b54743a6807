"""Where a sweep's loss is lowest, how sure that is, and what the recipe's own value loses against it.

The curve is `valley.py`, the law through several optima `rate_law.py`; what was trained and how,
`ladder/studying/sweep.py`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from rungwise.analysis.sweeps.valley import CURVE_DEGREES, Noise, Points, Posterior, shape
from rungwise.analysis.vocabulary import canonical_json

MIN_VALUES: Final = 3
"""Different values of one sweep below which there is no curve."""
FAR_FROM_OPTIMUM: Final = 0.5
"""Percent of the loss: a recipe that loses more is flagged."""


class OptimumStatus(StrEnum):
    """What a reader should know first; the value is the message."""

    INSIDE = "inside the grid"
    FLAT = "inside the grid, but the losses show no certain curvature: no interval"
    LOW_EDGE = "at the grid's lower edge: sweep smaller values"
    HIGH_EDGE = "at the grid's upper edge: sweep larger values"
    TOO_FEW = "fewer than three values without divergence: no optimum"
    ALL_DIVERGED = "every run diverged"


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best value of one sweep. Losses in nats per token.

    With an edge status `value` and `loss` are the best measured ones, one of `low` and `high` is the bound that a
    single valley allows and the other None, and `lost` is a lower bound. `value` is None where every run diverged.
    """

    status: OptimumStatus
    value: float | None
    low: float | None
    high: float | None
    loss: float | None
    loss_low: float | None = None
    loss_high: float | None = None
    recipe: float
    lost: float | None
    """Loss at the recipe's value above the optimum's; None where the recipe's value lies outside the stable ones."""
    lost_low: float | None = None
    lost_high: float | None = None
    smallest: float | None
    largest: float | None
    """Range of the values that did not diverge."""
    diverges_from: float | None
    """Smallest value above all stable ones that diverged; None where none did."""
    log_error: float | None = None
    """Standard error of log `value`."""
    curvature: float | None = None
    """c, nats per squared log; None without an interior optimum."""
    skew: float | None = None
    """s of the best curve."""
    noise: float | None = None
    """Relative spread of a run about the parabola, prior and other sweeps included."""
    degrees: float = 0.0
    num_values: int

    @property
    def at_edge(self) -> bool:
        """Whether the optimum may lie beyond what was swept."""
        return self.status not in (OptimumStatus.INSIDE, OptimumStatus.FLAT)

    @property
    def lost_percent(self) -> float | None:
        """`lost` in percent of the loss at the optimum."""
        return None if self.lost is None or self.loss is None else 100.0 * self.lost / self.loss

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json` and the sweep's file."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**plain, "status": str(self.status), "at_edge": self.at_edge, "lost_percent": self.lost_percent}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Final losses over one swept quantity, all else equal; values may repeat (seeds)."""

    values: tuple[float, ...]
    losses: tuple[float, ...]
    """Nats per token; of a diverged run anything."""
    diverged: tuple[bool, ...]
    recipe: float
    """The value the recipe takes; it need not be among the swept ones."""


def fit_optimum(
    values: ArrayLike,
    losses: ArrayLike,
    *,
    recipe: float,
    diverged: ArrayLike | None = None,
    level: float = 0.9,
    noise: Noise | None = None,
) -> Optimum:
    """The lowest point of a skewed parabola through losses over log values, with its interval.

    The posterior of (m, s) on a grid, with a, c > 0 and the spread of a run integrated out: m is flat over the swept
    range and one step beyond it, s normal. The standard deviation of a point is that of a run times 1 + excess /
    (MODEL_EXCESS · lowest loss); outliers are cut by Huber's weights once three degrees of freedom (of this or other
    sweeps) show what is one. Values are the posterior's medians, intervals its quantiles; an end of m's interval that
    lies outside the swept values is None.

    Args:
        values, losses: one entry a run, shape (n,); values positive.
        recipe: the value whose loss is compared with the optimum's.
        diverged: runs to leave out of the fit; a loss that is not finite counts as diverged.
        noise: residuals of other sweeps of the same kind.
    Raises:
        ValueError: shapes differ, a value is not positive, or `level` is not in (0, 1).
    """
    points = Points.checked(values, losses, diverged, level=level)
    if not recipe > 0:
        raise ValueError(f"recipe {recipe} must be positive; give the recipe's own value")
    status = _measured_status(points)
    if status is not None:
        return _measured(points, recipe, status)
    fit = Posterior(points, noise or Noise())
    place = fit.quantile(0.5)
    if not points.x.min() <= place <= points.x.max():
        return _measured(points, recipe, OptimumStatus.LOW_EDGE if place < 0 else OptimumStatus.HIGH_EDGE)
    return _inside(points, fit, recipe, level)


def fit_optima(sweeps: Sequence[Sweep], *, level: float = 0.9) -> list[Optimum]:
    """The optimum of each sweep, each judged with the noise that all the others show.

    Five values leave two degrees of freedom; sweeps of one family share the relative spread of a run, so the residuals
    of one tell what is noise in another.
    """
    squares = [_residuals(sweep) for sweep in sweeps]
    optima = []
    for index, sweep in enumerate(sweeps):
        others = [noise for other, noise in enumerate(squares) if other != index]
        noise = Noise(sum(item.squares for item in others), sum(item.degrees for item in others))
        optima.append(
            fit_optimum(
                sweep.values, sweep.losses, recipe=sweep.recipe, diverged=sweep.diverged, level=level, noise=noise
            )
        )
    return optima


def _residuals(sweep: Sweep) -> Noise:
    points = Points.checked(sweep.values, sweep.losses, sweep.diverged)
    degrees = points.x.size - CURVE_DEGREES
    if points.num_values < MIN_VALUES or degrees < 1:
        return Noise()
    return Noise(Posterior(points, Noise()).best_squares, degrees)


def _measured_status(points: Points) -> OptimumStatus | None:
    """What the measured losses alone already say; None where they fall and rise again."""
    if not points.x.size:
        return OptimumStatus.ALL_DIVERGED
    if points.num_values < MIN_VALUES:
        return OptimumStatus.TOO_FEW
    best = int(np.argmin(points.means()[1]))
    if best == 0:
        return OptimumStatus.LOW_EDGE
    return OptimumStatus.HIGH_EDGE if best == points.num_values - 1 else None


def _inside(points: Points, fit: Posterior, recipe: float, level: float) -> Optimum:
    tails = (0.5 - level / 2, 0.5, 0.5 + level / 2)
    ends = [fit.quantile(tail) for tail in tails]
    low, high = (points.value(end) if points.x.min() <= end <= points.x.max() else None for end in (ends[0], ends[2]))
    at_recipe = math.log(recipe) - points.centre
    loss, lost, curvature = fit.draws(at_recipe)
    loss_low, loss_middle, loss_high = np.quantile(loss, tails).tolist()
    lost_low, lost_middle, lost_high = np.quantile(lost, tails).tolist()
    covered = points.covers(recipe)
    return Optimum(
        status=OptimumStatus.FLAT if low is None and high is None else OptimumStatus.INSIDE,
        value=points.value(ends[1]),
        low=low,
        high=high,
        loss=loss_middle,
        loss_low=loss_low,
        loss_high=loss_high,
        recipe=recipe,
        lost=lost_middle if covered else None,
        lost_low=(0.0 if ends[0] <= at_recipe <= ends[2] else lost_low) if covered else None,
        lost_high=lost_high if covered else None,
        smallest=points.value(points.x.min()),
        largest=points.value(points.x.max()),
        diverges_from=points.diverges_from,
        log_error=fit.spread(),
        curvature=float(np.median(curvature)),
        skew=float(fit.skews[fit.best[1]]),
        noise=float(fit.scale[fit.best]),
        degrees=fit.degrees,
        num_values=points.num_values,
    )


def _measured(points: Points, recipe: float, status: OptimumStatus) -> Optimum:
    """What the losses say without a parabola: the best one measured, and the side from which it bounds the optimum."""
    if status is OptimumStatus.ALL_DIVERGED:
        return Optimum(status=status, value=None, low=None, high=None, loss=None, recipe=recipe, lost=None,
                       smallest=None, largest=None, diverges_from=points.diverges_from, num_values=0)  # fmt: skip
    x, y = points.means()
    best = int(np.argmin(y))
    at_recipe = float(np.interp(math.log(recipe) - points.centre, x, y))
    return Optimum(
        status=status,
        value=points.value(x[best]),
        low=points.value(x[best - 1]) if status is OptimumStatus.HIGH_EDGE else None,
        high=points.value(x[best + 1]) if status is OptimumStatus.LOW_EDGE else None,
        loss=float(y[best]),
        recipe=recipe,
        lost=at_recipe - float(y[best]) if points.covers(recipe) else None,
        smallest=points.value(x[0]),
        largest=points.value(x[-1]),
        diverges_from=points.diverges_from,
        num_values=x.size,
    )


@dataclass(frozen=True, kw_only=True)
class RecipeGap:
    """What a rung's recipe loses against its swept optimum."""

    nats: float | None
    """None where the rate lies outside the stable ones; a lower bound where `at_edge`."""
    percent: float | None
    at_edge: bool
    """Whether the optimum, or the recipe's own rate, lies at or beyond the edge of what was swept."""

    @property
    def flagged(self) -> bool:
        """Whether a forecast should warn: the recipe is more than FAR_FROM_OPTIMUM off, or nobody knows how far."""
        return self.at_edge or self.percent is None or self.percent > FAR_FROM_OPTIMUM


_NOT_IN_KEY: Final = frozenset(
    ["run", "rung", "role", "seed", "learning_rate", "checkpoint", "evaluation", "execution", "threads"]
)


def sweep_key(config: Mapping[str, Any]) -> str:
    """Identity of what a run's learning rate was swept over: its resolved config without rate, seed and bookkeeping.

    Args:
        config: `RunConfig` as plain JSON values, as a run's `config.json` holds it.
    """
    kept = {name: value for name, value in config.items() if name not in _NOT_IN_KEY}
    return hashlib.sha256(canonical_json(kept).encode()).hexdigest()


def recipe_gap(
    summary: Mapping[str, Any], rung: str, *, learning_rate: float | None = None, key: str | None = None
) -> RecipeGap | None:
    """What the recipe of a rung loses, by the sweeps there are; None where none of at least three rates covers it.

    Args:
        summary: the family's `sweep.json`.
        learning_rate: the rate the rung is trained with; None: the recipe's when it was swept.
        key: `sweep_key` of the rung's config, so that sweeps of another batch, horizon or recipe do not count; None
            takes those made at the recipe's batch and horizon.
    """
    found = [
        entry
        for entry in summary["rungs"].get(rung, ())
        if (entry["at_recipe"] if key is None else entry["key"] == key) and entry["optimum"]["num_values"] >= MIN_VALUES
    ]
    if not found:
        return None
    entry = min(found, key=lambda item: (item["optimum"]["at_edge"], -item["optimum"]["num_values"]))
    optimum = entry["optimum"]
    rate = optimum["recipe"] if learning_rate is None else learning_rate
    outside = not optimum["smallest"] * 0.9999 <= rate <= optimum["largest"] * 1.0001
    nats = None if outside else _lost_at(rate, optimum, entry)
    percent = None if nats is None else 100.0 * nats / optimum["loss"]
    return RecipeGap(nats=nats, percent=percent, at_edge=bool(optimum["at_edge"] or outside))


def _lost_at(rate: float, optimum: Mapping[str, Any], entry: Mapping[str, Any]) -> float:
    if optimum["lost"] is not None and math.isclose(rate, optimum["recipe"], rel_tol=1e-3):
        return float(optimum["lost"])
    if optimum["curvature"] is not None:
        return float(optimum["curvature"] * shape(math.log(rate / optimum["value"]), optimum["skew"]))
    measured = np.interp(math.log(rate), np.log(entry["values"]), np.asarray(entry["losses"], dtype=float))
    return max(0.0, float(measured) - float(optimum["loss"]))
