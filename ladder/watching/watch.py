"""Judging a family's run while it trains: once, followed, replayed, or inside the training loop.

All go through `watch_run.py`; runs of others, through `watch_foreign.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.alerts import OPEN_STATES
from rungwise.analysis.divergence import Alert, Monitor
from rungwise.analysis.reading.records import ALERTS_FILE, JOURNAL_FILE
from rungwise.analysis.reading.store import StoreError, public_address
from rungwise.analysis.reading.tail import ChainTail, FolderTail, StoreTail, Tail
from rungwise.analysis.source import RunRecord
from rungwise.ladder.console import duration, log, one_line
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import FAMILY_FILE, family_folder, resolve_tracking, run_folder
from rungwise.ladder.launching.status import STALE_AFTER, attempt_state, run_status
from rungwise.ladder.nowcast import nowcast_hero
from rungwise.ladder.predict import FamilyRuns, load_family_runs
from rungwise.ladder.recording.journal import append_verdict
from rungwise.ladder.recording.tracking import is_mirrored, mirror_folder
from rungwise.ladder.training.preemption import StopRun
from rungwise.ladder.watching.delivery import Delivery
from rungwise.ladder.watching.outbox import OUTBOX_FILE
from rungwise.ladder.watching.receivers import load_receivers
from rungwise.ladder.watching.watch_nowcast import LiveNowcast
from rungwise.ladder.watching.watch_run import Told, Watch, build_monitor, mismatch

EXIT_CODES: Final = {"healthy": 0, "cannot_judge": 3, "alert": 10}
DELIVER_FOR_S: Final = 30.0
"""How long `--once` tries to deliver before it leaves the rest to the next look."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the watch says of a run at a step; `remarks` tell what it could not judge, or judged with less."""

    run: str
    step: int
    state: str
    alerts: tuple[Alert, ...]
    remarks: tuple[str, ...] = ()
    deliveries: Mapping[str, Any] = field(default_factory=dict)
    """`pending` and `given_up`: what has not reached its receivers, as texts."""
    told: tuple[Told, ...] = ()
    """Of a replay: every change of an alert, in the order it would have come."""
    nowcast: Mapping[str, Any] | None = None
    """The final loss as forecast now (`HeroNowcast.to_dict`), where it can be; no state rests on it."""

    def to_dict(self) -> dict[str, Any]:
        """The object `ladder watch --json` prints."""
        told = [{"time": change.time, **change.alert.to_dict()} for change in self.told]
        return {
            "run": self.run,
            "step": self.step,
            "state": self.state,
            "alerts": [alert.to_dict() for alert in self.alerts],
            "remarks": list(self.remarks),
            "deliveries": dict(self.deliveries),
            "nowcast": self.nowcast,
            **({"told": told} if told else {}),
        }


def exit_code(verdict: Verdict) -> int:
    """0 healthy, 3 could not judge, 10 alert open, 11 alert open and a delivery given up, 12 healthy but for that."""
    if not verdict.deliveries.get("given_up"):
        return EXIT_CODES[verdict.state]
    return {"healthy": 12, "cannot_judge": 3, "alert": 11}[verdict.state]


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


def judge_run(
    runs: FamilyRuns,
    run: str,
    *,
    home: Path,
    tracking: str | None = None,
    continued: Sequence[str] = (),
    deliver_for: float = DELIVER_FOR_S,
) -> Verdict:
    """Judges everything a run has logged so far; where its folder is here, `alerts.jsonl` gets what is new.

    Args:
        continued: later names of the same run, oldest first.
        deliver_for: seconds to try to deliver; what is left waits on disk for the next look.
    """
    watch, delivery = open_watch(runs, run, home=home, tracking=tracking, continued=continued)
    if watch is None:
        return judge_loaded(runs, run)
    watch.catch_up()
    watch.tick(time.time())
    watch.finish()
    delivery.send_for(deliver_for)
    return _verdict(runs, run, watch, delivery)


