"""The journal: what a run says about itself, on disk before anybody else hears of it.

Append only, one JSON object a line, one `os.write` a record: a killed process loses nothing written, at
most its last line is torn. One process writes a run's metrics; others too may add events and alerts.
`analysis/reading/records.py` reads it, `mirror.py` copies it to MLflow.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rungwise.analysis.reading.records import (
    ALERTS_FILE,
    EVENTS_FILE,
    JOURNAL_FILE,
    Records,
    decode_record,
    read_records,
)
from rungwise.analysis.vocabulary import EVENT_KINDS, RUN_STATES, SCHEMA_VERSION, dump_json, is_metric_name
from rungwise.ladder.home import make_folder
from rungwise.ladder.recording.storage import Backlog, StorageTrouble
from rungwise.ladder.training.preemption import Preempted

__all__ = [
    "Journal",
    "Records",
    "append_acknowledgement",
    "append_alert",
    "append_event",
    "append_shared",
    "append_verdict",
    "read_records",
    "writer_of",
]

_LOCK_FILE: Final = "writer.lock"


class Journal:
    """Writes a run's `metrics.jsonl`; refuses to be the second writer.

    While the disk takes nothing, records wait in memory and the run goes on; `trouble` says so.

    Leaving a `with` block by an exception ends the attempt: `killed` for an interrupt or a request to stop, else
    `failed`.

    Raises:
        ValueError: another process writes here, or the folder holds another run.
    """

    def __init__(self, folder: str | Path, *, family: str, run: str) -> None:
        self.folder = make_folder(Path(folder))
        self.attempt = 0
        self._lock = _lock_folder(self.folder)
        lineage = {"family": family, "run": run, "lineage": f"{family}/{run}"}
        try:
            self._file = _open_records(self.folder / JOURNAL_FILE, lineage)
        except ValueError:
            os.close(self._lock)
            raise
        self._backlog = Backlog(self._file)
        self.trouble = StorageTrouble(self.folder, run)
        self._known_names: set[str] = set()
        self._time = 0.0
        self._step = 0
        self._open = False

    def start_attempt(self, step: int, **details: Any) -> int:
        """Begin the next attempt and return its number, from 1.

        Args:
            step: last step restored from the checkpoint, 0 for a fresh start. Earlier attempts' records
                above it are superseded.
            details: further plain values for the record, such as the device.
        """
        self.attempt = _last_attempt(self.folder / JOURNAL_FILE) + 1
        self._open = True
        self._append("attempt", step, {"pid": os.getpid(), "host": socket.gethostname(), **details})
        return self.attempt

    def write(
        self, step: int, values: Mapping[str, float], *, layers: Mapping[str, Iterable[float]] | None = None
    ) -> None:
        """Append one step's metrics; several records may share a step.

        Args:
            values: metric name → number; NaN and infinities are kept.
            layers: metric name → one number a layer.
        Raises:
            ValueError: a name is not in the vocabulary, or no attempt is open.
        """
        self._check_names(values)
        body: dict[str, Any] = {"values": {name: float(value) for name, value in values.items()}}
        if layers:
            self._check_names(layers)
            body["layers"] = {name: [float(value) for value in row] for name, row in layers.items()}
        self._append("metrics", step, body)

    def end(self, step: int, state: str, reason: str | None = None) -> None:
        """Close the attempt: `finished`, `failed` or `killed`, with a reason if there is one to give."""
        if state not in RUN_STATES or state == "running":
            raise ValueError(f"state {state!r} ends no attempt; use finished, failed or killed")
        self._append("end", step, {"state": state, **({"reason": reason} if reason else {})})
        self._open = False
        if (error := self._backlog.flush()) is not None:
            raise error
        self.sync()

    def sync(self) -> None:
        """Force what was written onto the disk; called with each checkpoint."""
        if not self._backlog:
            os.fsync(self._file)

    def close(self) -> None:
        """Let another writer in. An attempt left open reads as killed once another follows."""
        os.close(self._file)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._open:
                state = "killed" if isinstance(error, KeyboardInterrupt | Preempted) else "failed"
                self.end(self._step, state, f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            self.close()

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._known_names:
                if not is_metric_name(name):
                    raise ValueError(f"metric {name!r} is not in the vocabulary; add it to analysis/vocabulary.py")
                self._known_names.add(name)

    def _append(self, kind: str, step: int, body: Mapping[str, Any]) -> None:
        if not self._open:
            raise ValueError(f"record {kind!r} at step {step} is outside an attempt; call start_attempt first")
        self._step = int(step)
        self._time = _next_time(self._time)
        head = {"kind": kind, "attempt": self.attempt, "step": self._step, "time": self._time}
        error = self._backlog.write(_line({**head, **body}))
        if error is not None:
            self.trouble.failed("journal", self._step, error)
        else:
            self.trouble.worked("journal", self._step)


def append_event(folder: str | Path, kind: str, step: int, **details: Any) -> None:
    """Declare a change to a run: any process may, while the run trains or not.

    Args:
        kind: one of `EVENT_KINDS`.
        details: what changed and what is expected to move, as plain values.
    Raises:
        ValueError: `kind` is not an event kind.
    """
    if kind not in EVENT_KINDS:
        raise ValueError(f"event kind {kind!r} is unknown; use one of {', '.join(EVENT_KINDS)}")
    append_shared(Path(folder) / EVENTS_FILE, {"kind": kind, "step": int(step), **details})


def append_alert(folder: str | Path, alert: Mapping[str, Any]) -> None:
    """Record an alert of the watch."""
    append_shared(Path(folder) / ALERTS_FILE, {"kind": "alert", **alert})


def append_acknowledgement(folder: str | Path, rule: str, step: int, **details: Any) -> None:
    """Record that somebody knows of a rule's alerts from this step on; a `note` may say who and why."""
    append_shared(Path(folder) / ALERTS_FILE, {"kind": "acknowledgement", "rule": rule, "step": int(step), **details})


