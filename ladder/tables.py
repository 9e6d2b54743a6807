"""How results look in a terminal: each function turns the object that `--json` prints into Rich tables."""

import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rungwise.analysis.vocabulary import decode_number
from rungwise.ladder.console import duration

_STATE_STYLES = {
    "done": "green",
    "running": "cyan",
    "queued": "blue",
    "stale": "yellow",
    "failed": "red",
    "not started": "dim",
}
_VERDICT_STYLES = {"healthy": "green", "alert": "red", "cannot_judge": "yellow"}
_SEVERITY_STYLES = {"info": "dim", "warning": "yellow", "critical": "red"}


def quantity(value: float | None) -> str:
    """A count in three significant digits with its unit prefix; an empty string where missing.

    >>> quantity(1_081_344), quantity(960), quantity(2.5e15), quantity(None)
    ('1.08 M', '960', '2.50 P', '')
    """
    if value is None:
        return ""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{_three_digits(value / 10**power)} {prefix}"
    return f"{value:.3g}"


def _three_digits(value: float) -> str:
    """Three significant digits, trailing zeros kept, no exponent: 100, 16.8, 7.30, 0.00101."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def scientific(value: float) -> str:
    """A count of FLOPs.

    >>> scientific(2.6179e24)
    '2.62e24'
    """
    return f"{value:.2e}".replace("e+", "e")


def percent(share: float) -> str:
    """A share in three significant digits, however small.

    >>> percent(1.0), percent(0.1679), percent(1.01e-5)
    ('100%', '16.8%', '0.00101%')
    """
    return f"{_three_digits(100 * share)}%"


def loss_text(value: float | str | None) -> str:
    """A loss in nats to four decimals; non-finite values as words, missing ones as a dash."""
    return "–" if value is None else f"{decode_number(value):.4f}"


def build_table(title: str, *columns: str, caption: str | None = None) -> Table:
    """An empty table in the house style: first column of words, the others of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", caption=caption, box=box.SIMPLE_HEAD)
    table.caption_justify = "left"
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position == 0 else "right")
    return table


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """One row a run: how far it is, how it does, how long it still takes."""
    columns = ("run", "state", "step", "loss", "tokens/s", "time left", "attempts")
    table = build_table(f"runs of {status['family']}", *columns)
    for run in status["runs"]:
        style = _STATE_STYLES[run["state"]]
        stamp = " [dim](engineering only)[/]" if run.get("role") == "engineering" else ""
        steps = f"{run['step']:,} / {run['steps']:,}" if run["steps"] else f"{run['step']:,}"
        table.add_row(
            f"{run['run']}{stamp}",
            f"[{style}]{run['state']}[/]",
            steps,
            loss_text(run["loss"]),
            quantity(run["tokens_per_second"]),
            duration(run["seconds_left"]),
            str(run["attempts"]),
        )
        if run["reason"]:
            table.add_row("", f"[{style}]{escape(run['reason'])}[/]")
    return table


