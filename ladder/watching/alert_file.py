"""`alerts.jsonl` of a run: each state of an alert once, the verdict where it changes, and what was acknowledged."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rungwise.analysis.alerts import OPEN_STATES, Alert
from rungwise.analysis.reading.records import ALERTS_FILE, alert_key, latest_alerts, read_records
from rungwise.analysis.source import RunRecord
from rungwise.ladder.recording.journal import append_acknowledgement, append_alert, append_verdict


class AlertFile:
    """Writes what is new of a run's alerts, however often it is judged, and by whom."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        records = read_records(folder / ALERTS_FILE).records
        self._known = {_mark(entry) for entry in records if entry["kind"] == "alert"}
        self._states = [entry["state"] for entry in records if entry["kind"] == "verdict"]
        self._left_open = {alert_key(entry): entry for entry in latest_alerts(records) if is_open(entry)}

    def append(self, alerts: Iterable[Alert]) -> list[Alert]:
        """Writes and returns those that are new."""
        fresh = []
        for alert in alerts:
            entry = alert.to_dict()
            if _mark(entry) not in self._known:
                self._known.add(_mark(entry))
                append_alert(self._folder, entry)
                fresh.append(alert)
        return fresh

    def settle(self, state: str, step: int) -> None:
        """Writes the verdict where it is another than the last; the mirror makes it a tag of the run."""
        if self._states[-1:] != [state]:
            self._states.append(state)
            append_verdict(self._folder, state, step)

    def drop(self, alerts: Iterable[Alert], step: int) -> list[Alert]:
        """Writes and returns the end of what earlier watches left open and this one, up to `step`, does not raise.

        A silence that is over, a change declared afterwards, or other thresholds would leave an alert open for ever.
        """
        raised = {alert_key(alert.to_dict()) for alert in alerts}
        ends = []
        for key, entry in self._left_open.items():
            if key not in raised and entry["step"] <= step:
                known = {field.name: entry[field.name] for field in fields(Alert) if field.name in entry}
                why = f"{entry['explanation']}; no longer so when the run was judged again"
                ends.append(Alert(**known | {"state": "resolved", "updated": step, "explanation": why}))
        return self.append(ends)


def is_open(entry: Mapping[str, Any]) -> bool:
    """Whether an entry asks for attention."""
    return entry["state"] in OPEN_STATES


def recorded_alerts(record: RunRecord) -> list[Mapping[str, Any]]:
    """The latest state of each alert the watch wrote while the run trained, in the order they were raised."""
    return latest_alerts(record.alerts)


def acknowledge(folder: Path, rule: str, *, step: int | None = None, note: str | None = None) -> list[str]:
    """Say of the open alerts of a rule that somebody knows; they open again only by getting worse.

    Args:
        step: from which step of the run on; else where the latest of its records stands.
    Returns:
        The metrics whose alert it is.
    Raises:
        ValueError: no such alert is open.
    """
    entries = [entry for entry in latest_alerts(read_records(folder / ALERTS_FILE).records) if is_open(entry)]
    mine = [entry for entry in entries if entry["rule"] == rule]
    if not mine:
        known = ", ".join(sorted({entry["rule"] for entry in entries})) or "none"
        raise ValueError(f"rule {rule!r} has no open alert here; open are: {known}")
    at = max(entry["updated"] for entry in mine) if step is None else step
    append_acknowledgement(folder, rule, at, **({"note": note} if note else {}))
    return [entry["metric"] for entry in mine]


def _mark(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return *alert_key(entry), entry["state"], entry["updated"]
