"""Evaluation by subset: a verdict on the mean stands only if the subsets share it.

Each subset is held against its own recent line and its own noise, so that a noisy one weighs little; the one that rose
most is left out, so that no single subset can move the verdict. Memory: one window a subset.
"""

import math
from typing import Final

from rungwise.analysis.alerts import Row
from rungwise.analysis.detection.baseline import Window

LEAST: Final = 3
"""Subsets below which the mean is taken at its word."""
SHARED: Final = 0.5
"""Correlation expected between subsets: much of an evaluation's noise is the model's and moves them all."""
_LEAST_SPREAD: Final = 0.001
_MIN_ROWS: Final = 8


class Subsets:
    """Scores of the subsets of one evaluation, in deviations of their own noise."""

    def __init__(self, window: int, *, clip: float):
        self._size, self._clip = window, clip
        self.clear()

    def clear(self) -> None:
        self._windows: dict[str, Window] = {}
        self._pending: list[tuple[str, int, float, float]] = []
        self.carrier: str | None = None
        """The subset that rose most at the last row, in its own deviations."""

    def temper(self, row: Row, x: float, score: float) -> float:
        """The lower of the mean's `score` and the one the subsets share but for the one that rose most."""
        scores = {}
        for metric, value in row.values.items():
            if not (metric.startswith("eval/") and metric.count("/") == 2 and metric.endswith("/loss")):
                continue
            if not math.isfinite(value):
                continue
            name = metric.split("/")[1]
            self._pending.append((name, row.step, x, value))
            window = self._windows.setdefault(name, Window(self._size))
            if len(window) >= _MIN_ROWS:
                line = window.line(rise=0.0)
                spread = max(line.spread * (1.0 + 4.0 / len(window)), _LEAST_SPREAD * abs(value))
                scores[name] = (value - line.at(x)) / spread
        if len(scores) < LEAST:
            self.carrier = None
            return score
        self.carrier = max(scores, key=lambda name: scores[name])
        others = [min(max(each, -self._clip), self._clip) for name, each in scores.items() if name != self.carrier]
        return min(score, sum(others) / math.sqrt(len(others) * (1.0 + (len(others) - 1) * SHARED)))

    def accept(self) -> None:
        """Lets the values since the last call into the baselines."""
        for name, step, x, value in self._pending:
            self._windows[name].add(step, x, value)
        self._pending.clear()
