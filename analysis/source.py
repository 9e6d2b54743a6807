"""Runs, from where they are: the journal in their folder, or the MLflow store that mirrors it.

Both give the same `RunRecord`. A run is read from its folder when that is here, else from the store.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rungwise.analysis.reading.records import (
    ALERTS_FILE,
    CONFIG_FILE,
    EVENTS_FILE,
    JOURNAL_FILE,
    Records,
    read_json,
    read_records,
)
from rungwise.analysis.reading.store import (
    PointReader,
    find_attempts,
    find_experiment,
    newest_generation,
    public_address,
    read_artifacts,
    reading,
    unescape_key,
)
from rungwise.analysis.reading.trajectory import Points, Trajectory, build_trajectory
from rungwise.analysis.vocabulary import (
    INFINITE_PREFIX,
    TAG_ATTEMPT,
    TAG_END_REASON,
    TAG_LINEAGE,
    TAG_RESTORED_STEP,
    TAG_STATE,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


@dataclass(frozen=True)
class Attempt:
    """One start of a run, up to its end or its death."""

    number: int
    restored_step: int
    """Last step restored from a checkpoint; 0 for a fresh start."""
    started: float
    """Unix seconds."""
    ended: float | None
    """Unix seconds; None while it has not ended. A silent death, once superseded, ends at the last record."""
    state: str
    """One of `RUN_STATES`. An attempt without an end is `killed` once another follows, else `running`."""
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class RunRecord:
    """All that is known about one training run, rung or hero."""

    family: str
    run: str
    role: str
    rung: str
    seed: int
    plan: Mapping[str, Any]
    """The ladder plan's record of this run: `num_params`, `tokens`, `steps`, `flops`, …"""
    config: Mapping[str, Any]
    config_hash: str
    state: str
    """State of the last attempt; `running` says only that it has not ended: see `is_stale`."""
    attempts: tuple[Attempt, ...]
    trajectory: Trajectory
    events: tuple[Mapping[str, Any], ...]
    """Declared changes as written: `kind` (one of `EVENT_KINDS`), `step`, `time`, and what is expected."""
    alerts: tuple[Mapping[str, Any], ...]
    """What the watch wrote while the run trained: `kind` is "alert", or "verdict" where its state changed."""
    provenance: Mapping[str, Any]
    """What else `config.json` says: `corpus_hash`, `code_version`, `packages`."""
    heartbeat: float
    """Unix seconds of the last sign of life; NaN before the first."""
    notes: tuple[str, ...] = ()
    """What reading left out, one sentence each: corrupt lines."""

    def is_stale(self, *, now: float, limit_s: float) -> bool:
        """Whether a run that has not ended has been silent for longer than `limit_s`."""
        return self.state == "running" and not now - self.heartbeat <= limit_s


def load_run(folder: str | Path) -> RunRecord:
    """A run from its folder.

    Raises:
        ValueError: `config.json` is missing, or a file there is not one of ours.
    """
    folder = Path(folder)
    journal = read_records(folder / JOURNAL_FILE)
    points, restored = _journal_points(journal, "values")
    return _run_record(
        folder,
        attempts=_journal_attempts(journal),
        trajectory=build_trajectory(points, restored=restored),
        heartbeat=max((record["time"] for record in journal.records if "time" in record), default=math.nan),
        notes=_note(JOURNAL_FILE, journal),
    )


def load_layers(folder: str | Path, metric: str) -> pd.DataFrame:
    """The per-layer vectors of one metric, canonical like the trajectory: index step, a column a layer."""
    points, restored = _journal_points(read_records(Path(folder) / JOURNAL_FILE), "layers")
    width = max(
        (int(name.rpartition("#")[2]) + 1 for name in points.columns if name.startswith(f"{metric}#")),
        default=0,
    )
    names = [f"{metric}#{layer}" for layer in range(width)]
    chosen = Points(points.attempt, points.step, points.time, {name: points.columns[name] for name in names})
    frame = build_trajectory(chosen, restored=restored).frame.set_index("step")
    return pd.DataFrame(frame[names].to_numpy(), index=frame.index, columns=range(width))


def load_run_mlflow(tracking_uri: str, family: str, run: str) -> RunRecord:
    """A run from the store that mirrors it; per-layer vectors stay in the journal.

    Raises:
        ValueError: the address does not answer, or the store has no such run.
    """
    with reading(tracking_uri) as client:
        experiment = find_experiment(client, family)
        runs = newest_generation(find_attempts(client, experiment, f"{family}/{run}")) if experiment else []
        if runs:
            return _load_attempts(client, tracking_uri, runs)
    raise ValueError(
        f"run {family}/{run} is not in {public_address(tracking_uri)!r}; check the names, or wait for its mirror"
    )


