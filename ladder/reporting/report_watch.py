"""What the report says of the watch: alerts with their states, who was told, and the changes declared."""

from collections.abc import Iterator, Mapping
from typing import Any

from rungwise.analysis.reading.records import alert_key
from rungwise.analysis.source import RunRecord
from rungwise.ladder.reporting.report_page import Section, Table
from rungwise.ladder.watching.alert_file import recorded_alerts
from rungwise.ladder.watching.outbox import Outbox
from rungwise.ladder.watching.watch import Verdict


def alerts_section(verdict: Verdict, hero: RunRecord | None) -> Section:
    """Every alert in its latest state: as it was recorded while the hero trained, else as it is judged now."""
    recorded = [] if hero is None else recorded_alerts(hero)
    known = {alert_key(entry) for entry in recorded}
    judged = [entry for alert in verdict.alerts if alert_key(entry := alert.to_dict()) not in known]
    note = f"{len(recorded)} recorded while the hero trained. " + " ".join(f"{remark}." for remark in verdict.remarks)
    rows = [_alert_row(entry) for entry in sorted([*recorded, *judged], key=lambda entry: entry["step"])]
    if not rows:
        return Section(id="alerts", title="Alerts", text=["None was raised."], note=note)
    columns = ["rule", "severity", "state", "steps", "what it means"]
    return Section(id="alerts", title="Alerts", tables=[Table(columns=columns, rows=rows, wordy=True)], note=note)


def _alert_row(entry: Mapping[str, Any]) -> list[str]:
    more = [entry["explanation"]]
    if (cost := entry.get("cost")) is not None:
        more.append(f"worth {cost:.0%} of the run's compute if it stays")
    if held := entry.get("held_back"):
        more.append(f"{held:,} more rows fired")
    steps = f"{entry['since']:,} – {entry['updated']:,}"
    return [entry["rule"], entry["severity"], entry["state"], steps, "; ".join(more)]


def deliveries_section(outbox: Outbox | None) -> Section:
    """Each message at each receiver: delivered, on its way, or given up."""
    rows = [] if outbox is None else [list(row) for row in outbox.deliveries()]
    columns = ["receiver", "what became of it", "message"]
    tables = [Table(columns=columns, rows=rows, wordy=True)] if rows else []
    return Section(id="deliveries", title="Who was told", tables=tables)


def events_section(hero: RunRecord | None) -> Section:
    """The changes declared to the hero."""
    rows = [] if hero is None else [[*_event_row(event)] for event in hero.events]
    columns = ["kind", "step", "expected", "note"]
    tables = [Table(columns=columns, rows=rows, wordy=True)] if rows else []
    return Section(id="events", title="Declared changes", tables=tables)


def _event_row(event: Mapping[str, Any]) -> Iterator[str]:
    yield event["kind"]
    yield f"{event['step']:,}"
    expected = event.get("expected") or {}
    effects = expected.items() if isinstance(expected, Mapping) else [("", expected)]
    yield ", ".join(f"{metric} {effect:+g}" if isinstance(effect, float) else f"{metric} {effect}".strip()
                    for metric, effect in effects)  # fmt: skip
    yield "; ".join(str(event[name]) for name in ("what", "text", "note") if event.get(name))
