"""Verbs that study a recipe, the transports or this machine, apart from any ladder's own runs."""

from pathlib import Path
from typing import Annotated

import typer

from rungwise.ladder.verbs.options import Family, Home, Json


def sweep(
    family: Family,
    *,
    rung: Annotated[
        list[str] | None,
        typer.Option(help="Sweep on this rung; may be repeated; else the smallest.", show_default=False),
    ] = None,
    lr: Annotated[str, typer.Option(help="Factors of the recipe's peak learning rate.")] = "1",
    batch: Annotated[str, typer.Option(help="Factors of the recipe's batch (data replicas).")] = "1",
    horizon: Annotated[str, typer.Option(help="Factors of the recipe's tokens; steps follow.")] = "1",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE[,VALUE]",
            help="Values of a recipe field, or of table.field (optimizer, transport, execution); may be repeated.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds of every cell, such as 0,1; else the rung's first.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the sweep's folder; else what it varies.", show_default=False)
    ] = None,
    level: Annotated[float, typer.Option(help="Coverage the intervals aim at.")] = 0.9,
    home: Home = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress view.")] = False,
    as_json: Json = False,
) -> None:
    """Sweep learning rate, batch, horizon or any option on small rungs: a full grid, each cell trained once.

    Reports each optimum with its interval, the loss lost at the recipe's value, where runs diverge, and the
    learning-rate law through the optima. Finished cells are not run again. Exit code 1 where a cell failed.

    Example: `ladder sweep tiny --rung d32 --rung d48 --lr 0.25,0.5,1,2,4`
    """
    from rungwise.ladder import console
    from rungwise.ladder.home import resolve_home
    from rungwise.ladder.studying.sweep import run_sweep
    from rungwise.ladder.studying.sweep_grid import Grid, parse_factors, parse_seeds, parse_settings
    from rungwise.ladder.studying.sweep_table import sweep_table

    grid = Grid(
        rungs=tuple(rung or ()),
        lr=parse_factors("--lr", lr),
        batch=parse_factors("--batch", batch),
        horizon=parse_factors("--horizon", horizon),
        settings=parse_settings(settings or ()),
        seeds=parse_seeds(seeds) if seeds is not None else (),
    )
    result = run_sweep(family, grid, home=resolve_home(home), name=name, level=level, progress=not quiet)
    if as_json:
        console.print_json(result)
    else:
        console.print_result(sweep_table(result))
        console.log(f"figure and cells: {result['folder']}")


def bench(
    what: Annotated[str, typer.Argument(help="steps: ceiling and training step; transports: one against another.")] = (
        "steps"
    ),
    *,
    as_json: Json = False,
) -> None:
    """Measure this machine: matmul ceiling and training step, or the transports against one another.

    Example: `ladder bench transports --json`
    """
    from rungwise.ladder import console
    from rungwise.ladder.studying import bench_table

    if what == "steps":
        from rungwise.ladder.studying.bench import run_bench as measure

        table = bench_table.steps_table
    elif what == "transports":
        from rungwise.ladder.studying.bench_transports import run_bench_transports as measure

        table = bench_table.transports_table
    else:
        raise ValueError(f"bench {what!r} is unknown; give steps or transports")
    result = measure()
    if as_json:
        console.print_json(result)
    else:
        console.print_result(table(result))


def study_drops(
    *,
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens a rank and step.")] = 65_536,
    experts: Annotated[int, typer.Option(help="Experts of a layer.")] = 384,
    top_k: Annotated[int, typer.Option(help="Experts of a token.")] = 8,
    skew: Annotated[float, typer.Option(help="Dirichlet concentration of popularity; inf: equal.")] = 9.0,
    rank_tilt: Annotated[float, typer.Option(help="Spread of log popularity between ranks.")] = 0.0,
    documents: Annotated[int, typer.Option(help="Documents a rank whose tokens are alike; 0: none.")] = 0,
    document_tilt: Annotated[float, typer.Option(help="Spread of log popularity between documents.")] = 0.5,
    transport: Annotated[list[str] | None, typer.Option(help="One of them only; may be repeated.")] = None,
    capacity: Annotated[list[str] | None, typer.Option(help="Factor, or sender/receiver; may be repeated.")] = None,
    waves: Annotated[int, typer.Option(help="Waves of pooled_wave.")] = 1,
    spill: Annotated[int, typer.Option(help="Other choices a full slot spills to.")] = 0,
    payload: Annotated[str, typer.Option(help="compute or mxfp8.")] = "compute",
    width: Annotated[int, typer.Option(help="Values of a travelling row.")] = 3072,
    inner: Annotated[int, typer.Option(help="Inner width of an expert.")] = 3072,
    draws: Annotated[int, typer.Option(help="Seeds to average.")] = 3,
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    run: Annotated[Path | None, typer.Option(help="A run's folder: its journal's routing.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(help="Step of that run; else its last.", show_default=False)] = None,
    context: Annotated[int | None, typer.Option(help="Another context of that run.", show_default=False)] = None,
    counts: Annotated[Path | None, typer.Option(help="JSON of measured counts per expert.", show_default=False)] = None,
    published: Annotated[bool, typer.Option("--published", help="Predict published figures; report misses.")] = False,
    output: Annotated[Path | None, typer.Option(help="Page of --published.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw to this file.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Simulate what transports drop, and the memory and padded compute beside it; no devices, no training.

    Drop fractions depend on tokens a rank, documents a rank and skew: assumed, or read off a run.

    Example: `ladder drops --skew 9 --documents 16 --waves 3`
    """
    from rungwise.ladder import console
    from rungwise.ladder.studying import drops, drops_table

    if published:
        result = drops.published_result(log=console.log)
    else:
        shape = drops.Traffic(
            num_ranks=ranks,
            tokens_per_rank=tokens,
            num_experts=experts,
            top_k=top_k,
            concentration=skew,
            rank_tilt=rank_tilt,
            documents_per_rank=documents,
            document_tilt=document_tilt if documents else 0.0,
            seed=seed,
        )
        result = drops.study_result(
            shape,
            sizes=drops.Sizes(width=width, inner=inner),
            draws=draws,
            run=run,
            step=step,
            context=context,
            counts=counts,
            transports=transport or drops.TRANSPORTS,
            capacities=capacity or drops.CAPACITIES,
            waves=waves,
            spill=spill,
            payload=payload,
        )
    if output is not None:
        drops_table.save_page(result, output)
    if plot is not None:
        drops_table.save_figure(result, plot)
    if as_json:
        console.print_json(result)
    else:
        console.print_result(drops_table.result_table(result))
