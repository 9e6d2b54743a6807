"""Any run in an MLflow store as a series of records, whoever logged it: found by id, by name or by its tag.

Our own runs come through `tail.py`. Here metrics arrive one by one, some under other names, and what belongs to a step
is known only when the next one is there.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rungwise.analysis.reading.metric_names import MetricNames
from rungwise.analysis.reading.store import Point, connect_readonly, metric_page, public_address, reading, sqlite_path
from rungwise.analysis.vocabulary import TAG_LINEAGE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

SETTLE_S: Final = 30.0
"""Age at which the newest step counts as whole, though no later one has come."""
_OVERLAP: Final = 20
"""Points of a metric read again from a server, which sorts by a clock that may have been set back."""
_LARGEST: Final = 1.79e308
"""MLflow's SQL stores keep an infinite value as the largest finite one."""
_ENDS: Final = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}


def find_runs(
    tracking_uri: str, *, ids: Sequence[str] = (), experiment: str = "", names: Sequence[str] = ()
) -> list[str]:
    """Ids of the MLflow runs that make one series, oldest first.

    By id, or by the runs' names within an experiment. The runs that carry the same `rungwise.lineage` tag as one
    named belong to it.

    Raises:
        ValueError: there is no such run or experiment, or a name belongs to several runs.
        StoreError: the store does not answer.
    """
    where = public_address(tracking_uri)
    with reading(tracking_uri) as client:
        runs = [client.get_run(run_id) for run_id in ids]
        if names:
            found = client.get_experiment_by_name(experiment)
            if found is None:
                raise ValueError(f"experiment {experiment!r} is not in {where!r}; check its name")
            runs += [_named(client, found.experiment_id, name) for name in names]
        whole = {run.info.run_id: run for run in runs}
        for run in runs:
            if (lineage := run.data.tags.get(TAG_LINEAGE)) is not None:
                same = client.search_runs([run.info.experiment_id], f"tags.`{TAG_LINEAGE}` = '{lineage}'")
                whole |= {other.info.run_id: other for other in same}
        return sorted(whole, key=lambda run_id: whole[run_id].info.start_time)


def _named(client: "MlflowClient", experiment: str, name: str) -> "Run":
    quoted = name.replace("'", "\\'")
    found = client.search_runs([experiment], f"attributes.run_name = '{quoted}'", max_results=10)
    lineages = {run.data.tags.get(TAG_LINEAGE) for run in found}
    if not found:
        raise ValueError(f"run {name!r} is not in that experiment; check its name, or give --run-id")
    if len(found) > 1 and (len(lineages) > 1 or None in lineages):
        ids = ", ".join(run.info.run_id for run in found)
        raise ValueError(f"run {name!r} is the name of several runs; give --run-id, one of {ids}")
    return found[0]


class ForeignTail:
    """One MLflow run, in records of `attempt`, `metrics` and `end`; `points_read` counts the values brought.

    A step's record is told once a later step has come, the run has ended or `SETTLE_S` have passed. A value of a step
    told already goes with the next record. A loss at an earlier step than the last is a restart there: a new attempt.

    Args:
        names: how their metrics map to ours.
        patient: hold back the newest step; off, everything there is told.
    """

    def __init__(self, tracking_uri: str, run_id: str, names: MetricNames, *, patient: bool = True) -> None:
        self._uri, self._run_id, self._names = tracking_uri, run_id, names
        self._patient = patient
        self._reader = _AnyReader(tracking_uri)
        self._rows = _Rows()
        self._ended = False
        self.points_read = 0
        self.corrupt: dict[str, list[int]] = {}
        self.unmapped: list[str] = []
        """Names that were mapped and that the run does not have."""

    def new_records(self) -> Iterator[Mapping[str, Any]]:
        with reading(self._uri) as client:
            run = client.get_run(self._run_id)
            points = list(self._reader.read(client, run))
        self.points_read += len(points)
        self.unmapped = self._names.missing(run.data.metrics)
        mapped = [
            (named[0], step, at, value * named[1])
            for key, step, at, value in points
            if (named := self._names.ours(key)) is not None
        ]
        ended = _ENDS.get(run.info.status)
        yield from self._rows.take(sorted(mapped, key=lambda point: (point[2], point[1])))
        yield from self._rows.settled(None if ended or not self._patient else time.time() - SETTLE_S)
        if ended and not self._ended and self._rows.attempt:
            self._ended = True
            at = (run.info.end_time or run.info.start_time) / 1000
            yield {"kind": "end", "attempt": self._rows.attempt, "step": self._rows.told, "time": at, "state": ended}

    def new_events(self) -> Iterator[Mapping[str, Any]]:
        return iter(())


