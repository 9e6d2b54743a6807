"""Rules for norms and fractions that rise: at once, slowly, or in one part that the whole does not show.

They move by factors, so they are judged in logs. Constants come from healthy public runs, which must stay quiet, and
from planted and published faults: docs/benchmarks.md.
"""

import math
from typing import Final

import numpy as np
import pandas as pd
from scipy import special

from rungwise.analysis.alerts import EveryRow, Row, Signal
from rungwise.analysis.detection.rolling import Departure, Level, Trend
from rungwise.analysis.events import Change, preceding

SETTLED: Final = 0.03
"""Share of the run before which norms and routing find their place; nothing is judged there but what is not finite."""
GROUP_PREFIX: Final = "grad_norm/"


class Burst:
    """A norm that leaves its recent level by factors within a few rows, and whether it comes back.

    score = (log norm − centre) / spread. Opens at `SIGMA` and `LEAST` times the centre in `PERSIST` rows running:
    healthy runs have single rows of a thousand times. With under `FEW` rows behind it the factor alone counts. Over
    after two rows near the centre, `HOLD` steps or more after the last one that was not.
    Memory: 128 rows, each clipped at three spreads.
    """

    family, calm_rows = "run_change", 2
    ROWS: Final = 128
    SIGMA: Final = 6.0
    PERSIST: Final = 3
    LEAST: Final = 5.0
    FEW: Final = 20
    HOLD: Final = 20

    def __init__(self, metric: str, rule: str):
        self.metric, self.rule = metric, rule
        self._level = Level(self.ROWS, prior=0.35)
        self._over, self._since, self._firing = 0, 0, False
        self._peak, self._last = 0.0, 0

    def observe(self, row: Row) -> Signal | None:
        value = row.values.get(self.metric)
        if value is None or not 0.0 < value < math.inf or is_early(row):
            return None
        log = math.log(value)
        if self._level.count < 2:
            self._level.add(row.step, log)
            return None
        score, rise = self._level.score(log), math.exp(log - self._level.centre)
        centre, spread = math.exp(self._level.centre), self._level.spread
        over = rise > self.LEAST and (score > self.SIGMA or self._level.count < self.FEW)
        self._since = row.step if over and not self._over else self._since
        self._over = self._over + 1 if over else 0
        if over:
            self._last = row.step
            self._peak = max(self._peak, value) if self._firing else value
        else:
            self._level.add(row.step, log)
        fires = self._over >= self.PERSIST
        if not fires and not self._firing:
            return None
        self._firing = True
        return Signal(
            level=max(score / self.SIGMA, 1.0) if fires else 0.99 if row.step - self._last < self.HOLD else 0.0,
            observed=value,
            expected=centre,
            since=self._since,
            probability=tail(score, self._level.count),
            explanation=f"{self.metric} {value:.4g} is {rise:.3g} times its level {centre:.4g} of the last "
            f"{memory_of(self._level.span, row)} ({score:.1f} spreads of {spread:.2f}), since step {self._since}",
        )

    def rebaseline(self, step: int) -> None:
        self._level.forget()
        self._over = 0

    def rewind(self, step: int) -> None:
        self._over = 0

    def resolved(self) -> None:
        self._over, self._firing = 0, False


class Pattern:
    """How log(metric + floor) moves along the rungs: the median over them of each one's curve about its own mean."""

    BINS: Final = 100

    def __init__(self, peers: pd.DataFrame | None, metric: str, *, floor: float = 0.0):
        curves = []
        if peers is not None and metric in peers.columns:
            column = "tokens" if "tokens" in peers.columns and bool(peers["tokens"].notna().all()) else "step"
            for _, run in peers.groupby("run", sort=True):
                curves += _binned(
                    run[column].to_numpy(dtype=float), run[metric].to_numpy(dtype=float) + floor, self.BINS
                )
        self.runs = len(curves)
        self._table = np.median(curves, axis=0).tolist() if curves else None

    def at(self, progress: float | None) -> float:
        """The pattern at a progress; 0 where there is none to be had."""
        if self._table is None or progress is None:
            return 0.0
        place = min(max(progress * self.BINS - 0.5, 0.0), self.BINS - 1.0)
        left = min(int(place), self.BINS - 2)
        return self._table[left] + (place - left) * (self._table[left + 1] - self._table[left])


