"""A forecast of the hero at another horizon than its ladder's, or of a branch of it: what the ladder can say of both.

Three sources, the best there is: branches of the rungs that start and end at the same shares of the horizon; branches
that end there, brought to the new schedule by the law of schedules; that law on the rungs' own curves alone. What the
law changes is in doubt by `PLAN_ERROR` of itself, and the interval is wider by that. Imports no jax.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.fitting.laws import PowerLaw
from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.points import ladder_points, logged_values
from rungwise.analysis.source import RunRecord
from rungwise.analysis.whole_curves.schedule_law import Schedule, ScheduleLaw, fit_schedule_law
from rungwise.analysis.whole_curves.shapes import PLAN_ERROR
from rungwise.ladder.changing.cooldown import Cooldown, matching_branches
from rungwise.ladder.predict import CURVE_METRICS, FamilyRuns

Array = NDArray[np.float64]

LEAST_RUNGS: Final = 3
ROWS: Final = 60
"""Means of rows that a curve is reduced to before its law is fitted."""
FIRST: Final = 0.01
"""Share of a run from which its rows are fitted."""
NUM_STARTS: Final = 2


@dataclass(frozen=True, kw_only=True)
class _Rung:
    """One run of the ladder as it would have ended on the wanted course."""

    point: dict[str, Any]
    """Its row for `forecast_final`."""
    curves: dict[str, pd.DataFrame]
    """By metric: step and loss over the whole course."""
    shift: float
    """What the law of schedules changed of its log final loss; 0 where it was trained."""


def forecast_horizon(runs: FamilyRuns, wanted: Cooldown, target: dict[str, Any], *, level: float = 0.9) -> Forecast:
    """Forecast of a run that leaves the ladder's schedule at one share of the horizon and decays to its end at another.

    Args:
        wanted: those shares.
        target: its plan: FLOPs, tokens, parameters and what else conditions compare.
    Raises:
        ValueError: too few finished rungs, or curves that no law can be fitted to.
    """
    rungs, source = _rungs(runs, wanted)
    table = pd.DataFrame([rung.point for rung in rungs])
    forecast = forecast_final(table, target, level=level)
    shift = float(np.mean([rung.shift for rung in rungs]))
    forecast = _widened(forecast, PLAN_ERROR * abs(shift))
    said = {"start": wanted.start, "end": wanted.end, "source": source, "shift": shift}
    forecast = replace(
        forecast,
        method={**(forecast.method or {}), "horizon": said},
        warnings=[*forecast.warnings, *_warnings(source, shift)],
    )
    for metric in CURVE_METRICS if forecast.low is not None else ():
        curves = [_curve_rows(rung, metric) for rung in rungs if metric in rung.curves]
        if len(curves) == len(rungs):
            final = forecast if metric == forecast.metric else None
            curve = forecast_curve(pd.concat(curves, ignore_index=True), target, level=level, final=final)
            forecast = forecast.with_curve(curve, metric=metric)
    return forecast


def _rungs(runs: FamilyRuns, wanted: Cooldown) -> tuple[list[_Rung], str]:
    """The ladder's runs on the wanted course, and where that comes from."""
    for any_start, source in ((False, "branches"), (True, "branches and law of schedules")):
        branches = matching_branches(runs, wanted, any_start=any_start)
        if len({record.rung for record in branches}) >= LEAST_RUNGS:
            return [_from_branch(runs, record, wanted, moved=any_start) for record in branches], source
    trunks = [record for record in runs.rungs if record.state == "finished"]
    if len({record.rung for record in trunks}) < LEAST_RUNGS:
        raise UnfitForecast(f"{len(trunks)} finished rung runs cannot price another horizon; train at least 3 rungs")
    return [_from_law(record, wanted) for record in trunks], "law of schedules"


def _from_branch(runs: FamilyRuns, branch: RunRecord, wanted: Cooldown, *, moved: bool) -> _Rung:
    """A rung's own branch; where it leaves the trunk elsewhere than wanted, moved by the law fitted to both."""
    start = branch.config["start"]
    trunk = runs.record(start["parent"])
    (row,) = ladder_points([branch]).to_dict("records")
    curves = {
        metric: pd.concat([_rows(trunk, metric, last=start["step"]), _rows(branch, metric)], ignore_index=True)
        for metric in CURVE_METRICS
    }
    shift = 0.0
    if moved:
        rates = [_rates(trunk, last=start["step"]), _rates(branch)]
        own = pd.concat(rates, ignore_index=True)
        law = _fit([(_rates(trunk), _rows(trunk, "train/loss")), (own, curves["train/loss"])])
        end = int(own["step"].iloc[-1])
        shift = _log_ratio(law, own, _redirected(_rates(trunk), wanted, trunk.plan["steps"], end), end=end)
        row["loss"] *= math.exp(shift)
    return _Rung(point=_named(row, branch), curves=curves, shift=shift)


