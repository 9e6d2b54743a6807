"""A verdict as a reader sees it: the table of `tables.py`, and for a replay when each alert would have come."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from rungwise.ladder.tables import build_table, verdict_table


def verdict_view(verdict: Mapping[str, Any]) -> RenderableType:
    """State, alerts and remarks; of a replay, before them, every change in its order."""
    if not verdict.get("told"):
        return verdict_table(verdict)
    table = build_table("as it would have come", "step", "time", "rule", "severity", "state", "what it means")
    table.columns[-1].justify = "left"
    for change in verdict["told"]:
        table.add_row(
            f"{change['updated']:,}",
            _moment(change["time"]),
            f"{change['rule']}\n[dim]{change['metric']}[/]",
            change["severity"],
            change["state"],
            escape(change["explanation"]),
        )
    return Group(table, verdict_table(verdict))


def _moment(time: float | None) -> str:
    return "–" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
