"""The mirror process: one run's journal, copied to MLflow as it grows.

One MLflow run an attempt, known by its tags and start time. How far it is copied is a tag of that MLflow run:
the store itself knows, whatever becomes of this process, the folder or the store. A point's timestamp is its
record's time: copied twice, it is there once.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import select
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rungwise.analysis.reading.records import (
    ALERTS_FILE,
    CONFIG_FILE,
    EVENTS_FILE,
    JOURNAL_FILE,
    check_schema,
    decode_record,
    read_json,
)
from rungwise.analysis.reading.store import (
    escape_key,
    find_attempts,
    find_experiment,
    find_forecasts,
    open_client,
    public_address,
    sqlite_path,
)
from rungwise.analysis.vocabulary import (
    INFINITE_PREFIX,
    SCHEMA_VERSION,
    TAG_ATTEMPT,
    TAG_CODE_VERSION,
    TAG_CONFIG_HASH,
    TAG_CORPUS_HASH,
    TAG_END_REASON,
    TAG_FAMILY,
    TAG_FORECAST_HASH,
    TAG_JOB,
    TAG_LINEAGE,
    TAG_LOG,
    TAG_MIRRORED_BYTES,
    TAG_MIRRORED_TIME,
    TAG_RESTORED_STEP,
    TAG_ROLE,
    TAG_RUN,
    TAG_RUNG,
    TAG_SCHEMA,
    TAG_SEED,
    TAG_STATE,
    canonical_json,
    decode_number,
    load_json,
)
from rungwise.ladder.home import FAMILY_FILE, TRACKING_VARIABLE, make_folder
from rungwise.ladder.recording.journal import writer_of
from rungwise.ladder.recording.tracking import mark_mirrored
from rungwise.ladder.watching.watch_tags import write_alert_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

POLL_S: Final = 0.5
BATCH_S: Final = 10.0
BATCH_POINTS: Final = 500
"""34 ms of CPU into SQLite, and no more a point than larger ones (MLflow takes 1,000 entries; 2 cores)."""
RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
GIVE_UP_S: Final = 60.0
"""How long the copy is tried again after the trainer is gone."""
_PARAM_LIMIT: Final = 6000
_TAG_LIMIT: Final = 5000
_STATUS: Final = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_METRICS_LINE: Final = b'{"kind": "metrics"'


class Copier:
    """One pass over a run's journal, from its start to wherever it grows, skipping what the store has.

    After an error, begin with a new one.
    """

    def __init__(self, folder: Path, tracking_uri: str) -> None:
        self.folder, self.tracking_uri = folder, tracking_uri
        self.config = read_json(folder / CONFIG_FILE)
        self.client, self.experiment = open_experiment(tracking_uri, self.config["family"])
        lineage = f"{self.config['family']}/{self.config['run']}"
        known = find_attempts(self.client, self.experiment, lineage)
        self.known = {(int(run.data.tags[TAG_ATTEMPT]), run.info.start_time): run for run in known}
        self.run_id: str | None = None
        self.read = 0
        """Bytes of the journal looked at."""
        self.copied = 0
        """Bytes of the journal that this attempt's MLflow run holds."""
        self.running = False
        self.last_record = b""
        self.points: list[Metric] = []
        self.next_batch = time.monotonic() + BATCH_S
        self.files: dict[Path, tuple[int, int]] = {}

    def advance(self, *, last: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Read what is new; copy it if a batch is due, or if this is the `last` call.

        Args:
            hurried: asked after each batch; ends the call where it is true.
        """
        for line in self._new_lines():
            self.read += len(line)
            self._take(line)
            if len(self.points) >= BATCH_POINTS:
                self._flush()
                if hurried():
                    return
        if self.run_id is not None and (last or time.monotonic() >= self.next_batch):
            self.next_batch = time.monotonic() + BATCH_S
            self._copy_files()  # first: an event is known before the points it explains
            self._flush()
        if last and self.running and writer_of(self.folder) is None:
            self._close_silent()
        if last and not self.running:
            journals = {path.name: size for path, (size, _) in self.files.items() if path.suffix == ".jsonl"}
            mark_mirrored(self.folder, self.tracking_uri, {JOURNAL_FILE: self.read, **journals})

    def _new_lines(self) -> Iterator[bytes]:
        journal = self.folder / JOURNAL_FILE
        if not journal.exists():
            return
        with journal.open("rb") as lines:
            lines.seek(self.read)
            yield from takewhile(lambda line: line.endswith(b"\n"), lines)

    def _take(self, line: bytes) -> None:
        if self.read <= self.copied and line.startswith(_METRICS_LINE):
            self.last_record = line
            return
        record = decode_record(line)
        if record is None:
            return
        match record["kind"]:
            case "header":
                check_schema(record, self.folder / JOURNAL_FILE)
            case "attempt":
                if self.running:
                    self._close_silent()
                self._begin(record)
            case "metrics" if self.run_id is not None and self.read > self.copied:
                self._add_points(record)
            case "end" if self.running:
                self._close(record["state"], record["time"], record.get("reason"))
        self.last_record = line

    def _begin(self, record: Mapping[str, Any]) -> None:
        number, started = record["attempt"], round(record["time"] * 1000)
        run = self.known.get((number, started)) or self.client.create_run(
            self.experiment,
            start_time=started,
            tags=_attempt_tags(self.config, record),
            run_name=self.config["run"] + (f" attempt {number}" if number > 1 else ""),
        )
        self.run_id, self.files = run.info.run_id, {}
        self.running = run.info.status == "RUNNING"
        self.copied = int(run.data.tags.get(TAG_MIRRORED_BYTES, 0))
        if not self.copied:
            self._log_config()

    def _log_config(self) -> None:
        from mlflow.entities import Param

        settings = flatten({"plan": self.config["plan"], **self.config["config"]})
        params = [Param(escape_key(name), value) for name, value in settings]
        for start in range(0, len(params), 100):
            self.client.log_batch(self._run, params=params[start : start + 100])
        self._copy_files()
        self.client.set_tag(self._run, TAG_MIRRORED_BYTES, str(self.read))

    @property
    def _run(self) -> str:
        assert self.run_id is not None
        return self.run_id

    def _add_points(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        timestamp, step = round(record["time"] * 1000), record["step"]
        for name, word in record["values"].items():
            key, value = escape_key(name), decode_number(word)
            if math.isinf(value):
                self.points.append(Metric(INFINITE_PREFIX + key, math.copysign(1.0, value), timestamp, step))
                value = math.nan
            self.points.append(Metric(key, value, timestamp, step))

    def _flush(self) -> None:
        from mlflow.entities import RunTag

        whole = decode_record(self.last_record)
        assert whole is not None
        time = round(whole["time"] * 1000)
        done = [RunTag(TAG_MIRRORED_BYTES, str(self.read)), RunTag(TAG_MIRRORED_TIME, str(time))]
        for start in range(0, len(self.points), BATCH_POINTS):
            batch, rest = self.points[start : start + BATCH_POINTS], self.points[start + BATCH_POINTS :]
            self.client.log_batch(self._run, batch, tags=() if rest else done, synchronous=True)
        self.points = []

    def _close(self, state: str, time: float, reason: str | None) -> None:
        self._flush()
        self.client.set_tag(self._run, TAG_STATE, state)
        if reason:
            self.client.set_tag(self._run, TAG_END_REASON, reason[:_TAG_LIMIT])
        self.client.set_terminated(self._run, _STATUS[state], end_time=round(time * 1000))
        self.running = False

    def _close_silent(self) -> None:
        """The attempt died without a word: it ended, killed, with its last record."""
        record = decode_record(self.last_record)
        assert record is not None
        self._close("killed", record["time"], None)

    def _copy_files(self) -> None:
        """Copy family, config, events and alerts, and for the hero its forecast, where they changed."""
        family = self.folder.parents[1]
        files = [family / FAMILY_FILE, *(self.folder / name for name in (CONFIG_FILE, EVENTS_FILE, ALERTS_FILE))]
        if self.config["role"] == "hero":
            files += (family / "forecasts").glob("*.json")
        for path in files:
            if path.exists() and self.files.get(path) != (version := (path.stat().st_size, path.stat().st_mtime_ns)):
                self._copy_file(path)
                self.files[path] = version

    def _copy_file(self, path: Path) -> None:
        if path.parent.name == "forecasts":
            copy_forecast(self.client, self.experiment, path)
            self.client.set_tag(self._run, TAG_FORECAST_HASH, path.stem)
            return
        self.client.log_artifact(self._run, str(path))
        if path.name == ALERTS_FILE:
            write_alert_tags(self.client, self._run, path)


def copy_forecast(client: "MlflowClient", experiment: str, file: Path) -> None:
    """Keep a registered forecast as an MLflow run of its own, unless it is the last one there."""
    from mlflow.entities import Param

    records = find_forecasts(client, experiment)
    if records and records[-1].data.tags[TAG_FORECAST_HASH] == file.stem:
        return
    forecast = load_json(file.read_text(encoding="utf-8"))
    tags = {TAG_FAMILY: file.parents[1].name, TAG_SCHEMA: str(SCHEMA_VERSION)}
    run_id = client.create_run(experiment, tags=tags, run_name="forecast").info.run_id
    shown = ("metric", "point", "low", "high", "level", "status")
    client.log_batch(run_id, params=[Param(name, str(forecast[name])) for name in shown])
    client.log_artifact(run_id, str(file))
    client.set_tag(run_id, TAG_FORECAST_HASH, file.stem)  # last, so that what has it is whole
    client.set_terminated(run_id)


def _attempt_tags(config: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, str]:
    tags = {
        TAG_LINEAGE: f"{config['family']}/{config['run']}",
        TAG_ATTEMPT: start["attempt"],
        TAG_RESTORED_STEP: start["step"],
        TAG_FAMILY: config["family"],
        TAG_RUN: config["run"],
        TAG_ROLE: config["role"],
        TAG_RUNG: config["rung"],
        TAG_SEED: config["seed"],
        TAG_STATE: "running",
        TAG_CONFIG_HASH: config["config_hash"],
        TAG_CORPUS_HASH: config.get("corpus_hash"),
        TAG_CODE_VERSION: config.get("code_version"),
        TAG_JOB: start.get("job"),
        TAG_LOG: start.get("log"),
        TAG_SCHEMA: SCHEMA_VERSION,
    }
    return {name: str(value) for name, value in tags.items() if value is not None}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as dotted names and texts; of a text MLflow would cut, the hash (config.json has the whole).

    >>> list(flatten({"model": {"top_k": 2, "windows": [64, 0]}}))
    [('model.top_k', '2'), ('model.windows', '[64,0]')]
    """
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
            continue
        text = value if isinstance(value, str) else canonical_json(value)
        if len(text) > _PARAM_LIMIT:
            digest = hashlib.sha256(text.encode()).hexdigest()
            text = f"sha256:{digest} of {len(text)} characters, see {CONFIG_FILE}"
        yield prefix + name, text


def open_experiment(tracking_uri: str, family: str) -> "tuple[MlflowClient, str]":
    """A client and the id of the family's experiment, both made if need be, by one process at a time.

    Several processes that create a SQLite store's tables at once would leave it broken for good.
    """
    path = sqlite_path(tracking_uri)
    if path is None:
        client = open_client(tracking_uri)
        return client, _find_or_create(client, family, None)
    make_folder(path.parent)
    with _locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            _create_store(path)
        client = open_client(tracking_uri)
        folder = path.absolute().parent / "mlflow-artifacts" / family
        experiment = _find_or_create(client, family, folder.as_uri())
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    return client, experiment


def _create_store(path: Path) -> None:
    """Makes a SQLite store's tables in a draft that becomes the store when it is whole.

    Whoever is killed in between would else leave a store that MLflow can neither use nor complete.
    """
    draft = path.with_name(f".{path.name}.draft")
    for left in path.parent.glob(f"{draft.name}*"):
        left.unlink()
    open_client(f"sqlite:///{draft}").search_experiments()
    with contextlib.closing(sqlite3.connect(draft)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    draft.replace(path)


def _find_or_create(client: "MlflowClient", family: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    experiment = find_experiment(client, family)
    if experiment is None:
        # In the interface's other mode, the charts of a training run are not shown.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            experiment = client.create_experiment(family, artifact_location=artifacts, tags=tags)
        except MlflowException:
            experiment = find_experiment(client, family)  # another process was faster
            if experiment is None:
                raise
    return experiment


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copy_once(folder: Path, tracking_uri: str) -> None:
    """Copy all that MLflow lacks of one run, after any other mirror of it."""
    with _locked(folder / "mirror.lock"):
        Copier(folder, tracking_uri).advance(last=True)


def follow(folder: Path, tracking_uri: str, *, stopped: Callable[[float], bool], finisher: ThreadPoolExecutor) -> bool:
    """Copy as the journal grows until the trainer stops, then what is left; whether all of it was copied.

    Args:
        stopped: waits for at most the seconds given, and says whether the trainer has stopped.
        finisher: copies what is left once the trainer has.
    """
    copier: Copier | None = None
    failures, pause, give_up = 0, 0.0, math.inf
    with _locked(folder / "mirror.lock"):
        while True:
            last = stopped(pause)
            give_up = min(give_up, time.monotonic() + GIVE_UP_S) if last else math.inf
            try:
                copier = copier or Copier(folder, tracking_uri)
                if last:
                    finisher.submit(copier.advance, last=True).result()
                    return True
                copier.advance(hurried=lambda: stopped(0.0))
            except Exception as error:
                copier, pause = None, RETRY_S[min(failures, len(RETRY_S) - 1)]
                failures += 1
                if failures == 1:
                    _warn(tracking_uri, error)
                if time.monotonic() > give_up:
                    return False
                continue
            failures, pause = 0, POLL_S


def _warn(tracking_uri: str, error: Exception) -> None:
    reason = (str(error) or type(error).__name__).splitlines()[0][:200]
    print(
        f"tracking {public_address(tracking_uri)!r} failed ({reason}); training goes on, "
        "points stay in the journal and are copied when it works again",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    """Follow the folder named by the argument until standard input closes; the trainer then waits for the rest."""
    finisher = ThreadPoolExecutor(1)
    finisher.submit(os.getpid).result()  # starts its thread, which keeps its speed: Linux slows the calling one alone
    os.nice(19)
    closed = False

    def stopped(seconds: float) -> bool:
        nonlocal closed
        if closed:
            time.sleep(min(seconds, 2.0))
        closed = closed or bool(select.select([sys.stdin], [], [], seconds)[0])
        return closed

    folder, tracking_uri = Path(sys.argv[1]), os.environ[TRACKING_VARIABLE]
    return 0 if follow(folder, tracking_uri, stopped=stopped, finisher=finisher) else 1


if __name__ == "__main__":
    sys.exit(main())
