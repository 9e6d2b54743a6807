"""Rules for drops, the router and whatever else is logged beside the losses.

Rises are `norm_detectors.py`, settings that step `change_detectors.py`; here is the rest, and what makes all of them.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pandas as pd

from rungwise.analysis.alerts import Detector, EveryRow, Row, Signal
from rungwise.analysis.detection.detectors import Basis
from rungwise.analysis.detection.norm_detectors import GROUP_PREFIX, Burst, HiddenRise, Rise, is_early
from rungwise.analysis.detection.reference import Reference
from rungwise.analysis.detection.skipped import SkippedUpdates
from rungwise.analysis.detection.weights import WeightsAltered
from rungwise.analysis.forecast import Forecast

COMPARABLE: Final = ("transport", "tokens_per_rank", "sender_capacity_factor", "receiver_capacity_factor")
"""Settings that must agree before one run's drops say anything about another's."""


class CurveMiss:
    """A metric outside its registered band, at equal progress: a verdict on that forecast, not on the run.

    Median of the last `ROWS` rows against the band widened by `WIDER`, to hold all of the curve, in logs of value +
    `floor`, every `EVERY` rows; opens at the second look outside. Information, but a warning where drops lie above it.
    Memory: `ROWS` rows.
    """

    family, calm_rows = "forecast_miss", 3
    ROWS: Final = 24
    EVERY: Final = 8
    WIDER: Final = 1.5

    def __init__(self, forecast: Forecast, metric: str, *, floor: float = 0.0, severity: str = "info"):
        self.metric, self.rule = metric, f"{metric.rpartition('/')[2]}_forecast"
        self._curve, self._floor, self._severity = Reference.of(forecast, metric), floor, severity
        self._recent: deque[tuple[float, float]] = deque(maxlen=self.ROWS)
        self._rows = self._outside = self._since = 0

    def observe(self, row: Row) -> Signal | None:
        value = row.values.get(self.metric)
        if value is None or not 0.0 < value + self._floor < math.inf or row.progress is None or self._curve is None:
            return None
        self._recent.append((value, row.progress))
        self._rows += 1
        if self._rows % self.EVERY or len(self._recent) < self.ROWS:
            return None
        now = sorted(value for value, _ in self._recent)[self.ROWS // 2]
        registered = self._curve.at(self._recent[self.ROWS // 2][1])
        if registered is None:
            return None
        log, middle = math.log(now + self._floor), math.log(registered.loss + self._floor)
        edge = math.log(max((registered.high if log > middle else registered.low) + self._floor, 1e-12))
        level = abs(log - middle) / max(self.WIDER * abs(edge - middle), 1e-9)
        self._outside = self._outside + 1 if level >= 1.0 else 0
        self._since = row.step if self._outside == 1 else self._since
        side = "above" if log > middle else "below"
        return Signal(
            level=level if self._outside > 1 else min(level, 0.99) if level > 1.0 else 0.49 * level,
            observed=now, expected=registered.loss, since=self._since,
            severity=self._severity if log > middle else "info",
            explanation=f"{self.metric} {now:.4g} lies {side} its registered [{registered.low:.4g}, "
            f"{registered.high:.4g}] at {row.progress:.0%} of the run, {registered.loss:.4g} forecast",
        )  # fmt: skip

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        self._recent.clear()

    def resolved(self) -> None:
        self._outside = 0


class NotFinite(EveryRow):
    """NaN or infinity in any metric but the losses (`NonFinite` has those). Opens at once.

    A NaN routing figure or a NaN in a step without counted tokens is no data (0/0), and infinity is not.
    Memory: none but which metric it was.
    """

    rule, family, calm_rows = "nonfinite_metric", "fault", 20
    LOSSES: Final = frozenset(("train/loss", "train/objective", "eval/loss", "train/nonfinite"))

    def __init__(self) -> None:
        self.metric = "train/grad_norm"
        self._since: int | None = None

    def observe(self, row: Row) -> Signal | None:
        bad = [
            name for name, value in row.values.items() if not -math.inf < value < math.inf and self._counts(row, name)
        ]
        if not bad:
            quiet = self._since is None
            return None if quiet else Signal(level=0.0, observed=0.0, expected=None, since=row.step, explanation="")
        self._since = row.step if self._since is None else self._since
        self.metric = bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        gradient = any(name.startswith(("train/grad_norm", GROUP_PREFIX)) for name in bad)
        return Signal(
            level=1.0, observed=row.values[bad[0]], expected=None, since=self._since,
            severity="critical" if gradient else "warning",
            explanation=f"{bad[0]}{more} is {row.values[bad[0]]} at step {row.step}",
        )  # fmt: skip

    def _counts(self, row: Row, name: str) -> bool:
        if name in self.LOSSES or name.startswith("eval"):
            return False
        empty = row.values.get("train/counted_tokens") == 0.0 or name.startswith(("moe/", "moe_worst_layer/"))
        return not (empty and math.isnan(row.values[name]))

    def rebaseline(self, step: int) -> None: ...
    def rewind(self, step: int) -> None: ...

    def resolved(self) -> None:
        self._since = None


class Frozen:
    """A value that always changed and now repeats exactly: a bias that is no longer updated, a number logged twice.

    Opens after `ROWS` equal rows, where at least nine in ten of the rows before differed from their predecessor.
    Memory: two counts and the last value.
    """

    rule, family, calm_rows = "frozen", "run_change", 3
    ROWS: Final = 40

    def __init__(self, metric: str):
        self.metric = metric
        self._value = math.nan
        self._moved = self._rows = self._same = 0
        self._since = 0

    def observe(self, row: Row) -> Signal | None:
        value = row.values.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        fired = self._same >= self.ROWS
        if value == self._value:
            self._same += 1
        else:
            self._rows += 1 + self._same
            self._moved += 1
            self._value, self._same, self._since = value, 0, row.step
        fires = self._same >= self.ROWS and self._moved > max(0.9 * self._rows, self.ROWS)
        if not fires and not fired:
            return None
        return Signal(
            level=self._same / self.ROWS if fires else 0.0, observed=value, expected=None, since=self._since,
            explanation=f"{self.metric} has been exactly {value:.6g} for {self._same} rows; it used to change",
        )  # fmt: skip

    def rebaseline(self, step: int) -> None:
        self._moved = self._rows = self._same = 0

    def rewind(self, step: int) -> None:
        self._value, self._same = math.nan, 0

    def resolved(self) -> None: ...


class DeadExperts:
    """Experts that no token chooses, where all were chosen before: a median of one or more over `ROWS` rows.

    Memory: `ROWS` rows, and the least such median so far.
    """

    rule, family, calm_rows = "dead_experts", "run_change", 20
    ROWS: Final = 15

    def __init__(self, metric: str = "moe_worst_layer/dead_experts"):
        self.metric = metric
        self._recent: deque[float] = deque(maxlen=self.ROWS)
        self._least = math.inf
        self._since: int | None = None

    def observe(self, row: Row) -> Signal | None:
        value = row.values.get(self.metric)
        if value is None or not math.isfinite(value) or is_early(row):
            return None
        self._recent.append(value)
        if len(self._recent) < self.ROWS:
            return None
        now = sorted(self._recent)[self.ROWS // 2]
        self._least = min(self._least, now)
        level = now - self._least
        if level < 1.0 and self._since is None:
            return None
        self._since = row.step if self._since is None else self._since
        return Signal(
            level=level, observed=now, expected=self._least, since=self._since,
            explanation=f"{now:g} experts of the worst layer are chosen by no token, over {self.ROWS} rows; it was "
            f"{self._least:g} at best",
        )  # fmt: skip

    def rebaseline(self, step: int) -> None:
        self._recent.clear()
        self._least = math.inf

    def rewind(self, step: int) -> None:
        self._recent.clear()

    def resolved(self) -> None:
        self._since = None


def metric_detectors(basis: Basis) -> Iterator[Detector]:
    """The rules for every metric that is not a loss."""
    peers = basis.peers
    yield NotFinite()
    yield SkippedUpdates()
    yield WeightsAltered()
    yield Burst("train/grad_norm", "grad_norm")
    yield Rise("train/grad_norm", "grad_norm_rise", peers=peers)
    yield HiddenRise("train/grad_norm", peers=peers)
    for name in ("drop_fraction", "sender_drop_fraction", "receiver_drop_fraction"):
        yield Rise(f"moe/{name}", f"{name}_rise", peers=peers, floor=0.005, gap=0.2, rise=0.5)
    yield Rise("moe/expert_load_max_over_mean", "expert_load_rise", peers=peers, gap=0.15, rise=0.3)
    yield Rise("moe/rank_load_max_over_mean", "rank_load_rise", peers=peers, gap=0.1, rise=0.2)
    yield Rise("moe/router_entropy", "router_entropy_fall", peers=peers, falls=True, gap=0.05, rise=0.1)
    yield Rise("moe/frequency_deviation", "imbalance_rise", peers=peers, gap=0.3, rise=0.6)
    yield Rise("moe/router_bias_abs_max", "router_bias_rise", peers=peers, gap=0.3, rise=0.7)
    yield DeadExperts()
    if basis.forecast is not None:
        yield CurveMiss(basis.forecast, "train/grad_norm")
        yield CurveMiss(basis.forecast, "moe/drop_fraction", floor=0.005, severity="warning")
    for metric in ("moe/router_bias_abs_max", "train/grad_norm", "train/loss"):
        yield Frozen(metric)


def comparable_drops(peers: pd.DataFrame, target: Mapping[str, object]) -> pd.DataFrame:
    """The peers without the drops of those whose transport, tokens per rank or capacity is not the target's.

    A setting counts where the peers' table has it as a column and the target states it.
    """
    known = [name for name in COMPARABLE if name in peers.columns and target.get(name) is not None]
    other = np.any([peers[name].to_numpy() != target[name] for name in known], axis=0) if known else np.False_
    drops = [name for name in peers.columns if "drop" in str(name) or "tokens_lost" in str(name)]
    return peers if not np.any(other) else peers.assign(**{str(name): peers[name].mask(other) for name in drops})
