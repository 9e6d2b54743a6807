"""Judging a run while it trains: records in, alerts in `alerts.jsonl`, a verdict in the exit code.

The detectors are `rungwise.analysis.divergence`; live and replayed verdicts come from the same monitor.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from rungwise.analysis.divergence import Alert, Monitor
from rungwise.analysis.records import ALERTS_FILE, EVENTS_FILE, JOURNAL_FILE, decode_record, read_records
from rungwise.analysis.source import RunRecord
from rungwise.ladder.console import log, one_line
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import family_folder, run_folder
from rungwise.ladder.journal import append_alert
from rungwise.ladder.predict import FamilyRuns, load_family_runs

EXIT_CODES: Final = {"healthy": 0, "cannot_judge": 3, "alert": 10}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the watch says of a run at a step; `remarks` tell what it could not judge, or judged with less."""

    run: str
    step: int
    state: str
    alerts: tuple[Alert, ...]
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The object `ladder watch --json` prints."""
        alerts = [alert.to_dict() for alert in self.alerts]
        return {
            "run": self.run,
            "step": self.step,
            "state": self.state,
            "alerts": alerts,
            "remarks": list(self.remarks),
        }


def judge_run(family: str, run: str, *, home: Path, tracking: str | None = None, record: bool = True) -> Verdict:
    """Judges everything a run has logged so far.

    Args:
        record: append what is new to the run's `alerts.jsonl`, where its folder is here.
    Raises:
        ValueError: unknown family or run, unreadable files, or a tracking server that does not answer.
    """
    runs = load_family_runs(family, home=home, tracking=tracking)
    verdict = judge_loaded(runs, run)
    folder = run_folder(home, runs.family, run)
    if record and folder.exists():
        AlertFile(folder).append(verdict.alerts)
    return verdict


def judge_loaded(runs: FamilyRuns, run: str) -> Verdict:
    """The same on runs already in memory; reads and writes nothing."""
    if not _has_started(runs, run):
        return Verdict(run=run, step=0, state="cannot_judge", alerts=(), remarks=(f"{run} has not started",))
    judged = runs.record(run)
    monitor = build_monitor(runs, run, events=judged.events)
    monitor.extend(judged.trajectory)
    remarks = (*_remarks(runs, judged), *judged.notes)
    step = int(judged.trajectory.frame["step"].to_numpy().max(initial=0))
    return _verdict(run, step, monitor, remarks)


def follow_run(family: str, run: str, *, home: Path, tracking: str | None = None, every: float = 5.0) -> Verdict:
    """Judges a run as it is written, until it ends; waits for it to start.

    Each alert that opens or changes is one line on standard error and one record in `alerts.jsonl`.

    Raises:
        ValueError: as `judge_run`; or `every` is not positive.
    """
    if every <= 0:
        raise ValueError(f"every = {every} must be positive: seconds between two looks at the journal")
    runs = load_family_runs(family, home=home, tracking=tracking)
    if not _has_started(runs, run):
        log(f"waiting for {run} to start")
    watch = Watch(runs, run, run_folder(home, runs.family, run))
    while not watch.catch_up():
        time.sleep(every)
    return _verdict(run, watch.step, watch.monitor, _remarks(runs, None))


def live_watch(config: RunConfig, *, home: Path) -> Callable[[int, dict[str, float]], None] | None:
    """What the training loop calls with each step's metrics, to judge the hero live; None for a rung.

    A failure of the watch itself is said once and ends the watch, never the training.
    """
    if config.role != "hero":
        return None
    runs = load_family_runs(str(family_folder(home, config.family) / "family.toml"), home=home)
    watch = Watch(runs, config.run, run_folder(home, config.family, config.run))
    watch.catch_up()
    failed = False

    def observe(step: int, values: dict[str, float]) -> None:
        nonlocal failed
        if failed:
            return
        try:
            watch.see(step, values)
        except Exception as error:  # the hero's steps are worth more than their verdicts
            failed = True
            log(f"watch of {config.run} ends at step {step}: {type(error).__name__}: {one_line(error)}")

    return observe


class Watch:
    """One run under watch: records go to the monitor, changed alerts to `alerts.jsonl` and standard error."""

    def __init__(self, runs: FamilyRuns, run: str, folder: Path) -> None:
        self.run, self.step = run, 0
        self.monitor = build_monitor(runs, run)
        self._folder = folder
        self._journal, self._events = _Tail(folder / JOURNAL_FILE), _Tail(folder / EVENTS_FILE)

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """Judges one record."""
        for event in self._events.new_records():
            self.monitor.add_event(event)
        self.step = step
        changed = self.monitor.update({"step": step, **values})
        for alert in AlertFile(self._folder).append(changed) if changed else ():
            log(f"{self.run} {alert.severity} {alert.rule} {alert.state}: {alert.explanation}")

    def catch_up(self) -> bool:
        """Judges what the journal holds since the last call; returns whether the run has ended."""
        ended = False
        for record in self._journal.new_records():
            ended = record["kind"] == "end"
            if record["kind"] == "metrics":
                self.see(record["step"], record["values"])
        return ended


def recorded_alerts(folder: Path) -> list[dict[str, Any]]:
    """The latest record of each alert in a run's `alerts.jsonl`, in the order they were raised."""
    latest = {_key(entry): entry for entry in read_records(folder / ALERTS_FILE).records}
    return list(latest.values())


