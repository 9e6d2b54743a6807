"""Rules for what a run does not say: silence, a stall, a metric that stopped, lost throughput, a deadline out of reach.

Time is the records' own, Unix seconds in `Row.time`, and `Monitor.tick(now)` where no record comes: a row without
values at the step last seen. Limits are counted from the last record, so that a replay gives the alerts a live watch
gave.
"""

import math
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from rungwise.analysis.alerts import Detector, EveryRow, Row, Signal
from rungwise.analysis.detection.rolling import Level
from rungwise.analysis.events import Change

SILENCE_S: Final = 600.0
STARTUP_S: Final = 3600.0
"""Before the first step: compiling, and reading the first data, are no stall."""
SKEW_S: Final = 120.0
"""A record dated further than this after the watch's own clock makes silence unmeasurable."""
_CALM: Final = {"level": 0.0, "observed": 0.0, "expected": None, "explanation": ""}


class Silence(EveryRow):
    """No sign of life for too long, or life without a step.

    Silent: nothing was written for `limit_s`, or ten times the run's usual time between rows where that is longer.
    Stalled: rows or heartbeats come and the step stands still for as long. Before the first row `startup_s` holds, and
    a watch that has read nothing by then says so. A run that ended is not silent.
    Memory: times of the last row, step and heartbeat; the usual interval of 64 rows.
    """

    rule, family, metric, calm_rows = "silence", "fault", "time", 1
    USUAL: Final = 10.0

    def __init__(self, *, limit_s: float = SILENCE_S, startup_s: float = STARTUP_S):
        self._limit, self._startup = limit_s, startup_s
        self._interval = Level(64, prior=1.0)
        self._begun: float | None = None
        self._life: float | None = None
        self._moved: float | None = None
        self._step: int | None = None
        self._told = False
        self.ended = False

    def heartbeat(self, time: float) -> None:
        """A sign of life that is no row."""
        self._life = time if self._life is None else max(self._life, time)

    def observe(self, row: Row) -> Signal | None:
        if row.time is None:
            return None
        if not row.values:
            return self._tick(row)
        if self._life is not None and row.time > self._life:
            self._interval.add(row.step, math.log(row.time - self._life))
        self._life = row.time
        if row.step != self._step:
            self._step, self._moved = row.step, row.time
        alive = self._told and row.time - (self._moved or row.time) < self._limit_s
        if alive:
            self._told = False
            return Signal(since=row.step, **_CALM)
        return self._stalled(row)

    @property
    def _limit_s(self) -> float:
        usual = math.exp(self._interval.centre) if self._interval.count >= 3 else 0.0
        return max(self._limit, self.USUAL * usual)

    def _tick(self, row: Row) -> Signal | None:
        assert row.time is not None
        self._begun = row.time if self._begun is None else self._begun
        if self.ended or self._told:
            return None
        if self._step is None or self._life is None:
            if row.time - max(self._begun, self._life or 0.0) < self._startup:
                return None
            return self._tell(row, f"nothing was read of this run in {self._startup:g} s: it cannot be judged")
        if self._life - row.time > SKEW_S:
            return self._tell(row, "records are dated after this clock: silence cannot be measured, set the clocks")
        if row.time - self._life >= self._limit_s:
            usual = (
                f"a row usually takes {math.exp(self._interval.centre):.3g} s" if self._interval.count else "one row"
            )
            return self._tell(row, f"no record for {self._limit_s:g} s after step {self._step}; {usual}")
        return self._stalled(row)

    def _stalled(self, row: Row) -> Signal | None:
        if self._told or self._moved is None or row.time is None or row.time - self._moved < self._limit_s:
            return None
        return self._tell(row, f"stalled at step {self._step}: signs of life, and no step for {self._limit_s:g} s")

    def _tell(self, row: Row, explanation: str) -> Signal:
        self._told = True
        since = row.step if self._step is None else self._step
        return Signal(level=1.0, observed=self._limit_s, expected=None, since=since, explanation=explanation)

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None: ...

    def resolved(self) -> None: ...


