"""Watching a run: rows in, alerts out. `replay` is the same monitor fed from a finished table, and nothing
else.

Two families of verdicts stay apart: `run_change` says the run parted from its own past or from its ladder,
`forecast_miss` that the registered forecast and the run disagree. A declared event makes the first
re-baseline and leaves the second alone.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.alerts import Alert, Detector, Episode, EveryRow, Row, make_row, overall_state
from rungwise.analysis.detection.change_detectors import UndeclaredChange, change_detectors
from rungwise.analysis.detection.detectors import Basis, Builder, loss_detectors
from rungwise.analysis.detection.explain import Explainer
from rungwise.analysis.detection.health_detectors import SILENCE_S, Silence, health_detectors
from rungwise.analysis.detection.metric_detectors import comparable_drops, metric_detectors
from rungwise.analysis.detection.peers import AgainstPeers, peer_detectors
from rungwise.analysis.detection.skipped import without_left_out
from rungwise.analysis.detection.units import Units
from rungwise.analysis.events import Change, Informed, place_of_renewal
from rungwise.analysis.forecast import Forecast

__all__ = ["Alert", "Monitor", "overall_state", "replay"]

BUILDERS: Final[tuple[Builder, ...]] = (loss_detectors, peer_detectors, metric_detectors, change_detectors)
"""What makes a run's detectors out of its `Basis`, in the order they judge a row."""

HOLE_ROWS: Final = 10
"""Where the next row is so many usual spacings away, rows are missing."""
HOLE_SPAN: Final = 0.1
"""Log steps without rows after which all is judged anew: a tenth of what the run had done."""
SPACINGS: Final = 16
"""Rows that tell the usual spacing."""
LAYOUTS: Final = 64
"""Sets of names in a row for which it is remembered who judges them."""


