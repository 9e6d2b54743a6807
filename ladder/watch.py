"""Judging a run while it trains: records in, alerts in `alerts.jsonl`, a verdict in the exit code.

The detectors are `rungwise.analysis.divergence`; live and replayed verdicts come from the same monitor.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from rungwise.analysis.divergence import Alert, Monitor
from rungwise.analysis.records import ALERTS_FILE, JOURNAL_FILE, read_records
from rungwise.analysis.source import RunRecord
from rungwise.analysis.store import StoreError
from rungwise.analysis.tail import FolderTail, StoreTail, Tail
from rungwise.ladder.console import duration, log, one_line
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import FAMILY_FILE, family_folder, run_folder
from rungwise.ladder.journal import append_alert, append_verdict
from rungwise.ladder.predict import FamilyRuns, load_family_runs
from rungwise.ladder.status import STALE_AFTER, attempt_state

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


def load_watched(family: str, run: str, *, home: Path, tracking: str | None = None) -> FamilyRuns:
    """All that judging a run takes, read and checked; what goes wrong after this is no fault of the input.

    Raises:
        ValueError: unknown family or run, unreadable files, or a tracking server that does not answer.
    """
    runs = load_family_runs(family, home=home, tracking=tracking)
    planned = [record["name"] for record in (*runs.plan["rungs"], runs.plan["hero"])]
    if run not in planned and not _has_started(runs, run):
        raise ValueError(f"run {run!r} is not of family {runs.family}; its runs are {', '.join(planned)}")
    return runs


def judge_run(runs: FamilyRuns, run: str, *, home: Path) -> Verdict:
    """Judges everything a run has logged so far; where its folder is here, `alerts.jsonl` gets what is new."""
    verdict = judge_loaded(runs, run)
    folder = run_folder(home, runs.family, run)
    if folder.exists():
        file = AlertFile(folder)
        file.append(verdict.alerts)
        file.settle(verdict.state, verdict.step)
    return verdict


def judge_loaded(runs: FamilyRuns, run: str) -> Verdict:
    """The same without writing anything."""
    if not _has_started(runs, run):
        return Verdict(run=run, step=0, state="cannot_judge", alerts=(), remarks=(f"{run} has not started",))
    judged = runs.record(run)
    monitor = build_monitor(runs, run, events=judged.events)
    monitor.extend(judged.trajectory)
    step = int(judged.trajectory.frame["step"].to_numpy().max(initial=0))
    return _verdict(run, step, monitor, (*_remarks(runs, judged), *judged.notes))


def follow_run(
    runs: FamilyRuns,
    run: str,
    *,
    home: Path,
    tracking: str | None = None,
    every: float = 5.0,
    give_up: float = 600.0,
) -> Verdict:
    """Judges a run as it is written, from its folder or else from `tracking`, until it has finished.

    Waits for it to start, for as long as it takes. A run that stops unfinished, or a store that no longer
    answers, is said once and waited for; after `give_up` seconds the verdict is "cannot_judge", or the open alert.
    Each alert that opens or changes is one line on standard error and, for a run here, one record in `alerts.jsonl`.
    """
    folder = run_folder(home, runs.family, run)
    away = tracking if tracking and not (folder / JOURNAL_FILE).exists() else None
    tail = StoreTail(away, runs.family, run) if away else FolderTail(folder)
    watch = Watch(runs, run, tail, folder=None if away else folder)
    if not _has_started(runs, run):
        log(f"waiting for {run} to start")
    lost: float | None = None
    while True:
        state, trouble = _look(watch, folder)
        if state == "done":
            return _verdict(run, watch.step, watch.monitor, _remarks(runs, None))
        if trouble is None:
            if lost is not None:
                log(f"{run} goes on")
            lost = None
        elif lost is None:
            lost = time.monotonic()
            log(f"{trouble}; waiting for {duration(give_up)} at most")
        left = every if lost is None else lost + give_up - time.monotonic()
        if trouble and left <= 0:
            return _verdict(run, watch.step, watch.monitor, (*_remarks(runs, None), trouble), lost=True)
        time.sleep(min(every, left))


def _look(watch: "Watch", folder: Path) -> tuple[str, str | None]:
    """Judges what is new; returns the run's state, and what keeps it from going on."""
    try:
        watch.catch_up()
    except StoreError as error:
        return "unknown", str(error)
    state, reason = attempt_state(folder, watch.attempt, time.time())
    stopped = state in ("failed", "stale")
    because = f" ({reason})" if reason else ""
    return state, f"{watch.run} stopped at step {watch.step}, unfinished{because}" if stopped else None


def live_watch(config: RunConfig, *, home: Path) -> Callable[[int, dict[str, float]], None] | None:
    """What the training loop calls with each step's metrics, to judge the hero live; None for a rung.

    A failure of the watch itself is said once and ends the watch, never the training.
    """
    if config.role != "hero":
        return None
    runs = load_family_runs(str(family_folder(home, config.family) / FAMILY_FILE), home=home)
    folder = run_folder(home, config.family, config.run)
    watch = Watch(runs, config.run, FolderTail(folder), folder=folder)
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
            with suppress(OSError):
                append_verdict(folder, "cannot_judge", step)

    return observe


