"""Rules that judge a run by its own past or by its registered forecast. Each is one class over one metric.

Constants come from replays of healthy public runs, which must stay quiet, and of the same runs with a planted
fault: docs/log.md.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np

from rungwise.analysis.alerts import Row, Signal
from rungwise.analysis.curves import at_progress, registered_curve
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.laws import PowerLaw

MIN_BASELINE: Final = 20
"""Rows before which only non-finite values can alert."""


class _Window:
    """The last quiet values of a series with their steps and references, and their median and robust spread."""

    def __init__(self, size: int):
        self.rows: deque[tuple[int, float, float]] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, step: int, value: float, reference: float = 0.0) -> None:
        self.rows.append((step, value, reference))

    def rewind(self, step: int) -> None:
        while self.rows and self.rows[-1][0] >= step:
            self.rows.pop()

    def shorten(self, size: int) -> None:
        while len(self.rows) > size:
            self.rows.popleft()

    def centre(self) -> tuple[float, float]:
        """Median, and the larger of two robust deviations: about the median, and from row to row."""
        numbers = np.fromiter((value for _, value, _ in self.rows), float, len(self.rows))
        middle = float(np.median(numbers))
        about = np.median(np.abs(numbers - middle))
        between = np.median(np.abs(np.diff(numbers))) / math.sqrt(2.0)
        return middle, 1.4826 * float(max(about, between))

    @property
    def anchor(self) -> float:
        """The reference in the middle of the window."""
        return self.rows[len(self.rows) // 2][2]


class NonFinite:
    """NaN or infinite loss, or gradient entries that are. Opens at the first one."""

    rule, metric, family, calm_rows = "nonfinite", "train/loss", "fault", 20

    def __init__(self) -> None:
        self._since: int | None = None
        self._best = math.inf

    def observe(self, row: Row) -> Signal | None:
        losses = [row.values[name] for name in ("train/loss", "eval/loss") if name in row.values]
        entries = row.values.get("train/nonfinite", 0.0)
        if not losses and "train/nonfinite" not in row.values:
            return None
        bad = [value for value in losses if not math.isfinite(value)]
        if not bad and not entries:
            self._since = None
            self._best = min([self._best, *losses])
            return Signal(
                level=0.0,
                observed=losses[0] if losses else 0.0,
                expected=None,
                since=row.step,
                explanation="",
            )
        self._since = row.step if self._since is None else self._since
        what = f"loss is {bad[0]}" if bad else f"{entries:g} gradient entries are not finite"
        best = f"; best loss so far {self._best:.4f}" if math.isfinite(self._best) else ""
        return Signal(
            level=1.0, observed=bad[0] if bad else entries, expected=None, since=self._since, severity="critical",
            explanation=f"{what} at step {row.step}{best}",
        )  # fmt: skip

    def rebaseline(self, step: int) -> None: ...
    def rewind(self, step: int) -> None: ...
    def resolved(self) -> None: ...


class LossSpike:
    """A rise of the loss over its recent median: six robust deviations in three rows running, or one huge
    value.

    Spiking rows do not enter the baseline; recovery is ten rows under half the threshold.
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

    def __init__(self) -> None:
        self._window = _Window(self.WINDOW)
        self._over = 0
        self._since = 0

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        if len(self._window) < MIN_BASELINE:
            self._window.add(row.step, loss)
            return None
        middle, spread = self._window.centre()
        rise = loss - middle
        score = rise / max(spread, 0.002 * middle, 1e-9)
        over = score > self.SIGMA and rise > self.MIN_RISE * middle
        if over:
            self._since = row.step if self._over == 0 else self._since
            self._over += 1
        else:
            self._over = 0
            self._window.add(row.step, loss)
        jump = score > self.JUMP_SIGMA and rise > self.JUMP_RISE * middle
        fires = over and (self._over >= self.PERSIST or jump)
        level = score / self.SIGMA
        return Signal(
            level=level if fires else min(level, 0.99),
            observed=loss,
            expected=middle,
            since=self._since if over else row.step,
            severity="critical" if rise > 0.3 * middle else "warning",
            explanation=f"loss {loss:.4f} is {rise:+.4f} nats ({score:.1f} deviations) over its median {middle:.4f}",
        )

    def rebaseline(self, step: int) -> None:
        self._window.rows.clear()
        self._over = 0

    def rewind(self, step: int) -> None:
        self._window.rewind(step)
        self._over = 0

    def resolved(self) -> None:
        self._over = 0