def _from_law(trunk: RunRecord, wanted: Cooldown) -> _Rung:
    """A rung as its law of schedules has it on the wanted course: its own loss there, times what the law changes."""
    (row,) = ladder_points([trunk]).to_dict("records")
    steps, own = int(trunk.plan["steps"]), _rates(trunk)
    end = round(wanted.end * steps)
    other = _redirected(own, wanted, steps, end)
    law = _fit([(own, _rows(trunk, "train/loss"))])

    def changed(at: Array) -> Array:
        """Factor on the rung's own loss at each step; past its end, on its last."""
        ratio = law.value(_schedule(other), at) / law.value(_schedule(own), np.minimum(at, steps))
        return np.where(at > wanted.start * steps, ratio, 1.0)

    curves = {}
    for metric in CURVE_METRICS:
        rows = _rows(trunk, metric)
        at, loss = rows["step"].to_numpy(float), rows["loss"].to_numpy(float)
        upto = np.append(at[at < end], float(end))
        curves[metric] = pd.DataFrame({"step": upto, "loss": np.interp(upto, at, loss) * changed(upto)})
    row["loss"] = float(curves[row["metric"]]["loss"].iloc[-1])
    shift = math.log(float(changed(np.array([float(end)]))[0]))
    for name in ("steps", "tokens", *(name for name in row if name.startswith("flops"))):
        row[name] = row[name] * end / steps
    row["tokens_per_active_param"] = row["tokens"] / row["num_active_params"]
    return _Rung(point=_named(row, trunk), curves=curves, shift=shift)


def _named(row: dict[str, Any], record: RunRecord) -> dict[str, Any]:
    return {**row, "run": record.run, "rung": record.rung}


def _rows(record: RunRecord, metric: str, *, last: float = math.inf) -> pd.DataFrame:
    """Steps and losses of a run up to a step."""
    steps, values = logged_values(record.trajectory, metric)
    kept = steps <= last
    return pd.DataFrame({"step": steps[kept], "loss": values[kept]})


def _rates(record: RunRecord, *, last: float = math.inf) -> pd.DataFrame:
    """Steps and learning rates as applied.

    Raises:
        ValueError: the run logged none.
    """
    steps, values = logged_values(record.trajectory, "train/learning_rate")
    if not steps.size:
        raise ValueError(f"run {record.run} logged no learning rate: no law of schedules can be fitted to it")
    kept = steps <= last
    return pd.DataFrame({"step": steps[kept], "rate": values[kept]})


def _redirected(rates: pd.DataFrame, wanted: Cooldown, steps: float, end: int) -> pd.DataFrame:
    """A run's rates up to the wanted start, then straight down to its own last rate at the end."""
    begin = round(wanted.start * steps)
    kept: Any = rates[rates["step"] <= begin]
    fall = np.linspace(float(kept["rate"].iloc[-1]), float(rates["rate"].iloc[-1]), end - begin + 1)[1:]
    return pd.concat([kept, pd.DataFrame({"step": np.arange(begin + 1, end + 1), "rate": fall})], ignore_index=True)


def _schedule(rates: pd.DataFrame) -> Schedule:
    first = float(rates["step"].iloc[0])
    return Schedule.of(rates["step"].to_numpy(float), rates["rate"].to_numpy(float), warmup=first)


def _fit(curves: Sequence[tuple[pd.DataFrame, pd.DataFrame]]) -> ScheduleLaw:
    """The law of one rung, from (rates, losses) of its run and its branches."""
    given = []
    for rates, rows in curves:
        step, loss = rows["step"].to_numpy(float), rows["loss"].to_numpy(float)
        used = (step >= FIRST * step.max()) & np.isfinite(loss)
        step, loss = step[used], loss[used]
        groups = np.array_split(np.arange(step.size), min(step.size, ROWS))
        at = np.array([step[group].mean() for group in groups])
        given.append((_schedule(rates), at, np.array([np.exp(np.log(loss[group]).mean()) for group in groups])))
    return fit_schedule_law(given, num_starts=NUM_STARTS).law


def _log_ratio(law: ScheduleLaw, before: pd.DataFrame, after: pd.DataFrame, *, end: int) -> float:
    """Log loss at the end under one schedule over that under another."""
    at = np.array([float(end)])
    return math.log(float(law.value(_schedule(after), at)[0]) / float(law.value(_schedule(before), at)[0]))


def _curve_rows(rung: _Rung, metric: str) -> pd.DataFrame:
    """Rows for `forecast_curve`: progress is of the new horizon."""
    rows, point = rung.curves[metric], rung.point
    sizes = {name: point[name] for name in ("flops", "num_params", "num_active_params", "tokens", "steps")}
    return pd.DataFrame({"run": point["run"], "progress": rows["step"] / point["steps"], "loss": rows["loss"], **sizes})


def _widened(forecast: Forecast, error: float) -> Forecast:
    """The interval with one more source of doubt, a standard deviation of the log loss."""
    if forecast.low is None or forecast.high is None or not error:
        return forecast
    extra = NormalDist().inv_cdf(0.5 + forecast.level / 2) * error
    low = forecast.point * math.exp(-math.hypot(math.log(forecast.point / forecast.low), extra))
    high = forecast.point * math.exp(math.hypot(math.log(forecast.high / forecast.point), extra))
    nats = 0.5 * (high - low)
    law = PowerLaw(**{name: forecast.laws[0][name] for name in ("floor", "amplitude", "exponent")})
    factor = law.compute_factor(forecast.point, nats)
    top = max(row["flops"] for row in forecast.used)
    fall = float(np.mean([row["loss"] for row in forecast.used if row["flops"] > 0.999 * top])) - forecast.point
    half_width = {
        "nats": nats,
        "percent": 100.0 * nats / forecast.point,
        "compute_factor": factor if math.isfinite(factor) else None,
        "of_fall": nats / fall if fall > 0 else None,
    }
    return replace(forecast, low=low, high=high, half_width=half_width)


def _warnings(source: str, shift: float) -> list[str]:
    if source == "branches":
        return []
    return [
        f"another horizon by {source}: it moves the rungs' final losses by {100 * (math.exp(shift) - 1):+.1f}%, of"
        f" which {PLAN_ERROR:.0%} may be wrong; the interval is wider for it. Branches of the rungs would measure it"
    ]