def replay_run(
    runs: FamilyRuns, run: str, *, home: Path, tracking: str | None = None, continued: Sequence[str] = ()
) -> Verdict:
    """Judges a run from its first record as if it were live: when each change would have come. Writes nothing."""
    tail = _tail(runs, [run, *continued], home=home, tracking=tracking)
    watch = Watch(run, build_monitor(runs, run), tail, nowcast=LiveNowcast.of(runs, run), quiet=True)
    watch.catch_up()
    verdict = _verdict(runs, run, watch, None)
    return replace(verdict, told=tuple(watch.told))


def judge_loaded(runs: FamilyRuns, run: str) -> Verdict:
    """Judges a run as it is in memory, one value a step, without writing anything."""
    if not _has_started(runs, run):
        return Verdict(run=run, step=0, state="cannot_judge", alerts=(), remarks=(f"{run} has not started",))
    judged = runs.record(run)
    monitor = build_monitor(runs, run, events=judged.events)
    monitor.extend(judged.trajectory)
    step = int(judged.trajectory.frame["step"].to_numpy().max(initial=0))
    remarks = (*_remarks(runs, run, judged), *judged.notes)
    nowcast = None
    with suppress(ValueError):  # what there is to say against one, `ladder forecast --nowcast` says
        nowcast = nowcast_hero(runs).to_dict() if run == runs.plan["hero"]["name"] else None
    alerts = tuple(monitor.alerts)
    return Verdict(run=run, step=step, state=monitor.state, alerts=alerts, remarks=remarks, nowcast=nowcast)


def open_watch(
    runs: FamilyRuns, run: str, *, home: Path, tracking: str | None = None, continued: Sequence[str] = ()
) -> tuple[Watch | None, Delivery]:
    """A watch of a run that has not looked yet, and its deliveries; None where its records are out of reach."""
    state = state_folder(runs.family, run, home=home)
    here = run_folder(home, runs.family, run).exists()
    receivers = load_receivers()
    delivery = Delivery(f"{runs.family}/{run}", state, receivers=receivers)
    if not here and tracking is None:
        return None, delivery
    tail = _tail(runs, [run, *continued], home=home, tracking=tracking)
    written = state if here or receivers or (state / OUTBOX_FILE).exists() else None
    if written is not None:
        written.mkdir(parents=True, exist_ok=True)
    nowcast = LiveNowcast.of(runs, run)
    return Watch(run, build_monitor(runs, run), tail, folder=written, delivery=delivery, nowcast=nowcast), delivery


def state_folder(family: str, run: str, *, home: Path) -> Path:
    """Where alerts and outbox of a run lie: in its folder, or under `watches` where that is not here."""
    folder = run_folder(home, family, run)
    return folder if folder.exists() else family_folder(home, "watches") / family / run


def with_copied_alerts(verdict: Verdict, family: str, run: str, *, home: Path, tracking: str | None) -> Verdict:
    """Brings what the watch wrote of a run that nobody trains now into MLflow; a trainer's mirror does that itself.

    A store that fails is a remark: alerts stay in the journal, and the next look or mirror copies them.
    """
    folder, store = run_folder(home, family, run), resolve_tracking(home, tracking)
    if not (folder / ALERTS_FILE).exists() or is_mirrored(folder, store):
        return verdict
    if run_status(folder)["state"] not in ("done", "stale", "failed"):
        return verdict
    try:
        mirror_folder(folder, store)
    except Exception as error:  # what a store raises depends on the store
        said = f"alerts could not be copied to {public_address(store)!r} ({one_line(error)[:200]})"
        return replace(verdict, remarks=(*verdict.remarks, said))
    return verdict


def _tail(runs: FamilyRuns, names: Sequence[str], *, home: Path, tracking: str | None) -> Tail:
    """The records of a run under its names, each from its folder, else from the store."""
    parts: list[Tail] = []
    for name in names:
        folder = run_folder(home, runs.family, name)
        away = tracking if tracking and not (folder / JOURNAL_FILE).exists() else None
        parts.append(StoreTail(away, runs.family, name) if away else FolderTail(folder))
    return parts[0] if len(parts) == 1 else ChainTail(parts)