class AlertFile:
    """`alerts.jsonl` of a run: each state of an alert is written once, however often it is judged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        records = read_records(folder / ALERTS_FILE).records
        self._known = {(_key(entry), entry["state"], entry["updated"]) for entry in records}

    def append(self, alerts: Iterable[Alert]) -> list[Alert]:
        """Writes and returns those that are new."""
        fresh = []
        for alert in alerts:
            entry = alert.to_dict()
            mark = (_key(entry), alert.state, alert.updated)
            if mark not in self._known:
                self._known.add(mark)
                append_alert(self._folder, entry)
                fresh.append(alert)
        return fresh


class _Tail:
    """The whole records appended to a journal since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new_records(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._offset += len(line)
                record = decode_record(line)
                if record is not None and record["kind"] != "header":
                    yield record


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["rule"], entry["metric"], entry["step"]


def _has_started(runs: FamilyRuns, run: str) -> bool:
    planned = [record["name"] for record in (*runs.plan["rungs"], runs.plan["hero"])]
    started = any(record.run == run for record in runs.records)
    if not started and run not in planned:
        raise ValueError(f"run {run!r} is not of family {runs.family}; its runs are {', '.join(planned)}")
    return started


def build_monitor(runs: FamilyRuns, run: str, events: Iterable[Mapping[str, Any]] = ()) -> Monitor:
    """Judges the hero against forecast and finished rungs; a rung, against the other finished rungs."""
    peers = [
        record.trajectory.frame.assign(run=record.run)
        for record in runs.rungs
        if record.run != run and record.state == "finished"
    ]
    return Monitor(
        runs.registered if run == runs.plan["hero"]["name"] else None,
        peers=pd.concat(peers, ignore_index=True) if peers else None,
        events=events,
    )


def _verdict(run: str, step: int, monitor: Monitor, remarks: Iterable[str]) -> Verdict:
    alerts = tuple(monitor.alerts)
    return Verdict(run=run, step=step, state=monitor.state, alerts=alerts, remarks=tuple(remarks))


def _remarks(runs: FamilyRuns, judged: RunRecord | None) -> Iterator[str]:
    """What the verdict lacks: a forecast, peers, or the conditions the forecast was made under."""
    forecast = runs.registered
    if forecast is None:
        yield "no forecast is registered: judged against the run's own past and the finished rungs alone"
    if not any(record.state == "finished" for record in runs.rungs):
        yield "no rung has finished: judged without the ladder"
    if forecast is None or judged is None or judged.role != "hero":
        return
    for name, promised in forecast.target.items():
        actual = judged.plan.get(name, promised)
        if actual != promised:
            yield f"condition broken: the forecast is for {name} {promised}, the run has {actual}"
