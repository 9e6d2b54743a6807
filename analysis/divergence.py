"""Watching a run: rows in, alerts out. `replay` is the same monitor fed from a finished table, and nothing
else.

Two families of verdicts stay apart: `run_change` says the run parted from its own past or from its ladder,
`forecast_miss` that the registered forecast and the run disagree. A declared event makes the first
re-baseline and leaves the second alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.alerts import Alert, Detector, Episode, Row, make_row, overall_state
from rungwise.analysis.detectors import EvalDrift, ForecastMiss, LossLevel, LossSpike, NonFinite
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.peers import Pinned, peer_detectors
from rungwise.analysis.vocabulary import EVENT_KINDS

__all__ = ["Alert", "Monitor", "overall_state", "replay"]

REBASELINE_KINDS: Final = frozenset(EVENT_KINDS) - {"note", "restart"}


class Monitor:
    """Judges one run row by row.

    Args:
        forecast: the registered forecast; its curves are the reference, its target the horizon.
        peers: rows of the ladder's other runs: run, step, tokens, metrics by name.
        events: declared changes, each with step and kind.
        vocab_size: of the model, for the loss of a uniform guess; None takes the forecast target's, if it has one.
    """

    def __init__(
        self,
        forecast: Forecast | None = None,
        *,
        peers: pd.DataFrame | None = None,
        events: Iterable[Mapping[str, Any]] = (),
        vocab_size: int | None = None,
    ):
        target = forecast.target if forecast else {}
        self._horizon = {"horizon_tokens": target.get("tokens"), "horizon_steps": target.get("steps")}
        detectors: list[Detector] = [NonFinite(), LossSpike(), LossLevel(forecast), EvalDrift()]
        if forecast is not None and forecast.curve:
            detectors.append(ForecastMiss(forecast))
        against = peer_detectors(peers) if peers is not None and len(peers) else []
        detectors += against
        vocab_size = vocab_size or target.get("vocab_size")
        if vocab_size and not any(detector.rule == "not_learning" for detector in against):
            detectors.append(Pinned(int(vocab_size)))
        self._episodes = [Episode(detector) for detector in detectors]
        self._events = sorted((dict(event) for event in events), key=lambda event: event["step"])
        self._history: dict[tuple[str, int], Alert] = {}
        self._last_step: int | None = None
        self.judged = False
        """Whether any loss was seen; without one the state is "cannot_judge"."""

    @property
    def alerts(self) -> list[Alert]:
        """Every alert raised so far in its latest state, in the order raised."""
        return list(self._history.values())

    @property
    def state(self) -> str:
        return overall_state(self.alerts, judged=self.judged)

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Declare a change while the run goes on."""
        self._events = sorted([*self._events, dict(event)], key=lambda item: item["step"])

    def update(self, row: Mapping[str, Any]) -> list[Alert]:
        """Judge one row (step, tokens, metrics by name); returns the alerts that it opened or changed."""
        current = make_row(row, **self._horizon)
        changed: list[Alert] = []
        if self._last_step is not None and current.step < self._last_step:
            for episode in self._episodes:
                episode.detector.rewind(current.step)
        while self._events and self._events[0]["step"] <= current.step:
            changed += self._apply(self._events.pop(0), current)
        for episode in self._episodes:
            alert = episode.observe(current)
            if alert is not None:
                changed.append(alert)
        self._last_step = current.step
        self.judged = self.judged or "train/loss" in current.values or "eval/loss" in current.values
        for alert in changed:
            self._history[alert.rule, alert.step] = alert
        return changed

    def extend(self, trajectory: Any) -> list[Alert]:
        """Judge a table of rows in order; returns every change, as `update` would have."""
        return [alert for row in trajectory_rows(trajectory) for alert in self.update(row)]

    def _apply(self, event: Mapping[str, Any], row: Row) -> list[Alert]:
        if event.get("kind") not in REBASELINE_KINDS:
            return []
        closed = []
        for episode in self._episodes:
            if episode.detector.family == "run_change" and episode.detector.rule != "not_learning":
                alert = episode.close(row.step, f"re-baselined at the declared {event['kind']} change")
                episode.detector.rebaseline(row.step)
                if alert is not None:
                    closed.append(alert)
        return closed


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
    """Rows with only what was logged.

    A `Trajectory` knows a logged NaN from a missing value. In a plain table a NaN `train/loss` counts as
    logged, except in a row that has an evaluation and no other training metric; any other NaN is missing.
    """
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
    for index in range(len(frame)):
        row: dict[str, Any] = {"step": int(steps[index])}
        for name in names:
            if present[name][index]:
                row[name] = float(columns[name][index])
        yield row


def _numeric(column: pd.Series) -> np.ndarray:
    """Floats; the words NaN and Infinity are understood, other text is missing."""
    return np.asarray(pd.to_numeric(column, errors="coerce"), dtype=float)
