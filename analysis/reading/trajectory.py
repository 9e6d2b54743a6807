"""One value per step and metric, out of everything a run's attempts wrote.

A run that dies and resumes writes some steps twice; a mis-numbered evaluation may write a step far ahead. The
canonical series keeps, for each (step, metric), what the live attempt says. Nothing is lost:
`Trajectory.superseded` holds every other value with its attempt. `analysis/source.py` brings the points.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pandas as pd

TOKENS_METRIC: Final = "progress/tokens"


@dataclass(frozen=True)
class Points:
    """Raw points, records in the order written: attempts ascending, and by time within an attempt.

    `columns` maps a metric to the positions of the records that carry it and its values there.
    """

    attempt: np.ndarray
    step: np.ndarray
    time: np.ndarray
    """Unix seconds."""
    columns: Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A run's canonical series.

    `frame` has a row per step, ascending: `step`, `tokens` (the trainer's own counter, NaN where not logged),
    `time` (Unix seconds of the row's last write), `attempt` (the latest one), then a float column a metric.
    A NaN in a metric column is a logged NaN where `logged(metric)` is true, and a missing value elsewhere.

    `superseded` has columns attempt, step, time, metric, value.
    """

    frame: pd.DataFrame
    superseded: pd.DataFrame
    _logged: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self._logged)

    def logged(self, metric: str) -> np.ndarray:
        """Boolean per row of `frame`: whether `metric` has a value there, NaN being one."""
        return self._logged.get(metric, np.zeros(len(self.frame), dtype=bool))

    def series(self, metric: str) -> pd.Series:
        """The logged values of `metric` by step, logged NaN included; empty if it never was."""
        if metric not in self._logged:
            return pd.Series([], index=pd.Index([], name="step", dtype=np.int64), name=metric, dtype=float)
        return self.frame.loc[self.logged(metric)].set_index("step")[metric]

    def latest(self, metric: str) -> float | None:
        """The live attempt's last value of `metric`, or None where there is none."""
        values = self.series(metric)
        return float(values.iloc[-1]) if len(values) else None


def build_trajectory(points: Points, *, restored: Mapping[int, int]) -> Trajectory:
    """The canonical series of raw points.

    1. An attempt that restored at step k supersedes every earlier attempt's value at a step above k.
    2. Within an attempt, a value is superseded when all the attempt wrote of it afterwards is at lower steps:
       a stray high step, or a rewind.
    3. Of values left at the same step, the one written last wins (so the later attempt at step k itself).

    Args:
        restored: attempt number → last step it restored, 0 for a fresh start.
    """
    live = _live_records(points, restored)
    kept = {name: _canonical(points, rows, live) for name, (rows, _) in sorted(points.columns.items())}
    none = np.array([], dtype=np.int64)
    steps = np.unique(
        np.concatenate([none, *(points.step[points.columns[name][0][keep]] for name, keep in kept.items())])
    )
    time = np.full(len(steps), -np.inf)
    attempt = np.zeros(len(steps), dtype=np.int64)
    table: dict[str, np.ndarray] = {}
    logged: dict[str, np.ndarray] = {}
    superseded = [_long(points, "", none, none.astype(float))]
    for name, keep in kept.items():
        rows, values = points.columns[name]
        place = np.searchsorted(steps, points.step[rows[keep]])
        table[name] = np.full(len(steps), np.nan)
        table[name][place] = values[keep]
        logged[name] = np.zeros(len(steps), dtype=bool)
        logged[name][place] = True
        time[place] = np.maximum(time[place], points.time[rows[keep]])
        attempt[place] = np.maximum(attempt[place], points.attempt[rows[keep]])
        if not keep.all():
            superseded.append(_long(points, name, rows[~keep], values[~keep]))
    tokens = table.get(TOKENS_METRIC, np.full(len(steps), np.nan))
    frame = pd.DataFrame({"step": steps, "tokens": tokens, "time": time, "attempt": attempt, **table})
    return Trajectory(frame, pd.concat(superseded, ignore_index=True), logged)


def _live_records(points: Points, restored: Mapping[int, int]) -> np.ndarray:
    """Which records no later attempt took back."""
    last_kept = np.full(len(points.step), np.iinfo(np.int64).max)
    for attempt, step in restored.items():
        earlier = points.attempt < attempt
        last_kept[earlier] = np.minimum(last_kept[earlier], step)
    return points.step <= last_kept


def _canonical(points: Points, rows: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Which of one metric's values are canonical: boolean over `rows`."""
    step, attempt = points.step[rows], points.attempt[rows]
    keep = live[rows].copy()
    for number in np.unique(attempt):
        own = np.flatnonzero(attempt == number)
        highest_from_here = np.maximum.accumulate(step[own][::-1])[::-1]
        keep[own[:-1]] &= step[own][:-1] <= highest_from_here[1:]
    kept = np.flatnonzero(keep)
    if np.any(np.diff(step[kept]) <= 0):
        _, last_from_end = np.unique(step[kept][::-1], return_index=True)
        keep[:] = False
        keep[kept[::-1][last_from_end]] = True
    return keep


def _long(points: Points, metric: str, rows: np.ndarray, values: np.ndarray) -> pd.DataFrame:
    where = {name: getattr(points, name)[rows] for name in ("attempt", "step", "time")}
    return pd.DataFrame({**where, "metric": metric, "value": values})
