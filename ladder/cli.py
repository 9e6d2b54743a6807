"""The command line `ladder`: one function a verb; each calls one module and prints the result. The verbs that study
recipe, transports and machine are in `studies.py`, those about a run that trains in `watch.py`.

A verb imports what it needs when it runs, so that `ladder --help` answers at once.
Exit codes: 0 done, 1 a run failed, 2 bad input, 130 interrupted, 143 asked to stop and saved; `watch` adds 3 (could
not judge), 10 (alert open), 11 and 12 (the same and healthy, with a delivery given up).
"""

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn, cast

import typer

from rungwise.ladder.verbs import course, studies, watch
from rungwise.ladder.verbs.options import Family, Home, Json, Tracking, show_traceback_if_asked

app = typer.Typer(
    name="ladder",
    help="Train a ladder of small rungs, forecast the hero from them, watch the hero against the forecast.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Launcher = Literal["local", "slurm"]

RUN_FAILED, BAD_INPUT, COULD_NOT_JUDGE, INTERRUPTED, PREEMPTED = 1, 2, 3, 130, 143


def _version(wanted: bool) -> None:
    if wanted:
        from rungwise import __version__

        print(f"rungwise {__version__}")
        raise typer.Exit


@app.callback()
def _ladder(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    family: Family,
    *,
    device_memory: Annotated[
        str | None, typer.Option(help="Of one device, such as 80GB: says what does not fit it.", show_default=False)
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Other devices, such as data=2,expert=4,optimizer=sharded.", show_default=False)
    ] = None,
    execution: Annotated[
        str | None,
        typer.Option(help="Carried out otherwise, such as rematerialize=blocks.", show_default=False),
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="As if attention scores and whole logits were never stored.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print every derived number before anything runs: sizes, costs, memory of a device, comparable drops.

    Example: `ladder plan tiny`
    """
    from rungwise.ladder import console
    from rungwise.ladder.family import load_family
    from rungwise.ladder.planning import plan_table
    from rungwise.ladder.planning.memory import parse_bytes
    from rungwise.ladder.planning.plan import plan_ladder

    size = parse_bytes(device_memory) if device_memory else None
    made = plan_ladder(load_family(family), mesh=mesh, execution=execution, device_memory=size, fused=fused)
    result = made.to_dict()
    if as_json:
        console.print_json(result)
    else:
        console.print_result(plan_table.plan_view(result))


@app.command()
def run(
    family: Family,
    *,
    rung: Annotated[
        list[str] | None, typer.Option(help="Train this rung only; may be repeated.", show_default=False)
    ] = None,
    hero: Annotated[bool, typer.Option("--hero", help="Train the hero instead of the rungs.")] = False,
    launcher: Annotated[Launcher, typer.Option(help="Train here, or hand each rung to Slurm as a job.")] = "local",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Option of sbatch, as time=2-00:00:00; may be repeated.", show_default=False),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes of one run under Slurm, over all its nodes.")] = 1,
    mesh: Annotated[
        str | None,
        typer.Option(help="Fields of the family's mesh for this call, as data=2,expert=4.", show_default=False),
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores for runs side by side; else all.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory for runs side by side, as 16GB; else no limit.")] = None,
    cooldowns: course.Cooldowns = None,
    keep_at: course.KeepAt = None,
    steps: course.Steps = None,
    engineering: course.Engineering = False,
    anyway: course.Anyway = False,
    price: course.Price = None,
    home: Home = None,
    tracking: Tracking = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress view.")] = False,
    as_json: Json = False,
) -> None:
    """Train the rungs, or the hero; skips what is finished and resumes what is not.

    Exit code 1 where a run failed; the others are trained to their end.

    Example: `ladder run tiny --rung d64`
    """
    from rungwise.ladder import console, tables
    from rungwise.ladder.home import resolve_home
    from rungwise.ladder.launching import status
    from rungwise.ladder.launching.run import Budget, usable_cores
    from rungwise.ladder.launching.slurm import JobOptions
    from rungwise.ladder.mesh.processes import is_first
    from rungwise.ladder.planning.memory import parse_bytes

    if rung and hero:
        raise ValueError("--rung and --hero exclude each other; run the ladder first, then the hero")
    if launcher == "local" and (sbatch or processes > 1):
        raise ValueError("--sbatch and --processes are for Slurm; add --launcher slurm")
    words = ("--mesh", mesh) if mesh else ()
    options = JobOptions(sbatch=tuple(sbatch or ()), processes=processes, run_options=words)
    jobs = options if launcher == "slurm" else None
    budget = Budget(cores=cores or usable_cores(), memory=None if memory is None else parse_bytes(memory))
    folder, runs = resolve_home(home), tuple(rung) if rung else None
    if engineering or steps is not None:
        course.qualify_run(family, steps, engineering, runs=runs, home=folder, tracking=tracking, as_json=as_json)
        return
    start = course.starter(family, cooldowns, keep_at, home=folder, runs=runs, hero=hero)
    start(
        family,
        home=folder,
        runs=runs,
        hero=hero,
        tracking=tracking,
        progress=not quiet,
        jobs=jobs,
        mesh=mesh,
        budget=budget,
        anyway=anyway,
        price_per_hour=price,
    )
    if not is_first():
        return
    result = status.family_status(family, home=folder)
    if as_json:
        console.print_json(result)
    else:
        console.print_result(tables.status_table(result))


@app.command(name="status")
def show_status(
    family: Family,
    *,
    home: Home = None,
    tracking: Annotated[
        str | None, typer.Option(help="MLflow address to ask about runs that are not here.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is done, running, stale, failed; last loss, speed, time left.

    Example: `ladder status tiny`
    """
    from rungwise.ladder import console, tables
    from rungwise.ladder.home import resolve_home
    from rungwise.ladder.launching import status

    result = status.family_status(family, home=resolve_home(home), tracking=tracking)
    if as_json:
        console.print_json(result)
    else:
        console.print_result(tables.status_table(result))


@app.command()
def cancel(
    family: Family,
    *,
    rung: Annotated[
        list[str] | None, typer.Option(help="End this run's job only; may be repeated.", show_default=False)
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """End the Slurm jobs of a family's runs; what they have saved stays, and `ladder run` goes on from it.

    Example: `ladder cancel tiny --rung d64`
    """
    from rungwise.ladder import console
    from rungwise.ladder.family import load_family
    from rungwise.ladder.home import family_folder, resolve_home
    from rungwise.ladder.launching.slurm import cancel_jobs

    ended = cancel_jobs(family_folder(resolve_home(home), load_family(family).name), rung)
    if as_json:
        console.print_json({"family": family, "cancelled": [{"run": job.run, "job": job.job} for job in ended]})
    for job in () if as_json else ended:
        print(f"{job.run}: job {job.job} cancelled")
    if not (ended or as_json):
        console.log("no living job of these runs")


@app.command()
def forecast(
    family: Family,
    *,
    register: Annotated[
        bool, typer.Option("--register", help="Freeze the forecast; refused once the hero has started.")
    ] = False,
    backtest: Annotated[
        bool, typer.Option("--backtest", help="Also forecast the upper rungs from those below, and score it.")
    ] = False,
    nowcast: Annotated[
        bool,
        typer.Option("--nowcast", help="Show the registered forecast updated by the hero's own part; changes nothing."),
    ] = False,
    level: Annotated[
        float | None, typer.Option(help="Coverage the interval aims at; else 0.9.", show_default=False)
    ] = None,
    home: Home = None,
    tracking: Tracking = None,
    as_json: Json = False,
) -> None:
    """Forecast the hero's final loss and whole curve from the finished rungs, with intervals.

    Once the hero trains, `--nowcast` says what its own part makes of that.

    Example: `ladder forecast tiny --register`
    """
    from rungwise.ladder import console, predict, tables
    from rungwise.ladder.home import resolve_home

    folder = resolve_home(home)
    if nowcast:
        if register or backtest or level is not None:
            raise ValueError("--nowcast updates what is registered; leave --register, --backtest and --level away")
        from rungwise.ladder.nowcast import nowcast_record

        updated = nowcast_record(predict.load_family_runs(family, home=folder, tracking=tracking))
        if as_json:
            console.print_json(updated)
        else:
            console.print_result(tables.nowcast_table(updated))
        return
    level = 0.9 if level is None else level
    runs = predict.load_family_runs(family, home=folder, tracking=tracking)
    made = predict.forecast_runs(runs, level=level)
    if register:
        console.log(f"registered as {predict.register_forecast(made, runs, home=folder, tracking=tracking)}")
    held_out = predict.backtest_runs(runs, level=level).to_dict() if backtest else None
    if as_json:
        console.print_json(made.to_dict() | ({"backtest": held_out} if held_out else {}))
        return
    console.print_result(tables.forecast_table(made.to_dict()))
    if held_out:
        console.print_result(tables.backtest_table(held_out))


for _name, _verb in (("watch", watch.watch_run), ("event", watch.declare)):
    app.command(name=_name)(_verb)


@app.command()
def report(
    family: Family,
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write the page; else the family's report.html.", show_default=False),
    ] = None,
    home: Home = None,
    tracking: Tracking = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page: plan, curves, forecast, outcome, verdict, failures.

    Example: `ladder report tiny`
    """
    from rungwise.ladder import console
    from rungwise.ladder.home import resolve_home
    from rungwise.ladder.reporting.report import write_report

    path = write_report(family, home=resolve_home(home), tracking=tracking, output=output)
    if as_json:
        console.print_json({"family": family, "report": str(path)})
    else:
        print(path)


for _name, _verb in (("replan", course.replan), ("branch", course.branch)):
    app.command(name=_name)(_verb)


for _name, _verb in (("sweep", studies.sweep), ("drops", studies.study_drops), ("bench", studies.bench)):
    app.command(name=_name)(_verb)


@app.command(name="demo")
def run_demo(
    family: Annotated[str, typer.Argument(help="The family to go through.")] = "tiny",
    *,
    home: Home = None,
    tracking: Tracking = None,
    as_json: Json = False,
) -> None:
    """Go through the main job in small: ladder, registered forecast, hero under watch, report.

    A second call finds everything done. The exit code is 0 whether or not the forecast held.

    Example: `ladder demo`
    """
    from rungwise.ladder import console, tables
    from rungwise.ladder.demo import demo_family
    from rungwise.ladder.home import resolve_home

    result = demo_family(family, home=resolve_home(home), tracking=tracking)
    if as_json:
        console.print_json(result)
    else:
        console.print_result(tables.demo_table(result))


def main() -> NoReturn:
    """Runs the command line and exits; bad input is one line on standard error and exit code 2, a failed run 1."""
    usage_error = cast(type[Exception], typer.BadParameter.__mro__[1])  # typer does not export its name
    try:
        code = app(standalone_mode=False)
    except usage_error as error:
        _fail(_usage_message(error))
    except (ValueError, OSError) as error:
        _fail(error)
    except typer.Abort:
        code = INTERRUPTED
    except RuntimeError as error:
        from rungwise.ladder.launching.run import RunFailed
        from rungwise.ladder.training.preemption import Preempted

        if isinstance(error, Preempted):
            _fail(error, code=PREEMPTED)
        if not isinstance(error, RunFailed):
            raise
        _fail(error, code=RUN_FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def _usage_message(error: Exception) -> str:
    return error.format_message()  # pyright: ignore[reportAttributeAccessIssue]


def _fail(error: Exception | str, *, code: int = BAD_INPUT) -> NoReturn:
    from rungwise.ladder import console

    show_traceback_if_asked()
    if error:  # empty where the help was printed in its stead
        console.print_error(error)
    sys.exit(code)
