"""The shape of a larger run's curve, from its rungs' curves: candidates, each judged on rungs that it did not see.

A shape is log L(p) - log L(1) over progress p. Legend: C compute, E floor. Each candidate forecasts every upper rung
from the rungs below it, given that rung's final loss; the shapes are then averaged by how well they did, and what they
missed, and disagree about, is the uncertainty. Bands are `bands.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST_MISS: Final = 2e-4
"""Relative; below this, misses are noise of evaluations and rank nothing."""
SAME_STEPS: Final = 0.1
"""Rungs within 10 % of each other in steps (or compute) say nothing about what more of it does."""
PLAN_ERROR: Final = 0.5
"""Of what a schedule changes that no rung had: fitted to one run each, the law missed a third of it over pairs of
public schedules, 0.64 at worst."""
MIN_EXCESS: Final = 0.02
"""A floor is kept at least this share below every final loss, where excess over it still has a meaning."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Rung curves on one progress grid, smallest first.

    log_flops, log_steps (k,), the latter NaN where not known; log_loss (k, p); weight (p,), share of progress that each
    grid point stands for, zero before `SETTLED`; floor and exponent of the final law; planned (k, p), the shape that
    each rung's own law of schedules gives under the schedule of the next (of the target, for the last), else NaN.
    """

    log_flops: Array
    log_steps: Array
    log_loss: Array
    weight: Array
    floor: float
    exponent: float
    planned: Array

    @property
    def shapes(self) -> Array:
        return self.log_loss - self.log_loss[:, -1:]

    def below(self, held: int) -> "Ladder":
        """The lowest `held` rungs."""
        return replace(
            self,
            log_flops=self.log_flops[:held],
            log_steps=self.log_steps[:held],
            log_loss=self.log_loss[:held],
            planned=self.planned[:held],
        )


@dataclass(frozen=True, kw_only=True)
class ShapeForecast:
    """A shape for the target, with what it rests on. All logs.

    shape, disagreement (p,); misses (held, p) of the averaged shape on held-out rungs, forecast minus actual, lowest
    first, and squares, the candidates' own averaged (an average chosen on the same rungs looks better than it is);
    leverage: for each, and for the target, how much more a run that far away misses than one between the rungs, as
    variances; weights and errors by candidate.
    """

    shape: Array
    disagreement: Array
    misses: Array
    squares: Array
    held_leverage: Array
    leverage: float
    weights: dict[str, float]
    errors: dict[str, float]


def _excess(ladder: Ladder, floor: float, log_final: float) -> tuple[Array, float]:
    """log((L - E) / (L(1) - E)) of each rung (k, p), and the floor used."""
    loss = np.exp(ladder.log_loss)
    lowest = min(float(loss[:, -1].min()), math.exp(log_final))
    used = min(floor, (1.0 - MIN_EXCESS) * lowest)
    return np.log(np.maximum(loss - used, 1e-9) / (loss[:, -1:] - used)), used


def _on_floor(excess: Array, floor: float, log_final: float) -> Array:
    return np.log(floor + (math.exp(log_final) - floor) * np.exp(excess)) - log_final


def _trend(log_flops: Array, rows: Array, at: float) -> Array:
    """A line in log compute through rows (k, p), at `at`."""
    x = log_flops - log_flops.mean()
    return rows.mean(axis=0) + (x @ rows) / (x @ x) * (at - log_flops.mean())


def _same_ratio(ladder: Ladder, _log_flops: float, _log_final: float) -> Array:
    """The top rung's ratio to its own final loss."""
    return ladder.shapes[-1]


def _ratio_trend(ladder: Ladder, log_flops: float, _log_final: float) -> Array:
    """A line in log compute through the ratios at each progress."""
    return _trend(ladder.log_flops, ladder.shapes, log_flops)


def _same_excess(ladder: Ladder, _log_flops: float, log_final: float) -> Array:
    """Collapse on the top rung: its excess over the floor, as a share of its final excess."""
    excess, floor = _excess(ladder, ladder.floor, log_final)
    return _on_floor(excess[-1], floor, log_final)


def _mean_excess(ladder: Ladder, _log_flops: float, log_final: float) -> Array:
    """Collapse on all rungs."""
    excess, floor = _excess(ladder, ladder.floor, log_final)
    return _on_floor(excess.mean(axis=0), floor, log_final)


def _excess_trend(ladder: Ladder, log_flops: float, log_final: float) -> Array:
    """Per-progress fits log(L(p, C) - E) = b(p) - a(p) log C with the final law's floor, as a share of their end."""
    excess, floor = _excess(ladder, ladder.floor, log_final)
    return _on_floor(_trend(ladder.log_flops, excess, log_flops), floor, log_final)


def _shared_exponent(ladder: Ladder, log_flops: float, _log_final: float) -> Array:
    """Per-progress fits L(p, C) = b0(p) + b1(p) C^-alpha with the final law's exponent, as a ratio to their end."""
    power = np.exp(-ladder.exponent * (ladder.log_flops - ladder.log_flops.mean()))
    loss = np.exp(ladder.log_loss)
    x = power - power.mean()
    here = math.exp(-ladder.exponent * (log_flops - float(ladder.log_flops.mean())))
    predicted = loss.mean(axis=0) + (x @ loss) / (x @ x) * (here - power.mean())
    predicted = np.maximum(predicted, 0.2 * loss.min(axis=0))
    return np.log(predicted) - math.log(predicted[-1])


def _schedule_law(ladder: Ladder, _log_flops: float, _log_final: float) -> Array:
    """The top rung's own law of schedules, under the target's schedule."""
    return ladder.planned[-1]


