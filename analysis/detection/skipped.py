"""Steps whose update the trainer left out: handled, so not judged one by one, but not to become a habit."""

from collections import deque
from typing import Final

from rungwise.analysis.alerts import Row, Signal

SKIPPED: Final = "train/skipped"
KEPT: Final = (SKIPPED, "train/learning_rate", "train/param_norm", "train/counted_tokens")


def without_left_out(row: Row) -> Row:
    """The row without what its step reports of a batch that moved nothing: losses, gradients, routing."""
    if not row.values.get(SKIPPED):
        return row
    ours = {name: value for name, value in row.values.items() if name in KEPT or not _is_of_the_batch(name)}
    return row._replace(values=ours)


def _is_of_the_batch(name: str) -> bool:
    return name.startswith(("train/", "grad_norm/", "update_norm/", "moe/", "moe_worst_layer/"))


class SkippedUpdates:
    """Updates left out again and again: `COUNT` of the last `ROWS` steps. Memory: `ROWS` rows.

    Source: three skipped steps in 15 minutes is the alert of the reference run.
    """

    rule, metric, family, calm_rows = "skipped_updates", SKIPPED, "run_change", 50
    COUNT: Final = 3
    ROWS: Final = 50

    def __init__(self) -> None:
        self._steps: deque[int] = deque()

    def observe(self, row: Row) -> Signal | None:
        skipped = row.values.get(self.metric)
        if skipped is None:
            return None
        if skipped:
            self._steps.append(row.step)
        while self._steps and self._steps[0] <= row.step - self.ROWS:
            self._steps.popleft()
        count = len(self._steps)
        return Signal(
            level=count / self.COUNT, observed=float(count), expected=0.0, since=self._steps[0] if count else row.step,
            severity="critical" if count >= self.ROWS // 2 else "warning",
            explanation=f"{count} of the last {self.ROWS} updates were left out",
        )  # fmt: skip

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()

    def resolved(self) -> None: ...
