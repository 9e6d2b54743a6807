"""A lasting rise of a loss over the level the run itself had: the rules `loss_level` and `eval_level`.

r = loss - registered curve (the loss itself without a curve). While quiet, a robust line through the last r, in log
step, is the baseline. CUSUM charts add up the standardised r, less what the baseline may be wrong by, clipped; while
they hold anything the baseline stays frozen, so that a fault cannot teach it. A steady lead or lag against the
forecast is no alert, nor one that shrinks as it has been shrinking: that is the forecast's shape.

Memory: `Settings.window` rows, and the charts' sums since they were last zero.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rungwise.analysis.alerts import Row, Signal
from rungwise.analysis.detection.baseline import Line, Window
from rungwise.analysis.detection.pricing import Pricing
from rungwise.analysis.detection.reference import NOTHING, Expected, Reference
from rungwise.analysis.detection.sequential import Charts
from rungwise.analysis.detection.subsets import Subsets
from rungwise.analysis.forecast import Forecast

CRITICAL_SIGMA: Final = 6.0
CRITICAL_SHARE: Final = 0.1
"""Stands in for the band's upper half where there is no curve, as a share of the loss."""
STALE: Final = 2.0
"""Rows without an alarm, in baselines, after which a frozen baseline has told nothing and is renewed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Constants of one rule; docs/benchmarks.md says what they were tuned on.

    share: of the rows so far that the baseline spans, between `min_rows` and `window`. clip, allowances: deviations.
    rows: of white noise between two false alarms of one chart. recent: rows whose median is the shift reported.
    least_spread: share of the loss. bend: share of the slope (the curve's, as far as it may be wrong, and the run's
    against it) that may be lost after the baseline's end. widening: the spread of n rows grows by 1 + widening / n.
    """

    window: int
    share: float
    min_rows: int
    clip: float
    allowances: tuple[float, ...]
    rows: float
    recent: int
    least_spread: float
    bend: float
    widening: float


TRAIN: Final = Settings(
    window=1024, share=0.25, min_rows=40, clip=3.0, allowances=(0.2, 0.5, 1.25), rows=3e6, recent=40,
    least_spread=0.002, bend=1.0, widening=12.0,
)  # fmt: skip
TRAIN_ALONE: Final = replace(TRAIN, bend=1.5)
EVALUATION: Final = Settings(
    window=64, share=1.0, min_rows=8, clip=3.8, allowances=(0.5, 1.5), rows=1e4, recent=5,
    least_spread=0.001, bend=0.4, widening=4.0,
)  # fmt: skip
EVALUATION_ALONE: Final = replace(EVALUATION, share=0.5, rows=2e4, bend=1.0)
"""Without a registered curve a run's own line must not be trusted as far."""