def load_runs(home: str | Path, family: str, *, tracking_uri: str | None = None) -> list[RunRecord]:
    """Every run of a family, by name: those with a folder here, and those only the store has, if it is given.

    Raises:
        ValueError: a run cannot be read, or the address does not answer.
    """
    folders = sorted((Path(home) / family / "runs").glob(f"*/{CONFIG_FILE}"))
    found = {path.parent.name: load_run(path.parent) for path in folders}
    if tracking_uri is None:
        return list(found.values())
    with reading(tracking_uri) as client:
        experiment = find_experiment(client, family)
        lineages: dict[str, list[Run]] = {}
        for attempt in find_attempts(client, experiment) if experiment else ():
            lineages.setdefault(attempt.data.tags[TAG_LINEAGE].partition("/")[2], []).append(attempt)
        for name in lineages.keys() - found.keys():
            found[name] = _load_attempts(client, tracking_uri, newest_generation(lineages[name]))
    return [found[name] for name in sorted(found)]


def _run_record(
    folder: Path,
    *,
    attempts: tuple[Attempt, ...],
    trajectory: Trajectory,
    heartbeat: float,
    notes: tuple[str, ...] = (),
) -> RunRecord:
    """The record of a run whose config, events and alerts are in `folder`."""
    config = read_json(folder / CONFIG_FILE)
    names = ("family", "run", "role", "rung", "seed", "plan", "config", "config_hash")
    missing = [name for name in names if name not in config]
    if missing:
        raise ValueError(f"{CONFIG_FILE} of run {config.get('run')!r} lacks {', '.join(missing)}; restore the file")
    events, alerts = read_records(folder / EVENTS_FILE), read_records(folder / ALERTS_FILE)
    return RunRecord(
        **{name: config[name] for name in names},
        state=attempts[-1].state if attempts else "running",
        attempts=attempts,
        trajectory=trajectory,
        events=tuple(events.records),
        alerts=tuple(alerts.records),
        provenance={name: value for name, value in config.items() if name not in ("schema", *names)},
        heartbeat=heartbeat,
        notes=(*notes, *_note(EVENTS_FILE, events), *_note(ALERTS_FILE, alerts)),
    )


def _note(file: str, journal: Records) -> tuple[str, ...]:
    if not journal.corrupt:
        return ()
    lines = ", ".join(map(str, journal.corrupt[:5])) + (", …" if len(journal.corrupt) > 5 else "")
    return (f"{file}: {len(journal.corrupt)} corrupt line(s) left out (line {lines})",)


def _journal_attempts(journal: Records) -> tuple[Attempt, ...]:
    starts = [record for record in journal.records if record["kind"] == "attempt"]
    ends = {record["attempt"]: record for record in journal.records if record["kind"] == "end"}
    last = {record["attempt"]: record["time"] for record in journal.records if "attempt" in record}
    attempts = []
    for start in starts:
        number = start["attempt"]
        superseded = start is not starts[-1]
        end = ends.get(number, {"state": "killed", "time": last[number]} if superseded else {"state": "running"})
        attempts.append(Attempt(number, start["step"], start["time"], end.get("time"), end["state"], end.get("reason")))
    return tuple(attempts)


def _journal_points(journal: Records, part: str) -> tuple[Points, dict[int, int]]:
    """The journal's `values`, or its `layers` as columns `<metric>#<layer>`; and restored steps."""
    restored = {record["attempt"]: record["step"] for record in journal.records if record["kind"] == "attempt"}
    records = [record for record in journal.records if record["kind"] == "metrics"]
    alike: dict[tuple[str, ...], tuple[list[int], list[list[float | str]]]] = {}
    for position, record in enumerate(records):
        restored.setdefault(record["attempt"], record["step"] - 1)  # its start was on a corrupt line
        items = record.get(part, {})
        if part == "layers":
            items = {f"{name}#{layer}": value for name, row in items.items() for layer, value in enumerate(row)}
        positions, rows = alike.setdefault(tuple(items), ([], []))
        positions.append(position)
        rows.append(list(items.values()))
    where = [(record["attempt"], record["step"], record["time"]) for record in records]
    return _points(where, _columns(alike)), restored


