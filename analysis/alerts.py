"""What a verdict looks like, and the life of one alert: opened once, then worsening, recovering, resolved.

A detector looks at rows and returns a `Signal` (how bad, in units of its own threshold) or None where it
cannot judge; an `Episode` turns a detector's signals into one alert with hysteresis. Detectors are
`detectors.py` and `peers.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

from rungwise.analysis.vocabulary import SEVERITIES, decode_number

OPEN_STATES: Final = ("open", "worsening", "recovering")
"""States that ask for somebody's attention; an `acknowledged` alert has it already, a `resolved` one is over."""
WORSE: Final = 1.5
"""An open alert is announced as worsening when its level grows by this factor over the last announcement."""
RECOVERING: Final = 0.5
CLEAR: Final = 0.5
"""Level below which a row counts as calm; the level at which an alert opens is 1."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One finding about a run, in the words of `ladder watch --json`.

    family: "run_change" (the run parted from its own past or from its peers), "forecast_miss" (the registered
    forecast was wrong, the run may be fine) or "fault" (non-finite). step: where it was raised; since: where
    it began; updated: last change of state. cost: compute the excess loss is worth under the registered law,
    as a share of the run (None if unknown); cost_low, cost_high: the same over the floors the rungs allow.
    probability: chance of a healthy run showing this. carrier: the parameter group, subset or layer that
    carries it. event: the declared change that preceded it. precedent: how comparable situations in the
    ladder ended. held_back: rows that fired and were not announced.
    """

    rule: str
    metric: str
    family: str
    severity: str
    state: str
    step: int
    since: int
    updated: int
    observed: float
    expected: float | None
    explanation: str
    cost: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None
    probability: float | None = None
    carrier: str | None = None
    event: str | None = None
    precedent: str | None = None
    held_back: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Row(NamedTuple):
    """One row of a run: training step, position in the run, and the values logged at that step.

    time: Unix seconds of its record, attempt: the start of the run that wrote it; None where unknown.
    """

    step: int
    tokens: float | None
    progress: float | None
    values: Mapping[str, float]
    time: float | None = None
    attempt: int | None = None


class Signal(NamedTuple):
    """A detector's opinion of one row; `level` >= 1 fires."""

    level: float
    observed: float
    expected: float | None
    since: int
    explanation: str
    severity: str = "warning"
    cost: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None
    probability: float | None = None
    carrier: str | None = None
    event: str | None = None
    precedent: str | None = None


class Detector(Protocol):
    """One rule over one metric, fed a row at a time.

    It is shown the rows that have its metric; all of them where it is one of `EveryRow`.
    """

    rule: str
    metric: str
    family: str
    calm_rows: int
    """Calm rows after which its alert is resolved."""

    def observe(self, row: Row) -> Signal | None:
        """Judge a row; None where this rule has nothing to judge."""
        ...

    def rebaseline(self, step: int) -> None:
        """Forget the past: a declared change moved the level."""
        ...

    def rewind(self, step: int) -> None:
        """A restart repeats the run from `step`: forget what was seen there and later."""
        ...

    def resolved(self) -> None:
        """The alert was closed; watch again as if new."""
        ...


class EveryRow:
    """A detector that has something to say, or to remember, of rows without its metric too."""


