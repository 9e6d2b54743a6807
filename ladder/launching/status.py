"""How far every run of a family is, from the journals alone: without an array library, and without a tracking server
unless one is asked about runs that are not here.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rungwise.analysis.reading.records import CONFIG_FILE, JOURNAL_FILE, read_json, read_records
from rungwise.analysis.vocabulary import decode_number
from rungwise.ladder.console import duration
from rungwise.ladder.launching.slurm import ALIVE, WAITING, Job, seen_jobs
from rungwise.ladder.recording.journal import writer_of

if TYPE_CHECKING:
    from rungwise.analysis.source import RunRecord

_SPEED: Final = "perf/tokens_per_second"
_SHOWN: Final = ("train/loss", "eval/loss", _SPEED)
STALE_AFTER: Final = 180.0
"""Seconds without a record after which a run on another machine counts as stale."""
_PACE_RECORDS: Final = 50
_BRANCH: Final = {"role": "branch", "steps": None}
"""What is known of a cooldown that waits for its run."""
_ENDED: Final = {"finished": "done", "failed": "failed", "killed": "failed"}


def family_status(family: str, *, home: Path, tracking: str | None = None) -> dict[str, Any]:
    """State of every planned run of `family`, and of its branches and qualifications.

    `{"family", "runs": [{"run", "role", "state", "step", …}]}`

    Args:
        tracking: an MLflow address, to be asked about runs that have no folder here.
    Raises:
        ValueError: the family is unknown or its file is wrong, a journal is of a later version, or the address does
            not answer.
    """
    plan, away = _plan_and_stored(family, home=home, tracking=tracking)
    folder = home / plan["family"]
    planned = {record["name"]: record for record in (*plan["rungs"], plan["hero"])}
    jobs = {seen[0].run: seen for seen in seen_jobs(folder)}
    others = {path.parent.name for path in (folder / "runs").glob(f"*/{CONFIG_FILE}")} | {*jobs, *away}
    names = [*planned, *sorted(others - set(planned))]
    runs = [away.get(name) or _planned_status(folder / "runs" / name, planned.get(name, _BRANCH)) for name in names]
    return {"family": plan["family"], "runs": [_with_job(run, jobs.get(run["run"])) for run in runs]}


def _plan_and_stored(
    family: str, *, home: Path, tracking: str | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The family's plan, and the state of those of its runs that only the store has."""
    if tracking is None:
        from rungwise.ladder.family import load_family
        from rungwise.ladder.planning.plan import plan_ladder

        return plan_ladder(load_family(family)).to_dict(), {}
    from rungwise.ladder.predict import load_family_runs

    runs = load_family_runs(family, home=home, tracking=tracking)
    folders, now = home / runs.family / "runs", time.time()
    stored = (record for record in runs.records if not (folders / record.run / CONFIG_FILE).exists())
    return runs.plan, {record.run: _stored_status(record, now) for record in stored}


def _stored_status(record: "RunRecord", now: float) -> dict[str, Any]:
    """As `run_status`, of a run that is read from MLflow; its mirror is some seconds behind."""
    import numpy as np

    silent = record.is_stale(now=now, limit_s=STALE_AFTER)
    state = "stale" if silent else _ENDED.get(record.state, record.state)
    frame, series = record.trajectory.frame, record.trajectory.series
    last = {name: float(series(name).iloc[-1]) if len(series(name)) else None for name in _SHOWN}
    left = None
    if state == "running" and last[_SPEED]:
        left = (record.plan["tokens"] - frame["tokens"].to_numpy(float).max()) / np.median(series(_SPEED))
    return {
        "run": record.run,
        "role": record.role,
        "state": state,
        "reason": f"silent for {duration(now - record.heartbeat)}" if silent else record.attempts[-1].reason,
        "step": int(frame["step"].to_numpy().max()) if len(frame) else 0,
        "steps": record.plan["steps"],
        "loss": last["train/loss"],
        "eval_loss": last["eval/loss"],
        "tokens_per_second": last[_SPEED],
        "seconds_left": left,
        "attempts": len(record.attempts),
    }


