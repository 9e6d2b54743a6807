"""Evidence that adds up: one-sided CUSUM charts of standardised residuals, several side by side.

S <- max(0, S + z - k): what exceeds the allowance k accumulates, what falls short of it is paid back. A chart finds a
shift of about 2k deviations soonest; small ones take many rows, large ones few. Memory: the sums and where they left
zero, nothing else.
"""

import math
from collections.abc import Sequence
from typing import Final

OVERSHOOT: Final = 1.166
"""By how much a discrete Gaussian sum exceeds its limit on average, deviations (Siegmund 1985)."""


def false_alarm_rows(height: float, allowance: float) -> float:
    """Rows of white Gaussian noise between two times a one-sided CUSUM reaches `height` (Siegmund 1985).

    (exp(2kb) - 2kb - 1) / (2 k^2), b = height + 1.166
    """
    exponent = min(2.0 * allowance * (height + OVERSHOOT), 600.0)
    return (math.exp(exponent) - exponent - 1.0) / (2.0 * allowance**2)


def height_for(rows: float, allowance: float) -> float:
    """The height that white Gaussian noise reaches once in `rows` rows.

    >>> round(false_alarm_rows(height_for(1e6, 0.25), 0.25))
    1000000
    """
    low, high = 0.0, 300.0 / allowance - OVERSHOOT
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if false_alarm_rows(middle, allowance) < rows else (low, middle)
    return high


class Charts:
    """CUSUM charts of one series, each with its allowance, and heights of one and the same false-alarm rate."""

    def __init__(self, allowances: Sequence[float], *, rows: float):
        """
        Args:
            allowances: in deviations, ascending.
            rows: of white noise between two false alarms of one chart.
        """
        self._allowances = tuple(allowances)
        self._heights = tuple(height_for(rows, allowance) for allowance in allowances)
        self.reset()

    def reset(self) -> None:
        self._sums = [0.0] * len(self._allowances)
        self._since: list[int | None] = [None] * len(self._allowances)
        self.level = 0.0
        """The highest sum as a share of its height; 1 and more is an alarm."""
        self.since: int | None = None
        """First step of the rise that this sum counts."""
        self._leader = 0

    @property
    def quiet(self) -> bool:
        """Whether the most patient chart holds nothing."""
        return self._sums[0] == 0.0

    def add(self, step: int, score: float) -> float:
        """Counts one standardised residual; returns the level."""
        best = -1.0
        for index, allowance in enumerate(self._allowances):
            before = self._sums[index]
            after = before + score - allowance
            if after <= 0.0:
                self._sums[index], self._since[index] = 0.0, None
                continue
            if before == 0.0:
                self._since[index] = step
            self._sums[index] = after
            level = after / self._heights[index]
            if level > best:
                best, self._leader = level, index
        self.level = max(best, 0.0)
        self.since = self._since[self._leader] if best > 0 else None
        return self.level

    def probability(self, rows: int) -> float:
        """Chance that `rows` rows of white noise bring some chart as high as the highest stands now."""
        leader = self._leader
        once = false_alarm_rows(self._sums[leader], self._allowances[leader])
        return min(1.0, -math.expm1(-len(self._sums) * rows / max(once, 1.0)))