def append_verdict(folder: str | Path, state: str, step: int) -> None:
    """Record what the watch says of a run from this step on: `healthy`, `alert` or `cannot_judge`."""
    append_shared(Path(folder) / ALERTS_FILE, {"kind": "verdict", "state": state, "step": int(step)})


def writer_of(folder: str | Path) -> str | None:
    """Who writes this run's metrics now, as "pid 123 on host"; None if nobody does."""
    path = Path(folder) / _LOCK_FILE
    if not path.exists():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or "another process"
    return None


def _lock_folder(folder: Path) -> int:
    """Become the one writer of a folder until the descriptor returned is closed, or this process dies."""
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    for last in (False, False, False, True):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if last:
                owner = os.read(lock, 200).decode() or "another process"
                os.close(lock)
                raise ValueError(
                    f"run folder {folder} is being written by {owner}; stop it first, or wait for it"
                ) from None
            time.sleep(0.1)  # `writer_of` holds the lock for an instant
    os.ftruncate(lock, 0)
    os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _open_records(path: Path, lineage: Mapping[str, str]) -> int:
    """Open a journal for appending, with its header, and on a fresh line if the last one is torn."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    size = os.fstat(file).st_size
    head = os.pread(file, 65536, 0)
    if b"\n" not in head:
        os.ftruncate(file, 0)
        _write_line(file, {"schema": SCHEMA_VERSION, "kind": "header", **lineage})
        return file
    header = decode_record(head.partition(b"\n")[0]) or {}
    if header.get("kind") != "header" or any(header.get(name) != value for name, value in lineage.items()):
        os.close(file)
        raise ValueError(f"{path}: holds {header.get('lineage')!r}, not {lineage.get('lineage')!r}; use another folder")
    if os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


def append_shared(path: Path, record: Mapping[str, Any]) -> None:
    """Append to a journal that several processes write, one at a time."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = _open_records(path, {})
        try:
            _write_line(file, {**record, "time": _next_time(0.0)})
        finally:
            os.close(file)
    finally:
        os.close(lock)


def _line(record: Mapping[str, Any]) -> bytes:
    return dump_json(record).encode() + b"\n"


def _write_line(file: int, record: Mapping[str, Any]) -> None:
    data = _line(record)
    written = os.write(file, data)
    if written != len(data):
        os.write(file, b"\n")
        raise OSError(f"journal: {written} of {len(data)} bytes written; the disk may be full")


def _next_time(previous: float) -> float:
    """Unix seconds, to a millisecond and past the previous one: MLflow knows a record by its time."""
    return max(round(time.time(), 3), round(previous + 0.001, 3))


def _last_attempt(path: Path) -> int:
    """Number of the last attempt in a journal, 0 if there is none."""
    last = 0
    with path.open("rb") as lines:
        for line in lines:
            if b'"kind": "attempt"' in line:
                record = decode_record(line)
                last = record["attempt"] if record else last
    return last