def follow_run(
    runs: FamilyRuns,
    run: str,
    *,
    home: Path,
    tracking: str | None = None,
    continued: Sequence[str] = (),
    every: float = 5.0,
    give_up: float = 600.0,
) -> Verdict:
    """Judges a run as it is written, from its folder or else from `tracking`, until it has finished.

    Waits for it to start, for as long as it takes. A run that stops unfinished, or a store that no longer
    answers, is said once and waited for; after `give_up` seconds the verdict is "cannot_judge", or the open alert.
    Each alert that opens or changes is one line on standard error and, for a run here, one record in `alerts.jsonl`.
    """
    folder = run_folder(home, runs.family, run)
    if not folder.exists() and tracking is None:
        folder.mkdir(parents=True)
    watch, delivery = open_watch(runs, run, home=home, tracking=tracking, continued=continued)
    assert watch is not None
    if not _has_started(runs, run):
        log(f"waiting for {run} to start")
    trouble = follow(watch, delivery, lambda: _state(watch, folder), every=every, give_up=give_up)
    return _verdict(runs, run, watch, delivery, trouble=trouble)


def follow(
    watch: Watch, delivery: Delivery, state: Callable[[], tuple[str, str | None]], *, every: float, give_up: float
) -> str | None:
    """Looks every so often until the run is done; returns what kept it from going on where that took too long.

    Args:
        state: the run's state, and what keeps it from going on.
    """
    lost: float | None = None
    looked = False
    while True:
        now, trouble = _look(watch, state, first=not looked)
        looked = looked or now != "unknown"
        delivery.send()
        if now == "done":
            delivery.send_for(DELIVER_FOR_S)
            return None
        if trouble is None:
            if lost is not None:
                log(f"{watch.name} goes on")
            lost = None
        elif lost is None:
            lost = time.monotonic()
            log(f"{trouble}; waiting for {duration(give_up)} at most")
        left = every if lost is None else lost + give_up - time.monotonic()
        if trouble and left <= 0:
            watch.lose(trouble)
            delivery.send_for(min(give_up, DELIVER_FOR_S))
            return trouble
        time.sleep(min(every, left))


def _look(watch: Watch, state: Callable[[], tuple[str, str | None]], *, first: bool) -> tuple[str, str | None]:
    """Judges what is new; returns the run's state, and what keeps it from going on."""
    try:
        watch.catch_up()
    except StoreError as error:
        return "unknown", str(error)
    watch.tick(time.time())
    watch.finish() if first else watch.settle()
    if watch.nowcast is not None and (news := watch.nowcast.news()) is not None:
        log(news)
    return state()


def _state(watch: Watch, folder: Path) -> tuple[str, str | None]:
    state, reason = attempt_state(folder, watch.attempt, time.time())
    stopped = state in ("failed", "stale")
    because = f" ({reason})" if reason else ""
    return state, f"{watch.name} stopped at step {watch.step}, unfinished{because}" if stopped else None


def live_watch(config: RunConfig, *, home: Path) -> Callable[[int, dict[str, float]], None] | None:
    """What the training loop calls with each step's metrics, to judge the hero live; None for a rung.

    People are told by a process apart, so that no step waits for a webhook. A failure of the watch itself is said once
    and ends the watch, never the training.
    """
    if config.role != "hero":
        return None
    folder = run_folder(home, config.family, config.run)
    delivery = Delivery(f"{config.family}/{config.run}", folder)

    def begin() -> Watch:
        runs = load_family_runs(str(family_folder(home, config.family) / FAMILY_FILE), home=home)
        watch = Watch(config.run, build_monitor(runs, config.run), FolderTail(folder), folder=folder, delivery=delivery)
        watch.catch_up()
        watch.finish()
        return watch

    watch, failed = begin(), False

    def observe(step: int, values: dict[str, float]) -> None:
        nonlocal failed, watch
        if failed:
            return
        try:
            known = watch.num_successors
            watch.see(step, values)
            if watch.num_successors > known:  # replanned on the way: held against the forecast that follows
                watch = begin()
            delivery.send_apart()
        except Exception as error:  # the hero's steps are worth more than their verdicts
            failed = True
            log(f"watch of {config.run} ends at step {step}: {type(error).__name__}: {one_line(error)}")
            with suppress(OSError):
                append_verdict(folder, "cannot_judge", step)
        if config.actions.stop_on_divergence and (alert := _divergence(watch.monitor)) is not None:
            raise StopRun(f"{alert.rule} since step {alert.since}: {alert.explanation}")

    return observe