class Monitor:
    """Judges one run row by row.

    Args:
        forecast: the registered forecast; its curves are the reference, its target the horizon.
        peers: rows of the ladder's other runs: run, step, tokens, metrics by name.
        events: declared changes, each with step and kind.
        vocab_size: of the model, for the loss of a uniform guess; None takes the forecast target's, if it has one.
        deadline: Unix seconds by which the run is to end; None takes the forecast target's, if it has one.
        silence_s: seconds without a record after which a run counts as silent.
    """

    def __init__(
        self,
        forecast: Forecast | None = None,
        *,
        peers: pd.DataFrame | None = None,
        events: Iterable[Mapping[str, Any]] = (),
        vocab_size: int | None = None,
        deadline: float | None = None,
        silence_s: float = SILENCE_S,
    ):
        target = forecast.target if forecast else {}
        self._horizon = {"horizon_tokens": target.get("tokens"), "horizon_steps": target.get("steps")}
        peers = None if peers is None else comparable_drops(peers, target)
        basis = Basis(forecast=forecast, peers=peers, vocab_size=vocab_size or target.get("vocab_size"))
        detectors: list[Detector] = [detector for build in BUILDERS for detector in build(basis)]
        deadline = deadline or target.get("deadline")
        detectors += health_detectors(deadline=deadline, tokens=target.get("tokens"), silence_s=silence_s)
        self._units = Units()
        self._episodes = [Episode(detector) for detector in [*detectors, self._units]]
        self._shown: dict[tuple[str, ...], list[Episode]] = {}
        self._explainer = Explainer(peers, replay=replay)
        self._marked: dict[Episode, Change] = {}
        self._time: float | None = None
        self._events = sorted((dict(event) for event in events), key=lambda event: event["step"])
        renewal = -1 if forecast is None else place_of_renewal(self._events, forecast.hash)
        self._renewal = None if renewal < 0 else self._events[renewal]
        self._later = {each for each in self._episodes if renewal >= 0 and each.detector.family == "forecast_miss"}
        """Rules about a forecast that an event on the way registered: they begin there."""
        self._history: dict[tuple[str, str, int], Alert] = {}
        self._last_step: int | None = None
        self._spacings: deque[int] = deque(maxlen=SPACINGS)
        self._attempt: int | None = None
        self.judged = False
        """Whether any loss was seen; without one the state is "cannot_judge"."""

    @property
    def alerts(self) -> list[Alert]:
        """Every alert raised so far in its latest state, in the order raised."""
        now = [episode.alert for episode in self._episodes if episode.alert is not None]
        return list((self._history | {_key(alert): alert for alert in now}).values())

    @property
    def state(self) -> str:
        return overall_state(self.alerts, judged=self.judged)

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Declare a change while the run goes on."""
        self._events = sorted([*self._events, dict(event)], key=lambda item: item["step"])

    def update(self, row: Mapping[str, Any]) -> list[Alert]:
        """Judge one row (step, tokens, metrics by name); returns the alerts that it opened or changed."""
        current = self._units.convert(without_left_out(make_row(row, **self._horizon)))
        changed = self._pass_time(current)
        if self._is_rewind(current):
            for episode in self._episodes:
                episode.detector.rewind(current.step)
        elif (missing := self._missing(current)) > 0.0:
            self._forget(current.step, everything=missing > HOLE_SPAN)
        while self._events and self._events[0]["step"] <= current.step:
            changed += self._apply(self._events.pop(0), current)
        self._explainer.observe(current)
        for episode in self._concerned(current):
            if episode in self._marked or episode in self._later:
                continue
            alert = episode.observe(current)
            if alert is None:
                continue
            if alert.step == alert.updated and self._is_told(episode, alert):
                episode.alert = None
            else:
                changed.append(self._explained(episode, alert, current))
        self._last_step, self._attempt = current.step, current.attempt
        self.judged = self.judged or "train/loss" in current.values or "eval/loss" in current.values
        return self._keep(changed)

    def tick(self, now: float, *, heartbeat: float | None = None, ended: bool = False) -> list[Alert]:
        """Judge that time has passed without a row; returns the alerts that this opened or changed.

        Args:
            now: Unix seconds of this watch's clock.
            heartbeat: Unix seconds of the run's last sign of life that is no row.
            ended: whether the run is known to have ended, and so may be silent.
        """
        changed = []
        row = Row(step=self._last_step or 0, tokens=None, progress=None, values={}, time=now)
        for episode in self._episodes:
            if isinstance(silence := episode.detector, Silence):
                silence.ended = ended
                if heartbeat is not None:
                    silence.heartbeat(heartbeat)
                if (alert := episode.observe(row)) is not None:
                    changed.append(self._explained(episode, alert, row))
        return self._keep(changed)

    @property
    def marked(self) -> list[str]:
        """Comparisons with forecast and rungs that a declared change ended, and are no longer made; a sentence each."""
        return sorted(
            {
                f"{episode.detector.metric} is no longer compared with forecast and rungs after {change}"
                for episode, change in self._marked.items()
            }
        )

    def acknowledge(self, rule: str, step: int) -> list[Alert]:
        """Somebody knows of a rule's open alerts; returns those this changed."""
        mine = [episode for episode in self._episodes if episode.detector.rule == rule]
        return self._keep([alert for episode in mine if (alert := episode.acknowledge(step)) is not None])

    def extend(self, trajectory: Any) -> list[Alert]:
        """Judge a table of rows in order; returns every change, as `update` would have."""
        return [alert for row in trajectory_rows(trajectory) for alert in self.update(row)]

    def _keep(self, changed: list[Alert]) -> list[Alert]:
        for alert in changed:
            self._history[_key(alert)] = alert
        return changed

    def _concerned(self, row: Row) -> list[Episode]:
        """Those that a row is shown to, by the names it has; rows of a run have few sets of them."""
        names = tuple(row.values)
        found = self._shown.get(names)
        if found is None:
            if len(self._shown) >= LAYOUTS:
                self._shown.clear()
            found = self._shown[names] = [
                episode
                for episode in self._episodes
                if isinstance(episode.detector, EveryRow) or episode.detector.metric in row.values
            ]
        return found

    def _is_rewind(self, row: Row) -> bool:
        """Whether a row repeats steps: an earlier one than the last, or the last one in another attempt."""
        if self._last_step is None or row.step > self._last_step:
            return False
        return row.step < self._last_step or (row.attempt is not None and row.attempt != self._attempt)

    def _forget(self, step: int, *, everything: bool) -> None:
        """After a hole neighbouring rows tell no step, and after a long one what the run was like tells nothing."""
        for episode in self._episodes:
            detector = episode.detector
            concerned = detector.family == "run_change" if everything else isinstance(detector, UndeclaredChange)
            if concerned and episode.alert is None:
                detector.rebaseline(step)

    def _missing(self, row: Row) -> float:
        """How much of the run, in log step, has no rows before this one; 0 where rows come as they usually do."""
        last = self._last_step
        if last is None or row.step <= last:
            return 0.0
        spacing, spacings = row.step - last, self._spacings
        known = len(spacings) == SPACINGS
        hole = known and spacing > HOLE_ROWS * min(spacings)  # so that the median is asked for rarely
        if hole and spacing > HOLE_ROWS * float(np.median(spacings)):
            return math.log((row.step + 1) / (last + 1))
        spacings.append(spacing)
        return 0.0

    def _is_told(self, mine: Episode, alert: Alert) -> bool:
        """Whether another rule's open alert speaks of the same subject: the first to speak speaks for it."""
        about = _subject(alert.metric)
        open_ones = [episode.alert for episode in self._episodes if episode is not mine and episode.alert is not None]
        return about is not None and any(
            _subject(other.metric) == about and other.family == alert.family for other in open_ones
        )

    def _pass_time(self, row: Row) -> list[Alert]:
        """What a live watch would have said before this row came."""
        before, self._time = self._time, row.time
        return [] if before is None or row.time is None or row.time <= before else self.tick(row.time)

    def _explained(self, episode: Episode, alert: Alert, row: Row) -> Alert:
        stepped = getattr(episode.detector, "stepped", ())
        for other in self._episodes:  # the step is told; what follows is judged by the new level
            if other.alert is None and other.detector.metric in stepped and other is not episode:
                other.detector.rebaseline(row.step)
        explained = self._explainer.explain(alert, row)
        if episode.alert is not None:
            episode.alert = explained
        return explained

    def _apply(self, event: Mapping[str, Any], row: Row) -> list[Alert]:
        change = Change.of(event)
        self._explainer.declare(change)
        closed = []
        for episode in self._episodes:
            detector = episode.detector
            if episode in self._later and change.kind == "schedule":
                continue
            if isinstance(detector, Informed):
                detector.declare(change, row.step)
            elif _compares(detector) and change.breaks(detector.metric):
                self._marked[episode] = change
                closed.append(episode.close(row.step, f"no longer comparable after {change}"))
            elif detector.family == "run_change" and detector.rule != "not_learning" and change.moves(detector.metric):
                closed.append(episode.close(row.step, f"re-baselined at the declared {change.kind} change"))
                detector.rebaseline(row.step)
        if event is self._renewal:
            self._later.clear()
        return [alert for alert in closed if alert is not None]


