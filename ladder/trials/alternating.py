"""One run in two conditions by turns, window after window, so that a drift of the machine favours neither."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

WARMUP: Final = 10
"""Steps before the first window, and left out at the start of each."""


@dataclass
class Alternation:
    """`pairs` times two windows of `window` steps each, one in each condition; the two take turns in coming first."""

    pairs: int
    window: int
    _walls: list[list[float]] = field(init=False)
    _cpus: list[list[float]] = field(init=False)
    _last: tuple[float, float] = field(init=False, default=(0.0, 0.0))

    def __post_init__(self) -> None:
        if self.window < 2 * WARMUP:
            raise ValueError(
                f"window of {self.window} steps is shorter than {2 * WARMUP}; choose a longer run or fewer pairs"
            )
        self._walls = [[] for _ in range(2 * self.pairs)]
        self._cpus = [[] for _ in range(2 * self.pairs)]

    @classmethod
    def within(cls, steps: int, *, pairs: int) -> "Alternation":
        """As long windows as a run of so many steps has room for.

        Raises:
            ValueError: windows would be too short.
        """
        return cls(pairs, (steps - WARMUP) // (2 * pairs))

    def seen(self, step: int) -> None:
        """A step is over: its time counts where it belongs to a window and is no warm-up of it."""
        now = time.perf_counter(), time.process_time()
        index, place = divmod(step - WARMUP, self.window)
        if 0 <= index < 2 * self.pairs and place >= WARMUP:
            self._walls[index].append(now[0] - self._last[0])
            self._cpus[index].append(now[1] - self._last[1])
        self._last = now

    def starts_window(self, step: int) -> bool:
        """Whether the next steps may be in the other condition."""
        return step >= WARMUP and (step - WARMUP) % self.window == 0

    def forget(self) -> None:
        """What was done since the last step was no part of it, such as a change of condition."""
        self._last = time.perf_counter(), time.process_time()

    def is_changed(self, step: int) -> bool:
        """Whether the steps after `step` are in the changed condition: not outside the windows."""
        index = (step - WARMUP) // self.window
        return 0 <= index < 2 * self.pairs and self._changed(index)

    @staticmethod
    def _changed(index: int) -> bool:
        return (index % 2 == 1) != (index // 2 % 2 == 1)

    def result(self) -> dict[str, Any]:
        """Step time and CPU seconds a step of this process: changed over usual, over pairs, with a 90% interval."""
        return {
            "pairs": self.pairs,
            "steps_a_window": self.window - WARMUP,
            "step_time": self._compared(self._walls),
            "cpu_seconds": self._compared(self._cpus),
        }

    def _compared(self, windows: Sequence[Sequence[float]]) -> dict[str, float]:
        means = [statistics.median(window) for window in windows]
        ratios = []
        for pair in range(self.pairs):
            one, other = 2 * pair, 2 * pair + 1
            changed, usual = (other, one) if self._changed(other) else (one, other)
            ratios.append(means[changed] / means[usual])
        draws = np.median(np.random.default_rng(0).choice(ratios, (2000, self.pairs)), axis=1)
        low, high = np.quantile(draws, (0.05, 0.95))
        usual = statistics.median(means[index] for index in range(2 * self.pairs) if not self._changed(index))
        return {"ratio": statistics.median(ratios), "low": float(low), "high": float(high), "seconds_usual": usual}
