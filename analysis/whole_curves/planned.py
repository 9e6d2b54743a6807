"""What another schedule makes of a rung's curve: the law of schedules fitted to the rung, under the target's plan.

Rungs are usually trained under the target's relative schedule, and then this is one candidate shape among others. Where
the target's differs, only this candidate knows of it, and it moves the final loss too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rungwise.analysis.whole_curves.curve_rows import SETTLED, identity_of, log_steps_of
from rungwise.analysis.whole_curves.schedule_law import Schedule, ScheduleLaw, fit_schedule_law

Array = NDArray[np.float64]

ROWS: Final = 120
"""A run's curve is reduced to this many means of rows before its law is fitted."""
NUM_STARTS: Final = 3
FIRST: Final = 0.01
"""Progress from which rows are fitted."""
CHANGED: Final = 0.1
"""Schedules differ where, after `SETTLED`, their rates as shares of the peak come this far apart."""
LEAST_DROP: Final = 0.1
"""A rate must fall by this share of its peak for the law to know what a fall is worth."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """shapes (k, p): of each rung under the schedule of the next (the target, for the last), NaN where not known.

    shift: what the target's schedule instead of its own does to the top rung's log final loss; 0 where it is the same.
    """

    shapes: Array
    shift: float
    changed: bool


def plan_shapes(
    rungs: list[pd.DataFrame], schedule: pd.DataFrame | None, target: Mapping[str, Any], grid: Array
) -> Planned:
    """The law of schedules carried from rung to rung and to the target.

    Args:
        rungs: rows of one run each, smallest first, with progress, loss and, if known, steps and learning_rate.
        schedule: the target's progress and learning_rate.
    Raises:
        ValueError: the target's schedule is not the top rung's, and what the law needs to judge that is missing.
    """
    none = Planned(shapes=np.full((len(rungs), grid.size), math.nan), shift=0.0, changed=False)
    if schedule is None:
        return none
    rated = all("learning_rate" in run and run["learning_rate"].notna().any() for run in rungs)
    changed = rated and _differ(rungs[-1], schedule)
    steps = [*(math.exp(log_steps_of(identity_of(run))) for run in rungs), math.exp(log_steps_of(target))]
    if not rated or not np.all(np.isfinite(steps)) or not all(_falls(run) for run in rungs):
        if changed:
            raise ValueError(
                "the target's schedule is not the rungs': give steps of all, and rungs whose learning rate falls"
            )
        return none
    laws = [_law_of(run, count) for run, count in zip(rungs, steps, strict=False)]
    nexts = [*rungs[1:], schedule]
    logs = [
        np.log(np.maximum(law.value(_schedule_of(following, count), grid * count), 1e-3))
        for law, following, count in zip(laws, nexts, steps[1:], strict=True)
    ]
    shift = 0.0
    if changed:
        end = np.array([steps[-2]])
        other, own = (float(laws[-1].value(_schedule_of(each, steps[-2]), end)[0]) for each in (schedule, rungs[-1]))
        shift = math.log(other / own)
    return Planned(shapes=np.array([row - row[-1] for row in logs]), shift=shift, changed=changed)


def _law_of(run: pd.DataFrame, steps: float) -> ScheduleLaw:
    rows: Any = run[run["progress"] >= FIRST]
    progress, loss = rows["progress"].to_numpy(dtype=float), rows["loss"].to_numpy(dtype=float)
    groups = np.array_split(np.arange(progress.size), min(progress.size, ROWS))
    at = np.array([progress[group].mean() for group in groups])
    thinned = np.array([np.exp(np.log(loss[group]).mean()) for group in groups])
    return fit_schedule_law([(_schedule_of(run, steps), at * steps, thinned)], num_starts=NUM_STARTS).law


def _schedule_of(table: pd.DataFrame, steps: float) -> Schedule:
    """Up to its first row a schedule is taken to rise from zero."""
    progress, rate = _rates(table)
    return Schedule.of(progress * steps, rate, warmup=float(progress[0]) * steps)


def _rates(table: pd.DataFrame) -> tuple[Array, Array]:
    rows = table.dropna(subset=["learning_rate"]).drop_duplicates("progress")
    progress, rate = rows["progress"].to_numpy(dtype=float), rows["learning_rate"].to_numpy(dtype=float)
    order = np.argsort(progress)
    return progress[order], rate[order]


def _differ(run: pd.DataFrame, schedule: pd.DataFrame) -> bool:
    at = np.linspace(SETTLED, 1.0, 40)
    own, other = (np.interp(at, *_rates(table)) / _rates(table)[1].max() for table in (run, schedule))
    return bool(np.abs(own - other).max() > CHANGED)


def _falls(run: pd.DataFrame) -> bool:
    rate = _rates(run)[1]
    return bool(rate[int(np.argmax(rate)) :].min() < (1.0 - LEAST_DROP) * rate.max())
