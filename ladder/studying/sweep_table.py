"""How a sweep looks in a terminal: optima, laws in the form of a family file, every cell. From what `--json` prints."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rungwise.analysis.sweeps.optimum import FAR_FROM_OPTIMUM, OptimumStatus
from rungwise.analysis.vocabulary import decode_number
from rungwise.ladder.tables import loss_text, percent

_EXPONENTS = {"tokens": "tokens_exponent", "hidden_dim": "hidden_exponent", "tokens_per_step": "batch_exponent"}


def sweep_table(result: Mapping[str, Any]) -> RenderableType:
    """Optima first, then the laws they give, then the cells they rest on."""
    swept = result["optima"] if len(result["grid"]["lr"]) > 1 else []
    parts: list[RenderableType] = []
    if swept:
        parts += [_optima(result, swept), *_notes(swept)]
    if result["batch_optima"]:
        parts += ["", _batches(result), *_notes(result["batch_optima"])]
    for law in result["laws"] if swept else ():
        parts += ["", *(escape(line) for line in law_lines(law, level=result["level"]))]
    rule = escape(result["divergence_rule"])
    return Group(*parts, "", _cells(result), f"[dim]{rule}[/]")


def _table(title: str, places: Sequence[str], *columns: str) -> Table:
    style: Any = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = Table(title=title, collapse_padding=True, pad_edge=False, **style)
    for name in places:
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _setting_text(settings: Mapping[str, str]) -> str:
    return " ".join(f"{field}={value}" for field, value in settings.items())


def _places(result: Mapping[str, Any], *, batch: bool = True) -> list[str]:
    """Columns that say where a row stands: the rung, and what the grid varies."""
    axes = [axis for axis in ("batch", "horizon") if len(result["grid"][axis]) > 1 and (batch or axis != "batch")]
    return ["rung", *axes, *(["set"] if result["grid"]["set"] else [])]


def _place(row: Mapping[str, Any], places: Sequence[str]) -> list[str]:
    texts = {"rung": row["rung"], "set": escape(_setting_text(row["set"]))}
    return [texts[name] if name in texts else f"×{row[name]:g}" for name in places]


def _optima(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    places, level = _places(result), f"{result['level']:.0%}"
    title = f"learning rates of {result['family']} ({level} intervals, losses in nats per token)"
    diverged = any(row["optimum"]["diverges_from"] is not None for row in rows)
    columns = ["best rate", "loss there", "recipe's", "lost there", "share", *(["diverges"] if diverged else [])]
    table = _table(title, places, *columns)
    table.columns[len(places)].no_wrap = True
    for row in rows:
        optimum = row["optimum"]
        share, at_least = optimum["lost_percent"], "≥ " if optimum["at_edge"] else ""
        far = optimum["at_edge"] or share is None or share > FAR_FROM_OPTIMUM
        table.add_row(
            *_place(row, places),
            _with_interval(number(optimum["value"]), optimum["low"], optimum["high"]),
            loss_text(optimum["loss"]),
            number(optimum["recipe"]),
            _lost(optimum),
            "–" if share is None else f"[{'yellow' if far else 'green'}]{at_least}{share:.2f}%[/]",
            *([_from(optimum["diverges_from"])] if diverged else []),
        )
    return table


def _from(rate: float | None) -> str:
    return "no" if rate is None else f"from {number(rate)}"


def _lost(optimum: Mapping[str, Any]) -> str:
    if optimum["lost"] is None:
        return "–"
    text = f"{'≥ ' if optimum['at_edge'] else ''}{optimum['lost']:.4f}"
    return text if optimum["lost_high"] is None else f"{text} ({optimum['lost_low']:.4f} … {optimum['lost_high']:.4f})"


def _with_interval(text: str, low: float | None, high: float | None) -> str:
    return text if low is None and high is None else f"{text} ({interval(low, high)})"


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What keeps a row from having an optimum, one line each."""
    notes = []
    for row in rows:
        said = [] if row["optimum"]["status"] == OptimumStatus.INSIDE else [row["optimum"]["status"]]
        if row.get("rests_on_edges"):
            said.append(f"{len(row['rests_on_edges'])} of its batches have their best rate at an edge")
        notes += [f"[yellow]{escape(row['name'])}: {escape('; '.join(said))}[/]"] if said else []
    return notes