def forecast_table(forecast: Mapping[str, Any]) -> RenderableType:
    """The forecast first, then what it rests on, what it refuses and what to beware of."""
    table = build_table(f"forecast of {forecast['metric']}, nats per token", "", "", caption=f"hash {forecast['hash']}")
    table.show_header = False
    table.columns[1].justify = "left"
    table.columns[1].overflow = "fold"
    laws = (f"{law['role']}: {law_text(law)} → {law['value']:.4f}" for law in forecast["laws"])
    refused = (f"{item['run']}: {item['reason']}" for item in forecast["refused"])
    rows = {
        "final loss": f"{forecast['point']:.4f}",
        f"{forecast['level']:.0%} interval": interval_text(forecast),
        "half-width": half_width_text(forecast),
        "status": forecast["status"],
        "degrees of freedom": str(forecast["degrees_of_freedom"]),
        "extrapolates by": f"{forecast['extrapolation_ratio']:.3g} × the largest rung's compute",
        "laws": "\n".join(laws),
        "runs used": ", ".join(row["run"] for row in forecast["used"]),
        "runs refused": "\n".join(refused) or "none",
        "evidence": (forecast.get("method") or {}).get("evidence", "–"),
        "loss rule": forecast["loss_rule"],
        "beware": "\n".join(forecast["warnings"]) or "nothing noted",
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def backtest_table(result: Mapping[str, Any]) -> RenderableType:
    """Each upper rung forecast from the smaller ones, and what the forecasts say together."""
    caption = backtest_text(result)
    title = f"back-test: upper rungs forecast from those below, {result['level']:.0%} intervals"
    columns = ("run", "compute, times", "forecast", "interval", "measured", "error", "skill", "inside")
    table = build_table(title, *columns, caption=caption)
    for row in result["rows"]:
        interval = "–" if row["low"] is None else f"{row['low']:.4f} … {row['high']:.4f}"
        table.add_row(
            row["run"],
            f"{row['extrapolation_ratio']:.2f}",
            f"{row['point']:.4f}",
            interval,
            f"{row['observed']:.4f}",
            f"{row['percent']:+.2f}%",
            f"{row['skill']:.2f}",
            "–" if row["inside"] is None else "yes" if row["inside"] else "no",
        )
    return table


def backtest_text(result: Mapping[str, Any]) -> str:
    """One sentence on a back-test."""
    summary, rows = result["summary"], [row for row in result["rows"] if row["inside"] is not None]
    held = sum(bool(row["inside"]) for row in rows)
    mean = "" if summary is None else f"; mean absolute error {summary['mean_abs_percent']:.2f}%"
    counts = summary["counts"] if summary and len(summary["counts"]) > 1 else []
    alone = ", ".join(f"{item['mean_abs_percent']:.2f}% by {item['count']}" for item in counts)
    return f"{held} of {len(rows)} held-out runs inside their intervals{mean}{f' ({alone} alone)' if alone else ''}"


def nowcast_text(nowcast: Mapping[str, Any]) -> str:
    """One line: what the run so far makes of the final loss, beside what is registered."""
    text = (
        f"{nowcast['run']} at {nowcast['progress']:.0%}: final {nowcast['metric']} {nowcast['updated']['point']:.4f}"
        f" [{interval_text(nowcast['updated'])}], registered {nowcast['registered']['point']:.4f}"
        f" [{interval_text(nowcast['registered'])}]"
    )
    factor = nowcast["compute_factor"]
    return text if factor is None else f"{text}; the law's loss at {factor:.3g} × its compute"


def nowcast_table(nowcast: Mapping[str, Any]) -> RenderableType:
    """Registered and updated forecast side by side, then how the update moved along the run, to the outcome."""
    at = f"step {nowcast['step']:,} of {nowcast['steps']:,} ({nowcast['progress']:.0%})"
    title = f"nowcast of final {nowcast['metric']}: {nowcast['run']} at {at}"
    caption = f"the registered forecast {nowcast['forecast'][:12]} stays as it is"
    table = build_table(title, "", "registered", "updated", caption=caption)
    before, after = nowcast["registered"], nowcast["updated"]
    table.add_row("final loss, nats per token", f"{before['point']:.4f}", f"{after['point']:.4f}")
    table.add_row(f"{nowcast['level']:.0%} interval", interval_text(before), interval_text(after))
    table.add_row("width", "1", f"{nowcast['width_ratio']:.2f}")
    table.add_row("change", "", f"{nowcast['change']:+.4f} nats")
    if nowcast["compute_factor"] is not None:
        table.add_row("the law's loss at × compute", "1", worth_text(nowcast))
    table.add_row("surprise (1 is as expected)", "", f"{nowcast['surprise']:.2f}")
    return Group(table, nowcast_history_table(nowcast)) if nowcast["history"] or nowcast["outcome"] else table


def nowcast_history_table(nowcast: Mapping[str, Any]) -> Table:
    """What was known at shares of the run, and what came."""
    table = build_table("how it moved", "seen of the run", "forecast", "interval", "width", "surprise")
    for row in nowcast_rows(nowcast):
        table.add_row(*row)
    return table


def nowcast_rows(nowcast: Mapping[str, Any]) -> list[list[str]]:
    """Words of the history: registered, each mark, outcome."""
    registered, outcome = nowcast["registered"], nowcast["outcome"]
    rows = [["none: registered", f"{registered['point']:.4f}", interval_text(registered), "1", ""]]
    for mark in nowcast["history"]:
        numbers = [f"{mark['width_ratio']:.2f}", f"{mark['surprise']:.2f}"]
        rows.append([f"{mark['progress']:.0%}", f"{mark['point']:.4f}", interval_text(mark), *numbers])
    if outcome is not None:
        rows.append(["all: outcome", f"{outcome['measured']:.4f}", "", "", ""])
    return rows


def worth_text(nowcast: Mapping[str, Any]) -> str:
    """The change as a factor of compute under the registered law, with its range over the floors.

    >>> worth_text({"compute_factor": 0.9312, "compute_factor_low": 0.9, "compute_factor_high": 0.95})
    '0.931 (0.9 … 0.95)'
    """
    low, high = nowcast["compute_factor_low"], nowcast["compute_factor_high"]
    spread = "" if low is None or high is None else f" ({low:.3g} … {high:.3g})"
    return f"{nowcast['compute_factor']:.3g}{spread}"


def law_text(law: Mapping[str, Any]) -> str:
    """A fitted law as a formula, C in FLOPs.

    >>> law_text({"floor": 1.6, "amplitude": 95.25, "exponent": 0.09412})
    '1.6 + 95.25 · C^-0.09412'
    """
    return f"{law['floor']:.4g} + {law['amplitude']:.4g} · C^-{law['exponent']:.4g}"


def interval_text(forecast: Mapping[str, Any]) -> str:
    """The interval in nats, or the word that there is none."""
    if forecast["low"] is None:
        return "none"
    return f"{forecast['low']:.4f} … {forecast['high']:.4f}"


def half_width_text(forecast: Mapping[str, Any]) -> str:
    """Half the interval in nats, as a factor of compute, and beside the fall from top rung to hero."""
    half = forecast["half_width"]
    if half["nats"] is None:
        return "none"
    parts = [f"{half['nats']:.4f} nats"]
    if half["compute_factor"] is not None:
        parts.append(f"a factor {half['compute_factor']:.2f} of compute")
    if half["of_fall"] is not None:
        parts.append(f"{half['of_fall']:.0%} of the fall from the top rung")
    return ", ".join(parts)


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def verdict_table(verdict: Mapping[str, Any]) -> RenderableType:
    """State in one line, then one row an alert, then what could not be judged."""
    style = _VERDICT_STYLES[verdict["state"]]
    word = verdict["state"].replace("_", " ")
    head = f"[bold]{verdict['run']}[/] at step {verdict['step']}: [bold {style}]{word}[/]"
    parts: list[RenderableType] = [head]
    if verdict["alerts"]:
        columns = ("rule", "severity", "state", "since step", "observed", "expected", "what it means")
        table = build_table("alerts", *columns)
        table.columns[-1].justify = "left"
        for alert in verdict["alerts"]:
            colour = _SEVERITY_STYLES[alert["severity"]]
            table.add_row(
                f"{alert['rule']}\n[dim]{alert['metric']}[/]",
                f"[{colour}]{alert['severity']}[/]",
                alert["state"],
                str(alert["since"]),
                _word(alert["observed"]),
                _word(alert["expected"]),
                escape(str(alert["explanation"])),
            )
        parts.append(table)
    parts += [f"[dim]{escape(remark)}[/]" for remark in verdict["remarks"]]
    if (nowcast := verdict.get("nowcast")) is not None:
        parts.append(f"[dim]nowcast, {escape(nowcast_text(nowcast))}[/]")
    return Group(*parts)


def demo_table(result: Mapping[str, Any]) -> RenderableType:
    """The end of the demo: forecast, outcome, verdict, and where to look."""
    forecast, outcome = result["forecast"], result["outcome"]
    table = build_table(f"{result['family']}: what came of the forecast", "", "")
    table.show_header = False
    table.columns[1].justify, table.columns[1].overflow = "left", "fold"
    table.add_row("forecast", f"{forecast['point']:.4f} nats per token, final {forecast['metric']} of the hero")
    table.add_row(
        f"{forecast['level']:.0%} interval",
        f"{interval_text(forecast)}; half-width {half_width_text(forecast)}",
    )
    if outcome is not None:
        table.add_row("outcome", f"{outcome['measured']:.4f}, forecast minus outcome {outcome['error']:+.4f}")
        held = {
            True: "[green]the forecast held",
            False: "[red]the forecast did not hold",
            None: "[yellow]no interval to hold",
        }
        table.add_row("verdict", f"{held[outcome['held']]}[/]; skill {outcome['skill']:.2f}")
    table.add_row("watch", result["watch"].replace("_", " "))
    table.add_row("report", escape(result["report"]))
    table.add_row("the runs in MLflow", escape(result["mlflow_ui"]))
    return table
