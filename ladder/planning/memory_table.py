"""How a plan's memory and drop conditions look in a terminal; the objects are those of `ladder plan --json`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from rungwise.ladder.tables import build_table, percent, quantity

Row = Mapping[str, Any]

_GROUPS = {
    "weights": ("dense_weights", "expert_weights"),
    "optimizer state": ("optimizer_state",),
    "gradients": ("gradients", "gradient_sums", "head_gradient"),
    "saved activations": ("saved_", "pipeline_carries"),
    "… of them transport": ("saved_transport",),
    "layer at work": ("layer_work",),
    "logits": ("logits",),
    "optimizer at work": ("update_work", "bias_work"),
}


_PHASES = {
    "layers": "while layers run backwards",
    "loss": "… the loss is differentiated",
    "update": "… weights are moved",
    "evaluation": "… a batch is evaluated",
}


def size_text(size: float | None) -> str:
    """Bytes in three significant digits, decimal units.

    >>> size_text(1_235_877_888), size_text(0)
    ('1.24 GB', '–')
    """
    return f"{quantity(size)}B" if size else "–"


def memory_table(memory: Row, names: Sequence[str]) -> Table:
    """Bytes of one device by part and by phase, a column a run."""
    runs = [memory["runs"][name] for name in names]
    note = (
        f"Planned for {'an accelerator' if memory['device'] == 'accelerator' else 'a CPU'}. Parts at their largest, not"
    )
    note += " all at once; the phase that needs most counts. What is at work is estimated, the rest is exact."
    table = build_table("memory of one device, bytes", "", *names, caption=note)
    table.columns[0].no_wrap = True
    rows: dict[str, Callable[[Row], str]] = {
        "devices": lambda r: r["mesh"].replace(",", "\n"),
        "tokens at once": lambda r: f"{r['tokens_per_device']:,}",
    }
    for label, prefixes in _GROUPS.items():
        rows[label] = lambda r, prefixes=prefixes: size_text(max(_sum(part, prefixes) for part in r["phases"].values()))
    for phase, label in _PHASES.items():
        rows[label] = lambda r, phase=phase: size_text(_sum(r["phases"][phase], ("",)))
    rows |= {
        "most": lambda r: f"[bold]{size_text(r['total'])}[/]",
        "waves": lambda r: str(r["buffers"]["waves"]),
        "send, a wave": lambda r: size_text(r["buffers"]["send"]),
        "receive, a wave": lambda r: size_text(r["buffers"]["receive"]),
        "expert rows, a wave": lambda r: size_text(r["buffers"]["expert_rows"]),
    }
    if memory["device_memory"] is not None:
        rows[f"in {size_text(memory['device_memory'])}"] = _verdict
    for label, text in rows.items():
        table.add_row(label, *map(text, runs), end_section=label in ("tokens at once", "optimizer at work", "most"))
    return table


def _sum(parts: Mapping[str, int], prefixes: Sequence[str]) -> int:
    return sum(size for name, size in parts.items() if name.startswith(tuple(prefixes)))


def _verdict(row: Row) -> str:
    return "[green]fits[/]" if row["fits"] else f"[red]{size_text(row['short_by'])} short[/]"


def configurations_table(memory: Row) -> Table:
    """The hero under every transport and every choice of what the backward pass computes again."""
    known = memory["device_memory"] is not None
    columns = ("transport", "computed again", "bytes a device", *(["verdict"] if known else []))
    table = build_table("the hero's memory under other configurations", *columns)
    table.columns[1].justify = "left"
    for row in memory["configurations"]:
        cells = (row["transport"], row["rematerialize"], size_text(row["total"]))
        table.add_row(*cells, *([_verdict(row)] if known else []))
    return table


def _share(value: float) -> str:
    return percent(value) if value >= 1e-5 or not value else "< 0.001%"


def drops_table(drops: Mapping[str, Row], names: Sequence[str]) -> Table:
    """What each run's drop figures depend on; a run where that differs from the hero's is marked."""
    rows: dict[str, Callable[[Row], str]] = {
        "tokens a rank": lambda r: f"{r['tokens_per_rank']:,}",
        "sequences a rank": lambda r: f"{r['sequences_per_rank']:,}",
        "documents a rank": lambda r: "–" if r["documents_per_rank"] is None else f"{r['documents_per_rank']:.2f}",
        "rows a pool": lambda r: f"{r['rows_per_pool']:,}" if r["rows_per_pool"] else "–",
        "rows an expert": lambda r: f"{r['rows_per_expert']:,}" if r["rows_per_expert"] else "–",
        "dropped by sampling alone": lambda r: _share(r["expected_sender"] + r["expected_receiver"]),
        "comparable with the hero": lambda r: "[red]no[/]" if r["not_comparable"] else "[green]yes[/]",
    }
    differing = (f"{name}: {'; '.join(drops[name]['not_comparable'])}" for name in names)
    note = "Sampling alone: what a perfectly balanced router would drop."
    reasons = [line for line in differing if not line.endswith(": ")]
    caption = "\n".join((note, *(f"Not comparable, {line}." for line in reasons)))
    table = build_table("conditions of drop figures", "", *names, caption=caption)
    table.columns[0].no_wrap = True
    for label, text in rows.items():
        table.add_row(label, *(text(drops[name]) for name in names))
    return table
