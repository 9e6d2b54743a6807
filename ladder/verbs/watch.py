"""Verbs about a run that trains: judging it, saying that somebody knows, declaring a change to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from rungwise.ladder.verbs.options import Family, Home, Json, Tracking, show_traceback_if_asked

if TYPE_CHECKING:
    from rungwise.ladder.watching.watch import Verdict
    from rungwise.ladder.watching.watch_foreign import ForeignWatch, Watched

COULD_NOT_JUDGE: Final = 3


@dataclass(frozen=True, kw_only=True)
class _Look:
    """How to look at a run: once, follow or replay; where from, and for how long."""

    how: str
    home: Path
    tracking: str | None
    every: float
    give_up: float
    deliver_for: float


Run = Annotated[
    list[str] | None,
    typer.Option(help="The run to judge, else hero; again for each later name of the same run.", show_default=False),
]


def watch_run(
    family: Annotated[str | None, typer.Argument(help="A shipped family or a TOML file.", show_default=False)] = None,
    *,
    run: Run = None,
    once: Annotated[bool, typer.Option("--once", help="Judge what is there and leave: the default.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep judging until the run ends.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Judge from the start as if live, say when each alert would have come.")
    ] = False,
    acknowledge: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Say that somebody knows of this rule's alert.", show_default=False),
    ] = None,
    note: Annotated[str | None, typer.Option(help="Who and why, with --acknowledge.", show_default=False)] = None,
    run_id: Annotated[
        list[str] | None,
        typer.Option(help="Any MLflow run, by its id; again for each that continues it.", show_default=False),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Any MLflow experiment, with --run for its run's name.", show_default=False)
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="OURS=THEIRS[*FACTOR]", help="Another name of a metric.", show_default=False),
    ] = None,
    mapping: Annotated[Path | None, typer.Option(help="TOML or JSON file of such names.", show_default=False)] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Id of a finished smaller MLflow run to compare with.", show_default=False)
    ] = None,
    tag: Annotated[bool, typer.Option("--tag", help="Also write verdict and alerts to that MLflow run.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks of --follow.")] = 5.0,
    give_up: Annotated[
        float, typer.Option(min=0.0, help="Seconds --follow waits for a run that stopped unfinished to go on.")
    ] = 600.0,
    deliver_for: Annotated[
        float, typer.Option(min=0.0, help="Seconds to try to deliver before the rest is left to the next look.")
    ] = 30.0,
    home: Home = None,
    tracking: Tracking = None,
    as_json: Json = False,
) -> None:
    """Judge a run against the registered forecast and the ladder, or any MLflow run against its own past.

    A run whose folder is not here is read from the MLflow store, if an address is given. Warnings and critical alerts
    go to the webhooks named in RUNGWISE_WEBHOOKS (`name=https://…`, blanks between).

    Exit code 0 healthy, 2 bad input, 3 could not judge, 10 alert open, 11 alert open and a delivery given up,
    12 healthy and a delivery given up, 130 interrupted.

    Example: `ladder watch tiny --follow`
    """
    if once + follow + replay + (acknowledge is not None) > 1:
        raise ValueError("--once, --follow, --replay and --acknowledge exclude each other; give one")
    foreign = bool(run_id or experiment)
    if not foreign and (metric or mapping or peer or tag):
        raise ValueError("--metric, --mapping, --peer and --tag are for a run given by --run-id or --experiment")
    if not foreign and family is None:
        raise ValueError("no family and no run is named; give FAMILY, or --run-id, or --experiment with --run")
    from rungwise.ladder.home import resolve_home

    look = _Look(
        how="follow" if follow else "replay" if replay else "once",
        home=resolve_home(home),
        tracking=tracking,
        every=every,
        give_up=give_up,
        deliver_for=deliver_for,
    )
    if foreign:
        from rungwise.analysis.reading.metric_names import load_metric_names
        from rungwise.ladder.watching.watch_foreign import Watched, watched_names

        watched = Watched(
            run_ids=tuple(run_id or ()),
            experiment=experiment or "",
            names=watched_names(run or ()) if experiment else (),
            metrics=load_metric_names(metric or (), mapping),
            peers=tuple(peer or ()),
            family=family,
            tag=tag,
        )
        if acknowledge is None:
            _show(_judge_foreign(watched, look), as_json=as_json)
        _acknowledge(_open_foreign(watched, look, keep=False).folder, acknowledge, note, as_json=as_json)
    else:
        assert family is not None
        if acknowledge is None:
            _show(_judge_family(family, run or ["hero"], look), as_json=as_json)
        from rungwise.ladder.family import load_family
        from rungwise.ladder.watching.watch import state_folder

        folder = state_folder(load_family(family).name, (run or ["hero"])[0], home=look.home)
        _acknowledge(folder, acknowledge, note, as_json=as_json)


def declare(
    family: Family,
    *,
    kind: Annotated[str, typer.Option(help="transport, mixture, context, schedule, precision, restart or note.")],
    run: Annotated[str, typer.Option(help="The run that is changed.")] = "hero",
    step: Annotated[
        int | None, typer.Option(help="First step trained with the change; else the next.", show_default=False)
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'METRIC EFFECT'", help="Such as 'train/loss +0.03'; may be repeated.", show_default=False
        ),
    ] = None,
    note: Annotated[str | None, typer.Option(help="What is changed, in words.", show_default=False)] = None,
    grace: Annotated[
        int | None, typer.Option(min=1, help="Steps after which the effect is judged.", show_default=False)
    ] = None,
    planned: Annotated[
        bool, typer.Option("--planned", help="The rungs made the same change at the same progress.")
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="What the trainer changes by itself at that step; may be repeated. Needs --note.",
            show_default=False,
        ),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Declare a change to a run, with the effect expected, so that the watch checks it instead of crying wolf.

    It is written beside the run's journal, copied to MLflow and shown in the report. With --change the run itself takes
    the new values, from that step or its next checkpoint on.

    Example: `ladder event tiny --kind mixture --step 90 --expect 'train/loss +0.03' --note 'more code'`

    Example: `ladder event tiny --kind transport --change transport.name=ragged --note 'too many drops'`
    """
    from rungwise.ladder import console
    from rungwise.ladder.changing.declare import declare_event
    from rungwise.ladder.home import resolve_home

    event = declare_event(
        family, run, kind, home=resolve_home(home), step=step, expect=expect or (), note=note, grace=grace,
        planned=planned, change=change or (),
    )  # fmt: skip
    if as_json:
        console.print_json(event)
    else:
        effects = ", ".join(f"{metric} {effect}" for metric, effect in event.get("expected", {}).items())
        values = ", ".join(f"{field} = {value}" for field, value in event.get("change", {}).items())
        what = f"{kind} change at step {event['step']}" + (f", {values}" if values else "")
        print(f"{run}: {what}, expected: {effects or 'what its kind moves'}")


