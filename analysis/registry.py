"""Freezing a forecast before its hero runs: one content-hashed file, written once, checked at every reading.

`ladder/recording/mirror.py` puts a copy into the MLflow store, for those who have only its address.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rungwise.analysis.forecast import Forecast
from rungwise.analysis.reading.store import find_experiment, find_forecasts, public_address, read_artifacts, reading
from rungwise.analysis.vocabulary import TAG_FORECAST_HASH, dump_json, load_json


def register(forecast: Forecast, folder: str | Path) -> str:
    """Write `forecast` as `<hash>.json`, all or nothing, and return the hash; the same content again changes
    nothing.

    Raises:
        ValueError: the folder holds another forecast, or one that was changed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    digest = forecast.hash
    with _locked(folder):
        present = load_registered(folder)
        if present is not None and present.hash != digest:
            raise ValueError(
                f"forecast {digest} differs from the registered {present.hash}; a registered forecast is never replaced"
            )
        if present is None:
            _write_once(folder / f"{digest}.json", dump_json(forecast.to_dict(), indent=1) + "\n")
    return digest


def register_successor(forecast: Forecast, folder: str | Path) -> str:
    """Write a forecast that takes the registered one's place, which stays beside it; return its hash.

    Its `method` says in "supersedes" which one (`hash`) and why (`reason`). The same content again changes nothing.

    Raises:
        ValueError: it names no registered forecast as the one it supersedes, or one that has a successor already.
    """
    folder = Path(folder)
    with _locked(folder):
        present = load_registered(folder)
        if present is not None and present.hash == forecast.hash:
            return forecast.hash
        if present is None or superseded_hash(forecast) != present.hash:
            raise ValueError(
                f"forecast {forecast.hash} succeeds {superseded_hash(forecast)}, but"
                f" {'none' if present is None else present.hash} is registered; make it from that one"
            )
        _write_once(folder / f"{forecast.hash}.json", dump_json(forecast.to_dict(), indent=1) + "\n")
    return forecast.hash


def superseded_hash(forecast: Forecast) -> str | None:
    """Hash of the forecast whose place a forecast takes; None for a first one."""
    supersedes = (forecast.method or {}).get("supersedes") or {}
    return supersedes.get("hash")


def load_registered(folder: str | Path) -> Forecast | None:
    """The registered forecast of `folder`, the last of its successors; None without one.

    Raises:
        ValueError: several that do not succeed one another, an unreadable one, or content that no longer has the hash
            of its name.
    """
    forecasts = [_read_checked(file, str(file)) for file in sorted(Path(folder).glob("*.json"))]
    if not forecasts:
        return None
    past = {superseded_hash(forecast) for forecast in forecasts}
    current = [forecast for forecast in forecasts if forecast.hash not in past]
    if len(current) != 1 or len(past - {None}) != len(forecasts) - 1:
        hashes = ", ".join(forecast.hash for forecast in forecasts)
        raise ValueError(f"folder {folder} holds {len(forecasts)} forecasts ({hashes}); keep one and its successors")
    return current[0]


def load_registered_mlflow(tracking_uri: str, family: str) -> Forecast | None:
    """The forecast a family registered last, out of the store; None without one.

    Raises:
        ValueError: the address does not answer, or the content no longer has the hash it was registered under.
    """
    with reading(tracking_uri) as client, tempfile.TemporaryDirectory() as folder:
        experiment = find_experiment(client, family)
        records = find_forecasts(client, experiment) if experiment else []
        if not records:
            return None
        digest = records[-1].data.tags[TAG_FORECAST_HASH]
        where = f"{digest} in {public_address(tracking_uri)!r}"
        files = read_artifacts(client, records[-1], [f"{digest}.json"], Path(folder))
        if not files:
            raise ValueError(f"forecast {where} has lost its file; register it again where it was made")
        return _read_checked(files[0], where)


def _read_checked(file: Path, where: str) -> Forecast:
    """The forecast in a file named by its hash."""
    try:
        record: Any = load_json(file.read_text(encoding="utf-8"))
        forecast = Forecast.from_dict(record)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"forecast {where} was changed or is not one: {error}") from error
    if not forecast.hash == record["hash"] == file.stem:
        raise ValueError(
            f"forecast {where} was changed: content hashes to {forecast.hash}, name and record say otherwise"
        )
    return forecast


def _write_once(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".forecast-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(name, path)  # never replaces, unlike rename
    finally:
        os.unlink(name)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder against a second registration at the same time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
