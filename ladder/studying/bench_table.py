"""How `ladder bench` looks in a terminal: each function turns the object that `--json` prints into Rich tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from rungwise.ladder.tables import build_table, percent, quantity


def steps_table(result: Mapping[str, Any]) -> RenderableType:
    """What `ladder bench` measured: the ceiling, the training steps against it, the parts of a step."""
    ceiling = f"matrix-product ceiling, float32: [bold]{result['matmul_ceiling_gflops']:,.1f}[/] GFLOP/s"
    columns = ("", "ms", "tokens/s", "share of the ceiling", "in the best step")
    steps = build_table("training step, median", *columns)
    for name, figures in result["steps"].items():
        steps.add_row(
            name,
            f"{figures['step_ms']:,.1f}",
            f"{figures['tokens_per_second']:,.0f}",
            percent(figures["share_of_ceiling"]),
            percent(figures["share_of_ceiling_best_step"]),
        )
    overhead = result["tracking_and_watch"]
    recorded = (
        f"recording and judging a step: {overhead['record_and_judge_ms']:.2f} ms,"
        f" {percent(overhead['share_of_step'])} of the tiny hero's"
    )
    compiled = build_table("compiling the training step, smallest rung of tiny", "layers", "seconds", "operations")
    for depth, figures in result["compile"].items():
        compiled.add_row(depth, f"{figures['compile_seconds']:.1f}", f"{figures['operations']:,.0f}")
    shapes = result["parts_ms"]
    note = "Each compiled alone: within a step the compiler joins them."
    parts = build_table("parts of a layer and of a step, forward and backward, ms", "", *shapes, caption=note)
    for name in dict.fromkeys(name for figures in shapes.values() for name in figures):
        cells = (figures.get(name) for figures in shapes.values())
        parts.add_row(name, *("–" if value is None else f"{value:.2f}" for value in cells))
    return Group(_title(result), ceiling, "", steps, recorded, "", compiled, "", parts)


def transports_table(result: Mapping[str, Any]) -> RenderableType:
    """What `ladder bench transports` measured: one table a shape, then the collectives and what the columns mean."""
    note = (
        "× pooled, × 1 rank: time on virtual ranks over pooled_wave's, and over the same tokens on one rank;"
        f" medians of {result['rounds']} alternating rounds, forward and backward.\n"
        "sent: bytes from a rank to others; rows: what its experts compute, over its assignments; padded: share of"
        " these rows' FLOPs that no kept assignment needs. Virtual ranks emulate ragged's exchange and mxfp8."
    )
    title = "collectives of one layer, forward and backward, on a mesh of accelerators"
    collectives = build_table(title, "transport", "")
    collectives.show_header = False
    collectives.columns[1].justify = "left"
    records = (record for shape in result["shapes"] for record in shape["transports"])
    for name, text in dict.fromkeys((record["transport"], _collectives(record)) for record in records):
        collectives.add_row(name, text)
    return Group(_title(result), *(_shape_table(shape) for shape in result["shapes"]), collectives, f"[dim]{note}[/]")


def _title(result: Mapping[str, Any]) -> str:
    return f"[bold]bench: jax {result['jax']} on {result['devices']}[/]"


def _shape_table(shape: Mapping[str, Any]) -> Table:
    title = (
        f"{shape['num_ranks']} ranks × {shape['num_tokens']:,} tokens, {shape['num_experts']} experts top"
        f" {shape['top_k']}, width {shape['width']}, inner {shape['inner']}"
    )
    columns = ("transport", "ms", "× pooled", "× 1 rank", "dropped", "sent", "rows", "padded")
    table = build_table(title, *columns)
    table.columns[0].no_wrap = table.columns[6].no_wrap = True
    for record in shape["transports"]:
        table.add_row(
            record["transport"],
            f"{record['ms']:,.1f}",
            f"{record['time_over_pooled_wave']:.2f}",
            f"{record['time_over_one_rank']:.2f}",
            percent(record["drop_fraction"]),
            f"{quantity(record['bytes_sent'])}B",
            f"{record['rows_computed']:,} ({record['rows_over_assignments']:.2f}×)",
            percent(record["padded_flops_share"]),
        )
    return table


def _collectives(record: Mapping[str, Any]) -> str:
    """Counts by kind in words.

    >>> _collectives({"collectives": {"all_reduce": 1, "all_to_all": 4}})
    '1 all-reduce, 4 all-to-all'
    """
    return ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in record["collectives"].items())
