"""An early cooldown, or a longer context, from a checkpoint: made, trained, held against its forecast, exported.

`branch.py` makes the branch; here it is trained and judged.
"""

from pathlib import Path
from typing import Any

from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.points import final_eval_loss
from rungwise.analysis.source import load_run
from rungwise.ladder.changing.branch import begin_branch, branch_config, load_course, load_run_config
from rungwise.ladder.changing.cooldown import Cooldown
from rungwise.ladder.changing.course import Course, course_of, learning_rate_at, plan_course
from rungwise.ladder.changing.horizon import forecast_horizon
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.predict import load_family_runs
from rungwise.ladder.recording.export import export_weights


def run_branch(
    family: str,
    step: int,
    *,
    home: Path,
    run: str = "hero",
    tokens: int | None = None,
    seq_len: int | None = None,
    name: str | None = None,
    export: Path | None = None,
    tracking: str | None = None,
    progress: bool = True,
    level: float = 0.9,
) -> dict[str, Any]:
    """Branches from a run's checkpoint, trains the branch to its end, and says what it came to beside its forecast.

    Args:
        step: of a checkpoint that is there.
        tokens: of the branch; absent: a tenth of the run's.
        seq_len: context of the branch; absent: the run's.
        export: folder for the weights at its end.
    Raises:
        ValueError: no such run or checkpoint, or a shape that does not work.
        RunFailed: its training failed.
    """
    from rungwise.ladder.launching.run import run_ladder

    config = load_family(family)
    folder = run_folder(home, config.name, run)
    parent, course = load_run_config(folder), load_course(folder)
    context = "" if seq_len is None else f"-context{seq_len}"
    branch = branch_config(
        parent, course, step=step, name=name or f"{run}-at{step}{context}", tokens=tokens, seq_len=seq_len
    )
    place = begin_branch(folder, branch)
    forecast, remarks = _forecast(family, branch, course, home=home, tracking=tracking, level=level)
    run_ladder(family, home=home, runs=(branch.run,), tracking=tracking, progress=progress)
    loss = final_eval_loss(load_run(place).trajectory)
    held = None
    if loss is not None and forecast is not None and forecast.low is not None and forecast.high is not None:
        held = bool(forecast.low <= loss <= forecast.high)
    own = course_of(branch)
    return {
        "family": config.name,
        "run": branch.run,
        "parent": run,
        "step": step,
        "steps": branch.steps,
        "tokens": (branch.steps - step) * own[-1].config.tokens_per_step,
        "seq_len": own[-1].config.model.seq_len,
        "rate": learning_rate_at(own, step + 1),
        "final_rate": learning_rate_at(own, branch.steps),
        "forecast": None if forecast is None else _said(forecast),
        "loss": loss,
        "held": held,
        "export": None if export is None else str(export_weights(place, export)),
        "remarks": remarks,
    }


def _forecast(
    family: str, branch: RunConfig, course: Course, *, home: Path, tracking: str | None, level: float
) -> tuple[Forecast | None, list[str]]:
    """What the rungs' cooldowns say of the branch of a hero; and what to know of it."""
    assert branch.start is not None
    if branch.rung != "hero":
        return None, ["a branch of a rung is not forecast: it is what forecasts are made of"]
    if branch.context:
        return None, ["not forecast: the rungs were trained at another context"]
    runs = load_family_runs(family, home=home, tracking=tracking)
    whole = course[0].decay.steps
    target = {key: value for key, value in vars(plan_course(course_of(branch))).items() if not isinstance(value, dict)}
    wanted = Cooldown(branch.start.step / whole, branch.steps / whole)
    try:
        forecast = forecast_horizon(runs, wanted, target, level=level)
    except UnfitForecast as error:
        return None, [f"not forecast: {error}"]
    return forecast, list(forecast.warnings)


def _said(forecast: Forecast) -> dict[str, Any]:
    source = (forecast.method or {})["horizon"]["source"]
    return {"point": forecast.point, "low": forecast.low, "high": forecast.high, "source": source}