def _planned_status(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """State of a run by its plan, which is the one in its folder where it has started: the horizon may have changed."""
    started = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {"plan": plan}
    status = run_status(folder, steps=started["plan"]["steps"])
    return status | {"role": started.get("role", plan.get("role"))}


def _with_job(run: dict[str, Any], seen: tuple[Job, str, str] | None) -> dict[str, Any]:
    """A run's state with the Slurm job that waits or trains for it; a waiting one's run is `queued`.

    Of a job that is over, where it left its run without an end, the log is named.
    """
    if seen is None:
        return run | {"job": None}
    job, state, reason = seen
    said = f"is {state.lower()}" if state else "has left the queue"
    if state not in ALIVE:
        lost = run["state"] in ("not started", "stale")
        because = {"reason": f"job {job.job} {said}; run it again (log: {job.log})"} if lost else {}
        return run | {"job": None} | because
    if state in WAITING and run["state"] != "done":
        why = f" ({reason})" if reason not in ("", "None") else ""
        return run | {"job": job.job, "state": "queued", "reason": f"job {job.job} {said}{why}"}
    return run | {"job": job.job}


def run_status(folder: Path, *, steps: int | None = None, now: float | None = None) -> dict[str, Any]:
    """State of one run: `done`, `running`, `stale`, `failed` or `not started`, and how it does.

    `tokens_per_second` is the last one logged. `seconds_left` follows from the pace of this attempt's last
    records, evaluations and checkpoints included; None unless the run is running.
    """
    journal = read_records(folder / JOURNAL_FILE)
    attempts = [record for record in journal.records if record["kind"] == "attempt"]
    last = max((record["attempt"] for record in attempts), default=0)
    mine = [record for record in journal.records if record.get("attempt") == last]
    metrics = [record for record in mine if record["kind"] == "metrics"]
    state, reason = attempt_state(folder, mine, time.time() if now is None else now)
    step = max((record["step"] for record in mine), default=0)
    rate = _seconds_per_step(metrics)
    left = None
    if state == "running" and rate is not None and steps is not None:
        left = (steps - step) * rate
    return {
        "run": folder.name,
        "state": state,
        "reason": reason or _unread(journal.corrupt),
        "step": step,
        "steps": steps,
        "loss": _latest(metrics, "train/loss"),
        "eval_loss": _latest(metrics, "eval/loss"),
        "tokens_per_second": _latest(metrics, _SPEED),
        "seconds_left": left,
        "attempts": len(attempts),
    }


def attempt_state(folder: Path, records: Sequence[Mapping[str, Any]], now: float) -> tuple[str, str | None]:
    """State and, if there is one, its reason.

    Args:
        records: of the last attempt: all, or its first and its last.
    """
    if not records:
        return "not started", None
    if records[-1]["kind"] == "end":
        return _ENDED.get(records[-1]["state"], "failed"), records[-1].get("reason")
    silent = now - max(record["time"] for record in records if "time" in record)
    writer = writer_of(folder)
    if writer is not None or (silent < STALE_AFTER and _is_elsewhere(records)):
        return "running", None
    return "stale", f"silent for {duration(silent)}; run it again to resume"


def _is_elsewhere(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether another machine writes, whose lock may not show here."""
    start = next((record for record in records if record["kind"] == "attempt"), {})
    return start.get("host", socket.gethostname()) != socket.gethostname()


def _seconds_per_step(metrics: list[dict[str, Any]]) -> float | None:
    first, *_, last = metrics[-_PACE_RECORDS:] if len(metrics) > 1 else (None, None)
    if first is None or last is None or last["step"] <= first["step"]:
        return None
    return (last["time"] - first["time"]) / (last["step"] - first["step"])


def _latest(metrics: list[dict[str, Any]], name: str) -> float | None:
    values = (record["values"][name] for record in reversed(metrics) if name in record["values"])
    value = next(values, None)
    return None if value is None else decode_number(value)


def _unread(corrupt: tuple[int, ...]) -> str | None:
    return f"{len(corrupt)} journal lines cannot be read, the first at line {corrupt[0]}" if corrupt else None
