"""Where everything lives under one home folder, and JSON documents that are whole or absent.

`<home>/mlflow.db`, `<home>/<family>/{family.toml, forecasts/, runs/<run>/}`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.reading.records import CONFIG_FILE, read_json
from rungwise.analysis.vocabulary import SCHEMA_VERSION, dump_json

__all__ = [
    "CONFIG_FILE",
    "FAMILY_FILE",
    "family_folder",
    "forecasts_folder",
    "make_folder",
    "read_json",
    "resolve_home",
    "resolve_tracking",
    "run_folder",
    "write_json",
]

FAMILY_FILE: Final = "family.toml"
HOME_VARIABLE: Final = "RUNGWISE_HOME"
TRACKING_VARIABLE: Final = "MLFLOW_TRACKING_URI"
_REMEDY: Final = f"free it, or choose another home with --home or {HOME_VARIABLE}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def resolve_home(home: str | Path | None = None) -> Path:
    """The home folder: the argument, else `RUNGWISE_HOME`, else `./rungwise-runs`; absolute, not created."""
    return Path(home or os.environ.get(HOME_VARIABLE) or "rungwise-runs").expanduser().absolute()


def resolve_tracking(home: Path, tracking: str | None = None) -> str:
    """The MLflow address: the argument, else `MLFLOW_TRACKING_URI`, else the SQLite file at home."""
    return tracking or os.environ.get(TRACKING_VARIABLE) or f"sqlite:///{home / 'mlflow.db'}"


def family_folder(home: Path, family: str) -> Path:
    return home / _checked("family", family)


def forecasts_folder(home: Path, family: str) -> Path:
    return family_folder(home, family) / "forecasts"


def run_folder(home: Path, family: str, run: str) -> Path:
    return family_folder(home, family) / "runs" / _checked("run", run)


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
    return name


def make_folder(path: Path) -> Path:
    """Create a folder and its parents if need be.

    Raises:
        ValueError: it cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"folder {path} cannot be created ({error.strerror}); {_REMEDY}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"folder {path} cannot be written to; {_REMEDY}")
    return path


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, its schema version first, so that a reader sees the old one or the new one, whole."""
    text = dump_json({"schema": SCHEMA_VERSION, **document}, indent=2) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