def _divergence(monitor: Monitor) -> Alert | None:
    """An open critical alert about the run itself, not about its forecast."""
    return next(
        (
            alert
            for alert in monitor.alerts
            if alert.severity == "critical" and alert.state in OPEN_STATES and alert.family != "forecast_miss"
        ),
        None,
    )


def _has_started(runs: FamilyRuns, run: str) -> bool:
    return any(record.run == run for record in runs.records)


def _verdict(
    runs: FamilyRuns, run: str, watch: Watch, delivery: Delivery | None, *, trouble: str | None = None
) -> Verdict:
    """What the monitor says; of an unfinished run that is out of sight, that it cannot be judged."""
    record = runs.record(run) if _has_started(runs, run) else None
    started = () if watch.attempt else (f"{run} has not started",)
    said = (*started, *_remarks(runs, run, record), *watch.remarks(), *([trouble] if trouble else ()))
    return make_verdict(watch, delivery, said, lost=trouble is not None)


def make_verdict(watch: Watch, delivery: Delivery | None, remarks: Iterable[str], *, lost: bool = False) -> Verdict:
    """The same of any watch, with these remarks and what became of its messages."""
    monitor: Monitor = watch.monitor
    state = "cannot_judge" if lost and monitor.state == "healthy" else monitor.state
    deliveries = {} if delivery is None else delivery.summary()
    given_up = deliveries.get("given_up") or ()
    said = [*remarks, *(f"delivery given up: {text}" for text in given_up)]
    if waiting := deliveries.get("pending"):
        said.append(f"{len(waiting)} message(s) still on their way: {', '.join(waiting)}")
    current = None if watch.nowcast is None else watch.nowcast.current()
    return Verdict(
        run=watch.name,
        step=watch.step,
        state=state,
        alerts=tuple(monitor.alerts),
        remarks=tuple(said),
        deliveries=deliveries,
        nowcast=None if current is None else current.to_dict(),
    )


def _remarks(runs: FamilyRuns, run: str, judged: RunRecord | None) -> Iterator[str]:
    """What the verdict lacks: a forecast, peers, the conditions the forecast was made under, a sign of life."""
    forecast = runs.registered
    other = mismatch(runs) if run == runs.plan["hero"]["name"] else None
    if forecast is None or other:
        why = other or "no forecast is registered"
        yield f"{why}: judged against the run's own past and the finished rungs alone"
    if not any(record.state == "finished" for record in runs.rungs):
        yield "no rung has finished: judged without the ladder"
    if judged is not None and judged.attempts and judged.is_stale(now=time.time(), limit_s=STALE_AFTER):
        yield f"{judged.run} has not ended and has been silent for {duration(time.time() - judged.heartbeat)}"
    if judged is not None and judged.state in ("failed", "killed"):
        reason = judged.attempts[-1].reason
        yield f"the last attempt of {judged.run} was {judged.state}{f' ({reason})' if reason else ''}"
    if forecast is None or other or judged is None or judged.role != "hero":
        return
    for name in forecast.conditions:  # a seed or a name may differ
        promised = forecast.target.get(name)
        actual = judged.plan.get(name, promised)
        if promised is not None and actual != promised:
            yield f"condition broken: the forecast is for {name} {promised}, the run has {actual}"