def _binned(position: np.ndarray, values: np.ndarray, bins: int) -> list[np.ndarray]:
    """Medians of log values in bins of progress, gaps bridged, about their mean; empty where under half is known."""
    known = np.isfinite(values) & (values > 0) & np.isfinite(position)
    if not known.any():
        return []
    place = np.minimum((position[known] / np.nanmax(position) * bins).astype(int), bins - 1)
    medians = pd.Series(np.log(values[known])).groupby(place).median()
    if len(medians) < bins // 2:
        return []
    curve = np.interp(np.arange(bins), medians.index.to_numpy(), medians.to_numpy())
    return [curve - curve[bins // 20 :].mean()]


class Rise:
    """A metric that rises faster than it did and than it does on the rungs at equal progress, however slowly.

    `Trend` of r = log(value + floor) − pattern of the rungs. After a declared change that may raise it, this is
    information: the slope changed, as declared. Else it is a slow rise, a warning, never more. Of a gradient norm the
    past stays known across a declared change, whose `grace` steps are left out; other metrics begin anew after it.
    Memory: `Trend`'s, the run's own past in ever longer blocks; steps and tokens are in the explanation.

    Args:
        falls: watch 1/value instead: the metric must not fall.
        floor: added before the log, where values may be zero.
    """

    family, calm_rows = "run_change", 64

    def __init__(
        self,
        metric: str,
        rule: str,
        *,
        peers: pd.DataFrame | None = None,
        falls: bool = False,
        floor: float = 0.0,
        gap: float = 0.04,
        rise: float = 0.15,
    ):
        self.metric, self.rule = metric, rule
        self._sign, self._floor = -1.0 if falls else 1.0, floor
        self._pattern = Pattern(peers, metric, floor=floor)
        self._trend = Trend(gap=gap, rise=rise)
        self._keeps = "grad_norm" in metric
        self._changes: list[Change] = []
        self._quiet = 0
        self._firing = False

    def observe(self, row: Row) -> Signal | None:
        value = row.values.get(self.metric)
        if value is None or not math.isfinite(value) or value + self._floor <= 0.0 or is_early(row):
            return None
        if row.step < self._quiet:
            return None
        r = self._sign * (math.log(value + self._floor) - self._pattern.at(row.progress))
        found = self._trend.see(row.step, r)
        if found is None or (found.level < 1.0 and not self._firing):
            return None
        if found.level < 1.0:
            return Signal(level=found.level, observed=value, expected=None, since=found.since, explanation="")
        self._firing = True
        return self._signal(row, value, found)

    def _signal(self, row: Row, value: float, found: Departure) -> Signal:
        change = preceding(self._changes, row.step, within=found.span)
        declared = change is not None and change.allows_rise(self.metric)
        expected = (value + self._floor) * math.exp(-self._sign * found.gap) - self._floor
        way = "rises" if self._sign > 0 else "falls"
        against = f" and than on {self._pattern.runs} rungs at equal progress" if self._pattern.runs else ""
        before = f"{100_000 * found.slope:+.1%} to {100_000 * found.slope_after:+.1%} in 100,000 steps"
        parts = [
            f"{self.metric} {value:.4g} {way} faster than over the last {memory_of(found.span, row)}{against}: "
            f"{abs(math.expm1(found.gap)):.1%} beyond its own line ({found.score:.1f} standard errors), slope {before}"
        ]
        if change is not None and declared:
            parts.append(f"{row.step - change.step} steps after {change}: a slope change, not an undeclared rise")
        elif change is not None:
            parts.append(f"{change} was not to raise it")
        return Signal(
            level=found.level, observed=value, expected=expected, since=found.since,
            severity="info" if declared else "warning", probability=tail(found.score, found.degrees),
            event=str(change) if change else None, explanation="; ".join(parts),
        )  # fmt: skip

    def declare(self, change: Change, step: int) -> None:
        if change.moves(self.metric):
            self._changes.append(change)
            self._quiet = max(step, change.step) + change.grace
            if not self._keeps:
                self._trend.forget()

    def rebaseline(self, step: int) -> None:
        self._trend.forget()

    def rewind(self, step: int) -> None:
        self._trend.rewind(step)

    def resolved(self) -> None:
        self._firing = False


class HiddenRise(EveryRow):
    """A parameter group whose gradient norm rises while the total, which others carry, does not show it.

    `Rise` per group found in the rows; the worst one with less than `SHARE` of the squared norm speaks.
    Memory: as `Rise`, for each group.
    """

    rule, family, calm_rows = "group_norm_rise", "run_change", 64
    SHARE: Final = 0.5
    LOOK: Final = 16
    """Rows between two looks for new groups."""

    def __init__(self, total: str, *, peers: pd.DataFrame | None = None):
        self.metric = total
        self._total, self._peers = total, peers
        self._groups: dict[str, Rise] = {}
        self._rows = 0
        self._changes: list[Change] = []

    def observe(self, row: Row) -> Signal | None:
        worst: Signal | None = None
        total = row.values.get(self._total)
        if self._rows % self.LOOK == 0:
            for name in row.values:
                if name.startswith(GROUP_PREFIX) and name not in self._groups:
                    self._groups[name] = self._new(name)
        self._rows += 1
        for name, rise in self._groups.items():
            signal = rise.observe(row)
            if signal is None or (total and signal.level >= 1.0 and signal.observed**2 > self.SHARE * total**2):
                continue
            if worst is None or signal.level > worst.level:
                worst, self.metric = signal, name
        return worst

    def _new(self, name: str) -> Rise:
        rise = Rise(name, self.rule, peers=self._peers, gap=0.1, rise=0.4)
        for change in self._changes:
            rise.declare(change, change.step)
        return rise

    def declare(self, change: Change, step: int) -> None:
        self._changes.append(change)
        for rise in self._groups.values():
            rise.declare(change, step)

    def rebaseline(self, step: int) -> None:
        for rise in self._groups.values():
            rise.rebaseline(step)

    def rewind(self, step: int) -> None:
        for rise in self._groups.values():
            rise.rewind(step)

    def resolved(self) -> None:
        for rise in self._groups.values():
            rise.resolved()


def tail(score: float, degrees: float) -> float:
    """Chance of a Student t above `score`."""
    return float(special.stdtr(max(degrees, 1), -score))


def is_early(row: Row) -> bool:
    return row.progress is not None and row.progress < SETTLED


def memory_of(steps: float, row: Row) -> str:
    """So many steps, and tokens where the run counts them."""
    if row.tokens and row.step > 0:
        return f"{steps:,.0f} steps ({steps * row.tokens / row.step:.3g} tokens)"
    return f"{steps:,.0f} steps"
