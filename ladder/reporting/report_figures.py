"""The report's figures: `rungwise.analysis.drawing.figures` draws; here they meet runs and page."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import pandas as pd
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from rungwise.analysis.divergence import Alert
from rungwise.analysis.drawing.evidence_figures import backtest_figure, leave_one_out_figure
from rungwise.analysis.drawing.figures import (
    drops_figure,
    floor_profile_figure,
    ladder_fit_figure,
    trajectory_figure,
)
from rungwise.analysis.drawing.nowcast_figure import nowcast_history_figure
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.points import logged_values
from rungwise.analysis.source import RunRecord
from rungwise.ladder.nowcast import nowcast_hero
from rungwise.ladder.predict import CURVE_METRICS, FamilyRuns, Outcome

DROPS = "moe/drop_fraction"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure inside the page; `caption` says what to see in it."""

    svg: Markup
    caption: str


def fit_picture(forecast: Forecast, outcome: Outcome | None) -> Picture:
    """Rungs, law, interval, outcome."""
    figure = ladder_fit_figure(forecast, outcome=outcome and outcome.measured)
    caption = "Final losses of the rungs, the law, the forecast of the hero with its interval, and the outcome."
    return Picture(svg=inline_svg(figure, "fit", caption), caption=caption)


def backtest_picture(rows: Sequence[Mapping[str, Any]], *, level: float) -> Picture:
    """Held-out rungs with their forecasts."""
    caption = "Each upper rung forecast from those below it: error and interval in percent of what was measured."
    return Picture(svg=inline_svg(backtest_figure(rows, level=level), "backtest", caption), caption=caption)


def leave_one_out_picture(forecast: Forecast, rows: Sequence[Mapping[str, Any]]) -> Picture:
    """The hero's forecast without each rung."""
    caption = "The forecast of the hero with all rungs, and without each of them."
    return Picture(svg=inline_svg(leave_one_out_figure(forecast, rows), "leave-out", caption), caption=caption)


def floor_picture(forecast: Forecast) -> Picture:
    """The forecast as a function of the floor."""
    caption = "Forecast and interval for each floor of the law, and how much support the rungs give that floor."
    return Picture(svg=inline_svg(floor_profile_figure(forecast), "floor", caption), caption=caption)


def trajectory_pictures(runs: FamilyRuns, forecast: Forecast, *, alerts: Iterable[Alert] = ()) -> list[Picture]:
    """Each registered curve with the hero on it, the rungs behind, and while it trains, the nowcast of a loss."""
    steps = runs.plan["hero"]["steps"]
    told = [alert for alert in alerts if alert.severity != "info"]
    pictures = []
    for metric in dict.fromkeys(row["metric"] for row in forecast.curve):
        band = forecast.curve_table(metric)
        assert band is not None
        rungs = {record.run: _curve(record, metric) for record in _one_a_rung(runs)}
        hero = None if runs.hero is None else _curve(runs.hero, metric)
        marks = [{"progress": alert.step / steps, "rule": alert.rule} for alert in told if alert.metric == metric]
        updated = _updated(runs, metric)
        figure = trajectory_figure(
            hero, band, rungs=rungs, alerts=marks, updated=updated, metric=metric, unit=_unit(metric)
        )
        more = "" if updated is None else "; and the rest of the curve as the run so far has it"
        caption = f"{metric}: the registered band, the hero as it went, and the rungs{more}."
        name = metric.replace("/", "-")
        pictures.append(Picture(svg=inline_svg(figure, name, caption), caption=caption))
    return pictures


def _updated(runs: FamilyRuns, metric: str) -> pd.DataFrame | None:
    """The nowcast of a loss of a hero that is under way; None where there is none."""
    if runs.hero is None or runs.hero.state == "finished" or metric not in CURVE_METRICS:
        return None
    try:
        return nowcast_hero(runs, metric=metric).made.updated
    except ValueError:  # the section about the nowcast says why
        return None


def nowcast_picture(record: Mapping[str, Any]) -> Picture:
    """How the nowcast moved, to the outcome where there is one."""
    outcome = record["outcome"]
    figure = nowcast_history_figure(
        record["registered"], record["history"], level=record["level"], outcome=outcome and outcome["measured"]
    )
    caption = "The hero's final loss: as registered, and as forecast again from what the hero had shown by then."
    return Picture(svg=inline_svg(figure, "nowcast", caption), caption=caption)


def _unit(metric: str) -> str:
    return "nats per token" if metric.endswith("loss") else ""


def drops_pictures(runs: FamilyRuns) -> list[Picture]:
    """Dropped assignments of every rung and the hero; none where nothing was logged."""
    records = [*_one_a_rung(runs), *([runs.hero] if runs.hero else [])]
    tables = {record.run: _curve(record, DROPS).rename(columns={"loss": DROPS}) for record in records}
    tables = {name: table for name, table in tables.items() if len(table)}
    if not tables:
        return []
    caption = "Dropped assignments over valid assignments, mean over layers, along each run."
    return [Picture(svg=inline_svg(drops_figure(tables), "drops", caption), caption=caption)]


def _one_a_rung(runs: FamilyRuns) -> list[RunRecord]:
    """The first seed of each rung, smallest rung first."""
    first = [record for record in runs.rungs if record.run == record.rung]
    return sorted(first, key=lambda record: record.plan["flops"])


def _curve(record: RunRecord, metric: str) -> pd.DataFrame:
    steps, values = logged_values(record.trajectory, metric)
    return pd.DataFrame({"progress": steps / record.plan["steps"], "loss": values})


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an `<svg>` element that loads nothing; its ids begin with `name`, to share a page with others."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))
