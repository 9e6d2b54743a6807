"""What a series has been like lately: a robust line in log step, with its spread and how far it can be trusted.

Detectors hold a new value against it and let it in only while they see nothing: a fault must not teach the baseline.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

REFITS: Final = 16
"""A full window is refitted each time this share of it (one part in `REFITS`) is new."""
CLIP: Final = 3.0
"""Values further out than this many deviations count as that far, deviations."""
BLOCK: Final = 8
"""Rows of a block; the spread of block means tells whether neighbours move together."""
BLOCK_SHARE: Final = 0.8
"""What block means say of the spread is noisy; this share of it counts."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """value(x) = middle + slope (x - centre), x the log step; spread: of one value about it."""

    middle: float
    slope: float
    centre: float
    end: float
    """x of the last row."""
    spread: float
    level_error: float
    slope_error: float

    def at(self, x: float) -> float:
        return self.middle + self.slope * (x - self.centre)

    def error(self, x: float, bend: float) -> float:
        """Standard error of `at(x)`; `bend`: by how much the slope may change per unit of x, or stop at the end."""
        return math.hypot(self.level_error, self.slope_error * (x - self.centre), bend * (x - self.end))


class Window:
    """The last quiet rows of a series: steps, log steps and values."""

    def __init__(self, size: int):
        self._size = size
        self._table = np.empty((2 * size, 3))
        """Rows [step, log step, value]; those from `_start` to `_end` count. Full, they move to the front."""
        self._start = self._end = self._new = 0
        self._fitted: Line | None = None

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def rows(self) -> np.ndarray:
        """[rows, 3]: step, log step, value."""
        return self._table[self._start : self._end]

    def add(self, step: int, x: float, value: float) -> None:
        if self._end == 2 * self._size:
            self._table[: self._size] = self._table[self._size :]
            self._start, self._end = self._start - self._size, self._size
        self._table[self._end] = step, x, value
        self._end += 1
        self._start = max(self._start, self._end - self._size)
        self._new += 1

    def rewind(self, step: int) -> None:
        while self._end > self._start and self._table[self._end - 1, 0] >= step:
            self._end -= 1
        self._fitted = None

    def clear(self) -> None:
        self._start = self._end = 0
        self._fitted = None

    def shorten(self, size: int) -> None:
        self._start = max(self._start, self._end - size)

    def line(self, *, steepest: float = math.inf, rise: float = 0.0) -> Line:
        """The line through the rows, renewed once enough of them are new.

        Args:
            steepest: standard deviation that the slope is expected to have about zero; 0 keeps the line flat.
            rise: the largest slope a healthy run may have.
        """
        if self._fitted is None or self._new * REFITS >= len(self):
            self._fitted = _fit(self.rows, steepest, rise)
            self._new = 0
        return self._fitted


def _fit(rows: np.ndarray, steepest: float, rise: float) -> Line:
    """Least squares with a prior on the slope, values clipped to `CLIP` deviations of a first line."""
    x, y = rows[:, 1], rows[:, 2]
    count = len(y)
    centre = _mean(x)
    x = x - centre
    squares = float(x @ x)
    middle, slope, ridge = _median(y), 0.0, 0.0
    away = y - middle
    spread = _spread(away)
    for again in range(3):
        expected = middle + slope * x if slope else middle
        clipped = expected + np.minimum(np.maximum(y - expected, -CLIP * spread), CLIP * spread) if again else y
        middle = _mean(clipped)
        ridge = squares + (0.0 if math.isinf(steepest) else (spread / max(steepest, 1e-12)) ** 2)
        slope = min(float(x @ clipped) / ridge, rise) if squares > 0.0 else 0.0
        away = y - middle - slope * x if slope else y - middle
        spread = _spread(away)
    middle += _lag(away, spread)
    return Line(
        middle=middle, slope=slope, centre=centre, end=centre + float(x[-1]), spread=spread,
        level_error=spread / math.sqrt(count), slope_error=spread / math.sqrt(ridge) if ridge > 0 else 0.0,
    )  # fmt: skip


def _mean(values: np.ndarray) -> float:
    return float(np.add.reduce(values)) / values.size


def _median(values: np.ndarray) -> float:
    ordered, count = values.copy(), values.size
    ordered.sort()
    return 0.5 * float(ordered[(count - 1) // 2] + ordered[count // 2])


def _lag(residuals: np.ndarray, spread: float) -> float:
    """By how much the last quarter of the rows lies over the line, more than noise: a convex curve's end does."""
    last = residuals[-max(residuals.size // 4, 4) :]
    mean = _mean(np.minimum(last, CLIP * spread))
    return max(mean - spread / math.sqrt(last.size), 0.0)


def _spread(residuals: np.ndarray) -> float:
    """The largest of four deviations: robust about zero, robust from row to row, of the clipped, of block means."""
    about = _median(np.abs(residuals))
    between = _median(np.abs(residuals[1:] - residuals[:-1])) / math.sqrt(2.0) if residuals.size > 1 else 0.0
    robust = 1.4826 * max(about, between)
    spread = max(robust, math.sqrt(_mean(np.minimum(residuals**2, (CLIP * robust) ** 2))))
    blocks = residuals.size // BLOCK
    if blocks >= BLOCK:
        means = np.add.reduce(residuals[: blocks * BLOCK].reshape(blocks, BLOCK), axis=1) / BLOCK
        spread = max(spread, BLOCK_SHARE * math.sqrt(BLOCK) * 1.4826 * _median(np.abs(means)))
    return spread