def _columns(
    alike: Mapping[tuple[str, ...], tuple[list[int], list[list[float | str]]]],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Columns from records grouped by the names they carry: 6 million points in 1 s, not 5."""
    parts: dict[str, list[tuple[list[int], np.ndarray]]] = {}
    for names, (positions, rows) in alike.items():
        table = np.array(rows, dtype=float)  # reads the words of `encode_number` too
        for name, values in zip(names, table.T, strict=True):
            parts.setdefault(name, []).append((positions, values))
    columns = {}
    for name, pieces in parts.items():
        positions = np.concatenate([np.array(rows, dtype=np.int64) for rows, _ in pieces])
        order = np.argsort(positions, kind="stable")
        columns[name] = positions[order], np.concatenate([values for _, values in pieces])[order]
    return columns


def _points(records: Sequence[tuple[int, int, float]], columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> Points:
    attempt, step, time = zip(*records, strict=True) if records else ((), (), ())
    return Points(
        np.array(attempt, dtype=np.int64),
        np.array(step, dtype=np.int64),
        np.array(time, dtype=float),
        columns,
    )


def _load_attempts(client: "MlflowClient", tracking_uri: str, runs: Sequence["Run"]) -> RunRecord:
    """One training run out of its MLflow runs, oldest first."""
    points, restored = _store_points(client, tracking_uri, runs)
    attempts = tuple(_store_attempt(run, superseded=run is not runs[-1]) for run in runs)
    times = [*points.time, *(time for each in attempts for time in (each.started, each.ended) if time is not None)]
    with tempfile.TemporaryDirectory() as folder:
        found = read_artifacts(client, runs[-1], (CONFIG_FILE, EVENTS_FILE, ALERTS_FILE), Path(folder))
        if CONFIG_FILE not in [path.name for path in found]:
            raise ValueError(
                f"run {runs[-1].info.run_name!r} in {public_address(tracking_uri)!r} has no {CONFIG_FILE}; "
                "wait for its mirror, or read it from its folder"
            )
        return _run_record(
            Path(folder),
            attempts=attempts,
            trajectory=build_trajectory(points, restored=restored),
            heartbeat=max(times),
        )


def _store_attempt(run: "Run", *, superseded: bool) -> Attempt:
    tags = run.data.tags
    state = tags.get(TAG_STATE, "running")
    return Attempt(
        number=int(tags[TAG_ATTEMPT]),
        restored_step=int(tags[TAG_RESTORED_STEP]),
        started=run.info.start_time / 1000,
        ended=None if run.info.end_time is None else run.info.end_time / 1000,
        state="killed" if superseded and state == "running" else state,
        reason=tags.get(TAG_END_REASON),
    )


def _store_points(client: "MlflowClient", tracking_uri: str, runs: Sequence["Run"]) -> tuple[Points, dict[int, int]]:
    """The points of a run's attempts. A record is what an attempt wrote in one millisecond."""
    tables = []
    for run in runs:
        rows = PointReader(client, tracking_uri).read(run)
        table = pd.DataFrame(rows, columns=["key", "step", "time", "value"])
        tables.append(table.assign(attempt=int(run.data.tags[TAG_ATTEMPT])))
    table = pd.concat(tables, ignore_index=True)
    infinite = table["key"].str.startswith(INFINITE_PREFIX)
    signs = table[infinite].assign(key=table["key"].str.removeprefix(INFINITE_PREFIX))
    table = table[~infinite].merge(signs, on=["attempt", "time", "step", "key"], how="left", suffixes=("", "_sign"))
    table["value"] = table["value"].where(table["value_sign"].isna(), table["value_sign"] * np.inf)
    table = table.sort_values(["attempt", "time"], kind="stable", ignore_index=True)
    where = ["attempt", "time", "step"]
    table["record"] = table.groupby(where, sort=False).ngroup()
    records = table.drop_duplicates("record")
    columns = {
        unescape_key(str(key)): (rows["record"].to_numpy(np.int64), rows["value"].to_numpy(float))
        for key, rows in table.groupby("key")
    }
    attempt, step, milliseconds = (records[name].to_numpy(np.int64) for name in ("attempt", "step", "time"))
    points = Points(attempt, step, milliseconds / 1000, columns)
    return points, {int(run.data.tags[TAG_ATTEMPT]): int(run.data.tags[TAG_RESTORED_STEP]) for run in runs}