class Episode:
    """The alert of one detector, through its life.

    open → worsening (the level grew by `WORSE`, or the severity rose) → recovering (calm rows, level under
    `RECOVERING` of the worst; a row that fires opens it again) → resolved (`calm_rows` rows under `CLEAR` running).
    acknowledged: somebody knows; it says no more until it worsens or is over.
    """

    def __init__(self, detector: Detector):
        self.detector = detector
        self.alert: Alert | None = None
        self.level: float | None = None
        """What the detector made of the last row, in units of its limit; None where it had nothing to judge."""
        self._announced = self._worst = 0.0
        self._calm = 0

    def observe(self, row: Row) -> Alert | None:
        """The alert where this row opened it or changed its state, else None."""
        signal = self.detector.observe(row)
        self.level = None if signal is None else signal.level
        if signal is None:
            return None
        if self.alert is None:
            return self._open(row, signal) if signal.level >= 1.0 else None
        return self._follow(row, signal)

    def close(self, step: int, reason: str) -> Alert | None:
        """Resolve an open alert from outside."""
        if self.alert is None:
            return None
        closed = replace(self.alert, state="resolved", updated=step, explanation=f"{self.alert.explanation}; {reason}")
        self.alert = None
        self.detector.resolved()
        return closed

    def acknowledge(self, step: int) -> Alert | None:
        """Somebody knows of the open alert; None where there is none, or it is acknowledged already."""
        if self.alert is None or self.alert.state == "acknowledged":
            return None
        self.alert = replace(self.alert, state="acknowledged", updated=step)
        return self.alert

    def _open(self, row: Row, signal: Signal) -> Alert:
        self._announced = self._worst = signal.level
        self._calm = 0
        self.alert = Alert(
            rule=self.detector.rule,
            metric=self.detector.metric,
            family=self.detector.family,
            state="open",
            step=row.step,
            updated=row.step,
            **{name: getattr(signal, name) for name in ("since", "severity", *_TOLD)},
        )
        return self.alert

    def _follow(self, row: Row, signal: Signal) -> Alert | None:
        assert self.alert is not None
        self._worst = max(self._worst, signal.level)
        self._calm = self._calm + 1 if signal.level < CLEAR else 0
        if signal.level >= 1.0:
            self.alert = replace(self.alert, held_back=self.alert.held_back + 1)
        if self._calm >= self.detector.calm_rows:
            closed = self.close(row.step, f"back within limits since step {row.step}")
            return closed and replace(closed, observed=signal.observed, expected=signal.expected)
        rises = SEVERITIES.index(signal.severity) > SEVERITIES.index(self.alert.severity)
        if signal.level >= WORSE * self._announced or (signal.level >= 1.0 and rises):
            self._announced = max(self._announced, signal.level)
            return self._worsen(row, signal, rises=rises)
        eased = signal.level < RECOVERING * self._worst and self._calm >= 3
        if self.alert.state in ("open", "worsening") and eased:
            return self._turn("recovering", row, signal)
        if self.alert.state == "recovering" and signal.level >= 1.0:
            return self._turn("open", row, signal)
        return None

    def _turn(self, state: str, row: Row, signal: Signal) -> Alert:
        assert self.alert is not None
        seen, expected = signal.observed, signal.expected
        self.alert = replace(self.alert, state=state, updated=row.step, observed=seen, expected=expected)
        return self.alert

    def _worsen(self, row: Row, signal: Signal, *, rises: bool) -> Alert:
        """Worse than announced; what the signal leaves out stays as it was said."""
        assert self.alert is not None
        told = {name: value for name in _TOLD if (value := getattr(signal, name)) is not None}
        severity = signal.severity if rises else self.alert.severity
        held_back = self.alert.held_back - 1  # this row is announced
        self.alert = replace(
            self.alert, state="worsening", severity=severity, updated=row.step, **told | {"held_back": held_back}
        )
        return self.alert


_TOLD: Final = ("observed", "expected", "explanation", "cost", "cost_low", "cost_high", "probability", "carrier",
                "event", "precedent")  # fmt: skip
"""What an alert takes over from the signal that opened or worsened it."""


def overall_state(alerts: Iterable[Alert], *, judged: bool = True) -> str:
    """One word for `ladder watch`: "alert" with an open warning or worse, "cannot_judge" where nothing was
    read, else "healthy".

    Args:
        judged: whether any detector could judge anything; silence is not health.
    """
    if any(alert.state in OPEN_STATES and alert.severity != "info" for alert in alerts):
        return "alert"
    return "healthy" if judged else "cannot_judge"


_PLACE: Final = frozenset(("step", "tokens", "time", "attempt"))
"""What a row says of itself rather than of the run."""


def make_row(values: Mapping[str, Any], *, horizon_tokens: float | None, horizon_steps: float | None) -> Row:
    """A row from plain values: words for non-finite numbers are understood, None and text are left out.

    Progress is tokens over the horizon, else the trainer's own fraction, else steps over the horizon, else
    unknown.
    """
    numbers = {}
    for name, value in values.items():
        if name in _PLACE or value is None:
            continue
        try:
            numbers[name] = value if type(value) is float else decode_number(value)
        except (TypeError, ValueError):
            continue
    step = int(values["step"])
    tokens = values.get("tokens", numbers.get("progress/tokens"))
    tokens = None if tokens is None or tokens != tokens else float(tokens)
    progress = numbers.get("progress/fraction")
    if tokens is not None and horizon_tokens:
        progress = tokens / horizon_tokens
    elif progress is None and horizon_steps:
        progress = step / horizon_steps
    time, attempt = values.get("time"), values.get("attempt")
    return Row(
        step=step,
        tokens=tokens,
        progress=progress,
        values=numbers,
        time=None if time is None or time != time else float(time),
        attempt=None if attempt is None else int(attempt),
    )