class Missing(EveryRow):
    """A metric that came regularly and no longer does, while others go on.

    Opens when it has been absent for `STEPS` steps or three times its own longest gap, whichever is more. A change of
    transport, context or precision may end a metric: what comes after it is learned anew.
    Memory: last step and longest gap of each metric.
    """

    rule, family, calm_rows = "missing_metric", "fault", 1
    STEPS: Final = 50
    SEEN: Final = 3
    LOOK: Final = 8
    """Rows between two looks at what is absent."""

    def __init__(self) -> None:
        self.metric = "train/loss"
        self._known: dict[str, list[int]] = {}
        self._rows = 0
        self._lost: list[str] = []

    def observe(self, row: Row) -> Signal | None:
        if not row.values:
            return None
        known, step = self._known, row.step
        for name in row.values:
            if (seen := known.get(name)) is None:
                known[name] = [step, 0, 1]
            else:
                gap = step - seen[0]
                seen[0] = step
                seen[2] += 1
                if gap > seen[1]:
                    seen[1] = gap
        self._rows += 1
        if self._rows % self.LOOK and not self._lost:
            return None
        lost = [
            name for name, (last, gap, count) in known.items() if count >= self.SEEN and self._absent(step, last, gap)
        ]
        before, self._lost = self._lost, lost
        if not lost:
            return Signal(since=step, **_CALM) if before else None
        self.metric = lost[0]
        last, gap, _ = known[lost[0]]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return Signal(
            level=1.0 if len(lost) <= len(before) or not before else 1.6, observed=float(step - last),
            expected=float(gap), since=last,
            explanation=f"{lost[0]}{more} last came at step {last}, {step - last} steps ago; it used to come every "
            f"{gap} steps at most, and others go on",
        )  # fmt: skip

    def _absent(self, step: int, last: int, gap: int) -> bool:
        return step - last >= max(self.STEPS, 3 * gap)

    def declare(self, change: Change, step: int) -> None:
        if change.kind in ("transport", "context", "precision"):
            self._known.clear()

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        for seen in self._known.values():
            seen[0] = min(seen[0], step)

    def resolved(self) -> None:
        self._lost = []


