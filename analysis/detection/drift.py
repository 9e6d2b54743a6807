"""Slow rises that stay under every row's threshold: of an evaluation over its best, of blocks of the training loss."""

import math
from collections import deque
from statistics import median_low
from typing import Final

from rungwise.analysis.alerts import Row, Signal
from rungwise.analysis.detection.pricing import Pricing
from rungwise.analysis.detection.subsets import LEAST


class EvalDrift:
    """Evaluation loss creeping up: more than 3 % above its best, however small each rise.

    The best must lie below by `NOISE` times the usual move from one evaluation to the next, and be `SINCE` evaluations
    old or exceeded so twice running: one evaluation alone is no drift. Where subsets are logged, the one that rose most
    is left out of both means. After a declared change that moves it, the loss is followed up until it has lain under
    its highest twice running, for `SETTLE` evaluations at most; from there on it is judged again.
    Memory: the best row, and `MOVES` moves.
    """

    rule, metric, family, calm_rows = "eval_drift", "eval/loss", "run_change", 1
    LIMIT: Final = 0.03
    NOISE: Final = 3.5
    MOVES: Final = 16
    SINCE: Final = 4
    SETTLE: Final = 16

    def __init__(self) -> None:
        self._best: tuple[float, int, dict[str, float]] | None = None
        self._moves: deque[float] = deque(maxlen=self.MOVES)
        self._last: float | None = None
        self._age = self._over = 0
        """Evaluations since the best, and over the limit running."""
        self._highest = -math.inf
        self._settling = self._under = 0
        """Evaluations for which the loss is still followed, and under its highest running."""

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        parts = _subsets(row)
        self._age += 1
        if self._is_settling(loss) or self._best is None or loss < self._best[0]:
            self._best, self._age = (loss, row.step, parts), 0
        rise, carrier = self._rise(loss, parts)
        best, step, _ = self._best
        usual = median_low(self._moves) / best if self._moves else 0.0
        level = rise / max(self.LIMIT, self.NOISE * usual)
        self._over = self._over + 1 if level > 1.0 else 0
        drifts = level > 1.0 and (self._age >= self.SINCE or self._over >= 2)
        if self._last is not None:
            self._moves.append(abs(loss - self._last))
        self._last = loss
        # Calm is any value back under the limit, so the scale below it is squeezed under the hysteresis threshold.
        return Signal(
            level=level if drifts else 0.4 * min(max(level, 0.0), 1.0), observed=loss, expected=best, since=step,
            explanation=f"evaluation loss {loss:.4f} is {rise:.1%} above its best, {best:.4f} at step {step}",
            carrier=carrier,
        )  # fmt: skip

    def _rise(self, loss: float, parts: dict[str, float]) -> tuple[float, str | None]:
        """Share by which the mean lies over the best, and without the subset that rose most; that subset."""
        assert self._best is not None
        best, _, best_parts = self._best
        rise, carrier = loss / best - 1.0, None
        rises = {name: parts[name] / value - 1.0 for name, value in best_parts.items() if name in parts}
        if len(rises) >= LEAST:
            carrier = max(rises, key=lambda name: rises[name])
            others = [name for name in rises if name != carrier]
            rise = min(rise, sum(parts[name] for name in others) / sum(best_parts[name] for name in others) - 1.0)
        return rise, carrier

    def _is_settling(self, loss: float) -> bool:
        """Whether a declared change still moves the loss, so that its best is where it is now."""
        if self._settling:
            self._under = self._under + 1 if loss < self._highest else 0
            self._highest = max(self._highest, loss)
            self._settling = 0 if self._under == 2 else self._settling - 1
        return self._settling > 0

    def rebaseline(self, step: int) -> None:
        self._best = self._last = None
        self._moves.clear()
        self._settling, self._under, self._highest = self.SETTLE, 0, -math.inf

    def rewind(self, step: int) -> None:
        if self._best is not None and self._best[1] >= step:
            self._best = None

    def resolved(self) -> None: ...


def _subsets(row: Row) -> dict[str, float]:
    """Finite losses of the subsets evaluated in a row, by name."""
    return {
        name.split("/")[1]: value
        for name, value in row.values.items()
        if name.startswith("eval/") and name.count("/") == 2 and name.endswith("/loss") and math.isfinite(value)
    }


class LossDrift:
    """Training loss rising so slowly that every baseline would follow it: means of blocks, against the lowest so far.

    Fires when two blocks running lie over the lowest by `SIGMA` standard errors of a difference and by `MIN_RISE` of
    the loss. A loss that only falls less than its forecast is `forecast_miss`. Memory: sums over one block of `BLOCK`
    rows, and the lowest mean.
    """

    rule, metric, family, calm_rows = "loss_drift", "train/loss", "run_change", 2
    BLOCK: Final = 256
    SIGMA: Final = 7.0
    """The lowest of a hundred blocks lies 2.5 deviations low by chance; the rest is evidence."""
    MIN_RISE: Final = 0.005

    def __init__(self, pricing: Pricing | None = None):
        self._pricing = pricing
        self.rebaseline(0)

    def rebaseline(self, step: int) -> None:
        self._lowest: tuple[float, int] | None = None
        """Mean and first step of the lowest block."""
        self._over = 0
        self._start_block()

    def _start_block(self) -> None:
        self._count, self._first_step = 0, 0
        self._sum = self._squares = self._last = 0.0

    def resolved(self) -> None:
        self._over = 0

    def rewind(self, step: int) -> None:
        if self._lowest is not None and self._lowest[1] >= step:
            self._lowest = None
        self._over = 0
        self._start_block()

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        if self._count:
            self._squares += min((loss - self._last) ** 2, (0.1 * loss) ** 2)
        else:
            self._first_step = row.step
        self._last = loss
        self._count += 1
        self._sum += loss
        return self._judge(row) if self._count == self.BLOCK else None

    def _judge(self, row: Row) -> Signal | None:
        mean, first = self._sum / self.BLOCK, self._first_step
        error = math.sqrt(self._squares / (self.BLOCK - 1) / self.BLOCK)  # of a difference of two blocks
        self._start_block()
        if self._lowest is None or mean < self._lowest[0]:
            self._lowest, self._over = (mean, first), 0
            return Signal(level=0.0, observed=mean, expected=None, since=row.step, explanation="")
        lowest, since = self._lowest
        rise = mean - lowest
        level = rise / max(self.SIGMA * error, self.MIN_RISE * abs(mean))
        self._over = self._over + 1 if level >= 1.0 else 0
        return Signal(
            level=level if self._over >= 2 else min(level, 0.99),
            observed=mean,
            expected=lowest,
            since=since,
            explanation=f"training loss drifted up by {rise:+.4f} nats (means of {self.BLOCK} rows) since step {since}",
            **(self._pricing.cost(lowest, rise) if self._pricing is not None and level >= 1 else {}),
        )
