"""One self-contained HTML page about a family: what was forecast, what came of it, what it rests on.

Words and tables are made here, curves in `rungwise.analysis.drawing.figures`, looks in `templates/report.html.j2`.
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import rungwise
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.points import final_eval_loss
from rungwise.analysis.source import RunRecord
from rungwise.ladder.console import duration
from rungwise.ladder.home import family_folder, make_folder
from rungwise.ladder.planning.plan_table import plan_cells
from rungwise.ladder.predict import (
    FamilyRuns,
    Outcome,
    backtest_runs,
    hero_outcome,
    leave_one_out_runs,
    load_family_runs,
    top_rung_loss,
)
from rungwise.ladder.reporting.report_figures import (
    backtest_picture,
    drops_pictures,
    fit_picture,
    floor_picture,
    leave_one_out_picture,
    trajectory_pictures,
)
from rungwise.ladder.reporting.report_nowcast import nowcast_section
from rungwise.ladder.reporting.report_page import Card, Section, Table
from rungwise.ladder.reporting.report_watch import alerts_section, deliveries_section, events_section
from rungwise.ladder.tables import backtest_text, half_width_text, law_text, loss_text, nowcast_text, quantity
from rungwise.ladder.watching.outbox import Outbox
from rungwise.ladder.watching.watch import Verdict, judge_loaded, state_folder


def write_report(family: str, *, home: Path, tracking: str | None = None, output: Path | None = None) -> Path:
    """Writes the page and returns its path; by default `<home>/<family>/report.html`.

    Raises:
        ValueError: unknown family, no run has started, or unreadable files.
    """
    return write_page(load_family_runs(family, home=home, tracking=tracking), home=home, output=output)


def write_page(runs: FamilyRuns, *, home: Path, output: Path | None = None) -> Path:
    """The same of runs already in memory."""
    if not runs.records:
        raise ValueError(f"family {runs.family} has no runs in {home}; train its rungs with `ladder run {runs.family}`")
    path = output or make_folder(family_folder(home, runs.family)) / "report.html"
    make_folder(path.parent)
    hero = state_folder(runs.family, runs.plan["hero"]["name"], home=home)
    path.write_text(render_report(runs, outbox=Outbox(hero)), encoding="utf-8")
    return path


def render_report(runs: FamilyRuns, *, outbox: Outbox | None = None) -> str:
    """The page as text; its figures are inside, and it loads nothing.

    Args:
        outbox: the hero's, for what became of its messages.
    """
    outcome = hero_outcome(runs)
    verdict = judge_loaded(runs, runs.plan["hero"]["name"])
    source = resources.files("rungwise.ladder.reporting") / "templates" / "report.html.j2"
    environment = jinja2.Environment(autoescape=True, trim_blocks=False, undefined=jinja2.StrictUndefined)
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        title=f"{runs.family}: a forecast and its hero",
        subtitle=_subtitle(runs),
        cards=_cards(runs, outcome, verdict),
        lead=list(_lead(runs, outcome, verdict)),
        sections=[section for section in _sections(runs, outcome, verdict, outbox) if section],
    )


def _subtitle(runs: FamilyRuns) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{len(runs.plan['rungs'])} rung runs and a hero · written {now} by rungwise {rungwise.__version__}"


def _cards(runs: FamilyRuns, outcome: Outcome | None, verdict: Verdict) -> list[Card]:
    forecast = runs.registered
    measured = Card(name="outcome", value="–", note=_hero_progress(runs, verdict))
    if outcome is not None:
        measured = Card(name="outcome", value=f"{outcome.measured:.4f}", note="nats per token, measured on the hero")
    if forecast is None:
        missing = Card(name="forecast", value="–", note="none is registered")
        return [missing, Card(name="interval", value="–", note=""), measured, _verdict_card(None, verdict)]
    interval = Card(name=f"{forecast.level:.0%} interval", value="none", note=forecast.status)
    if forecast.low is not None and forecast.high is not None:
        note = half_width_text(forecast.to_dict()).split(",")[0]
        interval = Card(
            name=f"{forecast.level:.0%} interval",
            value=f"{forecast.low:.3f} – {forecast.high:.3f}",
            note=f"half-width {note}",
        )
    point = Card(name="forecast", value=f"{forecast.point:.4f}", note=f"nats per token, final {forecast.metric}")
    return [point, interval, measured, _verdict_card(outcome, verdict)]


def _hero_progress(runs: FamilyRuns, verdict: Verdict) -> str:
    if runs.hero is None:
        return "the hero has not started"
    steps = runs.plan["hero"]["steps"]
    return f"the hero is at step {verdict.step:,} of {steps:,} ({runs.hero.state})"


def _verdict_card(outcome: Outcome | None, verdict: Verdict) -> Card:
    if outcome is None or outcome.held is None:
        word = verdict.state.replace("_", " ")
        return Card(name="verdict", value="open", note=f"the watch says: {word}", tone="open")
    if outcome.held:
        return Card(name="verdict", value="held", note=f"skill {outcome.skill:.2f}", tone="held")
    return Card(name="verdict", value="did not hold", note=f"skill {outcome.skill:.2f}", tone="missed")


def _lead(runs: FamilyRuns, outcome: Outcome | None, verdict: Verdict) -> Iterator[str]:
    forecast = runs.registered
    if forecast is None:
        yield "No forecast is registered, so there is nothing to hold the hero against."
    elif outcome is None:
        yield "The forecast is registered; the hero has not finished, so the verdict is open."
        if verdict.nowcast is not None:
            yield f"Nowcast of the {nowcast_text(verdict.nowcast)}."
    else:
        yield _outcome_sentence(forecast, outcome)
        copied = abs(top_rung_loss(forecast) - outcome.measured)
        yield (
            f"The forecast missed by {abs(outcome.error):.4f} nats; copying the top rung's loss would "
            f"have missed by {copied:.4f}: skill {outcome.skill:.2f} "
            "(1 is exact, 0 no better than the copy)."
        )
    if forecast is not None and forecast.low is not None:
        yield f"Half the interval is {half_width_text(forecast.to_dict())}."
    serious = [alert for alert in verdict.alerts if alert.severity != "info"]
    raised = f"{len(serious)} alert{'s' if len(serious) != 1 else ''} of a warning or worse"
    yield f"The watch, over {verdict.step:,} steps of the hero, raised {raised if serious else 'no alert'}."


def _outcome_sentence(forecast: Forecast, outcome: Outcome) -> str:
    side = "above" if outcome.error < 0 else "below"
    ended = f"the hero ended at {outcome.measured:.4f}, {abs(outcome.error):.4f} nats {side} the forecast"
    if outcome.held is None:
        return f"The forecast has no interval, so it cannot be said to hold: {ended}."
    if outcome.held:
        return f"The forecast, registered before the hero's first step, held: {ended} and inside the interval."
    assert forecast.low is not None
    assert forecast.high is not None
    beyond = max(forecast.low - outcome.measured, outcome.measured - forecast.high)
    return f"The forecast did not hold: {ended}, {beyond:.2g} nats outside the interval."


def _sections(runs: FamilyRuns, outcome: Outcome | None, verdict: Verdict, outbox: Outbox | None) -> Iterator[Section]:
    forecast = runs.registered
    columns, rows, note = plan_cells(runs.plan)
    yield Section(id="plan", title="The plan", tables=[Table(columns=columns, rows=rows)], note=note)
    if forecast is not None:
        yield _fit_section(forecast, outcome)
        yield from _evidence_sections(runs, forecast)
        text = list(_floor_text(forecast))
        pictures = [floor_picture(forecast)]
        yield Section(id="floor", title="How much the floor matters", text=text, pictures=pictures)
        pictures = trajectory_pictures(runs, forecast, alerts=verdict.alerts)
        yield Section(id="trajectory", title="The hero against its registered curves", pictures=pictures)
        yield nowcast_section(runs)
    yield Section(id="drops", title="Dropped tokens", pictures=drops_pictures(runs))
    yield alerts_section(verdict, runs.hero)
    yield deliveries_section(outbox)
    yield events_section(runs.hero)
    yield Section(id="runs", title="Runs", text=list(_failures(runs)), tables=[_runs_table(runs)])
    if forecast is not None:
        yield _conditions_section(forecast)
    yield Section(id="provenance", title="Provenance", tables=[_provenance(runs)])


def _fit_section(forecast: Forecast, outcome: Outcome | None) -> Section:
    laws = [[law["role"].replace("_", " "), _law(law), f"{law['value']:.4f}"] for law in forecast.laws]
    refused = [f"Not used: {item['run']}, because {item['reason']}." for item in forecast.refused]
    basis = (
        f"{len(forecast.used)} runs leave {forecast.degrees_of_freedom} degrees of freedom; the hero has "
        f"{forecast.extrapolation_ratio:.3g} times the compute of the largest rung. Fit: {forecast.status}."
    )
    return Section(
        id="fit",
        title="The ladder and its law",
        text=[basis, *refused, *(f"Beware: {warning}." for warning in forecast.warnings)],
        pictures=[fit_picture(forecast, outcome)],
        tables=[Table(columns=["law", "L(C), nats; C in FLOPs", "at the hero"], rows=laws)],
    )


def _evidence_sections(runs: FamilyRuns, forecast: Forecast) -> Iterator[Section]:
    """The back-test on the ladder itself, and the forecast without each rung; none where rungs are too few."""
    try:
        held_out = backtest_runs(runs, level=forecast.level).to_dict()
    except UnfitForecast:
        return
    text = [f"{backtest_text(held_out)}."]
    if evidence := (forecast.method or {}).get("evidence"):
        text.append(f"{evidence[:1].upper()}{evidence[1:]}.")
    pictures = [backtest_picture(held_out["rows"], level=forecast.level)]
    with suppress(UnfitForecast):
        pictures.append(leave_one_out_picture(forecast, leave_one_out_runs(runs, level=forecast.level)))
    yield Section(id="evidence", title="How the procedure does on this ladder", text=text, pictures=pictures)


def _law(law: Mapping[str, Any]) -> Markup:
    head, exponent = law_text(law).split("^-")
    return Markup("{}<sup>−{}</sup>").format(head, exponent)


def _floor_text(forecast: Forecast) -> Iterator[str]:
    if forecast.floor is not None:
        reason = forecast.floor_reason or "no reason was given"
        yield f"The floor is pinned at {forecast.floor:.4f} nats: {reason}."
    if (spread := forecast.floor_range) is not None:
        yield (
            f"Floors from {spread['floor_low']:.3f} to {spread['floor_high']:.3f} nats pass the rungs within "
            f"{spread['rmse']:g} nats and forecast {spread['point_low']:.4f} to {spread['point_high']:.4f}; "
            "the interval carries that spread."
        )
    else:
        yield "No floor passes the rungs closely; the interval carries what is left."


def _runs_table(runs: FamilyRuns) -> Table:
    columns = ["run", "state", "steps", "final eval/loss", "tokens/s", "time", "attempts"]
    return Table(columns=columns, rows=[_run_row(record) for record in runs.records])


def _run_row(record: RunRecord) -> list[str]:
    speeds = record.trajectory.series("perf/tokens_per_second")
    steps = record.trajectory.frame["step"].to_numpy()
    return [
        record.run,
        record.state,
        f"{int(steps.max(initial=0)):,} / {record.plan['steps']:,}",
        loss_text(final_eval_loss(record.trajectory)),
        f"{statistics.median(speeds):,.0f}" if len(speeds) else "–",
        duration(sum((each.ended or record.heartbeat) - each.started for each in record.attempts)),
        str(len(record.attempts)),
    ]


def _failures(runs: FamilyRuns) -> Iterator[str]:
    """One sentence an attempt that did not finish, and one for what reading left out."""
    for record in runs.records:
        for attempt in record.attempts:
            if attempt.state in ("failed", "killed"):
                reason = f" ({attempt.reason})" if attempt.reason else ""
                yield f"Attempt {attempt.number} of {record.run} was {attempt.state}{reason}."
        yield from (f"{record.run}: {note}." for note in record.notes)


def _conditions_section(forecast: Forecast) -> Section:
    rows = [
        [
            name,
            _range(condition["rungs"]),
            _value(condition["hero"]),
            "outside" if condition["outside"] else "",
        ]
        for name, condition in forecast.conditions.items()
    ]
    return Section(
        id="conditions",
        title="Conditions of the forecast",
        text=["The forecast is for a hero trained like this; a setting outside the rungs' range is marked."],
        tables=[Table(columns=["condition", "rungs", "hero", ""], rows=rows)],
    )


def _range(values: list[Any]) -> str:
    distinct = dict.fromkeys(_value(value) for value in values)
    return " … ".join(distinct) if len(distinct) < 3 else ", ".join(distinct)


def _value(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return quantity(value) if value >= 1e5 else f"{value:,.5g}"


def _provenance(runs: FamilyRuns) -> Table:
    rows: list[list[str]] = []
    if runs.registered is not None:
        rows.append(["forecast", runs.registered.hash])
        rows.append(["loss rule", runs.registered.loss_rule])
    origins = [record.provenance for record in runs.records]
    for label, key in (("corpus", "corpus_hash"), ("code", "code_version")):
        rows += [[label, value] for value in dict.fromkeys(str(origin[key]) for origin in origins)]
    packages = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in origin["packages"].items()) for origin in origins
    )
    rows += [["packages", text] for text in packages]
    rows += [[f"config of {record.run}", record.config_hash] for record in runs.records]
    rows.append(["loss", "cross-entropy in nats per token; eval/loss on a fixed held-out set, without drops"])
    return Table(columns=["what", "which"], rows=rows, wordy=True)
