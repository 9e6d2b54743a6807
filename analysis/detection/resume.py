"""A restart that does not go on where the run was: the steps two attempts both took, compared one by one."""

import math
from collections import deque
from typing import Final

import numpy as np

from rungwise.analysis.alerts import Row, Signal


class ResumeMismatch:
    """The loss of a resumed attempt against the attempt before it, at the same steps.

    d = loss now - loss then; fires when the median d of at least three steps is more than `SIGMA` of its own robust
    standard errors and `LEAST` of the loss away from zero, in either direction. A run that resumes well repeats its
    losses to rounding, or differs by noise about zero where it draws other data. Memory: the last `STEPS` losses.
    """

    rule, metric, family, calm_rows = "resume_mismatch", "train/loss", "run_change", 200
    STEPS: Final = 4096
    ROWS: Final = 3
    SIGMA: Final = 5.0
    LEAST: Final = 0.0025

    def __init__(self) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=self.STEPS)
        """Of the attempt so far: step and loss, in order of steps."""
        self._before: dict[int, float] = {}
        self._differences: list[float] = []
        self._from: int | None = None
        """First step compared since the last restart."""

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        if self._losses and self._losses[-1][0] == row.step:
            self._losses.pop()
        self._losses.append((row.step, loss))
        before = self._before.pop(row.step, None)
        if before is None:
            calm = Signal(level=0.0, observed=loss, expected=None, since=row.step, explanation="")
            return calm if self._from is not None else None
        self._from = row.step if self._from is None else self._from
        self._differences.append(loss - before)
        return self._judge(loss, before, self._from)

    def _judge(self, loss: float, before: float, since: int) -> Signal | None:
        count = len(self._differences)
        if count < self.ROWS:
            return None
        differences = np.array(self._differences)
        middle = float(np.median(differences))
        error = 1.4826 * float(np.median(np.abs(differences - middle))) * 1.2533 / math.sqrt(count)
        limit = max((self.SIGMA + 20.0 / count) * error, self.LEAST * abs(before))
        return Signal(
            level=abs(middle) / limit,
            observed=loss,
            expected=before,
            since=since,
            explanation=f"resume does not match: from step {since} on, the loss is {middle:+.4g} nats off the "
            f"attempt before at the same steps ({count} compared)",
        )

    def rewind(self, step: int) -> None:
        self._before = {}
        while self._losses and self._losses[-1][0] >= step:
            at, loss = self._losses.pop()
            self._before[at] = loss
        self._differences.clear()
        self._from = None

    def rebaseline(self, step: int) -> None: ...
    def resolved(self) -> None: ...
