"""Reading what a run's folder holds: a JSON document, or a journal of one record a line.

Standard library only. `ladder/recording/journal.py` and `ladder/home.py` write these files; `analysis/source.py` knows
what the records mean together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.vocabulary import SCHEMA_VERSION, load_json

JOURNAL_FILE: Final = "metrics.jsonl"
EVENTS_FILE: Final = "events.jsonl"
ALERTS_FILE: Final = "alerts.jsonl"
CONFIG_FILE: Final = "config.json"

_REQUIRED: Final = {
    "attempt": ("attempt", "step", "time"),
    "metrics": ("attempt", "step", "time", "values"),
    "end": ("attempt", "step", "time", "state"),
    "alert": ("rule", "metric", "step", "state", "updated", "severity", "explanation"),
    "verdict": ("state", "step"),
    "acknowledgement": ("rule", "step"),
}


@dataclass(frozen=True)
class Records:
    """A journal as far as it is whole.

    A process killed in the middle of a write leaves a line without its end. Last in the file, or
    before the next writer's `attempt`, that is normal: `torn`. Any other unreadable line is `corrupt`.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0
    corrupt: tuple[int, ...] = ()
    """Line numbers, from 1."""


def check_schema(document: Any, path: Path) -> None:
    """Refuse a file of a later version, or of none.

    Raises:
        ValueError: the file's `schema` is not one this version reads.
    """
    version = document.get("schema") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema {version!r} is not readable; this version reads {SCHEMA_VERSION}: "
            "upgrade rungwise, or check that the file is one of its own"
        )


def read_json(path: str | Path) -> dict[str, Any]:
    """One JSON document of ours.

    Raises:
        ValueError: the file is missing, is not JSON, or has another schema version.
    """
    path = Path(path)
    try:
        document = load_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise ValueError(f"{path}: is not strict JSON ({error}); restore or remove it") from error
    check_schema(document, path)
    return document


def read_records(path: str | Path) -> Records:
    """Every whole record of a journal, without its header; a file that is not there has none.

    A record exists once its newline is on disk, so a live journal can be read at any time.

    Raises:
        ValueError: the header is missing or of another schema version.
    """
    path = Path(path)
    if not path.exists():
        return Records()
    *lines, rest = path.read_bytes().split(b"\n")
    if not lines:
        return Records(torn=1 if rest else 0)
    header = decode_record(lines[0])
    if header is None or header["kind"] != "header":
        raise ValueError(f"{path}: line 1 is not a journal header; restore the file or remove it")
    check_schema(header, path)
    found: list[dict[str, Any]] = []
    unread: list[int] = []
    torn = 1 if rest else 0
    for number, line in enumerate(lines[1:], start=2):
        record = decode_record(line)
        if record is None:
            unread.append(number)
            continue
        if record["kind"] == "attempt" and unread and unread[-1] == number - 1:
            unread.pop()
            torn += 1
        found.append(record)
    return Records(found, torn, tuple(unread))


def alert_key(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    """What makes two entries of an `alerts.jsonl` the same alert: rule, metric, and the step where it was raised."""
    return entry["rule"], entry["metric"], entry["step"]


def latest_alerts(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The latest state of each alert among the records of an `alerts.jsonl`, in the order they were raised."""
    return list({alert_key(entry): entry for entry in records if entry["kind"] == "alert"}.values())


def decode_record(line: bytes) -> dict[str, Any] | None:
    """One line as a record, or None where it is not a whole one."""
    try:
        record = load_json(line.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    return record if all(name in record for name in _REQUIRED.get(record["kind"], ())) else None