class LevelShift:
    """A lasting rise of one loss over the run's own level, shaped by the registered curve where there is one."""

    family = "run_change"

    def __init__(
        self,
        forecast: Forecast | None = None,
        *,
        rule: str = "loss_level",
        metric: str = "train/loss",
        settings: Settings | None = None,
    ):
        self._curve = Reference.of(forecast, metric)
        if settings is None:
            with_curve, alone = (TRAIN, TRAIN_ALONE) if metric == "train/loss" else (EVALUATION, EVALUATION_ALONE)
            settings = alone if self._curve is None else with_curve
        self.rule, self.metric, self.calm_rows, self._settings = rule, metric, settings.recent, settings
        self._pricing = Pricing(forecast) if forecast is not None else None
        self._window = Window(settings.window)
        self._charts = Charts(settings.allowances, rows=settings.rows)
        self._subsets = Subsets(settings.window, clip=settings.clip) if metric == "eval/loss" else None
        self._rows = 0
        self._reset()

    def _reset(self) -> None:
        self._charts.reset()
        self._since: int | None = None
        self._pending: deque[tuple[int, float, float]] = deque(maxlen=2 * self._settings.window + 1)
        self._recent: deque[tuple[int, float]] = deque(maxlen=self._settings.recent)
        self._opening: float | None = None
        self._chance = 1.0
        """The least since the alert opened: what it was raised for."""
        self._line: Line | None = None

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        expected = NOTHING if self._curve is None else self._curve.at(row.progress)
        if expected is None:
            return None
        self._rows += 1
        x, residual = math.log(row.step + 1.0), loss - expected.loss
        if len(self._window) < self._settings.min_rows:
            self._learn(row, (row.step, x, residual))
            return None
        line = self._baseline(expected)
        spread = max(
            line.spread * (1.0 + self._settings.widening / len(self._window)), self._settings.least_spread * abs(loss)
        )
        middle = line.at(x)
        score = (residual - middle) / spread
        if self._subsets is not None:
            score = self._subsets.temper(row, x, score)
        self._count(row, (row.step, x, residual), score, line=line, expected=expected, spread=spread)
        self._recent.append((row.step, residual - middle))
        return self._signal(row, expected, middle=middle, spread=spread)

    def _baseline(self, expected: Expected) -> Line:
        """The line through the last quiet rows, renewed while the charts hold nothing."""
        if self._line is None or self._charts.quiet:
            size = int(min(max(self._settings.share * self._rows, self._settings.min_rows), self._settings.window))
            self._window.shorten(size)
            steepest = math.inf if self._curve is None else expected.slope_error * abs(expected.slope)
            self._line = self._window.line(steepest=steepest, rise=max(0.0, -expected.slope))
        return self._line

    def _count(
        self, row: Row, point: tuple[int, float, float], score: float, *, line: Line, expected: Expected, spread: float
    ) -> None:
        slope = abs(line.slope) + expected.slope_error * abs(expected.slope)
        stretched = max(1.0, len(self._window) / (self._settings.share * self._rows))  # few rows: too long a line
        doubt = line.error(point[1], self._settings.bend * stretched * slope) / spread
        clip = self._settings.clip
        self._charts.add(row.step, min(max(score - doubt, -clip), clip))
        if self._opening is None:
            self._since = self._charts.since
        self._pending.append(point)
        stale = len(self._pending) > STALE * len(self._window) and self._charts.level < 1.0
        if stale and self._opening is None:
            self._charts.reset()
        if self._charts.quiet and self._opening is None:
            for pending in self._pending:
                self._window.add(*pending)
            self._pending.clear()
            if self._subsets is not None:
                self._subsets.accept()

    def _learn(self, row: Row, point: tuple[int, float, float]) -> None:
        self._window.add(*point)
        if self._subsets is not None:
            self._subsets.temper(row, point[1], 0.0)
            self._subsets.accept()

    def _signal(self, row: Row, expected: Expected, *, middle: float, spread: float) -> Signal:
        since = row.step if self._since is None else self._since
        level = self._charts.level
        if self._opening is None and level < 1.0:
            return Signal(
                level=level, observed=expected.loss + middle, expected=expected.loss + middle, since=since,
                explanation="",
            )  # fmt: skip
        shift = float(np.median([value for step, value in self._recent if step >= since] or [0.0]))
        if self._opening is None:
            self._opening = max(shift, 1e-9)
        else:
            level = shift / self._opening
        now = expected.loss + middle + shift
        told: dict[str, Any] = {}
        if level >= 1.0:
            told = self._told(expected, now=now, shift=shift, spread=spread)
        return Signal(level=level, observed=now, expected=expected.loss + middle, since=since, **told or _SILENT)

    def _told(self, expected: Expected, *, now: float, shift: float, spread: float) -> dict[str, Any]:
        over = "its own recent level"
        if self._curve is not None:
            side = "above" if now > expected.high else "below" if now < expected.low else "inside"
            over = "the registered curve, re-anchored to this run, "
            over += f"{side} its band [{expected.low:.4f}, {expected.high:.4f}]"
        name = "training" if self.metric == "train/loss" else "evaluation"
        self._chance = min(self._chance, self.chance)
        chance = self._chance
        return {
            "severity": "critical" if self._is_critical(expected, now, shift=shift, spread=spread) else "warning",
            "explanation": f"{name} loss runs {shift:+.4f} nats ({shift / spread:+.1f} deviations) over {over}; "
            f"a healthy run this long shows as much once in {1 / max(chance, 1e-12):.2g}",
            "probability": chance,
            "carrier": self._subsets.carrier if self._subsets is not None else None,
            **(self._pricing.cost(now - shift, shift) if self._pricing is not None else {}),
        }

    def _is_critical(self, expected: Expected, now: float, *, shift: float, spread: float) -> bool:
        """Whether the rise took the loss out of the registered band or, outside it, exceeds noise and half band."""
        if self._curve is None:
            return shift > max(CRITICAL_SIGMA * spread, CRITICAL_SHARE * (now - shift))
        if expected.low <= now <= expected.high:
            return False
        return now - shift <= expected.high < now or shift > max(CRITICAL_SIGMA * spread, expected.high - expected.loss)

    @property
    def chance(self) -> float:
        """That a healthy run of this many rows shows what the charts hold now, by the rates of white noise."""
        return self._charts.probability(self._rows)

    def rebaseline(self, step: int) -> None:
        self._window.clear()
        if self._subsets is not None:
            self._subsets.clear()
        self._reset()

    def rewind(self, step: int) -> None:
        self._window.rewind(step)
        self._reset()

    def resolved(self) -> None:
        quiet = list(self._pending)[-self._settings.min_rows :]  # the level the run came back to
        self._window.clear()
        for point in quiet:
            self._window.add(*point)
        self._reset()


_SILENT: Final[dict[str, Any]] = {"explanation": ""}