class Watch:
    """One run under watch: records go to the monitor, changed alerts to `alerts.jsonl` and standard error.

    Args:
        folder: of the run, where `alerts.jsonl` is written; None writes none.
    """

    def __init__(self, runs: FamilyRuns, run: str, tail: Tail, *, folder: Path | None) -> None:
        self.run, self.step = run, 0
        self.monitor = build_monitor(runs, run)
        self.attempt: list[Mapping[str, Any]] = []
        """First and last record of the last attempt."""
        self._tail, self._folder = tail, folder
        self._state: str | None = None

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """Judges one record."""
        self._judge(step, values)
        self._settle()

    def catch_up(self) -> None:
        """Judges what was written since the last call."""
        for record in self._tail.new_records():
            if record["kind"] == "attempt":
                self.attempt = [record]
            elif record["kind"] == "metrics":
                self._judge(record["step"], record["values"])
            self.attempt[1:] = [record]
        if self.step:
            self._settle()

    def _judge(self, step: int, values: Mapping[str, Any]) -> None:
        for event in self._tail.new_events():
            self.monitor.add_event(event)
        self.step = step
        changed = self.monitor.update({"step": step, **values})
        if changed and self._folder is not None:
            changed = AlertFile(self._folder).append(changed)
        for alert in changed:
            log(f"{self.run} {alert.severity} {alert.rule} {alert.state}: {alert.explanation}")

    def _settle(self) -> None:
        if self._folder is not None and self._state != self.monitor.state:
            self._state = self.monitor.state
            AlertFile(self._folder).settle(self._state, self.step)


def recorded_alerts(record: RunRecord) -> list[Mapping[str, Any]]:
    """The latest state of each alert the watch wrote while the run trained, in the order they were raised."""
    return list({_key(entry): entry for entry in record.alerts if entry["kind"] == "alert"}.values())


class AlertFile:
    """`alerts.jsonl` of a run: each state of an alert is written once, however often it is judged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        records = read_records(folder / ALERTS_FILE).records
        self._known = {_mark(entry) for entry in records if entry["kind"] == "alert"}
        self._states = [entry["state"] for entry in records if entry["kind"] == "verdict"]

    def append(self, alerts: Iterable[Alert]) -> list[Alert]:
        """Writes and returns those that are new."""
        fresh = []
        for alert in alerts:
            entry = alert.to_dict()
            if _mark(entry) not in self._known:
                self._known.add(_mark(entry))
                append_alert(self._folder, entry)
                fresh.append(alert)
        return fresh

    def settle(self, state: str, step: int) -> None:
        """Writes the verdict where it is another than the last; the mirror makes it a tag of the run."""
        if self._states[-1:] != [state]:
            self._states.append(state)
            append_verdict(self._folder, state, step)


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["rule"], entry["metric"], entry["step"]


def _mark(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return *_key(entry), entry["state"], entry["updated"]


def _has_started(runs: FamilyRuns, run: str) -> bool:
    return any(record.run == run for record in runs.records)


def build_monitor(runs: FamilyRuns, run: str, events: Iterable[Mapping[str, Any]] = ()) -> Monitor:
    """Judges the hero against forecast and finished rungs; a rung, against the finished rungs no larger than itself.

    Larger runs learn faster: held against them, a healthy small rung would seem not to learn at all.
    """
    plans = {record["name"]: record for record in (*runs.plan["rungs"], runs.plan["hero"])}
    largest = 1.001 * plans[run]["flops"] if run in plans else runs.record(run).plan["flops"]
    peers = [
        record.trajectory.frame.assign(run=record.run)
        for record in runs.rungs
        if record.run != run and record.state == "finished" and record.plan["flops"] <= largest
    ]
    return Monitor(
        runs.registered if run == runs.plan["hero"]["name"] else None,
        peers=pd.concat(peers, ignore_index=True) if peers else None,
        events=events,
    )


def _verdict(run: str, step: int, monitor: Monitor, remarks: Iterable[str], *, lost: bool = False) -> Verdict:
    """What the monitor says; of an unfinished run that is out of sight, that it cannot be judged."""
    state = "cannot_judge" if lost and monitor.state == "healthy" else monitor.state
    return Verdict(run=run, step=step, state=state, alerts=tuple(monitor.alerts), remarks=tuple(remarks))


def _remarks(runs: FamilyRuns, judged: RunRecord | None) -> Iterator[str]:
    """What the verdict lacks: a forecast, peers, the conditions the forecast was made under, a sign of life."""
    forecast = runs.registered
    if forecast is None:
        yield "no forecast is registered: judged against the run's own past and the finished rungs alone"
    if not any(record.state == "finished" for record in runs.rungs):
        yield "no rung has finished: judged without the ladder"
    if judged is not None and judged.attempts and judged.is_stale(now=time.time(), limit_s=STALE_AFTER):
        yield f"{judged.run} has not ended and has been silent for {duration(time.time() - judged.heartbeat)}"
    if forecast is None or judged is None or judged.role != "hero":
        return
    for name in forecast.conditions:  # a seed or a name may differ
        promised = forecast.target.get(name)
        actual = judged.plan.get(name, promised)
        if promised is not None and actual != promised:
            yield f"condition broken: the forecast is for {name} {promised}, the run has {actual}"
