"""What a run has written since the last look, while it is being written: from its folder, or from the store.

Both give the journal's records, in the order written. `analysis/source.py` reads a run as a whole.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rungwise.analysis.reading.records import EVENTS_FILE, JOURNAL_FILE, decode_record, read_records
from rungwise.analysis.reading.store import (
    Point,
    PointReader,
    find_attempts,
    find_experiment,
    newest_generation,
    read_artifacts,
    reading,
    unescape_key,
)
from rungwise.analysis.vocabulary import (
    INFINITE_PREFIX,
    TAG_ATTEMPT,
    TAG_END_REASON,
    TAG_MIRRORED_TIME,
    TAG_RESTORED_STEP,
    TAG_STATE,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


class Tail(Protocol):
    """New records of one run."""

    def new_records(self) -> Iterator[Mapping[str, Any]]:
        """The journal's `attempt`, `metrics` and `end` records since the last call."""
        ...

    def new_events(self) -> Iterator[Mapping[str, Any]]:
        """Changes declared since the last call."""
        ...

    @property
    def corrupt(self) -> Mapping[str, list[int]]:
        """File → lines of it that cannot be read."""
        ...


class FileTail:
    """The whole records of one journal file, each once; a file that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.corrupt: list[int] = []
        """Lines that cannot be read, from 1; one torn by a kill, before the next attempt, is none."""
        self._offset = self._line = 0

    def new(self) -> Iterator[Mapping[str, Any]]:
        """What was added since the last call; a line without its end is still being written."""
        try:
            if self.path.stat().st_size == self._offset:
                return
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._line += 1
                record = decode_record(line)
                if record is None:
                    self.corrupt.append(self._line)
                elif record["kind"] != "header":
                    if record["kind"] == "attempt" and self.corrupt[-1:] == [self._line - 1]:
                        self.corrupt.pop()
                    yield record


class FolderTail:
    """The records of a run whose folder is here, or will be."""

    def __init__(self, folder: Path) -> None:
        self._journal, self._events = FileTail(folder / JOURNAL_FILE), FileTail(folder / EVENTS_FILE)

    def new_records(self) -> Iterator[Mapping[str, Any]]:
        return self._journal.new()

    def new_events(self) -> Iterator[Mapping[str, Any]]:
        return self._events.new()

    @property
    def corrupt(self) -> dict[str, list[int]]:
        """Unreadable lines so far, by file."""
        return {tail.path.name: tail.corrupt for tail in (self._journal, self._events) if tail.corrupt}


class ChainTail:
    """Several runs as one: each continues the one before under a new name, its attempts follow, its steps win.

    Records of an earlier run that arrive once a later one has written are left out: the newest attempt is the run.
    """

    def __init__(self, parts: Sequence[Tail]) -> None:
        self._parts = parts
        self._live, self._attempt, self._numbers = 0, 0, dict[tuple[int, int], int]()

    def new_records(self) -> Iterator[Mapping[str, Any]]:
        for place, part in enumerate(self._parts):
            for record in part.new_records():
                if place < self._live:
                    continue
                if record["kind"] == "attempt":
                    self._live, self._attempt = place, self._attempt + 1
                    self._numbers[place, record["attempt"]] = self._attempt
                number = self._numbers.get((place, record["attempt"]), self._attempt)
                yield {**record, "attempt": number}

    def new_events(self) -> Iterator[Mapping[str, Any]]:
        for part in self._parts:
            yield from part.new_events()

    @property
    def corrupt(self) -> dict[str, list[int]]:
        """Unreadable lines so far, by run and file."""
        found: dict[str, list[int]] = {}
        for place, part in enumerate(self._parts, start=1):
            found |= {f"{file} of run {place}": lines for file, lines in part.corrupt.items()}
        return found


class StoreTail:
    """The same through the store that mirrors the run; it lags by a batch of the mirror, some ten seconds.

    A look that finds nothing new costs three small requests; `points_read` counts what was brought. It raises
    `StoreError` while the store does not answer; the next look then brings what that one could not.
    """

    def __init__(self, tracking_uri: str, family: str, run: str) -> None:
        self._uri, self._family, self._lineage = tracking_uri, family, f"{family}/{run}"
        self._readers: dict[str, PointReader] = {}
        self._ended: set[str] = set()
        self._events_at: str | None = None
        self._num_events = self.points_read = 0
        self.corrupt: dict[str, list[int]] = {}
        self._records: list[Mapping[str, Any]] = []
        self._events: list[Mapping[str, Any]] = []

    def new_records(self) -> Iterator[Mapping[str, Any]]:
        with reading(self._uri) as client:
            experiment = find_experiment(client, self._family)
            runs = newest_generation(find_attempts(client, experiment, self._lineage)) if experiment else []
            for run in runs:
                self._look_at(client, run, last=run is runs[-1])
        new, self._records = self._records, []
        yield from new

    def new_events(self) -> Iterator[Mapping[str, Any]]:
        new, self._events = self._events, []
        yield from new

    def _look_at(self, client: "MlflowClient", run: "Run", *, last: bool) -> None:
        run_id, tags = run.info.run_id, run.data.tags
        head = {"attempt": int(tags[TAG_ATTEMPT]), "step": int(tags[TAG_RESTORED_STEP])}
        if run_id not in self._readers:
            self._readers[run_id] = PointReader(client, self._uri)
            time = run.info.start_time / 1000
            self._records.append({"kind": "attempt", **head, "time": time, "host": "unknown"})
        if last and self._events_at != (newest := tags.get(TAG_MIRRORED_TIME)):
            self._read_events(client, run)
            self._events_at = newest
        points = self._readers[run_id].read(run)
        self.points_read += len(points)
        self._records += [head | record for record in _metrics_records(points)]
        state = tags.get(TAG_STATE, "running")
        if state != "running" and run_id not in self._ended:
            self._ended.add(run_id)
            end = {"time": (run.info.end_time or run.info.start_time) / 1000, "reason": tags.get(TAG_END_REASON)}
            self._records.append({"kind": "end", **head, **end, "state": state})

    def _read_events(self, client: "MlflowClient", run: "Run") -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in read_artifacts(client, run, [EVENTS_FILE], Path(folder)):
                events = read_records(path).records
                self._events += events[self._num_events :]
                self._num_events = len(events)


def _metrics_records(points: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Points as the records they were: what was written in one millisecond."""
    rows: defaultdict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for key, step, time, value in points:
        rows[time, step][key] = value
    for (time, step), row in sorted(rows.items()):
        signs = {key.removeprefix(INFINITE_PREFIX): row.pop(key) for key in [*row] if key.startswith(INFINITE_PREFIX)}
        values = row | {key: sign * math.inf for key, sign in signs.items()}
        named = {unescape_key(key): value for key, value in values.items()}
        yield {"kind": "metrics", "step": step, "time": time / 1000, "values": named}
