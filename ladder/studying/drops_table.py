"""How the drop study looks: tables in a terminal, the page docs/drops.md, and a figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from rungwise.analysis.drawing.figure_style import DPI, FORECAST, INK, MUTED, RUNG, WIDTH_INCHES, dress
from rungwise.ladder.tables import quantity

COLUMNS = ("transport", "dropped", "sender", "receiver", "balanced", "compute", "exchange", "experts")
BALANCED = "balanced: what the same capacity drops when every sequence spreads its routes evenly, sampling alone"
HELD = "compute: rows computed over assignments; exchange, experts: bytes a rank holds at once for one layer, forward"
FIGURE_COLUMNS = ("figure", "source", "published", "predicted", "miss", "sender", "receiver")

_UNITS = {
    "concentration": "Dirichlet concentration",
    "document_tilt": "standard deviation of log popularity between documents",
    "rank_tilt": "standard deviation of log popularity between ranks",
}


def share(value: float) -> str:
    """A drop fraction in percent, readable from 20% down to a millionth.

    >>> share(0.0267), share(1.86e-4), share(0.0)
    ('2.67%', '0.0186%', '0%')
    """
    return f"{100 * value:.3g}%" if value >= 1e-6 or not value else "<0.0001%"


def cells(record: Mapping[str, Any]) -> list[str]:
    """One transport's row."""
    return [
        record["label"],
        share(record["drop_fraction"]),
        share(record["sender_drop_fraction"]),
        share(record["receiver_drop_fraction"]),
        share(record["balanced_drop_fraction"]),
        f"{record['padded_compute']:.2f}×",
        f"{quantity(record['transport_bytes'])}B",
        f"{quantity(record['expert_bytes'])}B",
    ]


def figure_cells(row: Mapping[str, Any]) -> list[str]:
    """One published figure's row; the anchor has no miss."""
    miss = "calibrated" if row["anchor"] else f"{100 * row['miss']:+.3g} pp"
    return [
        row["what"],
        row["source"],
        share(row["published"]),
        share(row["predicted"]),
        miss,
        share(row["sender"]),
        share(row["receiver"]),
    ]


def traffic_text(traffic: Mapping[str, Any]) -> str:
    """What the routes are, in a line."""
    parts = [
        f"{traffic['num_ranks']} ranks × {traffic['tokens_per_rank']:,} tokens",
        f"{traffic['num_experts']} experts top {traffic['top_k']}",
    ]
    if traffic.get("concentration") is not None:
        parts.append(f"concentration {traffic['concentration']:.3g}")
    if traffic.get("rank_tilt"):
        parts.append(f"rank tilt {traffic['rank_tilt']:g}")
    if traffic.get("documents_per_rank"):
        parts.append(f"{traffic['documents_per_rank']} documents a rank, tilt {traffic['document_tilt']:.3g}")
    return ", ".join(parts)


def result_table(result: Mapping[str, Any]) -> RenderableType:
    """What `ladder drops` shows: one study, or the published figures with their misses and the studies after them."""
    if "groups" not in result:
        return study_table(result)
    return Group(published_table(result["groups"]), *(study_table(study) for study in result["studies"]))


def study_table(result: Mapping[str, Any]) -> RenderableType:
    """Drops by cause, memory and padded compute beside them."""
    lines = [BALANCED, HELD]
    if measured := result.get("measured"):
        lines.append(
            f"{measured['run']} dropped {share(measured['drop_fraction'])} at step {measured['step']}"
            f" (sender {share(measured['sender_drop_fraction'])}, receiver {share(measured['receiver_drop_fraction'])})"
        )
    return _table(traffic_text(result["traffic"]), COLUMNS, [cells(row) for row in result["rows"]], "\n".join(lines))