SHAPES: Final[Mapping[str, Callable[[Ladder, float, float], Array]]] = {
    "same_ratio": _same_ratio,
    "ratio_trend": _ratio_trend,
    "same_excess": _same_excess,
    "mean_excess": _mean_excess,
    "excess_trend": _excess_trend,
    "shared_exponent": _shared_exponent,
    "schedule_law": _schedule_law,
}


def forecast_shape(
    ladder: Ladder,
    *,
    log_flops: float,
    log_steps: float,
    log_final: float,
    floor_error: float = 0.0,
    only: Sequence[str] | None = None,
) -> ShapeForecast:
    """Average of the candidates, each weighted by its misses on held-out rungs.

    weight = (LEAST_MISS^2 + mean square miss)^-h for h held-out rungs: the likelihood of Gaussian misses of unknown
    size, two effective values a curve. `floor_error`: standard error of the floor, nats, that the shape inherits.
    `only` names the candidates that count, where the target is unlike the rungs in what the others do not know.
    """
    count = ladder.log_flops.size
    held = range(2, count)
    missed, at_target = {}, {}
    for name, candidate in SHAPES.items():
        if only is not None and name not in only:
            continue
        shape = candidate(ladder, log_flops, log_final)
        rows = [candidate(ladder.below(h), float(ladder.log_flops[h]), float(ladder.log_loss[h, -1])) for h in held]
        if np.all(np.isfinite(shape)) and np.all(np.isfinite(rows)):
            missed[name] = np.array(rows) - ladder.shapes[2:]
            at_target[name] = shape
    squares = {name: float(np.mean(rows**2 @ ladder.weight)) for name, rows in missed.items()}
    scores = np.array([-len(held) * math.log(LEAST_MISS**2 + square) for square in squares.values()])
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    stack = np.array(list(at_target.values()))
    shape = weights @ stack
    moved = [
        weights @ np.array([SHAPES[name](replace(ladder, floor=floor), log_flops, log_final) for name in missed])
        for floor in (max(ladder.floor - floor_error, 0.0), ladder.floor + floor_error)
    ]
    unlike = 0.0 if only is None else PLAN_ERROR * np.abs(shape - ladder.shapes[-1])
    rows = np.array(list(missed.values()))
    return ShapeForecast(
        shape=shape,
        disagreement=np.hypot(np.hypot(np.sqrt(weights @ (stack - shape) ** 2), 0.5 * (moved[1] - moved[0])), unlike),
        misses=np.einsum("c,chp->hp", weights, rows),
        squares=np.einsum("c,chp->hp", weights, rows**2),
        held_leverage=np.array([leverage_of(ladder.below(h), ladder.log_flops[h], ladder.log_steps[h]) for h in held]),
        leverage=leverage_of(ladder, log_flops, log_steps),
        weights=dict(zip(missed, weights.tolist(), strict=True)),
        errors={name: math.sqrt(square) for name, square in squares.items()},
    )


def leverage_of(ladder: Ladder, log_flops: float, log_steps: float) -> float:
    """Variance of a new run's shape over that of one rung's, were the shape to drift with compute and with steps.

    1 + 1/k + d_C^2 / S_C + d_s^2 / S_s: each drift a line through the k rungs, d the distance of the new run from their
    mean and S their sum of squares. Rungs alike in steps cannot say what 19 times the steps does, and S_s is small.
    """
    count = ladder.log_flops.size
    total = 1.0 + 1.0 / count
    for rungs, new in ((ladder.log_flops, log_flops), (ladder.log_steps, log_steps)):
        if np.all(np.isfinite(rungs)) and math.isfinite(new):
            spread = float(np.sum((rungs - rungs.mean()) ** 2)) + count * SAME_STEPS**2
            total += (new - float(rungs.mean())) ** 2 / spread
    return total


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """The floor at which the rungs' curves, as shares of their final excess, fall on one another."""

    floor: float
    error: float
    """Half the range of floors that collapse them nearly as well, nats."""
    share: float
    """Of the variance between the rungs' ratio curves, what this floor removes."""


def collapse_floor(log_loss: Array, weight: Array) -> Collapse:
    """Minimises over E the spread between rungs of log((L - E) / (L(1) - E)), in units of log L.

    Its error is the larger of the range of floors that do nearly as well and the jackknife over rungs.
    Source of the idea: Qiu et al. 2025 (supercollapse), whose floor is fitted to final losses instead.
    """
    share = (np.arange(400) + 0.5) / 400
    floors = float(np.exp(log_loss[:, -1].min())) * np.append(0.0, (share * (2.0 - share))[:-1])
    used = weight > 0
    spread = _spreads(np.exp(log_loss[:, used]), floors, weight[used])
    best = int(np.argmin(spread))
    near = floors[spread <= 1.2 * spread[best]]
    step = float(floors[min(best + 1, floors.size - 1)] - floors[max(best - 1, 0)])
    error = max(0.5 * float(near[-1] - near[0]), 0.25 * step)
    count = len(log_loss)
    if count > 2:
        kept = [np.delete(log_loss, index, axis=0)[:, used] for index in range(count)]
        without = np.array([floors[int(np.argmin(_spreads(np.exp(each), floors, weight[used])))] for each in kept])
        error = max(error, math.sqrt((count - 1) * float(np.var(without))))
    return Collapse(floor=float(floors[best]), error=error, share=1.0 - float(spread[best] / spread[0]) ** 2)


def _spreads(loss: Array, floors: Array, weight: Array) -> Array:
    """Root mean square distance of the curves (k, p) from their mean collapse, for each floor."""
    excess = loss[None] - floors[:, None, None]
    logs = np.log(np.maximum(excess, 1e-12) / np.maximum(excess[:, :, -1:], 1e-12))
    around = (logs - logs.mean(axis=1, keepdims=True)) * excess / loss
    return np.sqrt(np.mean(around**2, axis=1) @ weight)
