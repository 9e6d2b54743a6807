"""One run under watch: its records go to the monitor, what that says to `alerts.jsonl`, to people and to the terminal.

Live, followed, judged once or replayed, a run goes through here, record by record as it was written, restarts included.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pandas as pd

from rungwise.analysis.alerts import Alert
from rungwise.analysis.detection.health_detectors import STARTUP_S
from rungwise.analysis.detection.metric_detectors import COMPARABLE
from rungwise.analysis.divergence import Monitor
from rungwise.analysis.reading.records import ALERTS_FILE, JOURNAL_FILE
from rungwise.analysis.reading.tail import FileTail, Tail
from rungwise.ladder.console import duration, log
from rungwise.ladder.predict import FamilyRuns
from rungwise.ladder.watching.alert_file import AlertFile
from rungwise.ladder.watching.delivery import Delivery
from rungwise.ladder.watching.watch_nowcast import LiveNowcast

_CHUNK: Final = 1000
SKEW_S: Final = 120.0
"""How far a run's clock may be from ours before it is said."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """A change of an alert, and when the run had written what it rests on."""

    alert: Alert
    time: float | None


class Watch:
    """Judges a run's records as they come.

    Args:
        name: of the run, as people read it.
        folder: where `alerts.jsonl` is read and written; None writes nothing.
        delivery: who else hears of it.
        nowcast: kept up with the records, for whoever asks.
    """

    def __init__(
        self,
        name: str,
        monitor: Monitor,
        tail: Tail,
        *,
        folder: Path | None = None,
        delivery: Delivery | None = None,
        nowcast: LiveNowcast | None = None,
        quiet: bool = False,
    ) -> None:
        self.name, self.monitor, self.step = name, monitor, 0
        self.nowcast = nowcast
        self.attempt: list[Mapping[str, Any]] = []
        """First and last record of the last attempt."""
        self.told: list[Told] = []
        """Every change so far, as it would have come."""
        self.num_records = 0
        self.num_successors = 0
        """Declared changes with a forecast that succeeds the one before."""
        self._tail, self._folder, self._delivery, self._quiet = tail, folder, delivery, quiet
        self._said = FileTail(folder / ALERTS_FILE) if folder is not None else None
        self._acknowledged: list[tuple[int, str]] = []
        self._fresh: list[Alert] = []
        self._state: str | None = None
        self._written = 0.0
        self._arrived = 0.0

    @property
    def ended(self) -> str | None:
        """How the last attempt ended: finished, failed or killed; None while it has not."""
        return self.attempt[-1]["state"] if self.attempt and self.attempt[-1]["kind"] == "end" else None

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """Judges one record, now; the journal, which has it already, says which attempt it is of."""
        self._listen()
        for record in self._tail.new_records():
            if record["kind"] != "metrics":
                self._take(record)
        attempt = self.attempt[0]["attempt"] if self.attempt else None
        self._take({"kind": "metrics", "step": step, "values": values, "time": time.time(), "attempt": attempt})
        self._settle()

    def catch_up(self) -> None:
        """Judges what was written since the last call."""
        records = iter(self._tail.new_records())
        while chunk := list(islice(records, _CHUNK)):
            self._listen()
            for record in chunk:
                self._take(record)
        if self.step or self.attempt:
            self._listen()
            self._apply_acknowledged(self.step)

    def tick(self, now: float) -> None:
        """Judges what only the clock tells, such as silence; a run that has finished may be silent.

        Seconds since a record count from when it came, so that a run's clock that is set wrong neither hides a silence
        nor makes one.
        """
        if not self.attempt:
            return
        on_its_clock = self._written + max(0.0, now - self._arrived)
        starting = len(self.attempt) == 2 and self.attempt[-1]["kind"] == "attempt"
        if not starting or self.step == 0 or on_its_clock - self._written >= STARTUP_S:
            self._note(self.monitor.tick(on_its_clock, ended=self.ended == "finished"), on_its_clock)

    def settle(self) -> None:
        """Writes the verdict where it changed, and hands on what people should hear."""
        if self.step or self.attempt:
            self._settle()

    def finish(self) -> None:
        """The first look is over: what earlier watches left open and is so no more gets its end."""
        if self._folder is not None and (self.step or self.attempt):
            dropped = AlertFile(self._folder).drop(self.monitor.alerts, self.step)
            self._fresh += dropped
            for alert in dropped:
                self._say(alert)
        self.settle()

    def lose(self, trouble: str) -> None:
        """The run is out of sight for good: people hear of it, since nobody says any longer how it is."""
        lost = Alert(
            rule="out_of_sight",
            metric="",
            family="fault",
            severity="critical",
            state="open",
            step=self.step,
            since=self.step,
            updated=self.step,
            observed=math.nan,
            expected=None,
            explanation=f"the watch has stopped: {trouble}",
        )
        if self._delivery is not None:
            self._delivery.tell([lost])

    def remarks(self) -> Iterator[str]:
        """What reading left out, and a clock that is set wrong."""
        for file, lines in self._tail.corrupt.items():
            places = ", ".join(map(str, lines[:5])) + (", …" if len(lines) > 5 else "")
            yield f"{file}: {len(lines)} corrupt line(s) left out (line {places})"
        if (ahead := self._written - time.time()) > SKEW_S:
            yield f"the clock of {self.name} is {duration(ahead)} ahead of this one"
        yield from self.monitor.marked
        for name in getattr(self._tail, "unmapped", ()):
            yield f"the run has no metric {name!r}, though one of ours is mapped to it"

    def _take(self, record: Mapping[str, Any]) -> None:
        if self.nowcast is not None:
            self.nowcast.take(record)
        if record["kind"] == "attempt":
            silent = self.monitor.tick(record["time"], ended=self.ended == "finished")
            self._note(silent, record["time"])
            self.attempt = [record]
        elif record["kind"] == "metrics":
            self._judge(record)
        first = self.attempt[:1] or [record]
        self.attempt = [*first, record]
        self._written = record["time"]
        self._arrived = self._arrival(record["time"])

    def _arrival(self, written: float) -> float:
        """When a record came to be readable here: now, or before this watch looked, when its file was last written."""
        journal = None if self._folder is None else self._folder / JOURNAL_FILE
        if journal is not None and journal.exists():
            return journal.stat().st_mtime
        return min(written, time.time()) if self._state is None else time.time()

    def _judge(self, record: Mapping[str, Any]) -> None:
        self._apply_acknowledged(record["step"] - 1)
        self.step = record["step"]
        self.num_records += 1
        row = {"step": record["step"], "attempt": record.get("attempt"), **record["values"]}
        if not self._is_resumed(record):
            row["time"] = record["time"]
        self._note(self.monitor.update(row), record["time"])

    def _is_resumed(self, record: Mapping[str, Any]) -> bool:
        """Whether this is the first record of a restart; the time before it went into loading and compiling."""
        start = self.attempt[0] if self.attempt else None
        if start is None or self.attempt[-1]["kind"] != "attempt":
            return False
        return self.num_records > 1 and record["time"] - start["time"] < STARTUP_S

    def _listen(self) -> None:
        """Changes declared and alerts acknowledged since the last call."""
        for event in self._tail.new_events():
            self.monitor.add_event(event)
            if self.nowcast is not None:
                self.nowcast.declare(event)
            self.num_successors += event.get("forecast") is not None
        for entry in self._said.new() if self._said is not None else ():
            if entry["kind"] == "acknowledgement":
                self._acknowledged.append((entry["step"], entry["rule"]))

    def _apply_acknowledged(self, step: int) -> None:
        """What was acknowledged up to a step, once everything up to it is judged."""
        due = [item for item in self._acknowledged if item[0] <= step]
        self._acknowledged = [item for item in self._acknowledged if item[0] > step]
        for _, rule in due:
            self._note(self.monitor.acknowledge(rule, self.step), None)

    def _note(self, changed: Iterable[Alert], at: float | None) -> None:
        changed = list(changed)
        self.told += [Told(alert=alert, time=at) for alert in changed]
        self._fresh += changed
        if changed and self._folder is not None:
            changed = AlertFile(self._folder).append(changed)
        for alert in changed:
            self._say(alert)

    def _say(self, alert: Alert) -> None:
        if not self._quiet:
            log(f"{self.name} {alert.severity} {alert.rule} {alert.state}: {alert.explanation}")

    def _settle(self) -> None:
        if self._folder is not None and self._state != self.monitor.state:
            AlertFile(self._folder).settle(self.monitor.state, self.step)
        self._state = self.monitor.state
        fresh, self._fresh = self._fresh, []
        if self._delivery is not None:
            self._delivery.tell(self._current(fresh))

    def _current(self, alerts: Iterable[Alert]) -> Iterator[Alert]:
        """With the count of what was held back up to now."""
        held = {(alert.rule, alert.metric, alert.step): alert.held_back for alert in self.monitor.alerts}
        for alert in alerts:
            yield replace(alert, held_back=held.get((alert.rule, alert.metric, alert.step), alert.held_back))