def _batches(result: Mapping[str, Any]) -> Table:
    places = _places(result, batch=False)
    title = f"tokens a step, each batch at its own best rate and at equal tokens ({result['level']:.0%} intervals)"
    table = _table(title, places, "best", "loss there", "recipe's", "lost there")
    for row in result["batch_optima"]:
        optimum = row["optimum"]
        table.add_row(
            *_place(row, places),
            _with_interval(number(optimum["value"]), optimum["low"], optimum["high"]),
            loss_text(optimum["loss"]),
            number(optimum["recipe"]),
            _lost(optimum),
        )
    return table


def law_lines(laws: Mapping[str, Any], *, level: float) -> list[str]:
    """The learning-rate law as a family file's table with its intervals, and the batch law as a formula."""
    rate, batch = laws["learning_rate"], laws["batch"]
    heading = f" with {_setting_text(laws['set'])}" if laws["set"] else ""
    if rate is None:
        return [f"No optimum inside its grid{heading}: no law. Sweep more rates."]
    optima = _plural(rate["num_optima"], "optimum", "optima")
    lines = ["[learning_rate]".ljust(28) + f"# fitted to {optima}{heading}; {level:.0%} intervals"]
    constants = {"coefficient": rate["coefficient"]}
    constants |= {name: rate["exponents"][term] for term, name in _EXPONENTS.items()}
    for name, constant in constants.items():
        why = f"held: {constant['held']}" if constant["held"] else interval(constant["low"], constant["high"])
        value = f"{constant['value']:.4g}" if name == "coefficient" else f"{round(constant['value'], 4)}"
        lines.append(f"{name} = {value}".ljust(28) + f"# {why}")
    if rate["scatter"] is not None:
        lines.append(
            f"# the optima scatter {rate['scatter']:.2g} times as much as their own errors say"
            f" ({_plural(rate['degrees_of_freedom'], 'degree', 'degrees')} of freedom)"
        )
    lines += [f"# left out: {line}" for line in rate["left_out"]]
    lines += ["# rates by this law:", *_predicted(rate)]
    if batch is not None:
        exponents = batch["exponents"].items()
        terms = (f"{term}^{constant['value']:.3g}{_exponent_note(constant)}" for term, constant in exponents)
        lines.append(f"# best tokens a step = {batch['coefficient']['value']:.4g} · " + " · ".join(terms))
        lines += ["# tokens a step by this law:", *_predicted(batch)]
    return lines


def _predicted(law: Mapping[str, Any]) -> list[str]:
    rows = law["predictions"]
    texts = (_with_interval(number(row["value"]), row["low"], row["high"]) for row in rows)
    return [f"#   {row['name']:<6} {text}" for row, text in zip(rows, texts, strict=True)]


def _exponent_note(constant: Mapping[str, Any]) -> str:
    return " (held)" if constant["held"] else f" ({interval(constant['low'], constant['high'])})"


def _plural(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _cells(result: Mapping[str, Any]) -> Table:
    places = _places(result)
    seeds = ["seed"] if len({row["seed"] for row in result["cells"]}) > 1 else []
    title = "cells: final losses, |g| after warm-up and in the last half, drops and load of the last quarter"
    columns = ("lr", "rate", "steps", "held-out", "train", "peak |g|", "late |g|", "drops", "load")
    table = _table(title, [*places, *seeds], *columns, "")
    last = None
    for row in result["cells"]:
        group = [row[key] for key in ("rung", "set", "batch", "horizon")]
        if last not in (None, group):
            table.add_section()
        last = group
        stopped = f"{row['steps_done']:,} of " if row["steps_done"] < row["steps"] else ""
        table.add_row(
            *_place(row, places),
            *(str(row[name]) for name in seeds),
            f"×{row['lr']:g}",
            number(row["learning_rate"]),
            f"{stopped}{row['steps']:,}",
            loss_text(row["eval_loss"]),
            loss_text(row["train_loss"]),
            number(row["grad_norm_peak"]),
            number(row["grad_norm_peak_late"]),
            percent(decode_number(row["drop_fraction"])),
            f"{decode_number(row['expert_load']):.2f}",
            "diverged" if row["diverged"] else "",
            style="red" if row["diverged"] else None,
        )
    return table


def number(value: float | None) -> str:
    """Three significant digits; a dash where there is none.

    >>> number(0.03125), number(2048), number(None)
    ('0.0312', '2,048', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def interval(low: float | None, high: float | None) -> str:
    """An interval, or the one side of it that is known.

    >>> interval(0.01, 0.03), interval(None, 0.03), interval(0.01, None), interval(None, None)
    ('0.01 … 0.03', '≤ 0.03', '≥ 0.01', '–')
    """
    if low is None or high is None:
        return f"≥ {number(low)}" if low is not None else f"≤ {number(high)}" if high is not None else "–"
    return f"{number(low)} … {number(high)}"
