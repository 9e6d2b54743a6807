"""A metric that changes its unit: all later points times 1000, 100 or ln 2, which is no divergence.

Between the rows of a run and its detectors. Values in the new unit are turned back into the old one, so that every rule
goes on judging; the change itself is one alert.
"""

import math
from collections.abc import Mapping
from typing import Final

from rungwise.analysis.alerts import EveryRow, Row, Signal
from rungwise.analysis.detection.rolling import Level
from rungwise.analysis.events import Change

SCALES: Final[Mapping[str, float]] = {
    "1000 times": 1e3, "a thousandth of": 1e-3, "a million times": 1e6, "a millionth of": 1e-6,
    "100 times (percent?)": 100.0, "a hundredth of (percent?)": 0.01,
}  # fmt: skip
LOGARITHMS: Final[Mapping[str, float]] = {
    "1.4427 times (nats to bits?)": 1.0 / math.log(2.0), "0.6931 times (bits to nats?)": math.log(2.0),
}  # fmt: skip
"""Factors a loss could really move by: said only once they have held for long, and not turned back before."""
WATCHED: Final = (
    *("train/loss", "eval/loss", "eval/bits_per_byte", "train/grad_norm", "train/param_norm", "train/learning_rate"),
    *("moe/drop_fraction", "perf/tokens_per_second", "perf/mfu"),
)
NEAR: Final = 0.25
"""A value's log this near to the level is in the unit it was."""
FRACTIONS: Final = ("moe/drop_fraction", "perf/mfu")


class Units(EveryRow):
    """Recognises and undoes a change of unit; a detector like any other for what it finds.

    A value that is a scale's factor from the level of the last 32 rows, within their noise, is held to be in another
    unit and judged as such at once; the alert opens when `CONFIRM` rows running agree in the mean (`LONG` for nats and
    bits). A fraction must leave 0 to 1 for that, or come back.
    Memory: 32 rows of each metric, and its factor.
    """

    rule, family, calm_rows = "unit_change", "fault", 3
    CONFIRM: Final = 4
    LONG: Final = 32
    ROWS: Final = 20

    def __init__(self) -> None:
        self.metric = "train/loss"
        self._levels = {name: Level(32, prior=0.1) for name in WATCHED}
        self._factors: dict[str, tuple[str, float]] = {}
        self._pending: dict[str, tuple[str, int, list[float]]] = {}
        self._astray: dict[str, int] = {}
        self._before: dict[str, float] = {}
        self._told: dict[str, Signal] = {}
        self._said: Signal | None = None

    def convert(self, row: Row) -> Row:
        """The row with values of another unit turned back into the one each metric began with."""
        changed = {}
        for name in WATCHED:
            if name not in row.values or not 0.0 < (value := row.values[name]) < math.inf:
                continue
            kept = self._old_unit(name, self._levels[name], row, value)
            if kept != value:
                changed[name] = kept
        return row._replace(values={**row.values, **changed}) if changed else row

    def _old_unit(self, name: str, level: Level, row: Row, value: float) -> float:
        factor = self._factors[name][1] if name in self._factors else 1.0
        kept = value / factor
        log = math.log(kept)
        off = log - level.centre
        moved = log - self._before.get(name, log)
        self._before[name] = log
        if level.count < self.ROWS or abs(off) < NEAR:
            level.add(row.step, log)
            self._pending.pop(name, None)
            self._astray.pop(name, None)
            return kept
        if factor != 1.0 and abs(math.log(value) - level.centre) < NEAR:
            self._factors.pop(name)
            self._told.pop(name, None)
            return value
        scale = self._scale(name, level, off, value)
        if scale is None or name in self._astray:
            self._pending.pop(name, None)
            self._stray(name, level)
            return kept
        exact = (LOGARITHMS | SCALES)[scale]
        if name not in self._pending and abs(moved - math.log(exact)) > (0.1 if scale in LOGARITHMS else 0.7):
            self._stray(name, level)  # it came here by and by: a fall, not a unit
            return kept
        before, since, misses = self._pending.get(name, (scale, row.step, []))
        if before != scale:
            since, misses = row.step, []
        misses.append(off - math.log(exact))
        self._pending[name] = (scale, since, misses)
        slow = scale in LOGARITHMS
        if len(misses) >= (self.LONG if slow else self.CONFIRM):
            if abs(sum(misses)) / len(misses) > max(3.0 * level.spread / math.sqrt(len(misses)), 0.01):
                self._pending.pop(name)
                self._stray(name, level)
                return kept
            self._confirm(name, scale, since, value=value, level=level)
        elif slow:
            return kept
        return kept / exact

    def _stray(self, name: str, level: Level) -> None:
        """A value far from the level that no unit explains: with enough of them the level is learned anew."""
        self._astray[name] = self._astray.get(name, 0) + 1
        if self._astray[name] >= self.ROWS:
            level.forget()
            del self._astray[name]

    def _scale(self, name: str, level: Level, off: float, value: float) -> str | None:
        """The factor that `off` is within the noise, in words."""
        near = min(max(4.0 * level.spread, 0.01), 0.4)
        scales = SCALES | LOGARITHMS if "loss" in name else SCALES
        words = next((words for words, factor in scales.items() if abs(off - math.log(factor)) <= near), None)
        return None if name in FRACTIONS and value <= 1.0 else words

    def _confirm(self, name: str, scale: str, since: int, *, value: float, level: Level) -> None:
        factor = (LOGARITHMS | SCALES)[scale] * self._factors.get(name, ("", 1.0))[1]
        self._factors[name] = (scale, factor)
        self._pending.pop(name)
        expected = math.exp(level.centre)
        self._told[name] = Signal(
            level=1.0, observed=value, expected=expected, since=since,
            explanation=f"{name} is {scale} its level {expected:.4g} in all rows since step {since}: its unit changed, "
            "which is no divergence; it is judged in the old one",
        )  # fmt: skip

    def observe(self, row: Row) -> Signal | None:
        if not self._told:
            return None if self._said is None else self._said._replace(level=0.0)
        self.metric = next(reversed(self._told))
        self._said = self._told[self.metric]
        return self._said

    def declare(self, change: Change, step: int) -> None: ...

    def rebaseline(self, step: int) -> None:
        for level in self._levels.values():
            level.forget()

    def rewind(self, step: int) -> None:
        self._pending.clear()

    def resolved(self) -> None:
        self._said = None