class Throughput(EveryRow):
    """Tokens a second so far under what they were that it has cost time, and more than the run's own ups and downs do.

    Slow: median of the last 20 rows under `SHARE` of the level before them, and by `SIGMA` of its spreads. Opens when a
    slow spell has lost `LOST_S` seconds of work (`LOST_ROWS` rows where records carry no time): 15 % for 22 minutes, a
    half for 7; and twice what any spell before it lost and was over. The rate is the trainer's own, else tokens over
    time between rows.
    Memory: 20 rows, 512 rows of level before them, and the worst spell so far.
    """

    rule, metric, family, calm_rows = "throughput", "perf/tokens_per_second", "run_change", 20
    SHARE: Final = 0.85
    SIGMA: Final = 2.0
    LOST_S: Final = 200.0
    LOST_ROWS: Final = 10.0

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=20)
        self._level = Level(512, prior=0.1)
        self._last: tuple[float, float] | None = None
        self._before: Row | None = None
        self._since: int | None = None
        """Step at which the present slow spell began."""
        self._lost = self._worst = 0.0
        """Seconds or rows of work lost by the present spell, and by the worst that is over."""
        self._firing = False

    def observe(self, row: Row) -> Signal | None:
        passed = self._passed(row)
        rate = self._rate(row)
        if rate is None:
            return None
        if len(self._recent) == self._recent.maxlen and self._since is None:
            self._level.add(row.step, self._recent[0])
        self._recent.append(math.log(max(rate, 1e-9)))
        if self._level.count < 40:
            return None
        log = sorted(self._recent)[len(self._recent) // 2]
        now, usual = math.exp(log), math.exp(self._level.centre)
        if self._level.centre - log <= max(-math.log(self.SHARE), self.SIGMA * self._level.spread):
            self._worst, self._lost, self._since = max(self._worst, self._lost), 0.0, None
        else:
            self._since = row.step if self._since is None else self._since
            self._lost += (1.0 - now / usual) * passed
        limit = self.LOST_ROWS if row.time is None else self.LOST_S
        fires = self._since is not None and self._lost >= max(limit, 2.0 * self._worst)
        if not fires and not self._firing:
            return None
        self._firing = True
        since = row.step if self._since is None else self._since
        return Signal(
            level=(1.0 - now / usual) / (1.0 - self.SHARE) if fires else 0.0, observed=now, expected=usual, since=since,
            explanation=f"{now:.4g} tokens a second since step {since}, {1 - now / usual:.0%} under the usual "
            f"{usual:.4g}",
        )  # fmt: skip

    def _passed(self, row: Row) -> float:
        """Seconds since the row before, 1 where time is unknown; none across a restart, which is no slow row."""
        before, self._before = self._before, row
        if row.time is None:
            return 1.0
        if before is None or before.time is None or before.attempt != row.attempt:
            return 0.0
        return max(row.time - before.time, 0.0)

    def _rate(self, row: Row) -> float | None:
        rate = row.values.get(self.metric)
        last, self._last = self._last, None if row.time is None or row.tokens is None else (row.time, row.tokens)
        if rate is None and last and self._last and self._last[0] > last[0] and self._last[1] > last[1]:
            rate = (self._last[1] - last[1]) / (self._last[0] - last[0])
        return rate if rate is not None and math.isfinite(rate) else None

    def rebaseline(self, step: int) -> None:
        self._level.forget()
        self._recent.clear()
        self._lost, self._since = 0.0, None

    def rewind(self, step: int) -> None:
        self._last = None

    def resolved(self) -> None:
        self._firing = False


class ScheduleRisk(EveryRow):
    """A deadline that the run will not meet at the rate it really goes, stalls and restarts included.

    finish = now + (horizon − tokens) / rate, rate = tokens gained over the last quarter of the wall time so far. With
    it goes the token horizon that would fit.
    Memory: up to 256 (time, tokens) of the whole run, thinned evenly.

    Args:
        deadline: Unix seconds. tokens: the run's horizon.
    """

    rule, metric, family, calm_rows = "schedule_risk", "progress/tokens", "run_change", 20
    LEAST: Final = 0.01
    """Share of the run before which no rate is taken for the run's."""

    def __init__(self, deadline: float, tokens: float):
        self._deadline, self._horizon = deadline, tokens
        self._seen: list[tuple[float, float]] = []
        self._every, self._rows = 1, 0
        self._since: int | None = None

    def observe(self, row: Row) -> Signal | None:
        if row.time is None:
            return None
        if row.tokens is not None:
            self._keep(row.time, row.tokens)
        if len(self._seen) < 3 or self._seen[-1][1] - self._seen[0][1] < self.LEAST * self._horizon:
            return None
        began, now = self._seen[0][0], row.time
        start = next(seen for seen in reversed(self._seen) if seen[0] <= began + 0.75 * (now - began))
        rate = (self._seen[-1][1] - start[1]) / max(now - start[0], 1e-9)
        left = self._horizon - self._seen[-1][1]
        finish = now + left / rate if rate > 0 else math.inf
        fits = self._seen[-1][1] + rate * max(self._deadline - now, 0.0)
        late = finish > self._deadline and left > 0
        if not late and self._since is None:
            return None
        self._since = row.step if late and self._since is None else self._since
        return Signal(
            level=1.0 + (finish - self._deadline) / max(finish - began, 1.0) if late and rate > 0 else 2.0 * late,
            observed=finish, expected=self._deadline, since=self._since or row.step,
            explanation=f"at {rate:.4g} tokens a second, stalls and restarts included, the run ends {_date(finish)}, "
            f"{(finish - self._deadline) / 86400:.1f} days after its deadline {_date(self._deadline)}; until then "
            f"{fits:.4g} of {self._horizon:.4g} tokens fit",
        )  # fmt: skip

    def _keep(self, time: float, tokens: float) -> None:
        self._rows += 1
        if self._seen and self._rows % self._every:
            self._seen[-1] = (time, tokens) if len(self._seen) > 1 else self._seen[-1]
            return
        self._seen.append((time, tokens))
        if len(self._seen) > 256:
            del self._seen[1:-1:2]
            self._every *= 2

    def declare(self, change: Change, step: int) -> None: ...

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None: ...

    def resolved(self) -> None:
        self._since = None


def _date(time: float) -> str:
    if not math.isfinite(time):
        return "never"
    return f"on {datetime.fromtimestamp(time, tz=UTC):%Y-%m-%d %H:%M} UTC"


def health_detectors(
    *,
    deadline: float | None = None,
    tokens: float | None = None,
    silence_s: float = SILENCE_S,
    startup_s: float = STARTUP_S,
) -> Iterator[Detector]:
    """The rules about time and presence; the deadline's only where there is one, and a horizon."""
    yield Silence(limit_s=silence_s, startup_s=startup_s)
    yield Missing()
    yield Throughput()
    if deadline is not None and tokens:
        yield ScheduleRisk(deadline, tokens)