def replay(
    trajectory: Any,
    forecast: Forecast | None = None,
    *,
    peers: pd.DataFrame | None = None,
    events: Sequence[Mapping[str, Any]] = (),
    vocab_size: int | None = None,
) -> list[Alert]:
    """Every alert a live monitor would have raised over `trajectory`, each with its step and its latest
    state.

    Args:
        trajectory: columns step, tokens and metrics by name; a table or a `Trajectory`.
    """
    monitor = Monitor(forecast, peers=peers, events=events, vocab_size=vocab_size)
    monitor.extend(trajectory)
    return monitor.alerts


def trajectory_rows(trajectory: Any) -> Iterator[dict[str, Any]]:
    """Rows with only what was logged, in the order written: what an earlier attempt wrote before a later one took it
    back comes first, as it came to a live watch.

    A `Trajectory` knows a logged NaN from a missing value. In a plain table a NaN `train/loss` counts as
    logged, except in a row that has an evaluation and no other training metric; any other NaN is missing.
    """
    taken_back = _taken_back(trajectory)
    if not taken_back:
        yield from _canonical_rows(trajectory)
        return
    yield from sorted([*taken_back, *_canonical_rows(trajectory)], key=lambda row: (row.get("attempt", 0), row["step"]))


def _taken_back(trajectory: Any) -> list[dict[str, Any]]:
    """Rows of attempts that a later one superseded at the same step."""
    table = getattr(trajectory, "superseded", None)
    if table is None or table.empty:
        return []
    latest = dict(zip(trajectory.frame["step"], trajectory.frame["attempt"], strict=True))
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for attempt, step, time, metric, value in table.itertuples(index=False):
        if latest.get(step, attempt) > attempt:
            start = {"step": int(step), "time": float(time), "attempt": float(attempt)}
            rows.setdefault((int(attempt), int(step)), start)[metric] = float(value)
    return list(rows.values())


def _canonical_rows(trajectory: Any) -> Iterator[dict[str, Any]]:
    frame = getattr(trajectory, "frame", trajectory)
    names = [str(name) for name in frame.columns if name not in ("step", "time", "attempt", "run")]
    columns = {name: _numeric(frame[name]) for name in names}
    logged = getattr(trajectory, "logged", None)
    present = {
        name: np.asarray(logged(name), dtype=bool) if callable(logged) and name != "tokens" else ~np.isnan(values)
        for name, values in columns.items()
    }
    if not callable(logged) and "train/loss" in columns:
        none = np.zeros(len(frame), dtype=bool)
        training = [present[name] for name in names if name.startswith("train/") and name != "train/loss"]
        evaluated = [present[name] for name in names if name.startswith("eval")]
        only_evaluated = np.any([none, *evaluated], axis=0) & ~np.any([none, *training], axis=0)
        present["train/loss"] = present["train/loss"] | ~only_evaluated
    steps = frame["step"].to_numpy()
    whole = {name: _numeric(frame[name]) for name in ("time", "attempt") if name in frame.columns}
    for index in range(len(frame)):
        row: dict[str, Any] = {"step": int(steps[index])}
        row |= {name: float(values[index]) for name, values in whole.items() if math.isfinite(values[index])}
        for name in names:
            if present[name][index]:
                row[name] = float(columns[name][index])
        yield row


def _compares(detector: Detector) -> bool:
    """Whether a rule holds the run against forecast or rungs rather than its own past."""
    return detector.family == "forecast_miss" or isinstance(detector, AgainstPeers)


def _subject(metric: str) -> str | None:
    """What several rules on several metrics may all speak of; None where each rule speaks for itself."""
    return next((subject for subject in ("drop", "grad_norm", "router_bias", "load_max") if subject in metric), None)


def _key(alert: Alert) -> tuple[str, str, int]:
    return alert.rule, alert.metric, alert.step


def _numeric(column: pd.Series) -> np.ndarray:
    """Floats; the words NaN and Infinity are understood, other text is missing."""
    return np.asarray(pd.to_numeric(column, errors="coerce"), dtype=float)
