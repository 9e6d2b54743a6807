"""A forecast at another horizon without branches, on rungs whose curves follow a planted law of schedules."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.reading.trajectory import Points, build_trajectory
from rungwise.analysis.source import RunRecord
from rungwise.analysis.whole_curves.schedule_law import Schedule, ScheduleLaw
from rungwise.ladder.changing.cooldown import Cooldown
from rungwise.ladder.changing.horizon import forecast_horizon
from rungwise.ladder.family import load_family
from rungwise.ladder.planning.plan import RunPlan, plan_ladder
from rungwise.ladder.predict import FamilyRuns

PLAN = plan_ladder(load_family("tiny"))
RUNGS = [plan for plan in PLAN.rungs if plan.name == plan.rung]
WANTED = Cooldown(0.2, 0.6)


def _rates(steps: int, end: float) -> np.ndarray:
    """Warm-up over 15 steps, then straight down to 5% at the last; or redirected at 20% to end earlier."""
    at = np.arange(1, steps + 1)
    own = np.where(at <= 15, at / 15, 1 - 0.95 * (at - 15) / (steps - 15))
    begin, last = round(WANTED.start * steps), round(end * steps)
    if end == 1.0:
        return 0.01 * own
    fall = own[begin - 1] + (0.05 - own[begin - 1]) * (at[begin:last] - begin) / (last - begin)
    return 0.01 * np.append(own[:begin], fall)


def _law(plan: RunPlan) -> ScheduleLaw:
    """The rung's planted law: its floor falls with compute as the ladder's law wants it."""
    return ScheduleLaw(
        floor=1.0 + 500.0 * plan.flops**-0.25, amplitude=0.5, alpha=0.5, drop=80.0, rate=20.0, beta=0.6, gamma=0.4
    )


def _loss(plan: RunPlan, end: float = 1.0) -> np.ndarray:
    rates = _rates(plan.steps, end)
    steps = np.arange(1, rates.size + 1)
    return _law(plan).value(Schedule.of(steps, rates, warmup=1.0), steps)


def _record(plan: RunPlan) -> RunRecord:
    noise = np.random.default_rng(plan.hidden_dim)
    steps, loss = np.arange(1, plan.steps + 1), _loss(plan)
    rows, every = np.arange(plan.steps), np.append(np.arange(14, plan.steps - 1, 15), plan.steps - 1)
    columns = {
        "train/loss": (rows, loss * np.exp(0.01 * noise.standard_normal(plan.steps))),
        "train/learning_rate": (rows, _rates(plan.steps, 1.0)),
        "progress/tokens": (rows, steps * plan.tokens_per_step),
        "eval/loss": (every, loss[every]),
    }
    points = Points(np.ones(plan.steps, int), steps, steps.astype(float), columns)
    return RunRecord(
        family="tiny",
        run=plan.name,
        role="rung",
        rung=plan.rung,
        seed=0,
        plan=asdict(plan),
        config={},
        config_hash=plan.name,
        state="finished",
        attempts=(),
        trajectory=build_trajectory(points, restored={1: 0}),
        events=(),
        alerts=(),
        provenance={},
        heartbeat=0.0,
    )


def _runs(count: int) -> FamilyRuns:
    return FamilyRuns(
        family="tiny", plan=PLAN.to_dict(), records=[_record(plan) for plan in RUNGS[:count]], registered=None
    )


def _target(share: float) -> dict[str, Any]:
    sizes = {name: getattr(PLAN.hero, name) * share for name in ("flops", "flops_with_head", "tokens")}
    plan = replace(PLAN.hero, **sizes, tokens_per_active_param=share * PLAN.hero.tokens_per_active_param)
    return {key: value for key, value in vars(plan).items() if isinstance(value, int | float | str)}


def test_without_branches_the_law_of_schedules_prices_the_horizon_and_says_so():
    forecast = forecast_horizon(_runs(4), WANTED, _target(0.6))
    said = (forecast.method or {})["horizon"]
    assert said["source"] == "law of schedules"
    truth = {plan.name: float(_loss(plan, 0.6)[-1]) for plan in RUNGS}
    unchanged = {plan.name: float(_loss(plan)[round(0.6 * plan.steps) - 1]) for plan in RUNGS}
    for row in forecast.used:  # within the half of the change that the interval allows for
        assert abs(row["loss"] - truth[row["run"]]) < 0.5 * abs(unchanged[row["run"]] - truth[row["run"]])
    assert forecast.low is not None
    assert forecast.high is not None
    assert forecast.low < float(_loss(PLAN.hero, 0.6)[-1]) < forecast.high
    assert "another horizon by law of schedules" in forecast.warnings[-1]
    assert np.log(forecast.high / forecast.point) >= 1.645 * 0.5 * abs(said["shift"])
    curve = forecast.curve_table("eval/loss")
    assert curve is not None
    assert curve["progress"].iloc[-1] == 1.0


def test_two_rungs_price_no_horizon():
    with pytest.raises(UnfitForecast, match="2 finished rung runs cannot price another horizon"):
        forecast_horizon(_runs(2), WANTED, _target(0.6))