def _judge_family(family: str, names: Sequence[str], look: _Look) -> "Verdict":
    run, where = names[0], {"home": look.home, "tracking": look.tracking, "continued": tuple(names[1:])}
    with _could_not_judge(unless=ValueError):
        from rungwise.ladder.watching import watch
        from rungwise.ladder.watching.receivers import load_receivers

        load_receivers()
        runs = watch.load_watched(family, run, home=look.home, tracking=look.tracking)
    with _could_not_judge():
        if look.how == "replay":
            return watch.replay_run(runs, run, **where)
        if look.how == "follow":
            verdict = watch.follow_run(runs, run, every=look.every, give_up=look.give_up, **where)
        else:
            verdict = watch.judge_run(runs, run, deliver_for=look.deliver_for, **where)
        return watch.with_copied_alerts(verdict, runs.family, run, home=look.home, tracking=look.tracking)


def _judge_foreign(watched: "Watched", look: _Look) -> "Verdict":
    with _could_not_judge(unless=ValueError):
        opened = _open_foreign(watched, look, keep=look.how != "replay")
    with _could_not_judge():
        if look.how == "follow":
            return opened.follow(every=look.every, give_up=look.give_up)
        return opened.replay() if look.how == "replay" else opened.once(deliver_for=look.deliver_for)


def _open_foreign(watched: "Watched", look: _Look, *, keep: bool) -> "ForeignWatch":
    from rungwise.ladder.home import resolve_tracking
    from rungwise.ladder.watching.watch_foreign import ForeignWatch

    store = resolve_tracking(look.home, look.tracking)
    return ForeignWatch(watched, home=look.home, tracking=store, patient=look.how == "follow", keep=keep)


def _show(verdict: "Verdict", *, as_json: bool) -> NoReturn:
    """Prints a verdict and leaves with its exit code."""
    with _could_not_judge():
        from rungwise.ladder import console
        from rungwise.ladder.watching.watch import exit_code
        from rungwise.ladder.watching.watch_tables import verdict_view

        if as_json:
            console.print_json(verdict.to_dict())
        else:
            console.print_result(verdict_view(verdict.to_dict()))
    raise typer.Exit(exit_code(verdict))


def _acknowledge(folder: Path, rule: str, note: str | None, *, as_json: bool) -> None:
    from rungwise.ladder import console
    from rungwise.ladder.watching.alert_file import acknowledge

    metrics = acknowledge(folder, rule, note=note)
    if as_json:
        console.print_json({"rule": rule, "metrics": metrics, "state": "acknowledged", "note": note})
    else:
        print(f"{rule} of {', '.join(metrics)} acknowledged; it opens again only by getting worse")


@contextmanager
def _could_not_judge(*, unless: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Ends the command with one line and its own exit code for any error but bad input."""
    try:
        yield
    except unless:
        raise
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        from rungwise.ladder import console

        show_traceback_if_asked()
        console.print_error(f"could not judge: {type(error).__name__}: {console.one_line(error)}")
        raise typer.Exit(COULD_NOT_JUDGE) from None
