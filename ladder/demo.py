"""The main job in small, in one call: plan, rungs, registered forecast, hero under watch, report.

What is done is not done again, so a second call only reads; nothing of jax or MLflow is imported then.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rungwise.analysis.forecast import Forecast
from rungwise.analysis.reading.store import public_address
from rungwise.analysis.registry import load_registered
from rungwise.ladder.console import duration, log, log_console
from rungwise.ladder.family import load_family
from rungwise.ladder.home import forecasts_folder, resolve_tracking
from rungwise.ladder.launching.run import run_ladder
from rungwise.ladder.planning.plan import plan_ladder
from rungwise.ladder.planning.plan_table import plan_table
from rungwise.ladder.predict import (
    FamilyRuns,
    forecast_runs,
    hero_outcome,
    load_family_runs,
    register_forecast,
)
from rungwise.ladder.reporting.report import write_page
from rungwise.ladder.tables import forecast_table
from rungwise.ladder.watching.watch import judge_run


def demo_family(family: str, *, home: Path, tracking: str | None = None) -> dict[str, Any]:
    """Goes through the job and returns what a reader wants to know at its end; progress is on standard error.

    Raises:
        ValueError: bad input, or a hero that was started without a forecast.
        RunFailed: a run failed.
    """
    console = log_console()
    with _stage("1 of 5: the plan"):
        plan = plan_ladder(load_family(family)).to_dict()
        console.print(plan_table(plan))
    with _stage("2 of 5: the rungs"):
        run_ladder(family, home=home, tracking=tracking)
    with _stage("3 of 5: the forecast, registered before the hero starts"):
        registered = load_registered(forecasts_folder(home, plan["family"]))
        forecast = registered or _register(family, home=home, tracking=tracking)
        console.print(forecast_table(forecast.to_dict()))
    with _stage("4 of 5: the hero, under watch"):
        run_ladder(family, home=home, hero=True, tracking=tracking)
    with _stage("5 of 5: the report"):
        runs = load_family_runs(family, home=home)
        verdict = judge_run(runs, runs.plan["hero"]["name"], home=home)
        report = write_page(runs, home=home)
    return _result(runs, report=report, state=verdict.state, store=resolve_tracking(home, tracking))


def _register(family: str, *, home: Path, tracking: str | None) -> Forecast:
    runs = load_family_runs(family, home=home)
    forecast = forecast_runs(runs)
    register_forecast(forecast, runs, home=home, tracking=tracking)
    return forecast


def _result(runs: FamilyRuns, *, report: Path, state: str, store: str) -> dict[str, Any]:
    forecast, outcome = runs.registered, hero_outcome(runs)
    assert forecast is not None
    return {
        "family": runs.family,
        "forecast": {key: getattr(forecast, key) for key in ("metric", "point", "low", "high", "level", "half_width")},
        "hash": forecast.hash,
        "outcome": None if outcome is None else asdict(outcome),
        "watch": state,
        "report": str(report),
        "store": public_address(store),
        "mlflow_ui": f"{_mlflow_command()} ui --backend-store-uri {public_address(store)}",
    }


def _mlflow_command() -> str:
    """This environment's mlflow, as one would type it here."""
    path = Path(sys.executable).with_name("mlflow")
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


@contextmanager
def _stage(title: str) -> Iterator[None]:
    log_console().rule(f"[bold]{title}", align="left")
    start = time.monotonic()
    yield
    log(f"({duration(time.monotonic() - start)})")