class LossLevel:
    """A lasting rise of the training loss against the registered curve, re-anchored to the run itself.

    r = loss - curve(progress) (the loss itself without a curve). While quiet, the median and spread of the
    last r are the baseline; a one-sided CUSUM of the clipped standardised r accumulates what exceeds an
    allowance, and while it does the baseline stays frozen, so that a fault cannot teach it. A steady lead or
    lag against the forecast is no alert, nor is a rise of r by less than the curve's slope error times its
    fall since the baseline: an early lead that shrinks is the forecast's shape, not the run.
    """

    rule, metric, family, calm_rows = "loss_level", "train/loss", "run_change", 40
    WINDOW: Final = 512
    WINDOW_SHARE: Final = 0.25
    """The baseline spans this share of the rows so far, between `MIN_ROWS` and `WINDOW`: a short run changes fast."""
    MIN_ROWS: Final = 40
    CLIP: Final = 3.0
    ALLOWANCE: Final = 0.25
    """Deviations; half the smallest shift worth finding. The baseline's own uncertainty is added."""
    THRESHOLD: Final = 25.0
    """Deviations; times 1 + the curve's slope error while the loss is not above the registered band."""
    RECENT: Final = 40
    CRITICAL_SIGMA: Final = 6.0
    CRITICAL_SHARE: Final = 0.1
    """Stands in for the band's upper half where there is no curve, as a share of the loss."""

    def __init__(self, forecast: Forecast | None = None):
        self._curve = registered_curve(forecast, self.metric)
        self._law = forecast_law(forecast)
        self._window = _Window(self.WINDOW)
        self._rows = 0
        self._reset()

    def _reset(self) -> None:
        self._sum = 0.0
        self._since: int | None = None
        self._pending: deque[tuple[int, float, float]] = deque(maxlen=self.WINDOW)
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._opening: float | None = None
        self._baseline: tuple[float, float, float] | None = None

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        registered = self._registered(row)
        if registered is None:
            return None
        self._rows += 1
        reference = registered["loss"]
        residual = loss - reference
        if len(self._window) < self.MIN_ROWS:
            self._window.add(row.step, residual, reference)
            return None
        middle, spread, anchor = self._fresh_baseline(loss)
        allowance = self.ALLOWANCE + 2.0 / math.sqrt(len(self._window))
        allowance += registered["slope_error"] * max(anchor - reference, 0.0) / spread
        score = min(max((residual - middle) / spread, -self.CLIP), self.CLIP)
        self._accumulate((row.step, residual, reference), score - allowance)
        self._recent.append(residual - middle)
        return self._signal(row, registered, expected=reference + middle, spread=spread)

    def _registered(self, row: Row) -> Mapping[str, float] | None:
        """The registered curve at this progress; None before it begins, zero and a wide band without one."""
        if self._curve is None:
            return {"loss": 0.0, "low": -math.inf, "high": math.inf, "slope_error": 0.0}
        if row.progress is None or row.progress < self._curve["progress"][0]:
            return None
        return at_progress(self._curve, row.progress)

    def _fresh_baseline(self, loss: float) -> tuple[float, float, float]:
        """(median of r, spread of r, the curve where the baseline was taken), renewed while the sum is zero."""
        if self._baseline is None or self._sum == 0.0:
            size = int(min(max(self.WINDOW_SHARE * self._rows, self.MIN_ROWS), self.WINDOW))
            self._window.shorten(size)
            middle, spread = self._window.centre()
            self._baseline = (middle, max(spread, 0.002 * abs(loss), 1e-9), self._window.anchor)
        return self._baseline

    def _accumulate(self, row: tuple[int, float, float], gain: float) -> None:
        if self._sum == 0.0:
            self._since = row[0]
        self._sum = max(0.0, self._sum + gain)
        self._pending.append(row)
        if self._sum == 0.0 and self._opening is None:
            for pending in self._pending:
                self._window.add(*pending)
            self._pending.clear()

    def _signal(self, row: Row, registered: Mapping[str, float], *, expected: float, spread: float) -> Signal:
        recent = list(self._recent)
        shift = float(np.median(recent if self._opening else recent[-self.RECENT // 2 :]))
        low, now, high = registered["low"], expected + shift, registered["high"]
        if self._opening is None:
            level = self._sum / (self.THRESHOLD * (1.0 if now > high else 1.0 + registered["slope_error"]))
            self._opening = max(shift, 1e-9) if level >= 1.0 else None
        else:
            level = shift / self._opening
        cost = None
        if self._law is not None and shift > 0:
            cost = self._law.compute_factor(expected, shift) - 1.0
        over = "its own recent level"
        if self._curve is not None:
            side = "above" if now > high else "below" if now < low else "inside"
            over = f"the registered curve, re-anchored to this run, {side} its band [{low:.4f}, {high:.4f}]"
        return Signal(
            level=level,
            observed=now,
            expected=expected,
            since=self._since if self._since is not None else row.step,
            severity="critical" if self._is_critical(registered, now, expected=expected, spread=spread) else "warning",
            cost=cost if cost is None or math.isfinite(cost) else None,
            explanation=f"training loss runs {shift:+.4f} nats ({shift / spread:+.1f} deviations) over {over}",
        )

    def _is_critical(self, registered: Mapping[str, float], now: float, *, expected: float, spread: float) -> bool:
        """Whether the rise took the loss out of the registered band or, outside it, exceeds noise and half band."""
        high = registered["high"]
        if self._curve is None:
            return now - expected > max(self.CRITICAL_SIGMA * spread, self.CRITICAL_SHARE * expected)
        if registered["low"] <= now <= high:
            return False
        return expected <= high < now or now - expected > max(self.CRITICAL_SIGMA * spread, high - registered["loss"])

    def rebaseline(self, step: int) -> None:
        self._window.rows.clear()
        self._reset()

    def rewind(self, step: int) -> None:
        self._window.rewind(step)
        self._reset()

    def resolved(self) -> None:
        quiet = list(self._pending)[-self.RECENT :]  # the level the run came back to
        self._window.rows.clear()
        self._window.rows.extend(quiet)
        self._reset()


class EvalDrift:
    """Evaluation loss creeping up: more than 3 % above its best, however small each rise."""

    rule, metric, family, calm_rows = "eval_drift", "eval/loss", "run_change", 1
    LIMIT: Final = 0.03

    def __init__(self) -> None:
        self._best: tuple[float, int] | None = None

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        if self._best is None or loss < self._best[0]:
            self._best = (loss, row.step)
        best, step = self._best
        rise = loss / best - 1.0
        level = rise / self.LIMIT
        # Calm is any value back under the limit, so the scale below it is squeezed under the hysteresis threshold.
        return Signal(
            level=level if level > 1.0 else 0.4 * max(level, 0.0), observed=loss, expected=best, since=step,
            explanation=f"evaluation loss {loss:.4f} is {rise:.1%} above its best, {best:.4f} at step {step}",
        )  # fmt: skip

    def rebaseline(self, step: int) -> None:
        self._best = None

    def rewind(self, step: int) -> None:
        if self._best is not None and self._best[1] >= step:
            self._best = None

    def resolved(self) -> None: ...


class ForecastMiss:
    """Loss outside the registered band at equal progress. A verdict on the forecast, never more than a warning."""

    rule, family, calm_rows = "forecast_miss", "forecast_miss", 2
    PERSIST: Final = 2
    TRAIN_ROWS: Final = 20

    def __init__(self, forecast: Forecast):
        registered = {row["metric"] for row in forecast.curve}
        self.metric = next((name for name in ("eval/loss", "train/loss") if name in registered), forecast.metric)
        self._curve = registered_curve(forecast, self.metric)
        self._law = forecast_law(forecast)
        self._recent: deque[tuple[float, float]] = deque(maxlen=1 if self.metric == "eval/loss" else self.TRAIN_ROWS)
        self._run = 0
        self._since = 0

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss) or self._curve is None or row.progress is None:
            return None
        self._recent.append((row.progress, loss))
        at, loss = (float(np.median(column)) for column in zip(*self._recent, strict=True))
        if at < self._curve["progress"][0] or len(self._recent) < (self._recent.maxlen or 1):
            return None
        registered = at_progress(self._curve, at)
        expected, low, high = (registered[key] for key in ("loss", "low", "high"))
        above = loss > expected
        distance = (loss - expected) / max(high - expected if above else low - expected, 1e-9, key=abs)
        self._run = self._run + 1 if distance > 1.0 else 0
        self._since = row.step if self._run <= 1 else self._since
        fires = self._run >= self.PERSIST
        cost = self._law.compute_factor(expected, loss - expected) - 1.0 if above and self._law else None
        return Signal(
            level=distance if fires else min(distance, 0.99) if distance > 1.0 else 0.4 * distance,
            observed=loss,
            expected=expected,
            since=self._since,
            severity="warning" if above else "info",
            cost=cost if cost is None or math.isfinite(cost) else None,
            explanation=f"{self.metric} {loss:.4f} lies {'above' if above else 'below'} the registered "
            f"[{low:.4f}, {high:.4f}] at {at:.0%} of the run, {abs(loss - expected):.4f} nats "
            f"{'behind' if above else 'ahead of'} the forecast",
        )

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        self._recent.clear()
        self._run = 0

    def resolved(self) -> None:
        self._run = 0


def forecast_law(forecast: Forecast | None) -> PowerLaw | None:
    """The law a registered forecast goes by, to price a gap in compute."""
    if forecast is None or not forecast.laws:
        return None
    return PowerLaw(*(float(forecast.laws[0][key]) for key in ("floor", "amplitude", "exponent")))
