"""Verbs that change what a run does, another horizon or a branch, and what `ladder run` takes for such changes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rungwise.ladder.verbs.options import Family, Home, Json, Tracking

Cooldowns = Annotated[
    str | None,
    typer.Option(
        help="Then short branches of each rung that decay to the end: from these shares of it, 0.4,0.6, or 0.2-0.6.",
        show_default=False,
    ),
]
KeepAt = Annotated[
    str | None,
    typer.Option(help="Keep for good the checkpoints at these shares of the runs, as 0.3,0.6.", show_default=False),
]
Steps = Annotated[int | None, typer.Option(help="With --engineering: how many steps.", show_default=False)]
Engineering = Annotated[
    bool, typer.Option("--engineering", help="A few steps of the hero, or of a --rung: speed, memory, drops only.")
]
Anyway = Annotated[bool, typer.Option("--anyway", help="Start a hero whose plan is not the one that was forecast.")]
Price = Annotated[
    float | None, typer.Option(help="Of this machine per hour, to say what the hero will cost.", show_default=False)
]


def replan(
    family: Family,
    *,
    tokens: Annotated[float, typer.Option(help="The whole run's new token horizon, as 3.2e6.")],
    run: Annotated[str, typer.Option(help="The run to change.")] = "hero",
    reason: Annotated[str, typer.Option(help="Why; needed with --apply.", show_default=False)] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Change it; without this nothing is written.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also past the first quarter of the run; needs --reason.")
    ] = False,
    level: Annotated[float, typer.Option(help="Coverage the new interval aims at.")] = 0.9,
    plot: Annotated[Path | None, typer.Option(help="Draw before and after to this file.", show_default=False)] = None,
    home: Home = None,
    tracking: Tracking = None,
    as_json: Json = False,
) -> None:
    """Shorten or lengthen a run under way: schedule, phases, marks, FLOPs and forecast together.

    The rate falls from where it is to the same final rate at the new last step. The old forecast is kept, the new one
    registered as its successor. A run that trains takes the change after the next checkpoint it comes to.

    Example: `ladder replan tiny --tokens 3.0e6 --reason "two weeks less" --apply`
    """
    from rungwise.ladder import console
    from rungwise.ladder.changing import course_table
    from rungwise.ladder.changing.replan import apply_replan, plan_replan
    from rungwise.ladder.home import resolve_home

    folder = resolve_home(home)
    plan = plan_replan(
        family, round(tokens), home=folder, run=run, reason=reason, anyway=anyway, tracking=tracking, level=level
    )
    if plot is not None:
        course_table.save_replan_figure(plan, plot)
    if apply:
        plan = apply_replan(plan, home=folder, tracking=tracking)
    if as_json:
        console.print_json(plan.to_dict())
    else:
        console.print_result(course_table.replan_table(plan.to_dict()))


def branch(
    family: Family,
    *,
    at: Annotated[int, typer.Option(help="Step of the checkpoint to start from.")],
    run: Annotated[str, typer.Option(help="The run to branch from.")] = "hero",
    cooldown_tokens: Annotated[
        float | None, typer.Option(help="Tokens of the branch; else a tenth of the run's.", show_default=False)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Context of the branch; else the run's.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the branch; else run-atSTEP.", show_default=False)] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write its weights into this folder, as safetensors.", show_default=False)
    ] = None,
    level: Annotated[float, typer.Option(help="Coverage its forecast's interval aims at.")] = 0.9,
    home: Home = None,
    tracking: Tracking = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress view.")] = False,
    as_json: Json = False,
) -> None:
    """Branch from a checkpoint: decay to the end from there, in a run of its own. The parent is not touched.

    Called again it resumes, or prints what became of it.

    Example: `ladder branch tiny --at 370 --cooldown-tokens 5e5`
    """
    from rungwise.ladder import console
    from rungwise.ladder.changing import course_table
    from rungwise.ladder.changing.early import run_branch
    from rungwise.ladder.home import resolve_home

    result = run_branch(
        family,
        at,
        home=resolve_home(home),
        run=run,
        tokens=None if cooldown_tokens is None else round(cooldown_tokens),
        seq_len=seq_len,
        name=name,
        export=export,
        tracking=tracking,
        progress=not quiet,
        level=level,
    )
    if as_json:
        console.print_json(result)
    else:
        console.print_result(course_table.branch_table(result))


def qualify_run(
    family: str,
    steps: int | None,
    engineering: bool,
    *,
    runs: tuple[str, ...] | None,
    home: Path,
    tracking: str | None,
    as_json: bool,
) -> None:
    """`ladder run --steps N --engineering`: a few steps, of the hero unless a rung is named, and what they showed."""
    from rungwise.ladder import console
    from rungwise.ladder.changing import course_table
    from rungwise.ladder.launching.qualify import qualify

    if steps is None or not engineering:
        raise ValueError("--steps and --engineering go together: a few steps are no run; give both, as --steps 20")
    if runs is not None and len(runs) > 1:
        raise ValueError(f"--engineering takes one run, not {', '.join(runs)}; give one --rung, or none for the hero")
    result = qualify(family, steps=steps, home=home, run=runs[0] if runs else "hero", tracking=tracking)
    if as_json:
        console.print_json(result)
    else:
        console.print_result(course_table.qualification_table(result))


def starter(
    family: str,
    cooldowns: str | None,
    keep_at: str | None,
    *,
    home: Path,
    runs: tuple[str, ...] | None,
    hero: bool,
) -> Callable[..., None]:
    """What starts the runs: `run_ladder`, or with their cooldowns after them; asks for the checkpoints they keep.

    Raises:
        ValueError: options that do not go together.
    """
    from rungwise.ladder.changing.cooldown import keep_runs, parse_cooldowns, parse_shares, run_cooldowns
    from rungwise.ladder.launching.run import run_ladder

    if keep_at is not None:
        keep_runs(family, parse_shares("--keep-at", keep_at), home=home, runs=runs, hero=hero)
    if cooldowns is None:
        return run_ladder
    if hero:
        raise ValueError("--cooldowns are branches of rungs; leave --hero away, or use `ladder branch`")
    return partial(run_cooldowns, parse_cooldowns(cooldowns))