def published_table(groups: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Every group of published figures with its calibration and misses."""
    return Group(
        *(
            _table(
                group["title"],
                FIGURE_COLUMNS,
                [figure_cells(row) for row in group["rows"]],
                f"{_UNITS[group['by']]} {group['value']:.3g}",
            )
            for group in groups
        )
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption=caption, box=box.SIMPLE_HEAD)
    table.caption_justify = "left"
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position == 0 else "right", no_wrap=position == 0)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drops_page(result: Mapping[str, Any]) -> str:
    """docs/drops.md: what the model of the router predicts of published figures, and what the transports cost."""
    groups, studies = result["groups"], result["studies"]
    parts = [_OPENING, "## Published figures, one calibrated, the others predicted\n", _READING]
    for group in groups:
        parts.append(f"### {group['title']}\n\n{_UNITS[group['by']].capitalize()}: {group['value']:.3g}.\n")
        parts.append(markdown(FIGURE_COLUMNS, [figure_cells(row) for row in group["rows"]]) + "\n")
    notes = f"* {BALANCED}\n* {HELD}"
    parts.append(f"## What each transport drops, holds and computes\n\n{notes}\n")
    for result in studies:
        parts.append(f"### {result['title']}\n\n{traffic_text(result['traffic'])}.\n")
        parts.append(markdown(COLUMNS, [cells(row) for row in result["rows"]]) + "\n")
    return "\n".join(parts)


_OPENING = """# What transports drop

Written by `ladder drops --published --output docs/drops.md`; do not edit. Routes are drawn from a model of a router and
judged by the transports' own rules; nothing is trained. Bytes are of one rank and layer, bfloat16, width 3,072:
payloads of one exchange out, in and back; rows of experts computed at once, in, out and hidden. `dropless` is the
reference, with room for every token at one rank.
"""

_READING = """The model has one free number a group. *calibrated* marks the figure that sets it; every other figure is a
prediction, and its miss is predicted minus published, in percentage points. A miss says that the model lacks something,
not that the published figure is wrong.
"""


def study_figure(result: Mapping[str, Any]) -> Figure:
    """Drop fraction by cause, and beside it memory and padded compute, one bar a transport."""
    rows = result["rows"]
    figure = Figure(figsize=(WIDTH_INCHES, 1.2 + 0.32 * len(rows)), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1.2, 1))
    place = range(len(rows))
    sender = [row["sender_drop_fraction"] for row in rows]
    left.barh(place, sender, color=RUNG, label="at the sender")
    receiver = [row["receiver_drop_fraction"] for row in rows]
    left.barh(place, receiver, left=sender, color=FORECAST, label="at the receiver", hatch="//", edgecolor="white")
    even = [row["balanced_drop_fraction"] for row in rows]
    left.plot(even, place, "|", color=INK, ms=11, label="balanced per sequence")
    left.set_xlabel("dropped assignments")
    left.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    left.legend(fontsize=7.5, frameon=False, loc="lower right")
    gigabytes = [[row[f"{part}_bytes"] / 1e9 for row in rows] for part in ("transport", "expert")]
    middle.barh(place, gigabytes[0], color=RUNG, label="transport")
    middle.barh(place, gigabytes[1], left=gigabytes[0], color=MUTED, label="experts", hatch="..", edgecolor="white")
    middle.set_xlabel("GB held a layer")
    middle.legend(fontsize=7.5, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    compute = [row["padded_compute"] for row in rows]
    right.barh(place, compute, color=MUTED)
    right.axvline(1.0, color=INK, lw=0.8)
    right.set_xlabel("padded compute, ×")
    for axes, extent in ((middle, map(sum, zip(*gigabytes, strict=True))), (right, compute)):
        _cut_reference(axes, list(extent), [row["name"] for row in rows])
    for axes in (left, middle, right):
        dress(axes)
        axes.grid(visible=False, axis="y")
        axes.tick_params(labelsize=8)
    left.set_yticks(list(place), [row["label"] for row in rows])  # after `dress`, which sets a locator
    left.invert_yaxis()
    figure.suptitle(traffic_text(result["traffic"]), fontsize=8.5, color=INK, x=0.01, ha="left")
    return figure


def _cut_reference(axes: Axes, extent: Sequence[float], names: Sequence[str]) -> None:
    """Lets the bar of `dropless`, many times the others, run off the axes with its length written on it."""
    others = [length for length, name in zip(extent, names, strict=True) if name != "dropless"]
    if not others or max(extent) <= 2 * max(others):
        return
    axes.set_xlim(0, 1.25 * max(others))
    for place, (length, name) in enumerate(zip(extent, names, strict=True)):
        if name == "dropless":
            axes.text(0.6 * max(others), place, f"{length:.3g} →", color="white", va="center", ha="center", fontsize=8)


def save_page(result: Mapping[str, Any], path: Path) -> None:
    """Writes the page of published figures.

    Raises:
        ValueError: the result is of one study.
    """
    if "groups" not in result:
        raise ValueError(f"output {path} is a page of published figures; add --published, or take --json")
    path.write_text(drops_page(result))


def save_figure(result: Mapping[str, Any], path: Path) -> None:
    """The study's figure as a file, of the kind its suffix says; of published figures the last study's.

    Raises:
        ValueError: a suffix Matplotlib does not write.
    """
    figure = study_figure(result if "rows" in result else result["studies"][-1])
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise ValueError(f"plot {path}: suffix {path.suffix!r} is not one Matplotlib writes; use .png or .svg")
    figure.savefig(path)
