"""Sudden faults of the loss: values that are not finite, and spikes with whether the run came back from them."""

import math
from typing import Final

from rungwise.analysis.alerts import EveryRow, Row, Signal
from rungwise.analysis.detection.baseline import Line, Window

MIN_BASELINE: Final = 20
"""Rows before which only non-finite values can alert."""


class NonFinite(EveryRow):
    """NaN or infinite loss, or gradient entries that are. Opens at the first one. Memory: the best loss."""

    rule, metric, family, calm_rows = "nonfinite", "train/loss", "fault", 20

    def __init__(self) -> None:
        self._since: int | None = None
        self._best = math.inf
        self._firing = False

    def observe(self, row: Row) -> Signal | None:
        losses = [row.values[name] for name in ("train/loss", "eval/loss") if name in row.values]
        entries = row.values.get("train/nonfinite", 0.0)
        if not losses and "train/nonfinite" not in row.values:
            return None
        bad = [value for value in losses if not math.isfinite(value)]
        if not bad and not entries:
            self._since = None
            self._best = min(self._best, *losses) if losses else self._best
            seen = losses[0] if losses else 0.0
            return Signal(0.0, seen, expected=None, since=row.step, explanation="") if self._firing else None
        self._firing = True
        self._since = row.step if self._since is None else self._since
        what = f"loss is {bad[0]}" if bad else f"{entries:g} gradient entries are not finite"
        best = f"; best loss so far {self._best:.4f}" if math.isfinite(self._best) else ""
        return Signal(
            level=1.0, observed=bad[0] if bad else entries, expected=None, since=self._since, severity="critical",
            explanation=f"{what} at step {row.step}{best}", probability=0.0,
        )  # fmt: skip

    def rebaseline(self, step: int) -> None: ...
    def rewind(self, step: int) -> None: ...

    def resolved(self) -> None:
        self._firing = False


class LossSpike:
    """A rise of the loss over its recent mean: six robust deviations in three rows running, or one huge value.

    Spiking rows do not enter the baseline; recovery is ten rows under half the threshold. A spike that has kept half
    its height for `PATIENCE` rows is not recovering, and critical. Memory: `WINDOW` quiet rows.
    """

    rule, metric, family, calm_rows = "loss_spike", "train/loss", "run_change", 10
    WINDOW: Final = 128
    SIGMA: Final = 6.0
    PERSIST: Final = 3
    MIN_RISE: Final = 0.02
    """Share of the loss a spike must rise by at least."""
    JUMP_SIGMA: Final = 25.0
    JUMP_RISE: Final = 0.08
    """One value alone opens the alert when it is this far out, in deviations and as a share of the loss."""
    CRITICAL_RISE: Final = 0.3
    PATIENCE: Final = 200
    """Rows; public spikes that healed took 10 to 50 (BLOOM, PaLM), with outliers."""

    def __init__(self) -> None:
        self._window = Window(self.WINDOW)
        self.resolved()

    def resolved(self) -> None:
        self._over = self._held = self._since = 0
        self._height = 0.0

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        if len(self._window) < MIN_BASELINE:
            self._window.add(row.step, 0.0, loss)
            return None
        line: Line = self._window.line(steepest=0.0)
        rise = loss - line.middle
        score = rise / max(line.spread, 0.002 * line.middle, 1e-9)
        over = score > self.SIGMA and rise > self.MIN_RISE * line.middle
        self._follow(row, over=over, rise=rise)
        if not over:
            self._window.add(row.step, 0.0, loss)
        jump = score > self.JUMP_SIGMA and rise > self.JUMP_RISE * line.middle
        fires = over and (self._over >= self.PERSIST or jump)
        level = score / self.SIGMA
        stuck = self._held >= self.PATIENCE
        critical = stuck or rise > self.CRITICAL_RISE * line.middle
        return Signal(
            level=level if fires else min(level, 0.99),
            observed=loss,
            expected=line.middle,
            since=self._since if self._held else row.step,
            severity="critical" if critical else "warning",
            explanation=self._told(loss, rise, score, line.middle, stuck=stuck) if fires else "",
        )

    def _follow(self, row: Row, *, over: bool, rise: float) -> None:
        """Counts rows over the threshold, and rows in which the spike kept half its height."""
        self._over = self._over + 1 if over else 0
        if over and not self._held:
            self._since = row.step
        self._height = max(self._height, rise) if self._held or over else 0.0
        self._held = self._held + 1 if over or (self._held and rise > 0.5 * self._height) else 0

    def _told(self, loss: float, rise: float, score: float, middle: float, *, stuck: bool) -> str:
        said = f"loss {loss:.4f} is {rise:+.4f} nats ({score:.1f} deviations) over its recent {middle:.4f}"
        return f"{said}; not recovering: {self._held} rows at more than half its height" if stuck else said

    def rebaseline(self, step: int) -> None:
        self._window.clear()
        self.resolved()

    def rewind(self, step: int) -> None:
        self._window.rewind(step)
        self.resolved()
