"""What a run's page in MLflow says of its alerts: a tag with the verdict, and one a rule."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rungwise.analysis.reading.records import latest_alerts, read_records
from rungwise.analysis.reading.store import escape_key
from rungwise.analysis.vocabulary import TAG_ALERT_PREFIX, TAG_WATCH_STATE

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LIMIT: Final = 1000


def write_alert_tags(client: "MlflowClient", run_id: str, alerts: Path) -> None:
    """Tags of an MLflow run from its `alerts.jsonl`: `rungwise.watch_state`, and `rungwise.alert.<rule>` each."""
    for name, text in alert_tags(alerts).items():
        client.set_tag(run_id, name, text)


def alert_tags(alerts: Path) -> dict[str, str]:
    """Tag → text: the last verdict, and of each rule its latest alert."""
    records = read_records(alerts).records
    verdicts = [record["state"] for record in records if record["kind"] == "verdict"]
    tags = {TAG_WATCH_STATE: verdicts[-1]} if verdicts else {}
    for entry in latest_alerts(records):
        text = f"{entry['severity']} {entry['state']} at step {entry['updated']}: {entry['explanation']}"
        tags[TAG_ALERT_PREFIX + escape_key(entry["rule"])] = text[:_LIMIT]
    return tags
