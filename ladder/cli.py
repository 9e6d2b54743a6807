"""The command line `ladder`: one function a verb; each calls one module and prints the result. The verbs that study
recipe, transports and machine are in `cli_studies.py`.

A verb imports what it needs when it runs, so that `ladder --help` answers at once.
Exit codes: 0 done, 1 a run failed, 2 bad input, 130 interrupted; `watch` adds 3 (could not judge) and 10 (alert open).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer

from rungwise.ladder import cli_studies
from rungwise.ladder.cli_options import Family, Home, Json, Tracking

app = typer.Typer(
    name="ladder",
    help="Train a ladder of small rungs, forecast the hero from them, watch the hero against the forecast.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RUN_FAILED, BAD_INPUT, COULD_NOT_JUDGE, INTERRUPTED = 1, 2, 3, 130


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
def plan(family: Family, *, as_json: Json = False) -> None:
    """Print every derived number before anything runs.

    Example: `ladder plan tiny`
    """
    from rungwise.ladder import console, plan_table
    from rungwise.ladder.family import load_family
    from rungwise.ladder.plan import plan_ladder

    result = plan_ladder(load_family(family)).to_dict()
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
    home: Home = None,
    tracking: Tracking = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress view.")] = False,
    as_json: Json = False,
) -> None:
    """Train the rungs, or the hero; skips what is finished and resumes what is not.

    Exit code 1 where a run failed; the others are trained to their end.

    Example: `ladder run tiny --rung d64`
    """
    from rungwise.ladder import console, status, tables
    from rungwise.ladder.home import resolve_home
    from rungwise.ladder.run import run_ladder

    if rung and hero:
        raise ValueError("--rung and --hero exclude each other; run the ladder first, then the hero")
    folder, runs = resolve_home(home), tuple(rung) if rung else None
    run_ladder(family, home=folder, runs=runs, hero=hero, tracking=tracking, progress=not quiet)
    result = status.family_status(family, home=folder)
    if as_json:
        console.print_json(result)
    else:
        console.print_result(tables.status_table(result))


@app.command(name="status")
def show_status(family: Family, *, home: Home = None, as_json: Json = False) -> None:
    """Show what is done, running, stale, failed; last loss, speed, time left.

    Example: `ladder status tiny`
    """
    from rungwise.ladder import console, status, tables
    from rungwise.ladder.home import resolve_home

    result = status.family_status(family, home=resolve_home(home))
    if as_json:
        console.print_json(result)
    else:
        console.print_result(tables.status_table(result))


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
    level: Annotated[float, typer.Option(help="Coverage the interval aims at.")] = 0.9,
    home: Home = None,
    tracking: Tracking = None,
    as_json: Json = False,
) -> None:
    """Forecast the hero's final loss and whole curve from the finished rungs, with intervals.

    Example: `ladder forecast tiny --register`
    """
    from rungwise.ladder import console, predict, tables
    from rungwise.ladder.home import resolve_home

    folder = resolve_home(home)
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


@app.command(name="watch")
def watch_run(
    family: Family,
    *,
    run: Annotated[str, typer.Option(help="The run to judge.")] = "hero",
    once: Annotated[bool, typer.Option("--once", help="Judge what is there and leave: the default.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep judging until the run ends.")] = False,
    replay: Annotated[bool, typer.Option("--replay", help="Judge from the start; write nothing.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks of --follow.")] = 5.0,
    give_up: Annotated[
        float, typer.Option(min=0.0, help="Seconds --follow waits for a run that stopped unfinished to go on.")
    ] = 600.0,
    home: Home = None,
    tracking: Tracking = None,
    as_json: Json = False,
) -> None:
    """Judge a run against the registered forecast and the ladder.

    A run whose folder is not here is read from the MLflow store, if an address is given.

    Exit code 0 healthy, 2 bad input, 3 could not judge, 10 alert open, 130 interrupted.

    Example: `ladder watch tiny --follow`
    """
    from rungwise.ladder import console

    if once + follow + replay > 1:
        raise ValueError("--once, --follow and --replay exclude each other; give one")
    with _could_not_judge(unless=ValueError):
        from rungwise.ladder import tables, watch
        from rungwise.ladder.home import resolve_home

        folder = resolve_home(home)
        runs = watch.load_watched(family, run, home=folder, tracking=tracking)
    with _could_not_judge():
        if follow:
            verdict = watch.follow_run(runs, run, home=folder, tracking=tracking, every=every, give_up=give_up)
        else:
            verdict = watch.judge_loaded(runs, run) if replay else watch.judge_run(runs, run, home=folder)
        if as_json:
            console.print_json(verdict.to_dict())
        else:
            console.print_result(tables.verdict_table(verdict.to_dict()))
    raise typer.Exit(watch.EXIT_CODES[verdict.state])


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
    from rungwise.ladder.report import write_report

    path = write_report(family, home=resolve_home(home), tracking=tracking, output=output)
    if as_json:
        console.print_json({"family": family, "report": str(path)})
    else:
        print(path)


for _name, _verb in (("sweep", cli_studies.sweep), ("drops", cli_studies.study_drops), ("bench", cli_studies.bench)):
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


@contextmanager
def _could_not_judge(*, unless: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Ends the command with one line and its own exit code for any error but bad input."""
    try:
        yield
    except unless:
        raise
    except Exception as error:
        from rungwise.ladder.console import one_line

        _fail(f"could not judge: {type(error).__name__}: {one_line(error)}", code=COULD_NOT_JUDGE)


def _show_traceback_if_asked() -> None:
    if os.environ.get("RUNGWISE_TRACEBACK"):
        import traceback

        traceback.print_exc()


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
        from rungwise.ladder.run import RunFailed

        if not isinstance(error, RunFailed):
            raise
        _fail(error, code=RUN_FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def _usage_message(error: Exception) -> str:
    return error.format_message()  # pyright: ignore[reportAttributeAccessIssue]


def _fail(error: Exception | str, *, code: int = BAD_INPUT) -> NoReturn:
    from rungwise.ladder import console

    _show_traceback_if_asked()
    if error:  # empty where the help was printed in its stead
        console.print_error(error)
    sys.exit(code)
