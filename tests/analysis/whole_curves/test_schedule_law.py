"""The multi-power law: a slow sum as oracle, planted constants with noise and outliers, published values."""

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.fitting.fit import FitStatus
from rungwise.analysis.whole_curves.planned import plan_shapes
from rungwise.analysis.whole_curves.schedule_law import Schedule, ScheduleLaw, fit_schedule_law

LAW = ScheduleLaw(floor=2.65, amplitude=0.6, alpha=0.45, drop=440.0, rate=2.1, beta=0.6, gamma=0.65)
PEAK, STEPS, WARMUP = 3e-4, 4000, 400


def rates(name: str, steps: int = STEPS) -> np.ndarray:
    """Learning rate of steps 1 to `steps`."""
    step = np.arange(1, steps + 1)
    after = np.clip((step - WARMUP) / (steps - WARMUP), 0, 1)
    shape = {
        "cosine": 0.1 + 0.45 * (1 + np.cos(np.pi * after)),
        "constant": np.ones(steps),
        "drop": np.where(after > 0.5, 0.3, 1.0),
        "wsd": np.where(after > 0.8, 1 - 0.9 * (after - 0.8) / 0.2, 1.0),
    }[name]
    return PEAK * np.minimum(step / WARMUP, 1.0) * shape


def schedule(name: str, steps: int = STEPS) -> Schedule:
    return Schedule.of(np.arange(1, steps + 1), rates(name, steps))


def summed_step_by_step(law: ScheduleLaw, rate: np.ndarray, at: int) -> float:
    """The law as written: one term for each step's change of rate, the warm-up's rise included."""
    loss = law.floor + law.amplitude * rate[:at].sum() ** -law.alpha
    before = 0.0
    for k in range(at):
        since = rate[k:at].sum()
        left = (1 + law.rate * rate[k] ** -law.gamma * since) ** -law.beta
        loss -= law.drop * (before - rate[k]) * (1 - left)
        before = rate[k]
    return loss


@pytest.mark.parametrize("name", ["cosine", "constant", "drop", "wsd"])
def test_law_equals_the_sum_over_steps(name: str):
    rate = rates(name)
    value = LAW.value(schedule(name), [600, 2300, 4000])
    np.testing.assert_allclose(value, [summed_step_by_step(LAW, rate, at) for at in (600, 2300, 4000)], rtol=3e-4)


def test_gradient_equals_differences():
    at = np.array([500.0, 2500.0, 4000.0])
    gradient = LAW.gradient(schedule("wsd"), at)
    constants = np.array([LAW.floor, LAW.amplitude, LAW.alpha, LAW.drop, LAW.rate, LAW.beta, LAW.gamma])
    for index in range(7):
        step = np.zeros(7)
        step[index] = 1e-5 * constants[index]
        up, down = (ScheduleLaw(*(constants + sign * step)).value(schedule("wsd"), at) for sign in (1, -1))
        np.testing.assert_allclose(gradient[:, index], (up - down) / (2 * step[index]), rtol=1e-5)


def planted(name: str, rng: np.random.Generator) -> tuple[Schedule, np.ndarray, np.ndarray]:
    """Rows every 60 steps with 0.1 % noise, and one in 40 off by 5 %."""
    at = np.arange(WARMUP + 20, STEPS + 1, 60.0)
    loss = LAW.value(schedule(name), at) * np.exp(1e-3 * rng.standard_normal(at.size))
    return schedule(name), at, np.where(rng.random(at.size) < 1 / 40, 1.05 * loss, loss)