class _AnyReader:
    """Points of a run whose writer leaves no word about what is whole: by place in the table, or by count."""

    def __init__(self, tracking_uri: str) -> None:
        self._path = sqlite_path(tracking_uri)
        self._row = 0
        self._brought: Counter[str] = Counter()
        self._recent: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        self._latest: dict[str, tuple[int, int, str]] = {}

    def read(self, client: "MlflowClient", run: "Run") -> Iterator[Point]:
        if self._path is not None:
            value = "CASE WHEN is_nan THEN 'NaN' ELSE value END"
            query = f"SELECT rowid, key, step, timestamp, {value} FROM metrics WHERE run_uuid = ? AND rowid > ?"
            with closing(connect_readonly(self._path)) as table:
                for row, key, step, at, number in table.execute(query, (run.info.run_id, self._row)).fetchall():
                    self._row = max(self._row, row)
                    yield key, step, at, _finite(float(number))
            return
        for point in getattr(run.data, "_metric_objs", ()):
            mark = (point.timestamp, point.step, repr(point.value))
            if self._latest.get(point.key) != mark:
                self._latest[point.key] = mark
                yield from self._new_of(client, run.info.run_id, point.key)

    def _new_of(self, client: "MlflowClient", run_id: str, key: str) -> Iterator[Point]:
        start = max(0, self._brought[key] - _OVERLAP)
        page = metric_page(client, run_id, key, start=start)
        known = Counter(self._recent[key])
        for point in page:
            mark = (point.timestamp, point.step, repr(point.value))
            if known[mark]:
                known[mark] -= 1
            else:
                yield key, point.step, point.timestamp, _finite(point.value)
        self._brought[key] = start + len(page)
        self._recent[key] = [(point.timestamp, point.step, repr(point.value)) for point in page[-_OVERLAP:]]


@dataclass
class _Rows:
    """Points in the order logged → records, one a step."""

    attempt: int = 0
    told: int = 0
    """Last step told."""
    _waiting: dict[int, dict[str, float]] = field(default_factory=dict)
    _times: dict[int, float] = field(default_factory=dict)
    _leading: str = ""
    _newest: int = 0

    def take(self, points: Iterable[Point]) -> Iterator[Mapping[str, Any]]:
        for name, step, at, value in points:
            if name == "train/loss" or not self._leading:
                self._leading = name if name in ("train/loss", "eval/loss") else self._leading
            if name == self._leading:
                if self.attempt == 0 or step < self._newest:
                    yield from self._start(step, at / 1000)
                self._newest = step
            place = max(step, self.told) if name != self._leading else step
            self._waiting.setdefault(place, {})[name] = value
            self._times[place] = at / 1000
            yield from self._tell(step for step in sorted(self._waiting) if step < self._newest)

    def settled(self, before: float | None) -> Iterator[Mapping[str, Any]]:
        """What has waited since `before`, Unix seconds, or all; values ahead of the loss wait for it."""
        ready = [step for step, at in self._times.items() if before is None or (at < before and step <= self._newest)]
        if self.attempt:
            yield from self._tell(sorted(ready))

    def _start(self, step: int, at: float) -> Iterator[Mapping[str, Any]]:
        yield from self._tell(sorted(place for place in self._waiting if place <= self._newest))
        self.attempt, self.told = self.attempt + 1, step - 1
        yield {"kind": "attempt", "attempt": self.attempt, "step": step - 1, "time": at, "host": "unknown"}

    def _tell(self, steps: Iterable[int]) -> Iterator[Mapping[str, Any]]:
        for step in list(steps):
            values, at = self._waiting.pop(step), self._times.pop(step)
            self.told = step
            yield {"kind": "metrics", "attempt": self.attempt, "step": step, "time": at, "values": values}


def _finite(value: float) -> float:
    return value if abs(value) < _LARGEST or value != value else value * 10.0
