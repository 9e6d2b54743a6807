"""How replans, branches and qualifications look in a terminal, and a replan as a figure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape

from rungwise.analysis.drawing.figure_style import FORECAST, INK, MUTED, RUNG, canvases, dress
from rungwise.ladder.changing.course import Course, learning_rate_at
from rungwise.ladder.changing.replan import Replan
from rungwise.ladder.tables import build_table, interval_text, percent, quantity, scientific

CURVE_POINTS = 200


def replan_table(plan: Mapping[str, Any]) -> RenderableType:
    """Before and after, what it costs, and what became of it."""
    before, after = plan["before"], plan["after"]
    state = "applied" if plan["applied"] else "nothing is changed without --apply"
    table = build_table(
        f"{plan['family']}: {plan['run']} at another horizon from step {plan['step'] + 1:,}", "", "before", "after",
        caption=f"{plan['progress']:.0%} of the old horizon is done; {state}",
    )  # fmt: skip
    rows = (
        ("steps", "{:,}".format, "steps"),
        ("tokens", quantity, "tokens"),
        ("tokens per active parameter", "{:.4g}".format, "tokens_per_active_param"),
        ("FLOPs", scientific, "flops"),
        ("FLOPs with head", scientific, "flops_with_head"),
        ("learning rate, next step", "{:.6g}".format, "rate"),
        ("learning rate, last step", "{:.6g}".format, "final_rate"),
        ("phases to come", lambda phases: "; ".join(phases) or "none", "phases"),
        ("evaluations to come", str, "evaluations"),
        ("checkpoints to come", str, "checkpoints"),
    )
    for name, show, field in rows:
        table.add_row(name, show(before[field]), show(after[field]))
    if before["forecast"] is not None:
        table.add_row("forecast, nats", f"{before['forecast']:.4f}", f"{after['forecast']:.4f}")
        table.add_row("interval", interval_text(before), interval_text(after))
    parts: list[RenderableType] = [table]
    if plan["price"] is not None:
        parts.append(f"price: {plan['price']:+.4f} nats of forecast loss, by {plan['source']}")
    return Group(*parts, *(escape(remark) for remark in plan["remarks"]))


def branch_table(result: Mapping[str, Any]) -> RenderableType:
    """A branch, its forecast and what became of it."""
    table = build_table(f"{result['run']}, a branch of {result['parent']} at step {result['step']:,}", "", "")
    table.add_row("last step", f"{result['steps']:,}")
    table.add_row("own tokens", quantity(result["tokens"]))
    table.add_row("context", f"{result['seq_len']:,}")
    table.add_row("learning rate", f"{result['rate']:.6g} down to {result['final_rate']:.6g}")
    if result["forecast"] is not None:
        forecast = result["forecast"]
        table.add_row("forecast, nats", f"{forecast['point']:.4f} ({interval_text(forecast)}), by {forecast['source']}")
    if result["loss"] is not None:
        table.add_row("measured, nats", f"{result['loss']:.4f}")
    if result["held"] is not None:
        table.add_row("inside the interval", "yes" if result["held"] else "no")
    if result["export"] is not None:
        table.add_row("weights", escape(result["export"]))
    return Group(table, *(escape(remark) for remark in result["remarks"]))


def qualification_table(result: Mapping[str, Any]) -> RenderableType:
    """Speed, memory and drops of a few steps."""
    caption = f"{result['stamp']}; {result['measured_steps']} of {result['steps']} steps count"
    table = build_table(f"qualification: {result['run']}", "", "", caption=caption)
    table.add_row("tokens/s, median", quantity(result["tokens_per_second"]))
    table.add_row("seconds a step", f"{result['seconds_per_step']:.3g}")
    table.add_row("share of the matmul ceiling", percent(result["mfu"]))
    table.add_row("dropped, mean", percent(result["drop_fraction"]))
    table.add_row("dropped, worst layer", percent(result["drop_fraction_worst_layer"]))
    table.add_row("peak memory", f"{quantity(result['memory_bytes'])}B")
    table.add_row("whole run at this speed", f"{result['whole_run_seconds'] / 3600:.3g} h")
    return table


def save_replan_figure(plan: Replan, path: Path) -> None:
    """Learning rate and forecast loss over tokens, before and after."""
    figure, (rates, losses) = canvases(5.2, (1.0, 1.2))
    sides = (
        ("before", plan.old_course, plan.old_forecast, MUTED),
        ("after", plan.course, plan.forecast, FORECAST),
    )
    for name, course, forecast, colour in sides:
        at, rate = _rate_curve(course)
        rates.plot(at, rate, color=colour, label=name, lw=1.8)
        curve = None if forecast is None else forecast.curve_table(forecast.metric)
        if curve is not None:
            tokens = curve["progress"].to_numpy(float) * course[-1].tokens_at(course[-1].last_step)
            losses.plot(tokens, curve["loss"], color=colour, lw=1.8)
            losses.fill_between(tokens, curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
    done = plan.course[0].tokens_before + plan.done * plan.course[-1].config.tokens_per_step
    for axes in (rates, losses):
        dress(axes)
        axes.axvline(done, color=RUNG, lw=1, ls=(0, (4, 2)))
    rates.set_ylabel("learning rate")
    losses.set_ylabel("forecast loss, nats per token")
    losses.set_xlabel("tokens")
    rates.set_title(f"{plan.run}: {quantity(plan.before.tokens)} to {quantity(plan.after.tokens)} tokens", color=INK)
    rates.legend(frameon=False)
    figure.savefig(path)


def _rate_curve(course: Course) -> tuple[np.ndarray, np.ndarray]:
    first, last = course[0].first_step + 1, course[-1].last_step
    steps = np.unique(np.linspace(first, last, CURVE_POINTS).astype(int))
    tokens = course[-1].config.tokens_per_step
    return steps * tokens, np.array([learning_rate_at(course, int(step)) for step in steps])