def test_fit_forecasts_a_schedule_that_it_did_not_see():
    rng = np.random.default_rng(1)
    fit = fit_schedule_law([planted(name, rng) for name in ("cosine", "constant", "drop")])
    assert fit.status is FitStatus.CONVERGED
    assert fit.num_starts_agreeing >= 6
    assert fit.gradient < 1e-5
    at = np.arange(500, STEPS + 1, 50.0)
    truth = LAW.value(schedule("wsd"), at)
    predicted = fit.law.value(schedule("wsd"), at)
    assert np.abs(predicted / truth - 1).mean() < 1e-3
    assert np.abs(predicted / truth - 1).max() < 4e-3
    assert fit.to_dict()["starts"] == [fit.num_starts_agreeing, fit.num_starts]


@pytest.mark.parametrize(("name", "observed"), [("cosine", 2.9791), ("constant", 3.0354)])
def test_published_constants_need_the_rise_of_the_warm_up(name: str, observed: float):
    """Public last losses of 100M at step 23,930 (MultiPowerLaw, MIT): within 0.5 %; without the rise 4 % too low."""
    law = ScheduleLaw(2.651, 0.601, 0.453, 437.9, 2.132, 0.598, 0.655)
    step = np.arange(2160, 24001, 40.0)
    cosine = 0.1 + 0.45 * (1 + np.cos(np.pi * (step - 2160) / (24000 - 2160)))
    rate = 3e-4 * (cosine if name == "cosine" else np.ones(step.size))
    predicted = float(law.value(Schedule.of(step, rate, warmup=2159), 23930))
    assert predicted == pytest.approx(observed, rel=5e-3)
    assert predicted - law.drop * 3e-4 < 0.965 * observed


def test_bad_schedules_and_rows_are_refused():
    with pytest.raises(ValueError, match="ascending steps"):
        Schedule.of([1, 1], [0.1, 0.1])
    with pytest.raises(ValueError, match="one schedule"):
        Schedule.of([1], [0.1])
    with pytest.raises(ValueError, match="seven constants"):
        fit_schedule_law([(schedule("cosine"), [500.0, 600.0], [3.0, 2.9])])
    with pytest.raises(ValueError, match="finite and positive"):
        fit_schedule_law([(schedule("cosine"), np.arange(500.0, 520.0), np.full(20, -1.0))])


def rung(name: str, law: ScheduleLaw, steps: int = STEPS) -> pd.DataFrame:
    step = np.arange(20, steps + 1, 20)
    loss = law.value(schedule(name, steps), step)
    frame = {"progress": step / steps, "loss": loss, "learning_rate": rates(name, steps)[step - 1], "steps": steps}
    return pd.DataFrame(frame)


def test_plan_moves_shape_and_end_to_the_target_schedule():
    rungs = [rung("wsd", LAW), rung("wsd", LAW)]
    target = rung("cosine", LAW)
    grid = np.linspace(0.15, 1.0, 50)
    plan = plan_shapes(rungs, target, {"steps": STEPS}, grid)
    truth = np.log(np.interp(grid, target["progress"], target["loss"]))
    copied = np.log(np.interp(grid, rungs[0]["progress"], rungs[0]["loss"]))
    missed = np.abs(plan.shapes[-1] - (truth - truth[-1])).mean()
    assert plan.changed
    assert missed < 0.4 * np.abs((copied - copied[-1]) - (truth - truth[-1])).mean()
    assert plan.shift == pytest.approx(truth[-1] - copied[-1], abs=0.004)
    same = plan_shapes(rungs, rungs[0], {"steps": STEPS}, grid)
    assert not same.changed
    assert same.shift == 0.0
    np.testing.assert_allclose(same.shapes[-1], copied - copied[-1], atol=1e-3)


def test_plan_without_a_fall_to_learn_from_is_refused_only_where_it_matters():
    rungs = [rung("constant", LAW)] * 2
    grid = np.linspace(0.15, 1.0, 20)
    assert np.isnan(plan_shapes(rungs, rung("constant", LAW), {"steps": STEPS}, grid).shapes).all()
    with pytest.raises(ValueError, match="not the rungs'"):
        plan_shapes(rungs, rung("cosine", LAW), {"steps": STEPS}, grid)
