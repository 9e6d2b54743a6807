"""From a family's runs to a registered forecast, and from the finished hero to what became of it.

The laws, intervals and curves are `rungwise.analysis`; here runs are gathered and handed over.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.backtest import Backtest, backtest
from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.detection.metric_detectors import COMPARABLE
from rungwise.analysis.fitting.fit import MIN_RUNGS
from rungwise.analysis.fitting.leave_out import leave_one_rung_out
from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.points import final_eval_loss, final_train_loss, ladder_points, logged_values
from rungwise.analysis.reading.store import find_attempts, find_experiment, public_address, read_artifacts, reading
from rungwise.analysis.registry import load_registered, load_registered_mlflow, register
from rungwise.analysis.source import RunRecord, load_runs
from rungwise.analysis.sweeps.optimum import recipe_gap, sweep_key
from rungwise.analysis.whole_curves.metric_curves import forecast_metric
from rungwise.ladder.console import log, one_line
from rungwise.ladder.family import LadderConfig, UnknownFamily, load_family
from rungwise.ladder.home import FAMILY_FILE, forecasts_folder, resolve_tracking
from rungwise.ladder.planning.plan import plan_ladder
from rungwise.ladder.recording.tracking import mirror_forecast
from rungwise.ladder.studying.sweep import load_summary

CURVE_METRICS: Final = ("eval/loss", "train/loss")
"""Losses whose whole trajectory is forecast and registered."""
WATCHED_METRICS: Final = ("train/grad_norm", "moe/drop_fraction")
"""Other quantities whose whole trajectory is, where three rungs logged them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FamilyRuns:
    """A family's plan, the runs there are, and the forecast registered for its hero."""

    family: str
    plan: dict[str, Any]
    """What `ladder plan --json` prints."""
    records: list[RunRecord]
    registered: Forecast | None
    sweeps: dict[str, Any] | None = None
    """Summary of the family's sweeps here; None where nothing was swept."""

    @property
    def rungs(self) -> list[RunRecord]:
        return [record for record in self.records if record.role == "rung"]

    @property
    def hero(self) -> RunRecord | None:
        return next((record for record in self.records if record.role == "hero"), None)

    def record(self, run: str) -> RunRecord:
        """The run of that name.

        Raises:
            ValueError: it has not started, or there is none.
        """
        for record in self.records:
            if record.run == run:
                return record
        known = ", ".join(record.run for record in self.records) or "none"
        raise ValueError(f"run {run!r} of {self.family} has not started; started are: {known}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The finished hero beside its registered forecast. Losses in nats per token."""

    measured: float
    error: float
    """Forecast minus measured."""
    held: bool | None
    """Whether the measured loss lies inside the interval; None where the forecast has none."""
    skill: float
    """1 − |error| ÷ |error of copying the top rung's loss|."""


def load_family_runs(family: str, *, home: Path, tracking: str | None = None) -> FamilyRuns:
    """Plan, runs and registered forecast of a family; what is not here comes from `tracking`, if it is given.

    Raises:
        ValueError: unknown family, a file that is not ours or was changed, or a server that does not answer.
    """
    plan = plan_ladder(_load_definition(family, tracking)).to_dict()
    name = plan["family"]
    records = load_runs(home, name, tracking_uri=tracking)
    registered = load_registered(forecasts_folder(home, name))
    if registered is None and tracking is not None:
        registered = load_registered_mlflow(tracking, name)
    sweeps = load_summary(home, name)
    return FamilyRuns(family=name, plan=plan, records=records, registered=registered, sweeps=sweeps)


def _load_definition(family: str, tracking: str | None) -> LadderConfig:
    """A family by its shipped name or its file, or as its runs in the store have it."""
    try:
        return load_family(family)
    except UnknownFamily:
        if tracking is None:
            raise
        with reading(tracking) as client, tempfile.TemporaryDirectory() as folder:
            experiment = find_experiment(client, family)
            for run in reversed(find_attempts(client, experiment) if experiment else []):
                for path in read_artifacts(client, run, [FAMILY_FILE], Path(folder)):
                    return load_family(str(path))
        raise


def forecast_runs(runs: FamilyRuns, *, level: float = 0.9) -> Forecast:
    """Forecast of the hero's final loss and, where the rungs leave an interval, of its whole curves.

    Raises:
        ValueError: the ladder and the hero do not compare; the message says why.
        UnfitForecast: fewer than three usable rungs.
    """
    points = with_sweeps(ladder_points(runs.rungs), runs)
    target = _target(runs)
    forecast = forecast_final(points, target, level=level)
    if forecast.low is None:
        return forecast
    used = {row["run"] for row in forecast.used}
    for metric in CURVE_METRICS:
        curves = rung_curves((record for record in runs.rungs if record.run in used), metric)
        if set(curves["run"]) == used:
            final = forecast if metric == forecast.metric else None
            curve = forecast_curve(curves, target, level=level, final=final)
            forecast = forecast.with_curve(curve, metric=metric)
    for metric in WATCHED_METRICS:
        curve = _metric_curve(runs, used, metric, level=level)
        forecast = forecast if curve is None else forecast.with_curve(curve, metric=metric)
    return forecast


def _metric_curve(runs: FamilyRuns, used: set[str], metric: str, *, level: float) -> pd.DataFrame | None:
    """The registered curve of what has no final law, from one run a rung; None where fewer than three can say.

    Drops are forecast from the rungs alone whose transport, capacity and tokens per rank are the hero's.
    """
    rungs = [record for record in runs.rungs if record.run in used]
    if "drop" in metric:
        hero = _target(runs)
        rungs = [record for record in rungs if all(record.plan.get(key) == hero.get(key) for key in COMPARABLE)]
    first = {record.rung: record for record in sorted(rungs, key=lambda record: record.seed, reverse=True)}
    curves = rung_curves(first.values(), metric).rename(columns={"loss": metric})
    if len(first) < MIN_RUNGS or set(curves["run"]) != {record.run for record in first.values()}:
        return None
    curve = forecast_metric(curves, _target(runs), metric, level=level).rename(columns={"value": "loss"})
    return curve.clip(upper=1.0) if "fraction" in metric else curve


def _target(runs: FamilyRuns) -> dict[str, Any]:
    return {key: value for key, value in runs.plan["hero"].items() if isinstance(value, int | float | str)}


def backtest_runs(runs: FamilyRuns, *, level: float = 0.9) -> Backtest:
    """The same procedure on the ladder's own upper rungs: each forecast from those below it.

    Raises:
        UnfitForecast: fewer rungs than one forecast and one held-out rung need.
    """
    return backtest(ladder_points(runs.rungs), level=level)


def leave_one_out_runs(runs: FamilyRuns, *, level: float = 0.9) -> list[dict[str, Any]]:
    """The hero's forecast without each rung in turn.

    Raises:
        UnfitForecast: leaving one out leaves too few.
    """
    return leave_one_rung_out(ladder_points(runs.rungs), _target(runs), level=level)


def with_sweeps(points: pd.DataFrame, runs: FamilyRuns) -> pd.DataFrame:
    """The points with what each rung's recipe loses by the family's sweeps; missing where nothing was swept."""
    if runs.sweeps is None or points.empty:
        return points
    configs = {record.run: record.config for record in runs.rungs}
    gaps = [
        recipe_gap(runs.sweeps, row["rung"], learning_rate=row["learning_rate"], key=sweep_key(configs[row["run"]]))
        for row in points.to_dict("records")
    ]
    return points.assign(
        recipe_excess=[None if gap is None or gap.percent is None else gap.percent / 100 for gap in gaps],
        recipe_at_edge=[None if gap is None else gap.at_edge for gap in gaps],
    )


def rung_curves(records: Iterable[RunRecord], metric: str) -> pd.DataFrame:
    """Curves of one loss: columns run, progress (share of the run's steps), loss, and the plan's sizes."""
    tables = [pd.DataFrame(columns=["run", "progress", "loss"])]
    for record in records:
        steps, values = logged_values(record.trajectory, metric)
        scalars = {key: record.plan[key] for key in ("flops", "num_params", "num_active_params", "tokens", "steps")}
        progress = steps / record.plan["steps"]
        tables.append(pd.DataFrame({"run": record.run, "progress": progress, "loss": values, **scalars}))
    return pd.concat([table for table in tables if len(table)] or tables)


def register_forecast(forecast: Forecast, runs: FamilyRuns, *, home: Path, tracking: str | None = None) -> str:
    """Freezes a forecast under its hash, here and in the MLflow store, and returns the hash.

    The same content again changes nothing. With the store out of reach one line says so; the hero's mirror brings
    the forecast there later.

    Raises:
        ValueError: the hero has started, or another forecast is registered.
    """
    if runs.registered is None and runs.hero is not None and runs.hero.attempts:
        raise ValueError(f"the hero of {runs.family} has started; a forecast must be registered before that, to be one")
    folder, store = forecasts_folder(home, runs.family), resolve_tracking(home, tracking)
    if runs.registered is not None:
        register(runs.registered, folder)  # the store's may not be here yet
    digest = register(forecast, folder)
    try:
        mirror_forecast(folder / f"{digest}.json", store)
    except Exception as error:  # what counts is registered; what the store raises depends on the store
        log(f"tracking {public_address(store)!r} failed ({one_line(error)}); the forecast is registered here alone")
    return digest


def hero_outcome(runs: FamilyRuns) -> Outcome | None:
    """What became of the registered forecast; None until the hero has finished, or without a forecast."""
    forecast, hero = runs.registered, runs.hero
    if forecast is None or hero is None or hero.state != "finished":
        return None
    measured = (final_eval_loss if forecast.metric == "eval/loss" else final_train_loss)(hero.trajectory)
    if measured is None:
        return None
    held = None
    if forecast.low is not None and forecast.high is not None:
        held = bool(forecast.low <= measured <= forecast.high)
    error = forecast.point - measured
    skill = 1.0 - abs(error) / abs(top_rung_loss(forecast) - measured)
    return Outcome(measured=measured, error=error, held=held, skill=skill)


def top_rung_loss(forecast: Forecast) -> float:
    """Mean final loss of the largest rung used, nats: the forecast of somebody who forecasts nothing."""
    most = max(row["flops"] for row in forecast.used)
    return float(np.mean([row["loss"] for row in forecast.used if row["flops"] > 0.999 * most]))