def build_monitor(runs: FamilyRuns, run: str, events: Iterable[Mapping[str, Any]] = ()) -> Monitor:
    """Judges the hero against forecast and finished rungs; a rung, against the finished rungs no larger than itself.

    Larger runs learn faster: held against them, a healthy small rung would seem not to learn at all.
    """
    plans = {record["name"]: record for record in (*runs.plan["rungs"], runs.plan["hero"])}
    largest = 1.001 * plans[run]["flops"] if run in plans else runs.record(run).plan["flops"]
    peers = [
        record.trajectory.frame.assign(run=record.run, **{name: record.plan.get(name) for name in COMPARABLE})
        for record in runs.rungs
        if record.run != run and record.state == "finished" and record.plan["flops"] <= largest
    ]
    return Monitor(
        runs.registered if run == runs.plan["hero"]["name"] and not mismatch(runs) else None,
        peers=pd.concat(peers, ignore_index=True) if peers else None,
        events=events,
        deadline=runs.plan.get("deadline") if run == runs.plan["hero"]["name"] else None,
    )


def mismatch(runs: FamilyRuns) -> str | None:
    """Why the registered forecast is not about this family's hero; None where it is, or there is none."""
    if runs.registered is None:
        return None
    hero = runs.plan["hero"]
    for name in ("hidden_dim", "num_layers", "num_params", "num_active_params"):
        promised = runs.registered.target.get(name)
        if promised is not None and name in hero and promised != hero[name]:
            return f"the registered forecast is for another model ({name} {promised:,}, here {hero[name]:,})"
    return None
