"""What the report says of the nowcast: where the hero's own part leaves its forecast, and how that moved."""

from collections.abc import Mapping
from typing import Any

from rungwise.ladder.nowcast import nowcast_record
from rungwise.ladder.predict import FamilyRuns
from rungwise.ladder.reporting.report_figures import nowcast_picture
from rungwise.ladder.reporting.report_page import Section, Table
from rungwise.ladder.tables import interval_text, nowcast_rows, worth_text

TITLE = "The forecast, updated along the way"


def nowcast_section(runs: FamilyRuns) -> Section:
    """The record of the nowcasts at shares of the run, beside the outcome once it is in; empty before the hero."""
    if runs.registered is None or runs.hero is None or not runs.hero.attempts:
        return Section(id="nowcast", title=TITLE)
    try:
        record = nowcast_record(runs)
    except ValueError as error:
        return Section(id="nowcast", title=TITLE, text=[f"There is no nowcast: {error}."])
    columns = ["seen of the run", "forecast", f"{record['level']:.0%} interval", "width", "surprise"]
    note = (
        "Each line uses nothing but the registered curve and what the hero had shown by then. Width is over the"
        " registered interval's; a surprise of 1 is a run that misses its curve as much as the band expects. The"
        " registered forecast itself is never changed."
    )
    pictures = [nowcast_picture(record)] if record["history"] else []
    table = Table(columns=columns, rows=nowcast_rows(record))
    return Section(id="nowcast", title=TITLE, text=[_sentence(record)], pictures=pictures, tables=[table], note=note)


def _sentence(record: Mapping[str, Any]) -> str:
    if (outcome := record["outcome"]) is not None:
        inside = sum(row["low"] <= outcome["measured"] <= row["high"] for row in record["history"])
        return f"{inside} of {len(record['history'])} nowcasts held the outcome, {outcome['measured']:.4f}."
    text = (
        f"At {record['progress']:.0%} of the run the final {record['metric']} is forecast as"
        f" {record['updated']['point']:.4f} ({interval_text(record['updated'])}), {record['change']:+.4f} nats against"
        " what is registered"
    )
    if record["compute_factor"] is None:
        return f"{text}."
    return f"{text}. The registered law has that loss at {worth_text(record)} times the hero's compute."
