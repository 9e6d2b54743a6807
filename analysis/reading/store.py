"""The MLflow store as our runs use it: addresses, names and one run's points. Reading only.

MLflow costs a second to import, so it is imported where it is used. `analysis/source.py` knows what the
points mean; `ladder/recording/mirror.py` writes them.
"""

import hashlib
import logging
import os
import posixpath
import re
import socket
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rungwise.analysis.vocabulary import TAG_ATTEMPT, TAG_FORECAST_HASH, TAG_LINEAGE, TAG_MIRRORED_TIME

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

_DATABASE_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_REQUESTS: Final = 8
"""Metric histories asked of a server at a time."""
_PAGE: Final = 25_000
_KEY_LIMIT: Final = 250
_ESCAPED = re.compile(r":([0-9a-f]{4,6}):")


def open_client(tracking_uri: str) -> "MlflowClient":
    """An MLflow client that reports no usage to an outside host and soon gives up a dead server."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    logging.getLogger("alembic").setLevel(logging.ERROR)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


def sqlite_path(tracking_uri: str) -> Path | None:
    """The file behind a `sqlite:///` address, None for any other address.

    >>> sqlite_path("sqlite:////home/mlflow.db"), sqlite_path("http://host:5000")
    (PosixPath('/home/mlflow.db'), None)
    """
    scheme, _, path = tracking_uri.partition(":///")
    return Path(path) if scheme == "sqlite" else None


def public_address(tracking_uri: str) -> str:
    """The address without a user name or password, fit for messages.

    >>> public_address("https://me:secret@host:5000/path")
    'https://host:5000/path'
    """
    return re.sub(r"//[^/@]*@", "//", tracking_uri)


class StoreError(ValueError):
    """A tracking store that cannot be read; one line with its address."""


@contextmanager
def reading(tracking_uri: str) -> Iterator["MlflowClient"]:
    """A client for what only reads: whatever goes wrong with the store is one line with its address.

    Raises:
        StoreError: nothing answers, or the store refuses or breaks off.
    """
    check_reachable(tracking_uri)
    client_error, database_error = _store_errors()
    try:
        yield open_client(tracking_uri)
    except (client_error, database_error, sqlite3.Error, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise StoreError(f"tracking {public_address(tracking_uri)!r} cannot be read: {reason}") from error


def _store_errors() -> tuple[type[Exception], type[Exception]]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError


def check_reachable(tracking_uri: str, *, timeout_s: float = 3.0) -> None:
    """Return if a tracking address answers now; for commands that only read.

    Any HTTP answer below 500 counts: a server may ask for credentials. Of a database server, the port is tried.

    Raises:
        StoreError: nothing answers, there is no such file, or it is no tracking address.
    """
    address = public_address(tracking_uri)
    path = sqlite_path(tracking_uri)
    parts = urllib.parse.urlsplit(tracking_uri)
    scheme = parts.scheme.partition("+")[0]
    if path is not None:
        if not path.is_file():
            raise StoreError(f"tracking {address!r}: no such database; train a run first or check the path")
        return
    if scheme not in ("http", "https", *_DATABASE_PORTS):
        raise StoreError(
            f"tracking {address!r} is neither a server (http://…) nor a database (sqlite:///…); correct it"
        )
    try:
        if scheme in _DATABASE_PORTS:
            port = parts.port or _DATABASE_PORTS[scheme]
            socket.create_connection((parts.hostname or "localhost", port), timeout_s).close()
        else:
            urllib.request.urlopen(tracking_uri.rstrip("/") + "/health", timeout=timeout_s).close()
        return
    except urllib.error.HTTPError as error:
        if error.code < 500:
            return
        reason: object = f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
    raise StoreError(f"tracking {address!r} does not answer ({reason}); start the server or correct the address")


@lru_cache(maxsize=4096)
def escape_key(name: str) -> str:
    """A metric or parameter name MLflow accepts, one-to-one, names it accepts already unchanged.

    Other characters, and every slash and dot of a path that MLflow would normalise, become `:<hex>:`.

    >>> escape_key("train/loss"), escape_key("timing(s)/gen"), escape_key("a//b")
    ('train/loss', 'timing:0028:s:0029:/gen', 'a:002f::002f:b')
    """
    path = posixpath.normpath(name) == name and not name.startswith(("/", ".."))
    allowed = r"[^A-Za-z0-9_\-. /]" if path and name != "." else r"[^A-Za-z0-9_\- ]"
    key = re.sub(allowed, lambda found: f":{ord(found[0]):04x}:", name)
    if len(key) <= _KEY_LIMIT:
        return key
    return f"{key[:170]}:sha256:{hashlib.sha256(name.encode()).hexdigest()}"


@lru_cache(maxsize=4096)
def unescape_key(key: str) -> str:
    """Inverse of `escape_key`, for names that fit the length limit.

    >>> unescape_key("timing:0028:s:0029:/gen")
    'timing(s)/gen'
    """
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), key)


def find_experiment(client: "MlflowClient", family: str) -> str | None:
    """The id of the experiment named after a family, or None."""
    experiment = client.get_experiment_by_name(family)
    return experiment.experiment_id if experiment and experiment.lifecycle_stage == "active" else None


def find_attempts(client: "MlflowClient", experiment: str, lineage: str | None = None) -> list["Run"]:
    """The MLflow runs of one training run, or of all in the experiment, oldest first."""
    found = _search(client, experiment, f"tags.`{TAG_LINEAGE}` " + (f"= '{lineage}'" if lineage else "!= ''"))
    return sorted(found, key=lambda run: (run.info.start_time, int(run.data.tags[TAG_ATTEMPT])))


def find_forecasts(client: "MlflowClient", experiment: str) -> list["Run"]:
    """The MLflow runs that hold a registered forecast, oldest first; they are attempts of no training run."""
    tagged = _search(client, experiment, f"tags.`{TAG_FORECAST_HASH}` != ''")
    return [run for run in tagged if TAG_LINEAGE not in run.data.tags]


def _search(client: "MlflowClient", experiment: str, condition: str) -> list["Run"]:
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment], condition, order_by=["attributes.start_time ASC"], page_token=token)
        runs += page
        token = page.token
        if not token:
            return runs


def newest_generation(runs: Iterable["Run"]) -> list["Run"]:
    """The attempts of the newest run under a name: one trained again from nothing starts at attempt 1.

    Args:
        runs: MLflow runs of one lineage, oldest first.
    """
    newest: list[Run] = []
    for run in runs:
        if newest and int(run.data.tags[TAG_ATTEMPT]) <= int(newest[-1].data.tags[TAG_ATTEMPT]):
            newest = []
        newest.append(run)
    return newest


Point = tuple[str, int, int, float]
"""Key, step, Unix milliseconds, value (NaN as NaN)."""


class PointReader:
    """The points of one MLflow run, each once: a call brings what no earlier call brought."""

    def __init__(self, client: "MlflowClient", tracking_uri: str) -> None:
        self._client, self._path = client, sqlite_path(tracking_uri)
        self._until = -1
        self._brought: Counter[str] = Counter()

    def read(self, run: "Run") -> list[Point]:
        """All new points, up to the last record that is there whole.

        Args:
            run: as the store tells it now; always of the same id.
        """
        until = int(run.data.tags.get(TAG_MIRRORED_TIME, -1))
        if until <= self._until:
            return []
        points = self._from_server(run, until) if self._path is None else self._from_sqlite(self._path, run, until)
        self._until = until
        self._brought.update(key for key, *_ in points)
        return points

    def _from_sqlite(self, path: Path, run: "Run", until: int) -> list[Point]:
        """The table itself: 0.02 s for 24,000 points against 0.4 s through the client (2 cores)."""
        value = "CASE WHEN is_nan THEN 'NaN' ELSE value END"
        window = "run_uuid = ? AND timestamp > ? AND timestamp <= ?"
        query = f"SELECT key, step, timestamp, {value} FROM metrics WHERE {window}"
        with closing(connect_readonly(path)) as table:
            rows = table.execute(query, (run.info.run_id, self._until, until))
            return [(key, step, time, float(value)) for key, step, time, value in rows]

    def _from_server(self, run: "Run", until: int) -> list[Point]:
        keys = list(run.data.metrics)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            histories = pool.map(lambda key: self._history(run.info.run_id, key), keys)
            return [
                (key, point.step, point.timestamp, point.value)
                for key, history in zip(keys, histories, strict=True)
                for point in history
                if point.timestamp <= until
            ]

    def _history(self, run_id: str, key: str) -> list["Metric"]:
        return metric_page(self._client, run_id, key, start=self._brought[key])


def connect_readonly(path: Path) -> sqlite3.Connection:
    """An MLflow database, for reading alone."""
    return sqlite3.connect(f"file:{urllib.parse.quote(str(path))}?mode=ro", uri=True, timeout=20)


def metric_page(client: "MlflowClient", run_id: str, key: str, *, start: int) -> list["Metric"]:
    """One metric's points from a place on: a server sorts them by time, and a page token is a place."""
    from mlflow.utils.search_utils import SearchUtils

    store = client._tracking_client.store  # the public method always starts at the first point
    token = SearchUtils.create_page_token(start).decode() if start else None
    points: list[Metric] = []
    while True:
        page = store.get_metric_history(run_id, key, max_results=_PAGE, page_token=token)
        points += page
        token = page.token
        if not token:
            return points


def read_artifacts(client: "MlflowClient", run: "Run", names: Iterable[str], folder: Path) -> list[Path]:
    """Fetch into `folder` those of the named artifacts that the run has."""
    present = {found.path for found in client.list_artifacts(run.info.run_id)}
    return [Path(client.download_artifacts(run.info.run_id, name, str(folder))) for name in names if name in present]
