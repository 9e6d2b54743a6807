"""Evaluation against training: whether the two losses part, as on changed data or when a run memorises."""

import math
from collections import deque
from typing import Final

from rungwise.analysis.alerts import EveryRow, Row, Signal
from rungwise.analysis.detection.baseline import Window
from rungwise.analysis.detection.sequential import Charts


class EvalGap(EveryRow):
    """Evaluation loss less the mean training loss since the evaluation before, against its own recent level.

    Information only: it says which of the two to distrust. Memory: `WINDOW` evaluations.
    """

    rule, metric, family, calm_rows = "eval_gap", "eval/loss", "run_change", 3
    WINDOW: Final = 32
    MIN_ROWS: Final = 8
    LEAST: Final = 0.004
    """Share of the loss: the least spread."""

    def __init__(self) -> None:
        self._window = Window(self.WINDOW)
        self._charts = Charts((0.75,), rows=1e5)
        self._train: list[float] = []
        self._pending: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)

    def observe(self, row: Row) -> Signal | None:
        train = row.values.get("train/loss")
        if train is not None and math.isfinite(train):
            self._train.append(train)
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss) or not self._train:
            return None
        gap = loss - sum(self._train) / len(self._train)
        self._train.clear()
        x = math.log(row.step + 1.0)
        if len(self._window) < self.MIN_ROWS:
            self._window.add(row.step, x, gap)
            return None
        line = self._window.line()
        spread = max(line.spread * (1.0 + 4.0 / len(self._window)), self.LEAST * loss)
        score = (gap - line.at(x) - line.error(x, 0.5 * abs(line.slope))) / spread
        self._charts.add(row.step, min(max(score, -4.0), 4.0))
        self._pending.append((row.step, gap))
        if self._charts.quiet:
            for step, value in self._pending:
                self._window.add(step, math.log(step + 1.0), value)
            self._pending.clear()
        level = self._charts.level
        return Signal(
            level=level, observed=gap, expected=line.at(x), severity="info",
            since=row.step if self._charts.since is None else self._charts.since,
            probability=self._charts.probability(len(self._window)) if level >= 1.0 else None,
            explanation=f"evaluation lies {gap:+.4f} nats from training, {line.at(x):+.4f} expected: changed data, "
            "or a run that memorises" if level >= 1.0 else "",
        )  # fmt: skip

    def rebaseline(self, step: int) -> None:
        self._window.clear()
        self.resolved()

    def rewind(self, step: int) -> None:
        self._window.rewind(step)
        self.resolved()

    def resolved(self) -> None:
        self._charts.reset()
        self._pending.clear()
        self._train.clear()
