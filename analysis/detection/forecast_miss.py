"""A verdict on the registered forecast, never on the run: level and slope of the loss against the registered band.

At most a warning; a run ahead of its forecast, or one whose lead shrinks, is information.
"""

import math
from collections import deque
from typing import Any, Final

import numpy as np

from rungwise.analysis.alerts import Row, Signal
from rungwise.analysis.detection.pricing import Pricing
from rungwise.analysis.detection.reference import Expected, Reference
from rungwise.analysis.forecast import Forecast


class ForecastMiss:
    """Loss against the registered band at equal progress, d = gap / half band.

    Three ways to miss: d above 1 in two values running; d near 1 for long (what exceeds `NEAR`, summed over log
    progress, passes `ENOUGH`: gaps along one curve are one witness, so rows do not count, progress does); and a gap
    that changes by more than `MIN_CHANGE` of the loss and four standard errors of its trend, which is information.
    Memory: the last `TRAIN_ROWS` rows, and at most `GAPS` gaps.
    """

    rule, family, calm_rows = "forecast_miss", "forecast_miss", 2
    PERSIST: Final = 2
    TRAIN_ROWS: Final = 20
    NEAR: Final = 0.7
    ENOUGH: Final = 0.25
    GAPS: Final = 256
    MIN_CHANGE: Final = 0.01
    TREND_SIGMA: Final = 4.0
    MIN_GAPS: Final = 6

    def __init__(self, forecast: Forecast):
        registered = {row["metric"] for row in forecast.curve}
        self.metric = next((name for name in ("eval/loss", "train/loss") if name in registered), forecast.metric)
        self._curve = Reference.of(forecast, self.metric)
        self._pricing = Pricing(forecast)
        self._recent: deque[tuple[float, float]] = deque(maxlen=1 if self.metric == "eval/loss" else self.TRAIN_ROWS)
        self._gaps: list[tuple[float, float, int]] = []
        """Log progress, gap and step."""
        self._reset()

    def _reset(self) -> None:
        self._run = self._since = self._rows = 0
        self._sum = 0.0
        self._position: float | None = None

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss) or self._curve is None or row.progress is None:
            return None
        self._recent.append((row.progress, loss))
        if len(self._recent) < (self._recent.maxlen or 1):
            return None
        at, loss = (sorted(column)[len(self._recent) // 2] for column in zip(*self._recent, strict=True))
        expected = self._curve.at(at)
        if expected is None or at <= 0.0:
            return None
        return self._judge(row, at, loss, expected)

    def _judge(self, row: Row, at: float, loss: float, expected: Expected) -> Signal:
        gap = loss - expected.loss
        above = gap > 0
        distance = gap / max(expected.high - expected.loss if above else expected.low - expected.loss, 1e-9, key=abs)
        outside = self._accumulate(row.step, math.log(at), distance)
        trend = self._trend(row.step, math.log(at), gap, loss)
        fires = self._run >= self.PERSIST or outside >= 1.0
        told: dict[str, Any] = {"level": min(max(distance, outside), 0.99) if distance > 1.0 else 0.4 * distance}
        told |= {"severity": "info", "since": self._since, "explanation": ""}
        if fires:
            told["level"] = max(distance, outside)
            told["severity"] = "warning" if above else "info"
            told["explanation"] = (
                f"{self.metric} {loss:.4f} lies {'above' if above else 'below'} the registered "
                f"[{expected.low:.4f}, {expected.high:.4f}] at {at:.0%} of the run, {abs(gap):.4f} nats "
                f"{'behind' if above else 'ahead of'} the forecast"
            )
            if distance <= 1.0:
                told["explanation"] = told["explanation"].replace("lies above", "has long lain near the upper edge of")
                told["explanation"] = told["explanation"].replace("lies below", "has long lain near the lower edge of")
            told |= self._pricing.cost(expected.loss, gap) if above else {}
        elif trend is not None and trend["level"] > told["level"]:
            told |= trend | self._pricing.cost(expected.loss, abs(trend.pop("change")))
            told.pop("change", None)
        return Signal(observed=loss, expected=expected.loss, **told)

    def _accumulate(self, step: int, position: float, distance: float) -> float:
        """How much of `ENOUGH` has added up; counts the rows outside the band running."""
        ahead = 0.0 if self._position is None else max(position - self._position, 0.0)
        self._position = position
        self._sum = max(0.0, self._sum + (min(distance, 1.5) - self.NEAR) * ahead)
        self._run = self._run + 1 if distance > 1.0 else 0
        if self._run <= 1 and self._sum == 0.0:
            self._since = step
        return self._sum / self.ENOUGH if distance > self.NEAR else 0.0

    def _trend(self, step: int, position: float, gap: float, loss: float) -> dict[str, Any] | None:
        """What the gap's change along the run is worth saying, in units of the least change; None if little."""
        self._rows += 1
        if self._rows % (self._recent.maxlen or 1) == 0:
            self._gaps.append((position, gap, step))
            if len(self._gaps) > self.GAPS:
                self._gaps = self._gaps[::2]
        if len(self._gaps) < self.MIN_GAPS:
            return None
        x, y = (np.array([entry[index] for entry in self._gaps]) for index in (0, 1))
        x = x - x.mean()
        squares = float(x @ x)
        if squares <= 0.0:
            return None
        slope = float(x @ y) / squares
        left = y - y.mean() - slope * x
        error = math.sqrt(float(left @ left) / (len(y) - 2) / squares)
        first, last = (float(y.mean() + slope * each) for each in (x[0], x[-1]))
        limit = max(self.MIN_CHANGE * loss, self.TREND_SIGMA * error * (x[-1] - x[0]))
        change = last - first
        words = _gap_words(first, last)
        return {
            "level": abs(change) / limit, "severity": "info", "since": self._gaps[0][2], "change": change,
            "explanation": f"{self.metric}: the {words} between {math.exp(self._gaps[0][0]):.0%} and "
            f"{math.exp(position):.0%} of the run, a change of {change:+.4f} nats",
        }  # fmt: skip

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        self._recent.clear()
        while self._gaps and self._gaps[-1][2] >= step:
            self._gaps.pop()
        self._reset()

    def resolved(self) -> None:
        self._run, self._sum = 0, 0.0


def _gap_words(first: float, last: float) -> str:
    """How a gap (loss less forecast, nats) went from `first` to `last`."""
    start = f"{'lead over' if first < 0 else 'lag behind'} the forecast"
    if first * last < 0:
        return f"{start} of {abs(first):.4f} nats turned into a {'lag' if last > 0 else 'lead'} of {abs(last):.4f}"
    grows = abs(last) > abs(first)
    return f"{start} {'grew' if grows else 'shrank'} from {abs(first):.4f} to {abs(last):.4f} nats"
